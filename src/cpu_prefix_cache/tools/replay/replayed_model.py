"""A model's KV as replays keep it: in blocks that are counted, on the device and on the host alike.

plain blocks     a block of the trace is one block, whatever it takes
of groups        a chunk is a block of the trace, in whole host blocks; so is each piece of a checkpoint
"""

from collections.abc import Sequence
from copy import copy

from cpu_prefix_cache.model.groups import Group, PrefixGroup
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.tools.replay.models import ANY_LENGTH, in_large_blocks
from cpu_prefix_cache.tools.replay.traces import Trace


def of_plain_blocks(trace: Trace, block_bytes: int = 1) -> HybridChunkPlanner:
    block = PrefixGroup(name="blocks", block_tokens=trace.block_tokens, block_bytes=block_bytes)
    return HybridChunkPlanner([block], max_model_len=ANY_LENGTH)


def planner_of(groups: Sequence[Group], trace: Trace) -> HybridChunkPlanner:
    """The planner of a model whose chunks are the blocks of this trace."""
    large = in_large_blocks(groups, trace.block_tokens)
    return HybridChunkPlanner(large, max_model_len=ANY_LENGTH, grid_tokens=trace.block_tokens)


def counted(planner: HybridChunkPlanner) -> HybridChunkPlanner:
    """The same with host blocks of one byte, on a device with the same blocks."""
    by_number = copy(planner)
    by_number.host_block_bytes = by_number.lane_bytes = 1
    return by_number.below()


def most_blocks(trace: Trace, planner: HybridChunkPlanner) -> int:
    """Host blocks that hold all of the trace: a prompt wants two checkpoints at most, at its end or before it."""
    chunks = trace.different_blocks * planner.host_blocks_per_chunk
    widest = _widest_by_depth(trace, planner)
    checkpoints = sum(2 * widest[len(request.keys)] for request in trace.requests)
    return max(planner.fewest_blocks, chunks + checkpoints)


def chunks_beside(planner: HybridChunkPlanner, capacity: int, taken: int) -> int:
    """Chunks that have room in so many blocks beside those taken: any number, where chunks take none."""
    width = planner.host_blocks_per_chunk
    return max(0, capacity - taken) // width if width else ANY_LENGTH


def widest_checkpoint(trace: Trace, planner: HybridChunkPlanner) -> int:
    """Host blocks of the largest checkpoint of these prompts."""
    return _widest_by_depth(trace, planner)[-1]


def _widest_by_depth(trace: Trace, planner: HybridChunkPlanner) -> list[int]:
    """Host blocks of the largest checkpoint up to each depth."""
    widest = [0]
    for depth in range(1, max(len(request.keys) for request in trace.requests) + 1):
        widest.append(max(widest[-1], planner.checkpoint_blocks(depth)))
    return widest
