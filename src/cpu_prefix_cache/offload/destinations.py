"""The check of device blocks that a load is to fill, for whoever plans loads."""

from collections.abc import Sequence

from cpu_prefix_cache.messages.errors import MisuseError
from cpu_prefix_cache.model.planner import HybridChunkPlanner


def check_destinations(
    planner: HybridChunkPlanner, null_block: int | None, destinations: Sequence[Sequence[int]], n0: int, boundary: int
) -> None:
    """Raise MisuseError for blocks not given by group, too few or too many, null ones, and one named twice."""
    wanted = planner.device_blocks(n0 // planner.grid_tokens, boundary // planner.grid_tokens)
    if any(isinstance(blocks, int) for blocks in destinations):
        raise MisuseError(f"destinations are one list of blocks for each group, got {destinations!r}")
    if [len(blocks) for blocks in destinations] != wanted:
        raise MisuseError(f"destinations must be {wanted} blocks, got {[len(blocks) for blocks in destinations]}")
    for group, blocks in zip(planner.groups, destinations, strict=True):
        if null_block in blocks or len(set(blocks)) != len(blocks):
            raise MisuseError(f"a destination of group {group.name!r} is null or named twice (rule 7)")
