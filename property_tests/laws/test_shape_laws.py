"""The planner that a keeper makes of a model's numbers has the arithmetic of the engine's own."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.deciding import HybridChunkPlanner, PrefixGroup, WindowGroup, check_takes
from cpu_prefix_cache.keeper.protocol import ProtocolError
from cpu_prefix_cache.keeper.records import MOST_BLOCKS
from cpu_prefix_cache.keeper.shape import KINDS, planner_of, spelled
from property_tests.laws.test_planner_laws import depths, planners


@given(planners(kinds=KINDS), depths, st.sampled_from([1, 2, 4]))
def test_a_keeper_counts_as_the_engine_does(planner: HybridChunkPlanner, depth: int, ranks: int) -> None:
    groups = [replace(group, lookahead_tokens=0) if group.is_prefix else group for group in planner.groups]
    own = HybridChunkPlanner(groups, max_model_len=100_000, grid_tokens=planner.grid_tokens, ranks=ranks)
    try:
        made = planner_of(spelled(own))
    except ProtocolError:
        with pytest.raises(ConfigurationError, match="a pool of a node"):
            check_takes(own)
        return
    assert [piece.host_blocks for piece in made.pieces] == [piece.host_blocks for piece in own.pieces]
    assert made.checkpoint(depth) == own.checkpoint(depth)
    assert made.needs_checkpoint(depth) == own.needs_checkpoint(depth)
    assert made.resume_blocks(depth) == depth * own.host_blocks_per_chunk + own.checkpoint_blocks(depth)


def test_a_chunk_of_as_many_blocks_as_records_number_is_taken() -> None:
    groups = [
        PrefixGroup(name="0", block_tokens=MOST_BLOCKS, block_bytes=24),
        WindowGroup(name="1", block_tokens=1, block_bytes=24, window_tokens=4),
    ]
    numbers = spelled(HybridChunkPlanner(groups, max_model_len=MOST_BLOCKS, grid_tokens=MOST_BLOCKS))
    assert spelled(planner_of(numbers)) == numbers
