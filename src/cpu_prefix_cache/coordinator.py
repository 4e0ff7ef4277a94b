"""KVCacheCoordinator: the longest boundary at which every group can resume, and the copies between two boundaries.

Written for prefix groups: at boundary b every chunk before b must be here. Because the pool is closed under prefixes,
that is one bisection, however many groups share a chunk.

            0       16       32       48       64        grid 16, prompt of 64 tokens
    host    [ x ]   [ x ]    [ x ]    [ x ]
    device  [ x ]                                        n0 = 16
                    `------- loaded -----'
                                      48                 the boundary: the last token is always computed

>>> from cpu_prefix_cache.groups import Group, GroupKind
>>> attention = Group(name="attention", kind=GroupKind.PREFIX, block_tokens=16, block_bytes=512)
>>> planner, pool = HybridChunkPlanner([attention], max_model_len=64), BlockPool(num_blocks=4)
>>> keys = [b"first", b"second", b"third", b"fourth"]
>>> pool.commit(pool.allocate(4), keys, pool.root, pool.touch(None))
>>> KVCacheCoordinator(planner, pool).longest_boundary(keys, 16, 64)
48
"""

from collections.abc import Iterator, Sequence

from cpu_prefix_cache.block_pool import BlockPool
from cpu_prefix_cache.plan import GroupCopy
from cpu_prefix_cache.planner import HybridChunkPlanner


class KVCacheCoordinator:
    """One model's groups over one pool: the host's, or the device's of an engine that has none of its own."""

    def __init__(self, planner: HybridChunkPlanner, pool: BlockPool) -> None:
        self.planner = planner
        self.pool = pool

    def longest_boundary(self, keys: Sequence[bytes], n0: int, num_tokens: int) -> int:
        """The largest boundary in [n0, num_tokens - 1] at which all groups can resume (rule 6). Changes nothing.

        What lies before `n0` is the engine's; n0 itself is the answer when the pool has nothing beyond it, or when
        n0 is not on the grid (rule 10).
        """
        grid = self.planner.grid_tokens
        if n0 % grid:
            return n0
        stop = min(self.planner.hittable_chunks(num_tokens), len(keys))
        return max(n0, self.pool.resident_run(keys, n0 // grid, stop) * grid)

    def copies(self, chunks: Sequence[int], device_blocks: Sequence[int]) -> tuple[GroupCopy, ...]:
        """Pair the host blocks of `chunks` with the device blocks of the same chunks, group by group."""
        pieces = self.planner.pieces
        host_blocks = self.pool.blocks_of(chunks)
        if len(pieces) == 1:
            return (GroupCopy(0, host_blocks, tuple(device_blocks)),)
        host_lanes = _lanes(host_blocks, [piece.host_blocks for piece in pieces])
        device_lanes = _lanes(device_blocks, [piece.device_blocks for piece in pieces])
        return tuple(
            GroupCopy(group, host, device)
            for group, (host, device) in enumerate(zip(host_lanes, device_lanes, strict=True))
        )


def _lanes(blocks: Sequence[int], widths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Split a chunk-major list, each chunk `widths` blocks for one group after another, into a list per group."""
    chunk, begin = sum(widths), 0
    for width in widths:
        yield tuple(block for at in range(begin, len(blocks), chunk) for block in blocks[at : at + width])
        begin += width
