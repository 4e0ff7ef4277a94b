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

from collections.abc import Sequence

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

    def copies(self, chunks: Sequence[int], device_blocks: Sequence[Sequence[int]]) -> tuple[GroupCopy, ...]:
        """Pair the host blocks of `chunks` with the device blocks of the same chunks, given group by group."""
        host_blocks = _by_group(self.pool.blocks_of(chunks), [piece.host_blocks for piece in self.planner.pieces])
        return tuple(
            GroupCopy(group, tuple(host), tuple(device))
            for group, (host, device) in enumerate(zip(host_blocks, device_blocks, strict=True))
        )

    def device_blocks_by_group(self, device_blocks: Sequence[int]) -> list[Sequence[int]]:
        """Split device blocks given chunk by chunk, as `Device.find` gives them, into a list for each group."""
        return _by_group(device_blocks, [piece.device_blocks for piece in self.planner.pieces])


def _by_group(blocks: Sequence[int], widths: Sequence[int]) -> list[Sequence[int]]:
    """Split a list of chunks, each `widths` blocks for one group after another, into a list for each group."""
    if len(widths) == 1:
        return [blocks]
    groups: list[Sequence[int]] = []
    chunk, begin = sum(widths), 0
    for width in widths:
        groups.append([block for at in range(begin, len(blocks), chunk) for block in blocks[at : at + width]])
        begin += width
    return groups
