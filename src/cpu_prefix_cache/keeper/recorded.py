"""RecordedEdge: the edge of a keeper's pool, which keeps records of what is in each slot (`records.py`).

    receive     slots are handed out: their records are cleared first
    promoted    what was written there can be found: its records are written, each chunk and piece after those above

So whoever ends the keeper at any moment leaves a record behind only where the bytes are right.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, cast

from cpu_prefix_cache.keeper.records import CHUNK, Records
from cpu_prefix_cache.messages.tier import KEY_BYTES
from cpu_prefix_cache.offload.chain import Chain
from cpu_prefix_cache.offload.device import PooledDevice
from cpu_prefix_cache.offload.edge import Edge
from cpu_prefix_cache.offload.offload import Offload
from cpu_prefix_cache.offload.stores import StorePlanner
from cpu_prefix_cache.offload.transfers import Promotion, StoreTransfer, TransferLedger
from cpu_prefix_cache.pool.coordinator import KVCacheCoordinator

_Record = tuple[Sequence[int], bytes, bytes | None, int, int]  # arguments of `Records.write`


class RecordedStores(StorePlanner):
    """Nothing here looks at a device: what is written comes from those of engines, or from a tier."""

    def __init__(self, coordinator: KVCacheCoordinator, records: Records) -> None:
        super().__init__(coordinator, PooledDevice(coordinator.pool), TransferLedger(ranks=1))
        self._records = records

    def receive(self, chain: Chain, touch: Any, owner: Hashable) -> Promotion | None:
        write = super().receive(chain, touch, owner)
        if write is not None:
            for slot in (slot for record in self.records_of(write) for slot in record[0]):
                self._records.clear(slot)
        return write

    def records_of(self, write: StoreTransfer) -> Iterator[_Record]:
        """Records of its chunks, and then of the pieces of its checkpoint that no other one has."""
        chain = write.chain
        above = chain.parent_key
        for chunk, name in zip(write.nodes, chain.keys, strict=False):
            yield self.pool.blocks_of((chunk,)), name, above, CHUNK, 0
            above = name
        if chain.checkpoint is None:
            return
        below, node, checkpoints = write.keys[-1][:KEY_BYTES], write.nodes[-1], self.pool.checkpoints
        for need, slots in zip(checkpoints.needs(node), checkpoints.to_write(node), strict=True):
            if slots is not None:
                name, group, block = cast(tuple[bytes, int, int], need.key)
                yield slots, name, below, group, block


class RecordedEdge(Edge):
    """Over the pool of `stores`."""

    def __init__(self, stores: RecordedStores, records: Records) -> None:
        super().__init__(stores, Offload(stores))
        self._recorded, self._records = stores, records
        self._landed: dict[int, list[_Record]] = {}  # by the id of a write that has ended, and may have to wait

    def promoted(self, store: Promotion, ok: bool, good: int) -> Sequence[StoreTransfer]:
        self._landed[store.id] = list(self._recorded.records_of(store))
        committed = super().promoted(store, ok, good)
        for each in committed:
            records = self._landed[each.id]
            for record in records if each.chain.checkpoint is not None else records[: len(each.chain.keys)]:
                self._records.write(*record)
        self._landed = {id: records for id, records in self._landed.items() if self.ledger.get(id) is not None}
        return committed
