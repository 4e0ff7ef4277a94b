"""The arithmetic of the grid, of checkpoints and of host blocks, for any mix of groups (O8.15, S7.31).

The needs at a boundary follow from the tokens themselves, one by one: which tokens does each token to come read, and in
which blocks are they?
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.deciding import ChunkLocalGroup, Group, HybridChunkPlanner, PrefixGroup, StateGroup, WindowGroup
from cpu_prefix_cache.model.planner import FAR_CHUNKS, SMALLEST_SPLIT_BYTES, TOKENS_PER_CHECKPOINT
from cpu_prefix_cache.model.report import advice, conversation_bytes, describe, everything_bytes, group_waste
from tests.support.sinks import SinkGroup

BLOCKS = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24, 48])  # all divide 48, so a grid never passes it
SMALL_BYTES = st.integers(1, 5_000)
KINDS = (PrefixGroup, WindowGroup, ChunkLocalGroup, StateGroup, SinkGroup)
depths = st.integers(0, 12)


@st.composite
def groups(draw, kinds: Sequence[type[Group]] = KINDS, blocks=BLOCKS, num_bytes=SMALL_BYTES) -> Group:
    kind = draw(st.sampled_from(kinds))
    block_tokens = draw(blocks)
    options = {}
    if kind in (WindowGroup, ChunkLocalGroup, SinkGroup):
        whole = st.integers(1, 6).map(lambda number: number * block_tokens)
        options["window_tokens"] = draw(st.one_of(st.integers(1, 120), whole))
    if kind is WindowGroup:
        options["extra_tokens"] = draw(st.integers(0, 9))
    if kind is SinkGroup:
        options["sink_tokens"] = draw(st.integers(1, 20))
    if kind is PrefixGroup:
        options["lookahead_tokens"] = draw(st.integers(0, 60))
    return kind(
        name="",
        block_tokens=block_tokens,
        block_bytes=draw(num_bytes),
        device_blocks=draw(st.integers(1, 3)),
        lanes=draw(st.sampled_from([None, 1])),
        **options,
    )


def named(unnamed: Sequence[Group]) -> list[Group]:
    return [replace(group, name=f"g{at}") for at, group in enumerate(unnamed)]


def group_sets(most: int = 4, **options):
    return st.lists(groups(**options), min_size=1, max_size=most).map(named)


@st.composite
def planners(draw, **options) -> HybridChunkPlanner:
    chosen = draw(group_sets(**options))
    return HybridChunkPlanner(chosen, max_model_len=10_000, ranks=draw(st.integers(1, 4)))


# The oracle


def reads(group: Group, token: int, past: int) -> bool:
    """Whether computing `token` reads what the layers of the group left of token `past`."""
    match group:
        case PrefixGroup():
            return past < token
        case WindowGroup():
            return token - group.window_tokens - group.extra_tokens < past < token
        case ChunkLocalGroup():
            return past < token and past // group.window_tokens == token // group.window_tokens
        case StateGroup():
            return past == token - 1
        case SinkGroup():
            return past < token and (past < group.sink_tokens or past > token - group.window_tokens)


def blocks_to_resume(group: Group, boundary: int) -> list[int]:
    """The blocks with a token before the boundary that a token to come reads."""
    to_come = range(boundary, boundary + 50)
    read = {past for past in range(boundary) if any(reads(group, token, past) for token in to_come)}
    return sorted({past // group.block_tokens for past in read})


def kept(planner: HybridChunkPlanner, depth: int) -> list[tuple[int, int]]:
    """Group and block of every piece of the checkpoint below `depth` chunks."""
    boundary = resumed(planner, depth) * planner.grid_tokens
    return [
        (at, block)
        for at, group in enumerate(planner.groups)
        if not isinstance(group, PrefixGroup)
        for block in blocks_to_resume(group, boundary)
    ]


def resumed(planner: HybridChunkPlanner, present: int) -> int:
    """After how many of the chunks that are present a request can resume, each group having what it looks ahead to."""
    there = present * planner.grid_tokens
    ends = [(chunks, chunks * planner.grid_tokens) for chunks in range(present + 1)]
    return max(
        (chunks for chunks, end in ends if all(end + group.lookahead_tokens <= there for group in planner.groups)),
        default=0,
    )


def host_blocks(planner: HybridChunkPlanner, group: Group, own_blocks: int) -> int:
    """How many equal blocks hold so many of a group's blocks: each rank's in its lane, or what all have in all."""
    num_bytes = own_blocks * group.device_blocks * group.block_bytes
    room = planner.host_block_bytes // (group.lanes or planner.ranks)
    return next(count for count in range(num_bytes + 1) if count * room >= num_bytes)


# Groups


@given(groups(), st.integers(0, 40))
@example(StateGroup(name="", block_tokens=1, block_bytes=1), 1)  # the first page
def test_needed_blocks_are_those_that_the_tokens_to_come_read(group: Group, blocks: int) -> None:
    boundary = blocks * group.block_tokens
    needed = blocks_to_resume(group, boundary)
    assert list(group.needed(boundary)) == needed
    if not isinstance(group, SinkGroup):
        assert needed == list(range(blocks - len(needed), blocks)), "it ends at the boundary and has no holes"
    if isinstance(group, WindowGroup):
        assert len(needed) <= math.ceil((group.window_tokens - 1 + group.extra_tokens) / group.block_tokens)


@given(groups(), st.integers(0, 30), st.integers(1, 30))
def test_a_block_that_is_not_needed_any_more_is_never_needed_again(group: Group, blocks: int, more: int) -> None:
    now, later = (group.needed(each * group.block_tokens) for each in (blocks, blocks + more))
    assert {block for block in later if block < blocks} <= set(now)


# The grid


@given(planners())
def test_every_group_ends_a_block_at_every_boundary(planner: HybridChunkPlanner) -> None:
    for piece in planner.pieces:
        covers = planner.grid_tokens if piece.in_chunk else piece.group.block_tokens
        assert piece.device_blocks * piece.group.block_tokens == covers * piece.group.device_blocks
    smaller = range(1, planner.grid_tokens)
    assert not any(all(grid % group.block_tokens == 0 for group in planner.groups) for grid in smaller), "a finer one"


@given(group_sets(kinds=[PrefixGroup, StateGroup], blocks=st.integers(1, 40)), st.integers(1, 4_000))
def test_a_grid_that_is_too_coarse_fails_and_what_is_advised_works(chosen: list[Group], longest: int) -> None:
    grid = next(end for end in range(1, 40**4 + 1) if all(end % group.block_tokens == 0 for group in chosen))
    if grid <= longest:
        assert HybridChunkPlanner(chosen, max_model_len=longest).grid_tokens == grid
        return
    with pytest.raises(ConfigurationError, match=f"at {grid} tokens, past max_model_len {longest}") as caught:
        HybridChunkPlanner(chosen, max_model_len=longest)
    at = int(re.search(r"group 'g(\d+)' with blocks of (\d+)", str(caught.value))[1])
    others = chosen[:at] + chosen[at + 1 :]
    if advised := re.search(r"a multiple of (\d+) up to|at most (\d+) would", str(caught.value)):
        changed = replace(chosen[at], block_tokens=longest // int(advised[1] or 1) * int(advised[1] or 1))
        assert HybridChunkPlanner([*others, changed], max_model_len=longest).grid_tokens <= longest
    else:
        with pytest.raises(ConfigurationError):
            HybridChunkPlanner(others, max_model_len=longest)


@given(planners(), st.integers(0, 10_000))
def test_tokens_and_chunks_agree(planner: HybridChunkPlanner, tokens: int) -> None:
    full, hittable = planner.full_chunks(tokens), planner.hittable_chunks(tokens)
    assert full * planner.grid_tokens <= tokens < (full + 1) * planner.grid_tokens
    assert hittable in (full, full - 1) or tokens == 0
    assert hittable * planner.grid_tokens < max(tokens, 1)


@given(planners(), depths)
def test_a_boundary_counts_only_if_what_it_looks_ahead_to_is_there(planner: HybridChunkPlanner, present: int) -> None:
    assert planner.resumable_chunks(present) == resumed(planner, present)
    needed = planner.chunks_to_resume(present)
    assert resumed(planner, needed) == present
    assert not needed or not present or resumed(planner, needed - 1) < present, "fewer chunks would do"


# Checkpoints


@given(planners(), depths)
def test_a_checkpoint_is_what_the_tokens_to_come_read(planner: HybridChunkPlanner, depth: int) -> None:
    pieces = [
        (at, chunk * (planner.grid_tokens // planner.groups[at].block_tokens) + block)
        for at, chunk, block in planner.checkpoint(depth)
    ]
    assert pieces == kept(planner, depth)
    assert all(chunk < depth for _, chunk, _ in planner.checkpoint(depth))
    assert all(
        0 <= block * planner.groups[at].block_tokens < planner.grid_tokens for at, _, block in planner.checkpoint(depth)
    )
    assert planner.needs_checkpoint(depth) == bool(pieces)
    assert planner.has_checkpoints == any(not isinstance(group, PrefixGroup) for group in planner.groups)


@given(planners(), depths, depths)
def test_a_load_fills_what_lies_in_its_chunks(planner: HybridChunkPlanner, start: int, stop: int) -> None:
    assume(start <= stop)
    filled = [
        [
            block
            for block in blocks_to_resume(group, stop * planner.grid_tokens)
            if start * planner.grid_tokens <= block * group.block_tokens
        ]
        for group in planner.groups
    ]
    assert planner.positions(start, stop) == filled
    counts = [group.device_blocks * len(blocks) for group, blocks in zip(planner.groups, filled, strict=True)]
    assert planner.device_blocks(start, stop) == counts


# Memory


@given(planners())
def test_every_piece_fits_into_its_host_blocks_and_into_no_fewer(planner: HybridChunkPlanner) -> None:
    for piece in planner.pieces:
        group = piece.group
        own = planner.grid_tokens // group.block_tokens if isinstance(group, PrefixGroup) else 1
        assert piece.num_bytes == own * group.device_blocks * group.block_bytes
        assert piece.host_blocks == host_blocks(planner, group, own)
    chunk = [piece for piece in planner.pieces if isinstance(piece.group, PrefixGroup)]
    assert planner.chunk_bytes == sum(piece.num_bytes for piece in chunk)
    assert planner.host_blocks_per_chunk == sum(piece.host_blocks for piece in chunk)
    assert planner.device_blocks_per_chunk == sum(piece.device_blocks for piece in chunk)
    assert 0 <= planner.waste < 1
    assert all(0 <= group_waste(planner, at) < 1 for at in range(len(planner.groups)))
    assert len(describe(planner).splitlines()) == 2 + len(planner.groups) + len(advice(planner))


@given(planners(), depths)
def test_a_checkpoint_weighs_what_its_pieces_weigh(planner: HybridChunkPlanner, depth: int) -> None:
    groups = [planner.groups[at] for at, _ in kept(planner, depth)]
    assert planner.checkpoint_bytes(depth) == sum(group.block_bytes * group.device_blocks for group in groups)
    assert planner.checkpoint_blocks(depth) == sum(host_blocks(planner, group, 1) for group in groups)


@given(planners(), st.integers(0, 600), st.data())
def test_a_conversation_weighs_each_of_its_pieces_once(planner: HybridChunkPlanner, tokens: int, data) -> None:
    last = planner.full_chunks(tokens)
    resumed = data.draw(st.lists(st.integers(0, last), max_size=4))
    pieces = {piece for depth in resumed for piece in kept(planner, depth)}
    blocks = sum(host_blocks(planner, planner.groups[at], 1) for at, _ in pieces)
    blocks += last * planner.host_blocks_per_chunk
    weight = blocks * planner.host_block_bytes
    assert conversation_bytes(planner, tokens, resumed) == weight
    assert conversation_bytes(planner, tokens) == conversation_bytes(planner, tokens, [last])
    everything = everything_bytes(planner, tokens)
    assert weight <= everything
    counts = Counter(at for at, _ in pieces)
    all_kept = all(
        counts[at] == tokens // planner.grid_tokens * planner.grid_tokens // group.block_tokens
        for at, group in enumerate(planner.groups)
        if not isinstance(group, PrefixGroup)
    )
    assert (weight == everything) == all_kept


@given(planners(kinds=[PrefixGroup], most=1), st.integers(1, 8), st.integers(1, 4))
def test_bytes_that_ranks_have_in_common_are_kept_once(planner: HybridChunkPlanner, holders: int, lanes: int) -> None:
    ranks = holders * lanes

    def host_bytes(lanes: int | None) -> int:
        group = replace(planner.groups[0], lanes=lanes)
        return conversation_bytes(HybridChunkPlanner([group], max_model_len=100, ranks=ranks), group.block_tokens)

    num_bytes = planner.chunk_bytes
    assert host_bytes(None) == ranks * num_bytes
    assert lanes * num_bytes <= host_bytes(lanes) < lanes * num_bytes + ranks, "no more than each lane's rounding"


sizes = st.integers(1, 3_000) | st.integers(400, 4_000).map(lambda units: units * 512)


@given(planners(most=3, num_bytes=sizes))
def test_no_host_block_would_waste_much_less(planner: HybridChunkPlanner) -> None:
    """Every size is tried that is aligned as the pieces are, from the smallest allowed to the largest of use."""
    shares, counts = [], []
    for piece in planner.pieces:
        shares.append(math.ceil(piece.num_bytes * piece.lanes / planner.ranks))
        far = len(piece.group.needed(FAR_CHUNKS * planner.grid_tokens))
        counts.append(max(1, TOKENS_PER_CHECKPOINT // planner.grid_tokens if piece.in_chunk else far))

    def taken(block: int) -> int:
        return sum(math.ceil(share / block) * block * count for share, count in zip(shares, counts, strict=True))

    aligned = math.gcd(512, *shares)
    floor = min(SMALLEST_SPLIT_BYTES, *shares) if len(shares) > 1 else shares[0]
    assume(max(shares) // aligned < 10_000)
    least = min(taken(block) for block in range(floor, max(shares) + 1, aligned))
    assert planner.lane_bytes >= floor
    assert taken(planner.lane_bytes) <= 1.01 * least
    if len(shares) == 1:
        assert planner.lane_bytes == shares[0]
