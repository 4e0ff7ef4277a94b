"""The device side as the cache sees it: the engine's own prefix cache, reached through a handful of verbs.

Blocks are found by key, in both offload modes: positions in an engine's block tables are unstable (nulls, copies on
write, relocated speculative blocks). An engine adapter implements `Device`; `PooledDevice` is the one for an engine
whose device pool is this library's own BlockPool.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from cpu_prefix_cache.block_pool import BlockPool, Pin


class Device(Protocol):
    """What an engine lets the cache see and hold of its device blocks. Called from the deciding thread only."""

    @property
    def num_chunks(self) -> int:
        """How many chunks the device pool holds when nothing else is in it."""

    @property
    def null_block(self) -> int | None:
        """The block that stands for "no block" in the engine's tables, if it has one. Never copied."""

    def find(self, key: bytes) -> Sequence[int] | None:
        """The device blocks of the chunk with this key, group by group; None unless all of them are there."""

    def soonest_evicted(self, after: int | None) -> Iterator[tuple[int, bytes]]:
        """Chunks that wait to be evicted, soonest first, as (first block, key); those behind block `after` if given.

        Blocks without a key are left out. The cache reads it to the end it needs before it holds anything.
        """

    def is_waiting(self, block: int, key: bytes) -> bool:
        """Whether `block` still holds `key` and waits to be evicted."""

    def hold(self, blocks: Sequence[int]) -> Any:
        """Keep `blocks` from being reused, with a reference of the engine's own. Given back to one of the releases."""

    def release(self, hold: Any) -> None:
        """End a hold as the engine ends its own use of blocks: they become the last to be evicted."""

    def release_to_front(self, hold: Any) -> None:
        """End a hold so that the blocks are the first to be evicted, the deepest chunk before its ancestors.

        For blocks that were about to be evicted when they were stored: released as usual, the coldest blocks would
        become the hottest (measured: 6 points of hit ratio).
        """


class PooledDevice:
    """A device pool that is a BlockPool with one block to a chunk. A hold is a pin and moves nothing."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.num_chunks = pool.capacity
        self.null_block = None

    def find(self, key: bytes) -> Sequence[int] | None:
        block = self._pool.find(key)
        return None if block is None else (block,)

    def soonest_evicted(self, after: int | None) -> Iterator[tuple[int, bytes]]:
        for block in self._order_behind(after):
            key = self._pool.key(block)
            if key is not None:
                yield block, key

    def is_waiting(self, block: int, key: bytes) -> bool:
        return self._pool.key(block) == key and not self._pool.is_pinned(block)

    def hold(self, blocks: Sequence[int]) -> Pin:
        return self._pool.pin(*blocks)

    def release(self, hold: Pin) -> None:
        self._pool.unpin(hold)

    def release_to_front(self, hold: Pin) -> None:
        self._pool.unpin(hold)

    def _order_behind(self, after: int | None) -> Iterator[int]:
        """The eviction order behind `after`; all of it when `after` is not in it any more (a chunk below is pinned)."""
        order = self._pool.soonest_evicted()
        if after is not None and all(block != after for block in order):
            return self._pool.soonest_evicted()
        return order
