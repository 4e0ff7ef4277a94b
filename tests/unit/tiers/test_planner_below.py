"""Host blocks of whole pages, and the planner of the tier below them."""

import pytest

from cpu_prefix_cache.deciding import HybridChunkPlanner, PrefixGroup
from cpu_prefix_cache.model.planner import PAGE_BYTES
from property_tests.machines.test_hybrid_cache_machine import LAYOUTS


def planner(*sizes, in_pages=True, ranks=1):
    groups = [PrefixGroup(name=f"{at}", block_tokens=16, block_bytes=size) for at, size in enumerate(sizes)]
    return HybridChunkPlanner(groups, max_model_len=4_096, in_pages=in_pages, ranks=ranks)


@pytest.mark.parametrize("sizes", [(1,), (4_095,), (4_096,), (4_097,), (100_000,), (3_000, 12_000), (2 << 20, 300_000)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_host_blocks_are_whole_pages_and_hold_all(sizes, ranks):
    made = planner(*sizes, ranks=ranks)
    assert made.lane_bytes % PAGE_BYTES == 0 and made.host_block_bytes == ranks * made.lane_bytes
    for piece in made.pieces:
        assert piece.host_blocks * made.lane_bytes >= piece.num_bytes
        assert (piece.host_blocks - 1) * made.lane_bytes < piece.num_bytes


def test_pages_waste_no_more_than_they_must():
    assert planner(4_096).host_block_bytes == 4_096 and planner(4_096).waste == 0.0
    assert planner(4_097).host_block_bytes == 8_192
    assert planner(4_097, in_pages=False).host_block_bytes == 4_097
    even = planner(2 << 20, 1 << 20)
    assert (even.host_block_bytes, even.host_blocks_per_chunk, even.waste) == (1 << 20, 3, 0.0)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_below_a_slot_is_a_host_block(layout):
    made = HybridChunkPlanner(LAYOUTS[layout], max_model_len=1_000, in_pages=True)
    before = made.pieces, made.crossing_bytes, made.device_blocks_per_chunk, made.chunk_bytes
    below = made.below()
    assert before == (made.pieces, made.crossing_bytes, made.device_blocks_per_chunk, made.chunk_bytes)
    assert below.host_block_bytes == made.host_block_bytes and below.grid_tokens == made.grid_tokens
    assert below.host_blocks_per_chunk == below.device_blocks_per_chunk == made.host_blocks_per_chunk
    assert below.chunk_bytes == made.host_blocks_per_chunk * made.host_block_bytes
    for piece, above in zip(below.pieces, made.pieces, strict=True):
        assert piece.device_blocks == piece.host_blocks == above.host_blocks and piece.in_chunk == above.in_chunk
        assert piece.num_bytes == piece.host_blocks * made.host_block_bytes
    for depth in range(6):
        assert below.checkpoint(depth) == made.checkpoint(depth)
        assert below.checkpoint_blocks(depth) == made.checkpoint_blocks(depth)
        chunks = [depth * piece.host_blocks if piece.in_chunk else 0 for piece in made.pieces]
        for at in made.checkpoint(made.chunks_to_resume(depth)):
            chunks[at.group] += made.pieces[at.group].host_blocks
        assert below.device_blocks(0, depth) == chunks
