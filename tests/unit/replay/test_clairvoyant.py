"""MIN against a search of everything that a cache could do, on tiny traces."""

from functools import cache
from itertools import combinations

import pytest

from cpu_prefix_cache.tools.replay.clairvoyant import Future, replay_ideal, replay_min
from cpu_prefix_cache.tools.replay.meter import Meter
from tests.unit.replay.traces import random_prompts, trace_of


def minimum(trace, capacity):
    return replay_min(Future(trace), capacity, Meter("test", trace.blocks))


def slow_min(trace, capacity):
    """MIN with bypass, block by block, looking through the whole future every time. Hits and stores."""
    prompts = [request.keys for request in trace.requests]
    here: set[bytes] = set()
    hits = stored = 0
    for number, keys in enumerate(prompts):
        hits += next((at for at, key in enumerate(keys) if key not in here), len(keys))

        def next_use(key, number=number):
            uses = (
                (later, prompts[later].index(key)) for later in range(number + 1, len(prompts)) if key in prompts[later]
            )
            return next(uses, None)

        useful = [key for key in here | set(keys) if next_use(key) is not None]
        kept = set(sorted(useful, key=next_use)[:capacity])
        stored += len(kept - here)
        here = kept
    return hits, stored


def best_of_all(trace, capacity):
    """The most blocks that could be found where they are needed, whatever is kept: every set after every request."""
    prompts = [tuple(request.keys) for request in trace.requests]

    @cache
    def best(number: int, here: frozenset) -> int:
        if number == len(prompts):
            return 0
        found = sum(key in here for key in prompts[number])
        could = sorted(here | set(prompts[number]))
        size = min(capacity, len(could))
        return found + max(best(number + 1, frozenset(kept)) for kept in combinations(could, size))

    return best(0, frozenset())


@pytest.mark.parametrize("capacity", [1, 2, 3, 5, 8, 13, 40])
@pytest.mark.parametrize("seed", range(5))
def test_counts_of_buckets_are_min_block_by_block(seed, capacity):
    trace = trace_of(random_prompts(seed, 60))
    tally = minimum(trace, capacity)
    assert (tally.hit_blocks, tally.stored_blocks) == slow_min(trace, capacity)
    assert tally.evictions == tally.stored_blocks, "at the end nothing is used again, and nothing is kept"
    assert tally.loaded_blocks == tally.hit_blocks


@pytest.mark.parametrize("capacity", [1, 2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_no_cache_finds_more_single_blocks_than_min(seed, capacity):
    trace = trace_of(random_prompts(seed, 7, longest=3))
    assert minimum(trace, capacity).hit_blocks == best_of_all(trace, capacity)


def test_it_declines_what_is_not_used_again():
    tally = minimum(trace_of(["ab", "xyz", "ab"]), 2)
    assert (tally.hit_blocks, tally.stored_blocks) == (2, 2)


def test_a_cache_without_a_limit_computes_every_block_once():
    trace = trace_of(["abc", "abd", "abc", "x"])
    assert replay_ideal(trace).hit_blocks == 2 + 3
    assert minimum(trace, 100).hit_blocks == 5
