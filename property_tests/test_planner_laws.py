"""The arithmetic of the grid, for any mix of prefix groups (O8.15, S7.31)."""

import math

from hypothesis import given
from hypothesis import strategies as st

from cpu_prefix_cache import Group, GroupKind, HybridChunkPlanner

shapes = st.lists(
    st.tuples(st.sampled_from([1, 2, 4, 8, 16, 24, 48]), st.integers(1, 2_000_000)), min_size=1, max_size=4
)


def plan(shapes: list[tuple[int, int]]) -> HybridChunkPlanner:
    groups = [
        Group(name=str(at), kind=GroupKind.PREFIX, block_tokens=tokens, block_bytes=size)
        for at, (tokens, size) in enumerate(shapes)
    ]
    return HybridChunkPlanner(groups, max_model_len=10_000)


@given(shapes)
def test_every_group_ends_a_block_at_every_boundary(shapes: list[tuple[int, int]]) -> None:
    planner = plan(shapes)
    for piece in planner.pieces:
        assert piece.device_blocks * piece.group.block_tokens == planner.grid_tokens
    smaller = range(1, planner.grid_tokens)
    assert not any(all(grid % tokens == 0 for tokens, _ in shapes) for grid in smaller), "a finer grid would do"


@given(shapes)
def test_every_piece_fits_into_its_host_blocks_and_into_no_fewer(shapes: list[tuple[int, int]]) -> None:
    planner = plan(shapes)
    for piece in planner.pieces:
        assert piece.num_bytes == piece.device_blocks * piece.group.block_bytes
        assert (piece.host_blocks - 1) * planner.host_block_bytes < piece.num_bytes
        assert piece.num_bytes <= piece.host_blocks * planner.host_block_bytes
    assert planner.chunk_bytes == sum(piece.num_bytes for piece in planner.pieces)
    assert 0 <= planner.waste < 1


@given(shapes)
def test_no_piece_size_would_waste_much_less_as_the_host_block(shapes: list[tuple[int, int]]) -> None:
    planner = plan(shapes)
    sizes = [piece.num_bytes for piece in planner.pieces]
    held = planner.host_blocks_per_chunk * planner.host_block_bytes
    floor = min(192 * 1024, *sizes)
    for block in {math.gcd(*sizes), *sizes}:
        assert held <= 1.01 * sum(math.ceil(size / block) * block for size in sizes) or block < floor
    if len(sizes) == 1:
        assert planner.waste == 0


@given(shapes, st.integers(0, 10_000))
def test_tokens_and_chunks_agree(shapes: list[tuple[int, int]], tokens: int) -> None:
    planner = plan(shapes)
    full, hittable = planner.full_chunks(tokens), planner.hittable_chunks(tokens)
    assert full * planner.grid_tokens <= tokens < (full + 1) * planner.grid_tokens
    assert hittable in (full, full - 1) or tokens == 0
    assert hittable * planner.grid_tokens < max(tokens, 1)
