"""Shape: the groups of a model as numbers of a `hello`, of which the keeper makes a planner of its own.

    grid tokens, lanes of a row; and for each group: kind, block tokens, kept bytes, device blocks, lanes, window, extra

So engine and keeper have one arithmetic. A group whose class is not known here has rules that cannot be sent.
"""

from collections.abc import Sequence
from typing import Any

from cpu_prefix_cache.keeper.protocol import ProtocolError
from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.model.groups import ChunkLocalGroup, Group, PrefixGroup, StateGroup, WindowGroup
from cpu_prefix_cache.model.planner import HybridChunkPlanner

KINDS: tuple[type[Group], ...] = (PrefixGroup, WindowGroup, ChunkLocalGroup, StateGroup)  # a number is a place in here
PER_GROUP = 7
MOST = 1 << 40  # no number of a model is larger


def spelled(planner: HybridChunkPlanner) -> tuple[int, ...]:
    """The numbers of a model whose groups are all of these kinds."""
    return (planner.grid_tokens, planner.ranks, *(number for group in planner.groups for number in _numbers(group)))


def planner_of(numbers: Sequence[int]) -> HybridChunkPlanner:
    """The planner that has as many host blocks of each piece. Raises ProtocolError for numbers that are no model's."""
    if len(numbers) < 2 or (len(numbers) - 2) % PER_GROUP or max(numbers) > MOST:
        raise ProtocolError(f"got {len(numbers)} numbers that are no model's")
    grid, ranks, *rest = numbers
    try:
        groups = [_group(at, *rest[at : at + PER_GROUP]) for at in range(0, len(rest), PER_GROUP)]
        return HybridChunkPlanner(groups, max_model_len=grid, grid_tokens=grid, ranks=ranks)
    except (ConfigurationError, IndexError) as error:
        raise ProtocolError(f"got numbers that are no model's: {error}") from error


def shared_shape(planner: HybridChunkPlanner) -> tuple[int, ...]:
    """Numbers that are equal in all models of one pool: with checkpoints all, because these are found by them."""
    return spelled(planner) if planner.has_checkpoints else (planner.host_blocks_per_chunk,)


def num_slots(planner: HybridChunkPlanner, depth: int) -> int:
    """How many slots a request needs to resume after so many chunks."""
    checkpoint = planner.checkpoint_blocks(depth) if planner.needs_checkpoint(depth) else 0
    return depth * planner.host_blocks_per_chunk + checkpoint


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
