"""`adaptive@N`: of what is used alike, that which costs more to compute again stays."""

import pytest

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.deciding import HybridChunkPlanner, PrefixGroup
from cpu_prefix_cache.eviction import policy_of
from cpu_prefix_cache.eviction.levels import Levels
from cpu_prefix_cache.pool.coordinator import new_pool
from tests.support.story import Shelf


def left_of_both(policy):
    """Two prompts of one moment, a short one and a long one, and then one chunk more than there is room for."""
    shelf = Shelf(9, policy=policy)
    shelf.put("abcdefg")
    shelf.put("xy", after=0.0)
    return shelf.order[0]


def test_the_deeper_of_two_prompts_stays():
    assert left_of_both("adaptive@2") == "xy"


def test_without_a_depth_the_one_that_was_there_first_goes():
    assert left_of_both("adaptive") == "abcdefg"


def test_at_a_depth_that_no_prompt_reaches_it_is_adaptive():
    assert left_of_both("adaptive@999999999") == "abcdefg"


def test_the_depth_is_in_tokens():
    group = PrefixGroup(name="attention", block_tokens=16, block_bytes=1)
    pool = new_pool(HybridChunkPlanner([group], max_model_len=1_000), 8, "adaptive@32")
    assert pool._policy._buckets._levels.costs == Levels(even_depth=2).costs


@pytest.mark.parametrize(
    "name", ["mru", "adaptive@", "adaptive@0", "adaptive@-1", "adaptive@1.5", "lru@5", "adaptive@٣"]
)
def test_a_name_that_is_none_is_refused(name):
    with pytest.raises(ConfigurationError, match="policy must be one of adaptive, arc, lru"):
        policy_of(name)
