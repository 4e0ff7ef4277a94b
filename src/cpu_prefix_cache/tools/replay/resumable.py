"""Replays prompts through a host pool that keeps what one model needs to resume: chunks and checkpoints.

For each prompt, as CPUPrefixCache does:

    lookup      the hit is the longest boundary at which all groups can resume
    touch       once, the node at that boundary
    store       the missing chunks, with a checkpoint where one is wanted: at the end of the prompt, and where a second
                continuation of a prefix appears (rule 9). Chunks that do not fit together with their checkpoint are not
                stored

For a model without checkpoints this stores the prompt, cut to what fits. Prompts come one at a time, and nothing of a
prompt is evicted while it is served.
"""

from collections.abc import Iterable, Sequence

from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.pool.block_pool import Pin
from cpu_prefix_cache.pool.coordinator import KVCacheCoordinator, new_pool


class ResumableReplay:
    """Serves prompts, given as keys of chunks, from a host of `host_blocks` blocks of `planner.host_block_bytes`.

    `chunks` and `hit_chunks` are totals of all prompts so far.
    """

    def __init__(self, planner: HybridChunkPlanner, host_blocks: int, policy: str = "lru") -> None:
        self.chunks = 0
        self.hit_chunks = 0
        self.pool = new_pool(planner, host_blocks, policy)
        self._planner = planner
        self._coordinator = KVCacheCoordinator(planner, self.pool)

    @property
    def hit_ratio(self) -> float:
        """The share of all chunks so far that were hits."""
        return self.hit_chunks / self.chunks if self.chunks else 0.0

    def serve(self, keys: Sequence[bytes], now: float) -> int:
        """Serve a prompt at time `now`, in seconds, and store what is missing. Returns how many chunks were hits."""
        grid = self._planner.grid_tokens
        num_tokens = len(keys) * grid + 1  # so that a hit may cover all its chunks
        hit = self._coordinator.longest_boundary(keys, 0, num_tokens) // grid
        self.chunks += len(keys)
        self.hit_chunks += hit
        wanted = self._coordinator.wanted_checkpoints(keys, hit * grid, num_tokens)
        resumed = self._coordinator.resume_node(keys, hit) if hit else None
        touch = self.pool.touch(resumed, keys, now)
        pins = [] if resumed is None else [self.pool.pin(resumed)]
        for depth in sorted({*wanted, len(keys)}):
            pins += self._store(keys, depth, depth in wanted, touch)
        for pin in pins:
            self.pool.unpin(pin)
        return hit

    def _store(self, keys: Sequence[bytes], depth: int, with_checkpoint: bool, touch: object) -> Iterable[Pin]:
        """Store the first `depth` chunks, and the checkpoint after them. Returns pins on those that are stored now."""
        have = self.pool.resident_run(keys, 0, depth)
        parent = self.pool.find(keys[have - 1]) if have else None
        pins = [] if parent is None else [self.pool.pin(parent)]
        parent = self.pool.root if parent is None else parent
        if with_checkpoint:
            stored = self._store_with_checkpoint(keys, have, depth, parent, touch)
        elif have < depth and not self._planner.needs_checkpoint(depth):
            stored = self._store_chunks(keys[have:depth], parent, touch)
        else:
            stored = []
        return [*pins, *(self.pool.pin(node) for node in stored[-1:])]

    def _store_chunks(self, keys: Sequence[bytes], parent: int, touch: object) -> list[int]:
        accepted, victims = self.pool.choose(parent, keys)
        chunks = self.pool.take(accepted, keys[:accepted], victims=victims)
        self.pool.commit(chunks, keys[: len(chunks)], parent, touch)
        return chunks

    def _store_with_checkpoint(
        self, keys: Sequence[bytes], have: int, depth: int, parent: int, touch: object
    ) -> list[int]:
        new = [*keys[have:depth], checkpoint_key(keys[depth - 1])]
        needs = self._coordinator.needs(self._coordinator.checkpoint_at(keys, depth))
        accepted, victims = self.pool.choose(parent, new, needs)
        if accepted < len(new):
            return []
        nodes = self.pool.take(depth - have, new, needs, victims)
        self.pool.commit(nodes, new[: len(nodes)], parent, touch)
        return nodes


def blocks_of_everything(planner: HybridChunkPlanner, prompts: Sequence[Sequence[bytes]]) -> int:
    """Host blocks that suffice to store these prompts without evictions.

    A prompt wants two checkpoints at most, at its end or before it.
    """
    chunks = {key for keys in prompts for key in keys}
    heaviest = [0]
    for depth in range(1, max((len(keys) for keys in prompts), default=0) + 1):
        heaviest.append(max(heaviest[-1], planner.checkpoint_blocks(depth)))
    checkpoints = sum(2 * heaviest[len(keys)] for keys in prompts)
    return max(planner.fewest_blocks, len(chunks) * planner.host_blocks_per_chunk + checkpoints)
