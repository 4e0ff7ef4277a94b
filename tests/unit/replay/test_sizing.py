"""Finding a capacity, and the replay that gives hit ratios: prompts of letters, a letter to a chunk."""

import pytest

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.deciding import ChunkLocalGroup, HybridChunkPlanner, PrefixGroup, StateGroup
from cpu_prefix_cache.tools.replay.resumable import ResumableReplay, blocks_of_everything
from cpu_prefix_cache.tools.replay.sizing import Point, smallest_capacity
from property_tests.strategies import chain

FULL = PrefixGroup(name="full", block_tokens=16, block_bytes=512)
STATE = StateGroup(name="state", block_tokens=16, block_bytes=512)
LOCAL = ChunkLocalGroup(name="local", block_tokens=16, block_bytes=512, window_tokens=48)


def planner(*groups):
    return HybridChunkPlanner(groups, max_model_len=4096)


def serves(replay, *prompts):
    """How many chunks of each prompt were a hit."""
    hits = []
    for at, prompt in enumerate(prompts):
        hits.append(replay.serve(chain(prompt), float(at)))
        replay.pool.check_valid()
        assert not replay.pool.statistics().pinned
    return hits


def smallest(hit_ratio, **options):
    """The search, for a function from a capacity to a hit ratio."""
    return smallest_capacity(lambda capacity: Point(capacity, hit_ratio(capacity)), **options)


# The search


def test_the_smallest_capacity_is_found_within_two_in_a_hundred():
    asked = []

    def rises(capacity):
        asked.append(capacity)
        return min(capacity, 10_000) / 20_000

    found = smallest(rises, target=0.9, least=10, largest=50_000)
    assert 9_000 <= found.enough.capacity <= 9_000 * 1.02 and found.goal == 0.45
    assert [point.capacity for point in found.points] == sorted(asked) and len(set(asked)) == len(asked) < 15


def test_a_step_is_found_exactly_among_few_capacities():
    for step in range(3, 21):
        found = smallest(lambda capacity, step=step: float(capacity >= step), target=1, least=3, largest=20)
        assert found.enough.capacity == step


def test_round_steps_are_tried_first_and_the_answer_lies_between_two_of_them():
    found = smallest(lambda capacity: float(capacity >= 300), target=1, least=1, largest=1_000, steps=[128, 256, 512])
    assert [point.capacity for point in found.points if point.capacity in (128, 256, 512, 1_000)] == [256, 512, 1_000]
    assert 300 <= found.enough.capacity <= 306


def test_where_the_least_will_do_the_least_is_the_answer():
    assert smallest(lambda capacity: 0.0, target=0.5, least=2, largest=1_000).enough.capacity == 2
    assert smallest(lambda capacity: 0.5, target=0.5, least=7, largest=7).enough.capacity == 7


@pytest.mark.parametrize("options", [{"target": 0}, {"target": 1.1}, {"target": 0.5, "least": 0}, {"least": 11}])
def test_bounds_that_cannot_be_searched_are_refused(options):
    with pytest.raises(ConfigurationError):
        smallest(lambda capacity: 1.0, **{"target": 0.9, "least": 1, "largest": 10, **options})


# The replay


def test_full_attention_hits_whatever_is_there():
    replay = ResumableReplay(planner(FULL), 8)
    assert serves(replay, "abc", "abcd", "abx", "abcd") == [0, 3, 2, 4]
    assert replay.hit_ratio == 9 / 14


def test_a_prompt_longer_than_the_pool_is_cut_to_it():
    replay = ResumableReplay(planner(FULL), 3)
    assert serves(replay, "abcdef", "abcdef", "xy", "abcdef") == [0, 3, 0, 1]


def test_states_hit_at_the_ends_of_prompts_and_from_the_second_time_on_where_prompts_part():
    replay = ResumableReplay(planner(FULL, STATE), 100)
    assert serves(replay, "abc", "abcd", "abx", "aby", "abz") == [0, 3, 0, 2, 2]


def test_a_checkpoint_takes_room_and_what_does_not_fit_with_it_is_not_stored():
    assert serves(ResumableReplay(planner(FULL, STATE), 4), "abc", "abc") == [0, 3]
    assert serves(ResumableReplay(planner(FULL, STATE), 3), "abc", "abc", "ab", "ab") == [0, 0, 0, 2]


def test_local_chunks_need_no_checkpoint_where_they_begin():
    assert serves(ResumableReplay(planner(FULL, LOCAL), 100), "abcdef", "abcx", "abcdef", "abcde") == [0, 3, 6, 3]


@pytest.mark.parametrize("groups", [[FULL], [FULL, STATE], [FULL, LOCAL], [STATE], [FULL, STATE, LOCAL]])
def test_a_pool_for_everything_evicts_nothing(groups):
    prompts = ["abcdefg", "abx", "abcdefgh", "q", "abcdy", "abcdez", "abcd", "qr", "abcdefghijklmno"]
    blocks = blocks_of_everything(planner(*groups), [chain(prompt) for prompt in prompts])
    replay = ResumableReplay(planner(*groups), blocks)
    serves(replay, *prompts, *prompts)
    assert replay.pool.statistics().evictions == 0


def test_the_fewest_blocks_serve_a_single_chunk():
    replay = ResumableReplay(planner(FULL, STATE), planner(FULL, STATE).fewest_blocks)
    assert serves(replay, "a", "a", "b", "b", "a") == [0, 1, 0, 1, 0]
