"""Shape: the groups of a model as numbers of a `hello`, of which the keeper makes a planner of its own.

    grid tokens, lanes of a row; and for each group: kind, block tokens, kept bytes, device blocks, lanes, window, extra

So engine and keeper have one arithmetic. A group whose class is not known here has rules that cannot be sent.
"""

from collections.abc import Sequence
from typing import Any

from cpu_prefix_cache.keeper.protocol import ProtocolError
from cpu_prefix_cache.keeper.records import MOST_BLOCKS
from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.model.groups import ChunkLocalGroup, Group, PrefixGroup, StateGroup, WindowGroup
from cpu_prefix_cache.model.planner import SMALLEST_SPLIT_BYTES, HybridChunkPlanner

KINDS: tuple[type[Group], ...] = (PrefixGroup, WindowGroup, ChunkLocalGroup, StateGroup)  # a number is a place in here
PER_GROUP = 7
MOST = 1 << 40  # no number of a model is larger
MOST_NUMBERED = 255  # groups of a tier's record
MOST_GROUPS, MOST_PARTS = 64, 1 << 18  # a keeper has time for so many: a window of 131,072 blocks is a half of them


def spelled(planner: HybridChunkPlanner) -> tuple[int, ...]:
    """The numbers of a model whose groups are all of these kinds."""
    return (planner.grid_tokens, planner.ranks, *(number for group in planner.groups for number in _numbers(group)))


def planner_of(numbers: Sequence[int]) -> HybridChunkPlanner:
    """The planner that has as many host blocks of each piece. Raises ProtocolError for numbers that are no model's."""
    groups, rest = divmod(len(numbers) - 2, PER_GROUP)
    if rest or not 0 < groups <= MOST_GROUPS or max(numbers) > MOST:
        raise ProtocolError(f"got {len(numbers)} numbers that are no model's")
    grid, ranks, *each = numbers
    try:
        found = [_group(at, *each[at : at + PER_GROUP]) for at in range(0, len(each), PER_GROUP)]
        has_numbers = all(grid // group.block_tokens <= MOST_BLOCKS for group in found)
        is_small = has_numbers and _num_parts(found, grid, ranks) <= MOST_PARTS
        if not is_small or not any(group.is_prefix for group in found):
            raise ProtocolError("got numbers of a model that no pool of a node takes")
        return HybridChunkPlanner(found, max_model_len=grid, grid_tokens=grid, ranks=ranks)
    except (ConfigurationError, IndexError) as error:
        raise ProtocolError(f"got numbers that are no model's: {error}") from error


def shared_shape(planner: HybridChunkPlanner) -> tuple[int, ...]:
    """Numbers that are equal in all models of one pool: with checkpoints all, because these are found by them."""
    return spelled(planner) if planner.has_checkpoints else (planner.host_blocks_per_chunk,)


def shared_planner(planner: HybridChunkPlanner, block_bytes: int) -> HybridChunkPlanner:
    """The planner of what lies in files below a pool: without checkpoints the same for all models of the pool, since a
    chunk is so many slots of it. Raises ConfigurationError for more than a record can number.
    """
    if planner.has_checkpoints:
        return planner
    slots = planner.host_blocks_per_chunk
    if slots > MOST_NUMBERED:
        raise ConfigurationError(f"a chunk takes {slots} slots, and files have it in up to {MOST_NUMBERED}")
    groups = [PrefixGroup(name=str(at), block_tokens=1, block_bytes=block_bytes) for at in range(slots)]
    return HybridChunkPlanner(groups, max_model_len=1)


def _num_parts(groups: Sequence[Group], grid: int, ranks: int) -> int:
    """Blocks of a chunk and of a checkpoint, and host blocks that a piece could be divided into: all that a planner of
    these groups looks at one by one.
    """
    blocks = [grid // group.block_tokens for group in groups]
    seen = [(numbers[-2] + numbers[-1]) // numbers[1] for numbers in map(_numbers, groups)]
    sizes = [  # on one rank
        group.kept_bytes
        * group.device_blocks
        * (count if group.is_prefix else 1)
        * (group.lanes or ranks)
        // max(1, ranks)
        for group, count in zip(groups, blocks, strict=True)
    ]
    return sum(blocks) + sum(seen) + sum(sizes) // max(1, min(SMALLEST_SPLIT_BYTES, *sizes))


def _numbers(group: Group) -> tuple[int, ...]:
    window = extra = 0
    if isinstance(group, WindowGroup):
        window, extra = group.window_tokens, group.extra_tokens
    elif isinstance(group, ChunkLocalGroup):
        window = group.window_tokens
    kind, lanes = KINDS.index(type(group)), group.lanes or 0
    return (kind, group.block_tokens, group.kept_bytes, group.device_blocks, lanes, window, extra)


def _group(
    at: int, kind: int, block_tokens: int, kept_bytes: int, device_blocks: int, lanes: int, window: int, extra: int
) -> Group:
    fields: dict[str, Any] = {"block_tokens": block_tokens, "block_bytes": kept_bytes, "device_blocks": device_blocks}
    if KINDS[kind] is WindowGroup:
        fields |= {"window_tokens": window, "extra_tokens": extra}
    elif KINDS[kind] is ChunkLocalGroup:
        fields |= {"window_tokens": window}
    return KINDS[kind](name=str(at), lanes=lanes or None, **fields)
