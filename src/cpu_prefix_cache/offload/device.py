"""The device side as the cache sees it: the engine's own prefix cache, reached through a handful of verbs.

Blocks are found by key, in both offload modes: positions in an engine's block tables are unstable (nulls, copies on
write, relocated speculative blocks). An engine adapter implements `Device`; `PooledDevice` is the one for an engine
whose device pool is this library's own BlockPool.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.request import CheckpointAt
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.pool.block_pool import BlockPool, Pin


class Device(Protocol):
    """What an engine lets the cache see and hold of its device blocks. Called from the deciding thread only."""

    @property
    def num_chunks(self) -> int:
        """How many chunks the device pool holds when nothing else is in it."""

    @property
    def null_block(self) -> int | None:
        """The block that stands for "no block" in the engine's tables, if it has one. Never copied."""

    def find(self, key: bytes) -> Sequence[int] | None:
        """The device blocks of the chunk with this key, group by group; None unless all of them are there.

        Only blocks whose bytes are written: an engine that gives blocks their keys before it computes them leaves
        those out until it has (rule 12).
        """

    def find_all(self, keys: Sequence[bytes]) -> list[Sequence[int] | None]:
        """What `find` answers to each of them. Asked for thousands at a time."""

    def find_checkpoint(self, checkpoint: CheckpointAt) -> Sequence[Sequence[int]] | None:
        """The device blocks of the pieces of a checkpoint, in the planner's order; None unless all of them are there.

        Only what is written, and for a state only the page at this very boundary (rule 10).
        """

    def soonest_evicted(self, after: int | None) -> Iterator[tuple[int, bytes | None]]:
        """The blocks that wait to be handed out, soonest first, each with its key; those behind block `after` if given.

        Blocks without a key are among them, where they stand. A chunk of several blocks comes once, by its first, and
        a checkpoint once, by whatever number the engine knows it by, under its `checkpoint_key`. The cache reads as
        far as it needs before it holds anything.
        """

    def is_waiting(self, block: int, key: bytes | None) -> bool:
        """Whether `block` still has this key, or still none, and waits to be handed out."""

    def are_waiting(self, blocks: Sequence[int]) -> list[bool]:
        """Of each of these blocks, which were found this moment, whether it waits to be handed out."""

    def has_waiting(self, blocks: int) -> bool:
        """Whether at least so many blocks wait to be handed out."""

    def hold(self, blocks: Sequence[int]) -> Any:
        """Keep `blocks` from being reused, with a reference of the engine's own. Given back to one of the releases."""

    def release(self, hold: Any, before: int | None) -> None:
        """End a hold as the engine ends its own use of blocks: they become the last to be evicted, the deepest chunk
        before its ancestors. Those are behind block `before`, if it is given: what nobody uses then waits right before
        it, and does not outlive it.
        """

    def release_in_place(self, hold: Any, behind: int | None) -> None:
        """End a hold so that the blocks wait where they waited before it, the deepest chunk before its ancestors.

        That is right behind block `behind`, which waits itself, or if it is None before all others that have a key.
        For blocks that were about to be evicted when they were stored: released as usual, the coldest blocks would
        become the hottest (measured: 6 points of hit ratio), and always in front, the youngest of them the coldest.
        """


class PooledDevice:
    """A device pool that is a BlockPool with at most one block to a chunk. A hold is a pin and moves nothing.

    Raises ConfigurationError for a pool with several blocks to a chunk.
    """

    def __init__(self, pool: BlockPool) -> None:
        if pool.blocks_per_chunk > 1:
            raise ConfigurationError(f"a device pool takes 1 block to a chunk, not {pool.blocks_per_chunk}")
        self._pool = pool
        self.num_chunks = pool.capacity
        self.null_block = None

    def find(self, key: bytes) -> Sequence[int] | None:
        block = self._pool.find(key)
        return None if block is None else self._pool.blocks_of((block,))

    def find_all(self, keys: Sequence[bytes]) -> list[Sequence[int] | None]:
        return [self.find(key) for key in keys]

    def find_checkpoint(self, checkpoint: CheckpointAt) -> Sequence[Sequence[int]] | None:
        node = self._pool.find(checkpoint_key(checkpoint.tail[-1]))
        return None if node is None else self._pool.pieces(node)

    def soonest_evicted(self, after: int | None) -> Iterator[tuple[int, bytes | None]]:
        order = self._order()
        if after is not None and all(block != after for block, _ in order):
            order = self._order()  # `after` waits no more, or not for long: a chunk below it is pinned
        return order

    def is_waiting(self, block: int, key: bytes | None) -> bool:
        if key is None:
            return self._pool.is_free(block)
        return self._pool.key(block) == key and not self._pool.is_pinned(block)

    def are_waiting(self, blocks: Sequence[int]) -> list[bool]:
        return [not self._pool.is_pinned(block) for block in blocks]

    def has_waiting(self, blocks: int) -> bool:
        return self._pool.available(blocks) == blocks

    def hold(self, blocks: Sequence[int]) -> Pin:
        return self._pool.pin(*blocks)

    def release(self, hold: Pin, before: int | None) -> None:
        self._pool.unpin(hold)

    def release_in_place(self, hold: Pin, behind: int | None) -> None:
        self._pool.unpin(hold)

    def _order(self) -> Iterator[tuple[int, bytes | None]]:
        for block in self._pool.free_blocks():
            yield block, None
        for node in self._pool.soonest_evicted():
            if self._pool.blocks_per_chunk or self._pool.is_checkpoint(node):  # else it leaves and frees nothing
                yield node, self._pool.key(node)
