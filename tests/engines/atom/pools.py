"""Pools of blocks that later releases of ATOM have, as its BlockPool with their additions.

    slru           blocks used again wait in a second queue, of bounded length, and are handed out after the first
    superblocks    the next block is one that lies beside the last, before all queues

An ATOM that has the second queue itself uses its own.
"""

import inspect
from collections import OrderedDict
from contextlib import contextmanager

from tests.engines.atom import source  # noqa: F401  # before ATOM is imported

# isort: split
import atom.model_engine.block_manager
from atom.model_engine.block_pool import BlockPool

RATIO = 0.5  # of the device, ATOM's default


class SlruPool(BlockPool):
    def __init__(self, num_blocks, *arguments, cache_policy="slru", **options):
        super().__init__(num_blocks, *arguments, **options)
        self.cache_policy = cache_policy
        self.protected_ratio = RATIO
        self._protected = OrderedDict()
        self._reused = set()
        self.blocks_evicted = 0

    def claim(self, block_id):
        if self.block(block_id).hash != -1:
            self._reused.add(block_id)
        return super().claim(block_id)

    def free(self, block_id):
        super().free(block_id)
        if block_id in self._reused and self._cached.get(block_id, 0) is None and block_id in self._free:
            del self._cached[block_id]
            self._protected[block_id] = None
        while len(self._protected) > int(self.num_blocks * self.protected_ratio):
            oldest, _ = self._protected.popitem(last=False)
            self._reused.discard(oldest)
            self._cached[oldest] = None

    def _take_free(self):
        block_id = super()._take_free()
        while block_id < 0 and self._protected:
            oldest, _ = self._protected.popitem(last=False)
            if oldest in self._free and self.block(oldest).hash != -1:
                self._free.discard(oldest)
                block_id = oldest
        return block_id

    def _take_named(self, block_id):
        super()._take_named(block_id)
        self._protected.pop(block_id, None)

    def _unindex(self, block_id):
        self._protected.pop(block_id, None)
        self._reused.discard(block_id)
        super()._unindex(block_id)

    def clear_index(self):
        super().clear_index()
        self._protected.clear()
        self._reused.clear()


class SuperblockPool(BlockPool):
    """Counts the blocks in use of each superblock, as ATOM does, so a reference that bypasses it is noticed."""

    WIDTH = 4

    def __init__(self, num_blocks, *arguments, **options):
        super().__init__(num_blocks, *arguments, **options)
        self.superblocks = [0] * -(-num_blocks // self.WIDTH)
        self._last = 0

    def _take_free(self):
        first = self._last // self.WIDTH * self.WIDTH
        beside = [block for block in range(first, first + self.WIDTH) if block in self._free]
        vacant = [block for block in beside if self.block(block).hash == -1]
        if not vacant and (not beside or any(self.block(block).hash == -1 for block in self._free)):
            self._last = super()._take_free()
            return self._last
        self._last = (vacant or beside)[0]
        self._take_named(self._last)
        return self._last

    def _count(self, block_id, more):
        self.superblocks[block_id // self.WIDTH] += more
        if self.superblocks[block_id // self.WIDTH] < 0:
            raise AssertionError(f"block {block_id} was freed, and was not in use")

    def allocate(self, block_id):
        self._count(block_id, 1)
        return super().allocate(block_id)

    def claim(self, block_id):
        if not self.is_used(block_id):
            self._count(block_id, 1)
        return super().claim(block_id)

    def free(self, block_id):
        super().free(block_id)
        if not self.is_used(block_id):
            self._count(block_id, -1)


def slru_pool(num_blocks, *arguments, **options):
    """A pool with a second queue: ATOM's own, if it has one."""
    has_own = "cache_policy" in inspect.signature(BlockPool).parameters
    return (BlockPool if has_own else SlruPool)(num_blocks, *arguments, **options | {"cache_policy": "slru"})


POOLS = {"lru": BlockPool, "slru": slru_pool, "superblocks": SuperblockPool}


@contextmanager
def pools(kind):
    """ATOM's block managers that are made meanwhile have such pools."""
    before = atom.model_engine.block_manager.BlockPool
    atom.model_engine.block_manager.BlockPool = POOLS[kind]
    try:
        yield
    finally:
        atom.model_engine.block_manager.BlockPool = before
