"""vLLM's block pool as a `Device`.

A block waits to be evicted in the pool's free queue, hashed or not, and is handed out from its front:

    front                                                                     back
    [ no hash ][ deepest of the oldest ] ... [ its first chunk ] ... [ freed last ]
               `-- soonest_evicted walks from here, or from any block it is told, along the queue's own links

A block in use has `ref_cnt > 0` and is out of the queue. A hold is one more reference, which is all that vLLM needs to
leave a block and its hash alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_block_hash, get_group_id

from cpu_prefix_cache.request import CheckpointAt


class VllmDevice:
    """The blocks of one group of full-attention layers: a chunk is one block.

    vLLM's key of a block is its hash and the group, ours the hash alone, as it stands in `Request.block_hashes`.

    vLLM hashes a block when it allocates it, before the step that computes it. While such a step is decided, `awaiting`
    keeps those blocks from being found.
    """

    def __init__(self, pool: BlockPool, group: int = 0) -> None:
        self._pool = pool
        self._group = group
        self.num_chunks: int = pool.num_gpu_blocks - 1
        self.null_block: int = pool.null_block.block_id
        self._is_awaited: Callable[[bytes], bool] | None = None

    def find(self, key: bytes) -> Sequence[int] | None:
        found = self._pool.get_cached_block(key, [self._group])
        if found is None:
            return None
        awaited = self._is_awaited is not None and found[0].ref_cnt > 0 and self._is_awaited(key)
        return None if awaited else (found[0].block_id,)

    @contextmanager
    def awaiting(self, is_awaited: Callable[[bytes], bool]) -> Iterator[None]:
        """In this context, blocks in use are not found under keys whose bytes are still to come."""
        self._is_awaited = is_awaited
        try:
            yield
        finally:
            self._is_awaited = None

    def find_checkpoint(self, checkpoint: CheckpointAt) -> None:
        """Windows and states are not built yet: the settings refuse them."""

    def soonest_evicted(self, after: int | None) -> Iterator[tuple[int, bytes | None]]:
        start = None if after is None else self._pool.blocks[after]
        for block in self._pool.free_block_queue.iter_blocks_after(start):
            yield block.block_id, self._key(block)

    def is_waiting(self, block: int, key: bytes | None) -> bool:
        here = self._pool.blocks[block]
        return here.ref_cnt == 0 and self._key(here) == key

    def hold(self, blocks: Sequence[int]) -> list[KVCacheBlock]:
        held = [self._pool.blocks[block] for block in blocks]
        self._pool.touch(held)
        return held

    def release(self, hold: list[KVCacheBlock]) -> None:
        # Deepest first, as vLLM frees a request: a chunk must not outlive its parent.
        self._pool.free_blocks(reversed(hold))

    def release_in_place(self, hold: list[KVCacheBlock], behind: int | None) -> None:
        # Not `free_blocks`: that puts hashed blocks at the back of the queue. The queue has no verb for its middle, so
        # the blocks are linked in by hand.
        queue = self._pool.free_block_queue
        place = queue.fake_free_list_head if behind is None else self._pool.blocks[behind]
        while place.next_free_block is not queue.fake_free_list_tail and place.next_free_block.block_hash is None:
            place = place.next_free_block  # blocks without a hash are handed out first
        for block in reversed(hold):
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                block.prev_free_block, block.next_free_block = place, place.next_free_block
                place.next_free_block.prev_free_block = block
                place.next_free_block = place = block
                queue.num_free_blocks += 1

    def _key(self, block: KVCacheBlock) -> bytes | None:
        """Our key of a block; None without one, or with one of another group."""
        key = block.block_hash
        return None if key is None or get_group_id(key) != self._group else get_block_hash(key)
