"""KVCacheCoordinator: the longest boundary at which every group can resume, and the copies between two boundaries.

At boundary b the prefix groups need every chunk before b, and the others their checkpoint at b. Because the pool is
closed under prefixes, the first is one bisection, however many groups share a chunk; the second is the nearest chunk
above its end that has a checkpoint. Where both hold is the intersection of what the groups allow (rule 6).

            0       16       32       48       64        grid 16, prompt of 64 tokens
    host    [ x ]   [ x ]    [ x ]    [ x ]              chunks
                             |                           a checkpoint at 32
    device  [ x ]                                        n0 = 16
                    `-------'                            loaded: chunk 1 and the checkpoint; prefill begins at 32

>>> from cpu_prefix_cache.model.groups import PrefixGroup, StateGroup
>>> attention = PrefixGroup(name="attention", block_tokens=16, block_bytes=1024)
>>> mamba = StateGroup(name="mamba", block_tokens=16, block_bytes=1024)
>>> planner = HybridChunkPlanner([attention, mamba], max_model_len=64)
>>> coordinator = KVCacheCoordinator(planner, new_pool(planner, num_blocks=8))
>>> keys, pool = [key * 16 for key in (b"a", b"b", b"c", b"d")], coordinator.pool
>>> touch, chunks = pool.touch(None), pool.allocate(4)
>>> pool.commit(chunks, keys, pool.root, touch)
>>> coordinator.longest_boundary(keys, 16, 64)  # there is no state to resume from
16
>>> [checkpoint] = pool.allocate(0, needs=coordinator.needs(coordinator.checkpoint_at(keys, depth=2)))
>>> pool.commit([checkpoint], [checkpoint_key(keys[1])], chunks[1], touch)
>>> coordinator.longest_boundary(keys, 16, 64)
32
"""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress

from cpu_prefix_cache.eviction import policy_of
from cpu_prefix_cache.messages.errors import MisuseError
from cpu_prefix_cache.messages.options import USUAL_OPTIONS, CacheOptions
from cpu_prefix_cache.messages.plan import GroupCopy
from cpu_prefix_cache.messages.request import CheckpointAt
from cpu_prefix_cache.messages.tier import Found
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.pool.block_pool import BlockPool
from cpu_prefix_cache.pool.checkpoints import PieceNeed
from cpu_prefix_cache.pool.group_copies import Blocks, GroupCopies
from cpu_prefix_cache.pool.shape import Beside
from cpu_prefix_cache.pool.wanted import is_worth, wanted_depths


def new_pool(
    planner: HybridChunkPlanner,
    num_blocks: int,
    policy: str = "lru",
    *,
    ready: int | None = None,
    on_device: bool = False,
    thresholds: CacheOptions | None = USUAL_OPTIONS,
    log_boundaries: bool = False,
    beside: int | None = None,
) -> BlockPool:
    """A pool for the chunks and checkpoints of this model: of host blocks, or of device blocks. `beside`: how many
    chunks the pool holds that it is closed with.
    """
    return BlockPool(
        num_blocks,
        policy_of(policy, planner.grid_tokens),
        blocks_per_chunk=planner.device_blocks_per_chunk if on_device else planner.host_blocks_per_chunk,
        ready=ready,
        needs_checkpoint=planner.needs_checkpoint if planner.has_checkpoints else None,
        thresholds=thresholds,
        log_boundaries=log_boundaries,
        beside=None if beside is None else Beside(beside, planner.lookahead_chunks),
    )


class KVCacheCoordinator(GroupCopies):
    """One model's groups over one pool: the host's, or, `on_device`, that of an engine that has none of its own."""

    def __init__(self, planner: HybridChunkPlanner, pool: BlockPool, *, on_device: bool = False) -> None:
        super().__init__(planner)
        self.pool = pool
        self._widths = [piece.device_blocks if on_device else piece.host_blocks for piece in planner.pieces]

    # Looking: changes nothing

    def findable(self, keys: Sequence[bytes], num_tokens: int) -> int:
        """How many of the chunks with these keys a hit of a prompt of so many tokens may need, at most."""
        return min(self.planner.findable_chunks(num_tokens), len(keys))

    def longest_boundary(self, keys: Sequence[bytes], n0: int, num_tokens: int) -> int:
        """The largest boundary in [n0, num_tokens - 1] at which all groups can resume (rule 6). Changes nothing.

        What lies before `n0`, rounded down to a boundary, is the engine's. n0 itself is the answer when the pool has
        nothing beyond it.
        """
        planner, grid = self.planner, self.planner.grid_tokens
        depth = self.pool.resident_run(keys, n0 // grid, self.findable(keys, num_tokens))
        if planner.has_checkpoints and planner.resumable_chunks(depth) * grid > n0:
            depth = self.pool.depth(self.pool.resume_points.nearest(self._chunk(keys, depth)))
        return max(n0, planner.resumable_chunks(depth) * grid)

    def resume_node(self, keys: Sequence[bytes], depth: int) -> int | None:
        """Node that holds all that is needed to resume after `depth` chunks, one or more, if it is here.

        That is the checkpoint for it, or the chunk, where none is needed. To pin it is to pin the whole prefix.
        """
        present = self.planner.chunks_to_resume(depth)
        if not self.planner.needs_checkpoint(present):
            return self.pool.find(keys[depth - 1])
        return self.pool.find(checkpoint_key(keys[present - 1])) if present <= len(keys) else None

    def resume_nodes(self, keys: Sequence[bytes], depth: int) -> tuple[int, ...]:
        """The nodes that lead to all that is read to resume after `depth` chunks: the `resume_node`, and before it the
        last of these, if the checkpoint hangs further down. Empty if it is not all here.
        """
        node = self.resume_node(keys, depth)
        if node is None:
            return ()
        last = (self._chunk(keys, depth),) if self.planner.lookahead_chunks else ()
        return tuple(dict.fromkeys((*last, node)))

    def wanted_checkpoints(
        self,
        keys: Sequence[bytes],
        end: int,
        num_tokens: int,
        interval: int | None = None,
        is_elsewhere: Callable[[bytes], bool] = lambda key: False,
    ) -> list[int]:
        """The depths at which a prompt of `num_tokens` tokens is worth a checkpoint to resume from, beyond token `end`
        and within the prompt (wanted.py). It departs from what somebody had before, here or, by the key of a chunk,
        elsewhere. Ascending.
        """
        last = min(self.planner.hittable_chunks(num_tokens), len(keys))
        branch = self._branch(keys, end, last, is_elsewhere)
        return wanted_depths(self.planner, len(keys), end, num_tokens, branch, interval)

    def branch(
        self,
        keys: Sequence[bytes],
        end: int,
        num_tokens: int,
        is_elsewhere: Callable[[bytes], bool] = lambda key: False,
    ) -> int | None:
        """The one of `wanted_checkpoints` where the prompt departs from what somebody had before, if there is one."""
        depth = self._branch(keys, end, min(self.planner.hittable_chunks(num_tokens), len(keys)), is_elsewhere)
        return depth if is_worth(self.planner, depth, end, num_tokens) else None

    def _branch(self, keys: Sequence[bytes], end: int, last: int, is_elsewhere: Callable[[bytes], bool]) -> int:
        here = self.pool.resident_run(keys, end // self.planner.grid_tokens, last)
        return here + bisect_left(range(here, last), True, key=lambda at: not is_elsewhere(keys[at]))

    def _chunk(self, keys: Sequence[bytes], depth: int) -> int:
        chunk = self.pool.find(keys[depth - 1])
        return self.pool.root if chunk is None else chunk

    # Blocks of a checkpoint

    def holds(self, checkpoint: CheckpointAt) -> bool:
        """Whether the pool is large enough for a checkpoint and all of its prefix."""
        chunks = checkpoint.depth * self.pool.shape.blocks_per_chunk
        return chunks + self.num_blocks(checkpoint.depth) <= self.pool.capacity

    def needs(self, checkpoint: CheckpointAt) -> list[PieceNeed]:
        """The pieces a checkpoint has.

        A piece is known by the chunk it lies in, its group, and its place in the chunk: so checkpoints share it.
        """
        first = checkpoint.depth - len(checkpoint.tail)
        return [
            PieceNeed((checkpoint.tail[at.chunk - first], at.group, at.block), self._widths[at.group])
            for at in self.planner.checkpoint(checkpoint.depth)
        ]

    def take_in(self, boundary: bytes, pieces: dict[Hashable, Found]) -> Sequence[Found]:
        """Take in the checkpoint below the chunk with this key, if that is here, and each of its pieces is or was found
        in blocks that are free. The pieces that were, which are left out of `pieces` from now on.
        """
        chunk, key = self.pool.find(boundary), checkpoint_key(boundary)
        if chunk is None or self.pool.find(key) is not None:
            return ()
        depth = self.pool.depth(chunk)
        above = self.pool.keys_of(self.pool.path(chunk, self.planner.reach(depth)))
        needs = self.needs(CheckpointAt(depth, tuple(key for key in above if key)))
        missing = [need.key for need in self.pool.checkpoints.missing(needs)]
        if not needs or not pieces.keys() >= set(missing):
            return ()
        found = [pieces.pop(each) for each in missing]
        with suppress(MisuseError):  # a block is in use: what it held is written over
            node = self.pool.claim_checkpoint([block for each in found for block in each.slots], needs)
            self.pool.commit([node], [key], chunk, self.pool.touch(None))
            return found
        return ()

    def num_blocks(self, depth: int) -> int:
        """How many blocks of this pool the checkpoint below `depth` chunks takes, shared ones included."""
        return sum(self._widths[at.group] for at in self.planner.checkpoint(depth))

    def destinations(self, chunks: Sequence[int], start: int, stop: int, checkpoint: int | None) -> list[Blocks]:
        """The blocks, for each group, that a load of chunks [start, stop) is to fill, where this is the device's pool.

        `chunks` are those chunks, and `checkpoint` the one after them, if one is needed: nodes that are being written.
        """
        found: list[list[int]] = [[] for _ in self.planner.pieces]
        by_group = self.chunk_blocks_by_group(self.pool.blocks_of(chunks))
        for group, blocks in zip(self._in_chunk, by_group, strict=True):
            found[group].extend(blocks)
        if checkpoint is not None:
            places = self.planner.checkpoint(self.planner.chunks_to_resume(stop))
            for at, piece in zip(places, self.pool.checkpoints.pieces(checkpoint), strict=True):
                found[at.group].extend(piece if at.chunk >= start else ())
        return list(found)

    # Copies

    def chunk_copies(self, chunks: Sequence[int], device_blocks: Sequence[Blocks]) -> list[GroupCopy]:
        """Pair the host blocks of `chunks` with their device blocks, given for each group that chunks have."""
        return self.of_chunks(self.pool.blocks_of(chunks), device_blocks) if chunks else []

    def load_copies(
        self, keys: Sequence[bytes], start: int, stop: int, destinations: Sequence[Blocks]
    ) -> list[GroupCopy]:
        """Fill `destinations`, device blocks for each group, so that a request resumes after `stop` chunks.

        The prefix up to there must be here. What lies before chunk `start` is not copied (rule 8).
        """
        chunks = self.pool.path(self._chunk(keys, stop), stop - start)
        node, depth = self.resume_node(keys, stop), self.planner.chunks_to_resume(stop)
        has_checkpoint = node is not None and self.planner.needs_checkpoint(depth)
        pieces = self.pool.checkpoints.pieces(node) if node is not None and has_checkpoint else None
        return self.of_load(self.pool.blocks_of(chunks), pieces, start, stop, destinations)
