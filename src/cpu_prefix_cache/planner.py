"""One grid for all groups, and how many blocks a chunk of it takes on either side.

A *boundary* is a multiple of the grid G; a *chunk* is the G tokens between two boundaries; a *piece* is what one
group keeps of a chunk. Host memory is one pool of equal blocks, and a piece takes whole ones (rule 8).

    draft model        blocks of 16 tokens,  3,000 bytes each  ->  2 device blocks a chunk
    target model       blocks of 32 tokens, 12,000 bytes each  ->  1 device block a chunk
    grid               32 tokens
    host block         6,000 bytes: the pieces take 1 and 2 of them and nothing is wasted

>>> draft = Group(name="draft", kind=GroupKind.PREFIX, block_tokens=16, block_bytes=3_000)
>>> target = Group(name="target", kind=GroupKind.PREFIX, block_tokens=32, block_bytes=12_000)
>>> planner = HybridChunkPlanner([draft, target], max_model_len=4_096)
>>> planner.grid_tokens, planner.host_block_bytes, planner.host_blocks_per_chunk, planner.waste
(32, 6000, 3, 0.0)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cpu_prefix_cache.errors import ConfigurationError
from cpu_prefix_cache.groups import Group, GroupKind

# Stores to random host addresses reach 87 % of the link at this size and less below it (one H200, staged copies), so a
# smaller host block is chosen only when the smallest piece is itself smaller.
SMALLEST_SPLIT_BYTES = 192 * 1024


@dataclass(frozen=True, slots=True)
class Piece:
    """What one group keeps of one chunk: `num_bytes` in `device_blocks` blocks there and `host_blocks` here."""

    group: Group
    device_blocks: int
    host_blocks: int
    num_bytes: int


class HybridChunkPlanner:
    """The arithmetic of one model's cache. Pure: it knows no pool, no request and no bytes.

    `grid_tokens` is the engine's own hit granularity; without it, the least common multiple of the groups' blocks.

    Raises ConfigurationError, in a sentence that names the group to change, when the groups have no common
    boundary up to `max_model_len`, when `grid_tokens` is not a multiple of a group's block, or for a group kind
    that cannot be kept yet.
    """

    def __init__(self, groups: Sequence[Group], *, max_model_len: int, grid_tokens: int | None = None) -> None:
        self.groups = tuple(groups)
        _check_kinds(self.groups)
        self.grid_tokens = _common_grid(self.groups, max_model_len, grid_tokens)
        piece_bytes = [group.block_bytes * (self.grid_tokens // group.block_tokens) for group in self.groups]
        self.host_block_bytes = _least_wasteful_block(piece_bytes)
        self.pieces = tuple(
            Piece(group, self.grid_tokens // group.block_tokens, math.ceil(size / self.host_block_bytes), size)
            for group, size in zip(self.groups, piece_bytes, strict=True)
        )
        self.device_blocks_per_chunk = sum(piece.device_blocks for piece in self.pieces)
        self.host_blocks_per_chunk = sum(piece.host_blocks for piece in self.pieces)
        self.chunk_bytes = sum(piece_bytes)

    @property
    def waste(self) -> float:
        """The share of the host bytes of a chunk that holds nothing."""
        return 1 - self.chunk_bytes / (self.host_blocks_per_chunk * self.host_block_bytes)

    def full_chunks(self, num_tokens: int) -> int:
        """How many chunks `num_tokens` tokens fill."""
        return num_tokens // self.grid_tokens

    def hittable_chunks(self, num_tokens: int) -> int:
        """How many chunks of a prompt a hit may cover: its last token is always computed, for its logits (rule 6)."""
        return max(0, num_tokens - 1) // self.grid_tokens


def _check_kinds(groups: Sequence[Group]) -> None:
    if not groups:
        raise ConfigurationError("a model needs at least one group of KV state to cache")
    names = [group.name for group in groups]
    if len(set(names)) != len(names):
        raise ConfigurationError(f"group names must differ, got {', '.join(names)}")
    for group in groups:
        if group.kind is not GroupKind.PREFIX:
            raise ConfigurationError(
                f"group {group.name!r} is of kind {group.kind.value!r}, which is not built yet; only 'prefix' is"
            )


def _common_grid(groups: Sequence[Group], max_model_len: int, grid_tokens: int | None) -> int:
    common = math.lcm(*(group.block_tokens for group in groups))
    grid = common if grid_tokens is None else grid_tokens
    if grid < 1 or grid % common:
        misfit = next(group for group in groups if grid < 1 or grid % group.block_tokens)
        raise ConfigurationError(
            f"a grid of {grid} tokens is not a multiple of the {misfit.block_tokens} tokens of a block of group "
            f"{misfit.name!r}; a multiple of {common} fits all groups"
        )
    if grid > max_model_len and grid_tokens is not None and common <= max_model_len:
        raise ConfigurationError(
            f"a grid of {grid} tokens is past max_model_len {max_model_len}; a multiple of {common} up to that works"
        )
    if grid > max_model_len:
        coarsest = max(groups, key=lambda group: group.block_tokens)
        raise ConfigurationError(
            f"the first boundary all groups share is at {grid} tokens, past max_model_len {max_model_len}; "
            f"group {coarsest.name!r} with blocks of {coarsest.block_tokens} tokens makes it so: "
            f"give it a block size that divides {max_model_len} more finely"
        )
    return grid


def _least_wasteful_block(piece_bytes: Sequence[int]) -> int:
    """The host block size that wastes least over one chunk, and of those the largest."""

    def host_bytes(block: int) -> int:
        return sum(math.ceil(size / block) * block for size in piece_bytes)

    floor = min(SMALLEST_SPLIT_BYTES, *piece_bytes) if len(piece_bytes) > 1 else piece_bytes[0]
    candidates = {math.gcd(*piece_bytes)}
    for size in piece_bytes:
        candidates.update(math.ceil(size / parts) for parts in range(1, size // floor + 1))
    return min((block for block in candidates if block >= floor), key=lambda block: (host_bytes(block), -block))
