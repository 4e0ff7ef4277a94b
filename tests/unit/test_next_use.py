"""Hints of the next use of a prompt: counted by the cache, used by its policy, and no reason to stop a request."""

from math import inf, nan

import pytest

from cpu_prefix_cache.deciding import HintStatistics
from cpu_prefix_cache.eviction.kinds import HINTED
from cpu_prefix_cache.eviction.survival import BINS
from cpu_prefix_cache.testing.engine import Engine


def hinted_bin(pool, prompt):
    """The bin of the hint that the chunks of a prompt have; None: they have none."""
    return HINTED.get(pool._policy._mark[pool.find(prompt.encode())].kind)


def served(engine, prompt, next_use):
    engine.now += 1.0
    engine.starts(prompt, prompt, next_use=next_use)
    engine.computes(prompt)
    engine.copies()
    engine.ends(prompt)
    engine.copies()


@pytest.mark.parametrize(
    ("next_use", "bin", "counted"),
    [
        (None, None, HintStatistics()),
        (0, 0, HintStatistics(accepted=1)),
        (40.5, 3, HintStatistics(accepted=1)),
        (inf, BINS, HintStatistics(accepted=1)),
        (-3.0, 0, HintStatistics(clipped=1)),
        (-inf, 0, HintStatistics(clipped=1)),
        (10**400, 17, HintStatistics(clipped=1)),
        (nan, None, HintStatistics(malformed=1)),
        ("soon", None, HintStatistics(malformed=1)),
        (True, None, HintStatistics(malformed=1)),
        ([30], None, HintStatistics(malformed=1)),
    ],
)
def test_each_hint_is_counted_and_its_request_is_served(next_use, bin, counted):
    engine = Engine(policy="adaptive")
    served(engine, "abc", next_use)
    assert engine.cache.statistics().hints == counted
    assert hinted_bin(engine.cache.pool, "abc") == bin
    assert engine.host == {"a", "ab", "abc"}


def test_a_request_counts_once_each_time_it_is_admitted():
    engine = Engine(policy="adaptive")
    engine.starts("r", "ab", next_use=30.0)
    engine.cache.admit(engine.requests["r"], 0, None, engine.now)  # it runs
    assert engine.cache.statistics().hints.accepted == 1
    engine.preempts("r")
    engine.starts("r", "ab", next_use=30.0)
    assert engine.cache.statistics().hints.accepted == 2


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_policy_that_does_not_use_hints_counts_them_all_the_same(policy):
    engine = Engine(policy=policy)
    served(engine, "abc", 30.0)
    assert engine.cache.statistics().hints == HintStatistics(accepted=1)
