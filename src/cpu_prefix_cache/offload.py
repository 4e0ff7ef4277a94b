"""What to store, and when.

    eager    a chunk as soon as its tokens are confirmed computed; what is left when the request ends
    lazy     a chunk shortly before the device evicts it, its missing ancestors first

Lazy stores less and hits more: what the device still holds need not be held twice. Each step it looks at the stretch
of the device's eviction order that the next steps may use up, the *horizon*, and makes sure all of it is covered: on
the host, on its way there, or beyond saving.

    next to be evicted                                                    last
    [ covered ][ covered ][ covered ]|[ new: look ][ new: look ] ... | ...
    `--------- walked before ---------'                              horizon

Only what joined the stretch since the last step is looked at, so a step that allocates nothing costs nothing.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from cpu_prefix_cache.block_pool import BlockPool
from cpu_prefix_cache.device import Device
from cpu_prefix_cache.lineage import Lineage
from cpu_prefix_cache.stores import Stop, StorePlanner
from cpu_prefix_cache.transfers import Transfer


class Progress(Protocol):
    """What a running request has computed for certain. `confirmed` counts chunks."""

    @property
    def id(self) -> str: ...

    @property
    def keys(self) -> Sequence[bytes]: ...

    @property
    def confirmed(self) -> int: ...

    @property
    def touch(self) -> Any: ...


class Offload(Protocol):
    """Told what was computed and what left the device; asked once a step to plan stores."""

    work: int

    @property
    def lost(self) -> int:
        """Chunks the device evicted before they were stored."""

    @property
    def remembered(self) -> int:
        """Chunks whose parent is remembered."""

    def confirmed(self, progress: Progress, before: int) -> None:
        """The chunks from `before` up to `progress.confirmed` hold computed tokens now."""

    def ended(self, progress: Progress) -> None:
        """The request finished. Its blocks stay on the device until they are evicted."""

    def used(self, keys: Sequence[bytes]) -> None:
        """These chunks on the device were used again: they no longer wait to be evicted."""

    def plan(self) -> None:
        """Plan the stores of this step."""

    def landed(self, transfer: Transfer) -> None:
        """The copy of a store has ended, and its device blocks were released."""

    def committed(self, keys: Sequence[bytes]) -> None:
        """These chunks can be found on the host now."""

    def reset(self) -> None:
        """Forget everything."""


class Eager:
    """Stores what is confirmed, request by request, oldest first."""

    def __init__(self, pool: BlockPool, stores: StorePlanner) -> None:
        self._pool = pool
        self._stores = stores
        self._due: dict[str, Progress] = {}
        self.work = 0

    @property
    def lost(self) -> int:
        return 0

    @property
    def remembered(self) -> int:
        return 0

    def confirmed(self, progress: Progress, before: int) -> None:
        self._due[progress.id] = progress

    def ended(self, progress: Progress) -> None:
        self._due.pop(progress.id, None)
        self.work += store_confirmed(self._pool, self._stores, progress)

    def used(self, keys: Sequence[bytes]) -> None:
        pass

    def plan(self) -> None:
        due, self._due = self._due, {}
        for progress in due.values():
            self.work += store_confirmed(self._pool, self._stores, progress)

    def landed(self, transfer: Transfer) -> None:
        pass

    def committed(self, keys: Sequence[bytes]) -> None:
        pass

    def reset(self) -> None:
        self._due.clear()


def store_confirmed(pool: BlockPool, stores: StorePlanner, progress: Progress) -> int:
    """Store the confirmed chunks of a request that the host lacks. How many chunks were looked at.

    Begins at the first one missing, wherever it is: what the pool evicted since, or had no room for, is mended here.
    """
    keys, stop = progress.keys, progress.confirmed
    start = present = pool.resident_run(keys, 0, stop)
    while start < stop and stores.is_covered(keys[start]):
        start += 1
    if start < stop:
        stores.plan(keys[start - 1] if start else None, keys[start:stop], progress.touch)
    return stop - present


class Lazy:
    """Keeps the next `horizon` chunks of the device's eviction order covered, at most `chunks_per_step` a step."""

    def __init__(
        self, pool: BlockPool, stores: StorePlanner, device: Device, *, horizon: int, chunks_per_step: int
    ) -> None:
        self._pool = pool
        self._stores = stores
        self._device = device
        self._horizon = horizon
        self._chunks_per_step = chunks_per_step
        self._lineage = Lineage(lambda key: device.find(key) is not None, stores.is_covered)
        self._covered: OrderedDict[bytes, int] = OrderedDict()  # the walked stretch, soonest evicted first
        self._returned: set[bytes] = set()  # the first of them: given back by stores, and not met by the walk yet
        self._left = 0  # chunks that left the old end since all of the stretch was last gone through
        self._holding = 0  # chunks kept from being reused until their store lands
        self._in_flight: dict[int, list[tuple[int, bytes]]] = {}  # store -> the chunks of the stretch it holds
        self.work = 0

    @property
    def remembered(self) -> int:
        return len(self._lineage)

    @property
    def lost(self) -> int:
        return self._lineage.lost

    def confirmed(self, progress: Progress, before: int) -> None:
        self._lineage.add(progress.keys, before, progress.confirmed)
        self.work += progress.confirmed - before

    def ended(self, progress: Progress) -> None:
        pass

    def used(self, keys: Sequence[bytes]) -> None:
        # At once: one that is released again soon waits at the far end, and must not pass for the end of the walk.
        if self._covered:
            self.work += len(keys)
            for key in keys:
                self._drop(key)

    def plan(self) -> None:
        self._drop_what_left()
        missing = self._horizon - len(self._covered)
        if missing <= 0:
            return
        joined = self._next(missing)
        block_of = {key: block for block, key in joined}
        for block, key in joined:
            self.work += 1
            if not self._cover(key, block_of):
                return
            if self._device.is_waiting(block, key):
                self._covered[key] = block
                self._covered.move_to_end(key)
                self._returned.discard(key)

    def landed(self, transfer: Transfer) -> None:
        back = self._in_flight.pop(transfer.id, None)
        if back is None:
            return
        self._holding -= len(transfer.keys)
        for block, key in back:
            if self._device.is_waiting(block, key):
                self._covered[key] = block
                self._covered.move_to_end(key, last=False)
                self._returned.add(key)

    def committed(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._lineage.saved(key)

    def reset(self) -> None:
        self._lineage.clear()
        self._covered.clear()
        self._returned.clear()
        self._left = 0

    def _drop_what_left(self) -> None:
        """Take out of the stretch what was evicted: from its ends at once, and from its middle now and then."""
        covered, is_waiting = self._covered, self._device.is_waiting
        for old_end in (True, False):
            while covered:
                key = next(iter(covered)) if old_end else next(reversed(covered))
                if is_waiting(covered[key], key):
                    break
                self._drop(key)
                self._left += 1
                self.work += 1
        if self._left * 4 > len(covered):
            self.work += len(covered)
            self._left = 0
            for key in [key for key, block in covered.items() if not is_waiting(block, key)]:
                self._drop(key)

    def _drop(self, key: bytes) -> None:
        self._covered.pop(key, None)
        self._returned.discard(key)

    def _next(self, missing: int) -> list[tuple[int, bytes]]:
        """The chunks behind those walked already, until `missing` of them are new to the stretch."""
        last = next(reversed(self._covered.values())) if len(self._covered) > len(self._returned) else None
        joined = []
        for block, key in self._device.soonest_evicted(last):
            joined.append((block, key))
            missing -= key not in self._returned
            if not missing:
                break
        return joined

    def _cover(self, key: bytes, joined: Mapping[bytes, int]) -> bool:
        """Plan the store of one chunk and its missing ancestors, if need be. Whether there is no more to do for it."""
        chain = self._missing_chain(key)
        if not chain:
            return True
        budget = self._chunks_per_step - self._holding
        if budget <= 0:
            return False
        parent_key, touch = self._lineage.parent(chain[0]), self._pool.touch(None)
        decision = self._stores.plan(parent_key, chain[:budget], touch, waiting=joined)
        if decision.transfer is not None:
            back = [(joined[each], each) for each in decision.transfer.keys if each in joined]
            self._in_flight[decision.transfer.id] = back
            self._holding += decision.planned
        return decision.stopped_by is Stop.NOT_ON_DEVICE or decision.planned == len(chain)

    def _missing_chain(self, key: bytes) -> list[bytes]:
        """The chunks from the first one the host lacks down to `key`; nothing if it is covered or beyond saving."""
        chain: list[bytes] = []
        above: bytes | None = key
        while above is not None and not self._stores.is_covered(above):
            if above not in self._lineage:
                return []  # never confirmed, or an ancestor is gone from the device: nothing can be stored
            chain.append(above)
            above = self._lineage.parent(above)
        self.work += len(chain)
        chain.reverse()
        return chain
