"""A proposal to vLLM: what a connector that stores late needs of the block pool, as lines to be added.

Such a connector works on the order in which vLLM evicts blocks, and holds what it stores. The interface of connectors
hands out the pool (`bind_gpu_block_pool`) and promises nothing of its order. So `connector/vllm/pool_view.py` links
blocks of the free queue by hand, wraps `get_new_blocks`, and checks at start that all of it still fits. These lines
would make an interface of it. In `get_new_blocks`, before the hashes go: `for call in self.reuse_calls: call(ret)`,
which costs nothing where nobody uses it.

* A block that is copied must not be handed out, and must not become young by it. `touch` and `free_blocks`, the only
  way to hold one, put it at the end of the queue: each store would renew what it stores. With the order kept, device
  and host have the hits of one pool of the sum.
* What is handed out is known one call too late. Its bytes are whole until the step runs, so a connector that is called
  in `get_new_blocks` can save it first. `unpin_blocks(on_reuse=...)` of 0.32 does so for held blocks alone.
* Nothing promises the queue's links: another list would break every connector that walks it, at run time.

`iter_blocks_after`, `get_num_free_blocks`, `get_cached_block` and `reset_prefix_cache` are there already and would do.
`test_upstream.py` holds these lines against what `pool_view.py` does by hand.
"""

from collections.abc import Callable, Sequence

from vllm.v1.core.kv_cache_utils import KVCacheBlock


class FreeKVCacheBlockQueue:
    def remove_run(self, run: Sequence[KVCacheBlock]) -> None:
        """Take neighbours out of the queue, given from front to back."""
        before, after = run[0].prev_free_block, run[-1].next_free_block
        before.next_free_block, after.prev_free_block = after, before
        for block in run:
            block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= len(run)

    def insert_run(self, run: Sequence[KVCacheBlock], before: KVCacheBlock | None) -> None:
        """Insert blocks right behind one of the queue; None: before all others."""
        before = self.fake_free_list_head if before is None else before
        after = before.next_free_block
        for block in run:
            before.next_free_block, block.prev_free_block = block, before
            before = block
        before.next_free_block, after.prev_free_block = after, before
        self.num_free_blocks += len(run)


class BlockPool:
    def hold_run(self, run: Sequence[KVCacheBlock]) -> None:
        """Add a reference to neighbours of the free queue: they keep their place if `release_run` names it."""
        self.free_block_queue.remove_run(run)
        for block in run:
            block.ref_cnt += 1

    def release_run(self, run: Sequence[KVCacheBlock], before: KVCacheBlock | None) -> None:
        """End a hold. The blocks wait right behind `before`, and not at the end as if they had been used."""
        for block in run:
            block.ref_cnt -= 1
        self.free_block_queue.insert_run(run, before)

    def on_reuse(self, call: Callable[[Sequence[KVCacheBlock]], None]) -> None:
        """Have `get_new_blocks` pass the blocks that it hands out, while they have their hashes."""
        self.reuse_calls.append(call)
