"""A tier's values in a store that machines share, to be measured. Plain calls are the store's, without frames.

Values have a namespace of their own. What is put replaces nothing: all is deleted before each write, and at the end.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from cpu_prefix_cache.messages.plan import CHUNK
from cpu_prefix_cache.slab.namespace import namespace_of
from cpu_prefix_cache.slab.tier_copier import TierCopier
from cpu_prefix_cache.stores.keyed_store import Got, KeyedStore
from cpu_prefix_cache.stores.keyed_values import DELETE_SECONDS, GET_SECONDS, PUT_SECONDS, KeyedValues
from cpu_prefix_cache.tools.bench.slot_rates import SlotsUnderTest, TimedRun, key_of, planner_for

DELETED_AT_ONCE = 64  # values


class StoreUnderTest(SlotsUnderTest):
    """`num_bytes` in values of `slot_bytes` in `store`, which is at `where`, and stays open."""

    def __init__(self, store: KeyedStore, where: str, num_bytes: int, slot_bytes: int) -> None:
        slots, planner = max(1, num_bytes // slot_bytes), planner_for(slot_bytes)
        own = os.urandom(16).hex()
        named = namespace_of(planner, model="bench", revision=own, dtype="none", hash="sha256", ranks=1)
        values = KeyedValues(store, named, number=0, owners=1, slot_bytes=slot_bytes)
        self._store = store
        self._names = [values.names.of(key_of(slot), 0, 0, CHUNK) for slot in range(slots)]
        self._plain = [f"{name}.plain" for name in self._names]
        super().__init__(slots, slot_bytes, partial(TierCopier, values), where)

    def write(self) -> TimedRun:
        self._delete(self._names)
        return super().write()

    def plain_write(self) -> TimedRun:
        self._delete(self._plain)
        return self._timed(lambda: self._in_threads(self._each(self._store.put_from, PUT_SECONDS, "did not take")))

    def plain_read(self) -> TimedRun:
        return self._timed(lambda: self._in_threads(self._each(self._store.get_into, GET_SECONDS, "does not have")))

    def remove(self) -> None:
        """After `close`: delete what was put, if the server still answers."""
        with suppress(OSError):
            self._delete(self._names + self._plain)

    def _each(
        self, call: Callable[..., Sequence[Got | bool]], seconds: float, what: str
    ) -> Callable[[int, memoryview], None]:
        def move(slot: int, view: memoryview) -> None:
            if not all(call([self._plain[slot]], [[view]], seconds)):
                raise OSError(f"the store {what} a value of {len(view)} bytes")

        return move

    def _delete(self, names: list[str]) -> None:
        for begin in range(0, len(names), DELETED_AT_ONCE):
            self._store.delete(names[begin : begin + DELETED_AT_ONCE], DELETE_SECONDS)
