"""Stores of chunks that leave the device, and their places in a prompt that device and host hold together.

A chunk that leaves may hang below one that the device alone has: `place` finds where by the parents that are
remembered. What leaves at once is stored in runs of chunks right above one another, parents first.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from cpu_prefix_cache.offload.eager import Eager
from cpu_prefix_cache.offload.parents import Ancestry
from cpu_prefix_cache.offload.stores import Chain, Stop, StorePlanner
from cpu_prefix_cache.offload.transfers import Transfer


class Leaving(Eager):
    """The part that `Lazy` and `Late` have in common. `parents` are those of the chunks on the device."""

    def __init__(self, stores: StorePlanner, parents: Ancestry) -> None:
        super().__init__(stores)
        self._device = stores.device
        self._parents = parents

    @property
    def lost(self) -> int:
        return self._parents.lost

    @property
    def remembered(self) -> int:
        return len(self._parents)

    def place(self, key: bytes) -> int | None:
        place = self._pool.place(key)
        if place is not None or not self._pool.is_shared:
            return place
        outside = self._parents.missing_above(key, lambda each: self._pool.place(each) is not None)
        if outside is None:
            return None
        keys, above = outside
        parent = self._pool.root if above is None else self._pool.place(above)
        return None if parent is None else self._pool.outline(keys, parent)

    def _runs(self, keys: Sequence[bytes], left: set[bytes]) -> Iterator[Chain]:
        """The runs of those `keys` that are `left`. Each is asked for once: what is declined or finds no room is not
        stored.
        """
        for key in keys:
            run = self._parents.run_above(key, left.__contains__)
            if run is not None and run[0]:
                left.difference_update(run[0])
                yield Chain(run[1], run[0])

    def _store_run(
        self, run: Chain, sources: Mapping[bytes, Sequence[int]], into: Mapping[bytes, int]
    ) -> list[Transfer]:
        """Store a run from these sources; the chunks of `into` take the blocks of host chunks that a load reads."""
        stores, above = list[Transfer](), run.parent_key
        for _, group in groupby(run.keys, into.__contains__):
            part = list(group)
            store = self._store_part(Chain(above, part), sources, [into[each] for each in part if each in into])
            stores += [] if store is None else [store]
            if store is None or len(store.keys) < len(part):
                break  # what hangs below could not be committed
            above = part[-1]
        return stores

    def _store_part(self, chain: Chain, sources: Mapping[bytes, Sequence[int]], read: Sequence[int]) -> Transfer | None:
        transfer, stop = self._stores.plan(
            chain, self._pool.touch(None), found=lambda some: [*map(sources.get, some)], read=read
        )
        if stop is Stop.DECLINED:
            self._parents.unwanted([each for each in chain.keys if not self._stores.is_covered(each)])
        if transfer is not None:
            transfer.held_blocks = 0  # none of them waits
            self._parents.unwanted(transfer.keys)  # they have left the device, and are not lost
        return transfer
