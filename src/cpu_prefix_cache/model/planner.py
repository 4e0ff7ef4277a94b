"""One grid for all groups; what is kept of a chunk and at a boundary; and the host block that wastes least.

What one group keeps is a *piece*: a prefix group one piece of every chunk, the others one for each of their own blocks
in a *checkpoint* (rule 9). Host memory is one pool of equal blocks, and a piece takes whole ones (rule 8).

>>> from cpu_prefix_cache.model.groups import PrefixGroup, WindowGroup
>>> full = PrefixGroup(name="full", block_tokens=32, block_bytes=12_288)
>>> local = WindowGroup(name="local", window_tokens=40, block_tokens=16, block_bytes=6_144)
>>> planner = HybridChunkPlanner([full, local], max_model_len=4_096)
>>> planner.grid_tokens, planner.host_block_bytes, planner.host_blocks_per_chunk, planner.waste
(32, 6144, 2, 0.0)
>>> planner.checkpoint(depth=3)  # to resume at token 96: the window's blocks 3, 4 and 5, two to a chunk
(PieceAt(group=1, chunk=1, block=1), PieceAt(group=1, chunk=2, block=0), PieceAt(group=1, chunk=2, block=1))
"""

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import NamedTuple

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.model.groups import Group

# A host block is smaller than this only if a piece is: stores to random host addresses reach 87 % of the link at this
# size, and less below it (one H200, staged copies).
SMALLEST_SPLIT_BYTES = 192 * 1024
SMALL_WASTE = 0.01  # the largest block is taken whose waste is larger than the least by no more than this share
ALIGNMENT = 512  # bytes, at most: host blocks are as well aligned as the pieces in them
PAGE_BYTES = 4096  # alignment of sizes and addresses for direct file I/O
TOKENS_PER_CHECKPOINT = 2048  # for weighing waste: a conversation keeps two checkpoints in a turn of 4,096 tokens
# A boundary far from token 0, where a window is full. A chunk later a local chunk begins that has 2, 3, 5 or 7 chunks,
# or a product of these, so that it is nearly full here.
FAR_CHUNKS = 2**20 * 3**3 * 5**2 * 7 - 1


@dataclass(frozen=True, slots=True)
class Piece:
    """Unit of what one group keeps: `num_bytes` on each rank, as the host keeps them, `device_blocks` blocks there and
    `host_blocks` here. These are divided into `lanes`, one for each rank, or for all that have the same bytes."""

    group: Group
    device_blocks: int
    host_blocks: int
    num_bytes: int
    lanes: int = 1

    @property
    def in_chunk(self) -> bool:
        """Whether every chunk has one; else checkpoints have them."""
        return self.group.is_prefix


class PieceAt(NamedTuple):
    """One piece of a checkpoint: block number `block` of its group in chunk number `chunk`, both from 0."""

    group: int  # index into the planner's groups
    chunk: int
    block: int


class HybridChunkPlanner:
    """The arithmetic of one model's cache. It knows no pool and no request.

    `grid_tokens` is the engine's own hit granularity; without it, the least common multiple of the groups' blocks.
    A host block, of `host_block_bytes` bytes, is a row of `ranks` lanes. A piece that is the same on all ranks takes
    whole rows; of another each rank has one, which takes its lane of them; and one that several ranks have, their
    lanes. With `in_pages` lanes are whole pages of PAGE_BYTES, as a file tier needs them.

    Raises ConfigurationError, naming the group to change, when the groups have no common boundary up to
    `max_model_len`, when `grid_tokens` is not a multiple of a group's block, the lanes of a group do not divide those
    of a row, or there are no groups.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        max_model_len: int,
        grid_tokens: int | None = None,
        ranks: int = 1,
        in_pages: bool = False,
    ) -> None:
        names = [group.name for group in groups]
        if len(set(names)) != len(names):
            raise ConfigurationError(f"group names must differ, got {', '.join(names)}")
        if ranks < 1:
            raise ConfigurationError(f"ranks must be at least 1, got {ranks}")
        self.groups = tuple(groups)
        if not self.groups:
            raise ConfigurationError("a model needs at least one group of KV state to cache")
        self.ranks = ranks
        _check_lanes(self.groups, ranks)
        self.grid_tokens = _common_grid(self.groups, max_model_len, grid_tokens)
        self._blocks_per_chunk = tuple(self.grid_tokens // group.block_tokens for group in self.groups)
        self._piece_blocks = tuple(  # device blocks to a piece
            group.device_blocks * (count if group.is_prefix else 1)
            for group, count in zip(self.groups, self._blocks_per_chunk, strict=True)
        )
        self.lane_bytes = self._choose_lane(PAGE_BYTES if in_pages else 1)
        self.host_block_bytes = self.ranks * self.lane_bytes
        self.crossing_bytes = tuple(group.kept_bytes for group in self.groups)  # of a device block, on the link
        self.pieces = tuple(self._piece(at) for at in range(len(self.groups)))
        in_chunk = [piece for piece in self.pieces if piece.in_chunk]
        self.device_blocks_per_chunk = sum(piece.device_blocks for piece in in_chunk)
        self.host_blocks_per_chunk = sum(piece.host_blocks for piece in in_chunk)
        self.chunk_bytes = sum(piece.num_bytes for piece in in_chunk)
        lookahead_tokens = max(group.lookahead_tokens for group in self.groups)
        self.lookahead_chunks = -(-lookahead_tokens // self.grid_tokens)
        self._checkpoint_groups = tuple(at for at, piece in enumerate(self.pieces) if not piece.in_chunk)
        self._known_needs: dict[int, bool] = {}  # depth -> `needs_checkpoint`, asked for every chunk that is cached
        self._known_unaided = [0]  # by depth: `unaided_depth`

    def below(self) -> "HybridChunkPlanner":
        """The planner of a cache whose device is the host pool, with slots as large as host blocks."""
        lower = copy(self)
        lower.crossing_bytes = (self.host_block_bytes,) * len(self.groups)
        lower.pieces = tuple(
            replace(piece, device_blocks=piece.host_blocks, num_bytes=piece.host_blocks * self.host_block_bytes)
            for piece in self.pieces
        )
        lower.device_blocks_per_chunk = self.host_blocks_per_chunk
        lower.chunk_bytes = self.host_blocks_per_chunk * self.host_block_bytes
        return lower

    # Boundaries

    def full_chunks(self, num_tokens: int) -> int:
        """How many chunks `num_tokens` tokens fill."""
        return num_tokens // self.grid_tokens

    def hittable_chunks(self, num_tokens: int) -> int:
        """How many chunks of a prompt a hit may cover: its last token is always computed, for its logits (rule 6)."""
        return max(0, num_tokens - 1) // self.grid_tokens

    def findable_chunks(self, num_tokens: int) -> int:
        """How many chunks of a prompt a hit may need: what groups look ahead to may hold the prompt's last token."""
        return min(self.full_chunks(num_tokens), self.chunks_to_resume(self.hittable_chunks(num_tokens)))

    def resumable_chunks(self, present: int) -> int:
        """With so many chunks present, after how many of them a request can resume: prefix groups may look ahead."""
        return max(0, present - self.lookahead_chunks)

    def chunks_to_resume(self, resumed: int) -> int:
        """How many chunks must be present, so that a request can resume after `resumed` of them."""
        return resumed + self.lookahead_chunks

    # Checkpoints: the one at a depth is what resuming with so many chunks present takes

    @property
    def has_checkpoints(self) -> bool:
        """Whether there are groups beside the prefix groups."""
        return bool(self._checkpoint_groups)

    @property
    def has_states_alone(self) -> bool:
        """Whether all groups beside the prefix groups are of states."""
        return self.has_checkpoints and all(self.groups[at].is_state for at in self._checkpoint_groups)

    def needs_checkpoint(self, depth: int) -> bool:
        """Whether resuming with `depth` chunks present takes more than those chunks."""
        if (known := self._known_needs.get(depth)) is None:
            boundary = self.resumable_chunks(depth) * self.grid_tokens
            known = any(len(self.groups[at].needed(boundary)) for at in self._checkpoint_groups)
            self._known_needs[depth] = known
        return known

    def unaided_depth(self, depth: int) -> int:
        """The largest depth, up to this one, at which a request can resume without a checkpoint; 0 if there is none.
        Amortised O(1): with windows or states it is 0 everywhere.
        """
        known = self._known_unaided
        for each in range(len(known), depth + 1):
            is_aided = not self.resumable_chunks(each) or self.needs_checkpoint(each)
            known.append(known[-1] if is_aided else each)
        return known[depth]

    def checkpoint(self, depth: int) -> tuple[PieceAt, ...]:
        """The pieces of the checkpoint below `depth` chunks: group by group, in token order."""
        boundary = self.resumable_chunks(depth) * self.grid_tokens
        return tuple(
            PieceAt(at, *divmod(block, self._blocks_per_chunk[at]))
            for at in self._checkpoint_groups
            for block in self.groups[at].needed(boundary)
        )

    def reach(self, depth: int) -> int:
        """Over how many chunks the checkpoint below `depth` of them reaches back."""
        return depth - min((at.chunk for at in self.checkpoint(depth)), default=depth - 1)

    def checkpoint_bytes(self, depth: int) -> int:
        """Bytes of the checkpoint below `depth` chunks on each rank, shared pieces included."""
        return sum(self.pieces[at.group].num_bytes for at in self.checkpoint(depth))

    def checkpoint_blocks(self, depth: int) -> int:
        """How many host blocks it takes."""
        return sum(self.checkpoint_widths(depth))

    def checkpoint_widths(self, depth: int) -> list[int]:
        """How many host blocks each of its pieces takes."""
        return [self.pieces[at.group].host_blocks for at in self.checkpoint(depth)]

    def resume_blocks(self, depth: int) -> int:
        """How many host blocks hold all that a request takes to resume with `depth` chunks."""
        return depth * self.host_blocks_per_chunk + self.checkpoint_blocks(depth)

    @property
    def fewest_blocks(self) -> int:
        """The host blocks of the shortest prefix at whose end a request can resume. A smaller host is of no use."""
        return self.resume_blocks(self.chunks_to_resume(1))

    def positions(self, start: int, stop: int) -> list[list[int]]:
        """The blocks of each group, counted from token 0, that a load of chunks [start, stop) fills (rule 8)."""
        found: list[list[int]] = [
            list(range(start * each, stop * each)) if piece.in_chunk else []
            for each, piece in zip(self._blocks_per_chunk, self.pieces, strict=True)
        ]
        for at in self.checkpoint(self.chunks_to_resume(stop)):
            if at.chunk >= start:
                found[at.group].append(at.chunk * self._blocks_per_chunk[at.group] + at.block)
        return found

    def device_blocks(self, start: int, stop: int) -> list[int]:
        """How many device blocks of each group such a load fills."""
        counts = [(stop - start) * piece.device_blocks if piece.in_chunk else 0 for piece in self.pieces]
        for at in self.checkpoint(self.chunks_to_resume(stop)):
            if at.chunk >= start:
                counts[at.group] += self.pieces[at.group].device_blocks
        return counts

    # Memory

    @property
    def waste(self) -> float:
        """The share of host bytes that hold nothing, with one checkpoint for TOKENS_PER_CHECKPOINT tokens."""
        taken = sum(self.held_bytes(at) * count for at, count in enumerate(self._counts()))
        return 1 - sum(self.piece_bytes(at) * count for at, count in enumerate(self._counts())) / taken

    def _lanes(self, at: int) -> int:
        """How many pieces with bytes of their own all ranks together hold where one rank holds one."""
        return self.groups[at].lanes or self.ranks

    def _piece(self, at: int) -> Piece:
        group = self.groups[at]
        blocks = self._piece_blocks[at]
        host_blocks = self._host_blocks(at, self.host_block_bytes)
        return Piece(group, blocks, host_blocks, blocks * group.kept_bytes, self._lanes(at))

    def piece_bytes(self, at: int) -> int:
        """A piece on all ranks together, as the host keeps it."""
        return self._piece_blocks[at] * self.groups[at].kept_bytes * self._lanes(at)

    def _host_blocks(self, at: int, block: int) -> int:
        return math.ceil(self.piece_bytes(at) / block)

    def held_bytes(self, at: int) -> int:
        return self.pieces[at].host_blocks * self.host_block_bytes

    def _counts(self) -> list[int]:
        """How many pieces each group keeps of TOKENS_PER_CHECKPOINT tokens and one checkpoint that shares nothing."""
        chunks = max(1, TOKENS_PER_CHECKPOINT // self.grid_tokens)
        far = FAR_CHUNKS * self.grid_tokens
        return [chunks if group.is_prefix else max(1, len(group.needed(far))) for group in self.groups]

    def _choose_lane(self, page: int) -> int:
        """The lane of the largest host block that wastes hardly more than the one that wastes least.

        It is a multiple of `page` bytes.
        """
        sizes = [-(-self.piece_bytes(at) // self.ranks) for at in range(len(self.groups))]
        counts = self._counts()

        def host_bytes(lane: int) -> int:
            return sum(self._host_blocks(at, lane * self.ranks) * lane * count for at, count in enumerate(counts))

        floor = -(-(min(SMALLEST_SPLIT_BYTES, *sizes) if len(sizes) > 1 else sizes[0]) // page) * page
        alignment = math.lcm(page, math.gcd(ALIGNMENT, *sizes))
        candidates = {floor}
        for size in sizes:  # the least wasteful block that is larger has a piece that fills its blocks
            parts = range(1, size // floor + 1)
            candidates.update(math.ceil(size / (each * alignment)) * alignment for each in parts)
        taken = {each: host_bytes(each) for each in candidates}
        most = min(taken.values()) * (1 + SMALL_WASTE)
        return max(each for each in taken if taken[each] <= most)


def _check_lanes(groups: Sequence[Group], ranks: int) -> None:
    for group in groups:
        if group.lanes is not None and ranks % group.lanes:
            raise ConfigurationError(
                f"group {group.name!r} has {group.lanes} lanes, which do not divide {ranks} of a row"
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
    if grid <= max_model_len:
        return grid
    if common <= max_model_len:
        raise ConfigurationError(
            f"a grid of {grid} tokens is past max_model_len {max_model_len}; a multiple of {common} up to that works"
        )
    raise ConfigurationError(
        f"the first boundary all groups share is at {grid} tokens, past max_model_len {max_model_len}; "
        + _remedy(groups, max_model_len)
    )


def _remedy(groups: Sequence[Group], max_model_len: int) -> str:
    """Names the group without which the others meet soonest, and block sizes that would work."""

    def others_meet(group: Group) -> int:
        return math.lcm(*(other.block_tokens for other in groups if other is not group))

    misfit = min(groups, key=lambda group: (others_meet(group), -group.block_tokens))
    meet = others_meet(misfit)
    named = f"group {misfit.name!r} with blocks of {misfit.block_tokens} tokens makes it so"
    if meet > max_model_len:
        sizes = f"sizes up to {max_model_len} that divide one another would do"
        return f"{named}, but the others meet only at {meet}, too; {sizes}"
    if len(groups) == 1:
        return f"{named}; at most {max_model_len} would do"
    return f"{named}; the others meet every {meet} tokens, so a multiple of {meet} up to {max_model_len} would do"
