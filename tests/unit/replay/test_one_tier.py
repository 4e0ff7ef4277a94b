"""The host alone, against an LRU of single blocks that is written without a thought of speed."""

import pytest

from cpu_prefix_cache.eviction import POLICIES
from cpu_prefix_cache.tools.replay.meter import Meter
from cpu_prefix_cache.tools.replay.one_tier import replay_one_tier
from cpu_prefix_cache.tools.replay.tiers import HostTier
from tests.unit.replay.traces import random_prompts, trace_of


def replayed(trace, policy, capacity, **options):
    return replay_one_tier(trace, HostTier(capacity, policy, **options), Meter("test", trace.blocks))


def slow_lru(trace, capacity):
    """Hits, stores and evictions. Of the blocks used by the same request the deepest goes first."""
    last_use: dict[bytes, tuple[int, int]] = {}
    hits = stored = evictions = 0
    for number, request in enumerate(trace.requests):
        hit = next((at for at, key in enumerate(request.keys) if key not in last_use), len(request.keys))
        hits += hit
        kept = request.keys[:capacity]
        for depth, key in enumerate(kept):
            stored += key not in last_use
            last_use[key] = (number, -depth)
        while len(last_use) > capacity:
            del last_use[min(last_use, key=last_use.__getitem__)]
            evictions += 1
    return hits, stored, evictions


@pytest.mark.parametrize("capacity", [1, 2, 3, 5, 8, 13, 30, 1_000])
@pytest.mark.parametrize("seed", range(5))
def test_lru_is_an_lru_of_single_blocks(seed, capacity):
    trace = trace_of(random_prompts(seed, 300))
    tally = replayed(trace, "lru", capacity)
    assert (tally.hit_blocks, tally.stored_blocks, tally.evictions) == slow_lru(trace, capacity)
    assert tally.loaded_blocks == tally.hit_blocks == tally.hit.tokens


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_that_fit_are_computed_once(policy):
    tally = replayed(trace_of(["abc", "abd", "abc"]), policy, 4)
    assert (tally.hit_blocks, tally.stored_blocks, tally.evictions) == (5, 4, 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_beginning_of_a_prompt_longer_than_the_cache_is_kept(policy):
    tally = replayed(trace_of(["abcdef", "abcdef"]), policy, 4)
    assert (tally.hit_blocks, tally.stored_blocks) == (4, 4)


def test_adaptive_with_a_depth_counts_it_in_tokens():
    """An even depth of two blocks, in blocks of 10 tokens: more time is saved than by hits alone. A control: not so."""
    trace = trace_of(random_prompts(1, 300), block_tokens=10)
    saved = {name: replayed(trace, name, 8).hit for name in ("adaptive@20", "adaptive@999999999", "adaptive")}
    assert saved["adaptive@20"] != saved["adaptive"] == saved["adaptive@999999999"]


def test_the_running_request_is_not_evicted_for_itself():
    assert replayed(trace_of(["ab", "xy", "abc", "abc"]), "lru", 4).hit_blocks == 2 + 3


def test_a_hit_has_no_more_tokens_than_the_prompt():
    trace = trace_of(["ab", "ab"], block_tokens=10)
    trace.requests[1] = trace.requests[1]._replace(tokens=17)
    assert replayed(trace, "lru", 4).hit.tokens == 17


def test_a_policy_gets_all_keys_and_the_time_and_may_decline(monkeypatch):
    told = []

    class Picky(POLICIES["lru"]):
        def admitted(self, deepest, keys, now, next_use=None):
            told.append((list(keys), now, next_use))
            return super().admitted(deepest, keys, now, next_use)

        def choose(self, parent, incoming, count, margin):
            return min(1, len(incoming))

    monkeypatch.setitem(POLICIES, "picky", Picky)
    trace = trace_of(["abc", "xyz", "xyz"])
    trace.requests[1] = trace.requests[1]._replace(next_use=1.0)
    tally = replayed(trace, "picky", 3)
    assert told == [(request.keys, request.now, request.next_use) for request in trace.requests]
    assert (tally.stored_blocks, tally.hit_blocks) == (3 + 1 + 1, 1)
