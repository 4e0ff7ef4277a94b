"""A short vocabulary for tests. A prompt is letters, one to a chunk; the key of a chunk is all the letters up to it."""

from typing import Any

from cpu_prefix_cache.deciding import BlockPool, CPUPrefixCache, HybridChunkPlanner, Pin, PooledDevice
from cpu_prefix_cache.testing.engine import chain


def make_scarce(pool: BlockPool) -> None:
    """A pool beside another one is filled, and the first chunk that it evicts is requested again."""
    keys = [b"-%d" % at for at in range(pool.capacity // max(1, pool.shape.blocks_per_chunk) + 1)]
    for key in keys:
        pool.commit(pool.allocate(1, [key]), [key], pool.root, pool.touch(None))
    pool.missed(keys[:1])


class Shelf:
    """A pool spoken to in prompts, so that a test reads as a story."""

    def __init__(self, chunks: int, blocks_per_chunk: int = 1, policy: str = "lru") -> None:
        self.pool = BlockPool(chunks * blocks_per_chunk, policy, blocks_per_chunk=blocks_per_chunk)
        self.now = 0.0

    def put(self, prompt: str, after: float = 1.0, next_use: float | None = None) -> None:
        """A request uses what is here of its prompt, and stores of the rest what the policy wants."""
        keys = chain(prompt)
        self.now += after
        have = self.pool.resident_run(keys, 0, len(keys))
        deepest = self.pool.find(keys[have - 1]) if have else None
        touch = self.pool.touch(deepest, keys, self.now, next_use=next_use)
        hold = None if deepest is None else self.pool.pin(deepest)
        parent = self.pool.root if deepest is None else deepest
        new = keys[have : have + self.pool.choose(parent, keys[have:])]
        self.pool.commit(self.pool.allocate(len(new), new), new, parent, touch)
        if hold is not None:
            self.pool.unpin(hold)
        self.pool.check_valid()

    def use(self, prompt: str) -> None:
        self.now += 1.0
        self.pool.touch(self.at(prompt), chain(prompt), self.now)

    def pin(self, prompt: str) -> Pin:
        return self.pool.pin(self.at(prompt))

    def withdraw(self, prompt: str) -> None:
        self.pool.withdraw(self.at(prompt))
        self.pool.check_valid()

    def at(self, prompt: str) -> int:
        block = self.pool.find(prompt.encode())
        assert block is not None, f"{prompt} is not here"
        return block

    @property
    def names(self) -> set[str]:
        keys = (self.pool.key(block) for block in range(self.pool.capacity))
        return {key.decode() for key in keys if key is not None}

    @property
    def order(self) -> list[str]:
        """The order in which they leave."""
        return [self.pool.key(block).decode() for block in self.pool.soonest_evicted()]


def whole_prompts(planner: HybridChunkPlanner, device: PooledDevice, **options: Any) -> CPUPrefixCache:
    """A cache that holds each chunk with all that it hangs below: its device notes nothing of what it hands out."""
    device.handed_out = lambda: None  # of this device alone
    return CPUPrefixCache(planner, device, **options)
