"""Time that computing takes, by depth, and savings of it: in seconds, in shares, and in money."""

import math

import pytest

from cpu_prefix_cache.tools.replay.clairvoyant import replay_ideal
from cpu_prefix_cache.tools.replay.meter import Meter
from cpu_prefix_cache.tools.replay.one_tier import replay_one_tier
from cpu_prefix_cache.tools.replay.outcome import Ratios
from cpu_prefix_cache.tools.replay.seconds_saved import Rates, Work
from cpu_prefix_cache.tools.replay.tiers import DeviceTier, HostTier
from cpu_prefix_cache.tools.replay.two_tiers import replay_two_tiers
from tests.unit.replay.traces import random_prompts, trace_of

BLOCK = 100  # tokens


def work(*spans):
    some = Work()
    for start, stop in spans:
        some.add(start, stop)
    return some


def test_a_token_attends_to_itself_and_to_all_before_it():
    assert work((0, 1)) == Work(tokens=1, pairs=1)
    assert work((0, 4)) == Work(tokens=4, pairs=1 + 2 + 3 + 4)
    assert work((2, 4)) == Work(tokens=2, pairs=3 + 4)


def test_a_prompt_in_two_parts_takes_what_it_takes_as_one():
    assert work((0, 300), (300, 1000)) == work((0, 1000))


def test_at_the_even_depth_a_token_takes_twice_as_long_as_at_the_beginning():
    rates = Rates(prefill_tokens=1000, even_depth=5000)
    first, there = (rates.seconds(work((at, at + 1))) for at in (0, 4999))
    assert first == pytest.approx(1.0002 / 1000) and there == pytest.approx(2 / 1000)
    assert Rates(prefill_tokens=1000).seconds(work((4999, 5000))) == 1 / 1000


def test_seconds_saved_exclude_the_time_that_bytes_take():
    some = Rates(50, host_bytes=2_000, below_bytes=4_000, block_bytes=1_000, block_tokens=BLOCK)
    loaded = work((0, 10 * BLOCK))
    assert some.saved(loaded, loaded=10, read=4) == 10 * 100 / 50 - 10 * 1000 / 2000 - 4 * 1000 / 4000
    assert some.even_bytes(loaded) == 500
    assert Rates(50).saved(loaded, loaded=10) == 20 and Rates(50).below_blocks is None


def test_an_hour_costs_its_price():
    assert Rates(50, gpu_price=3.0).money(1800) == 1.5 and Rates(50).money(1800) is None


def test_the_same_hits_save_less_where_they_lie_at_the_beginning():
    """Both find three of six blocks: one those of a beginning, the other all of a prompt but none of another."""
    shallow, deep = trace_of(["abcdef", "abcxyz"], BLOCK), trace_of(["abcdef", "abcdef"], BLOCK)
    found = [Ratios.of(replay_ideal(trace), trace, even_depth=100) for trace in (shallow, deep)]
    assert [ratios.block_hit_ratio for ratios in found] == [3 / 12, 6 / 12]
    assert found[0].time_hit_ratio < 3 / 12 and found[1].time_hit_ratio == pytest.approx(6 / 12)
    assert Ratios.of(replay_ideal(shallow), shallow, math.inf).time_hit_ratio is None


def test_without_a_device_all_hits_were_loaded():
    trace = trace_of(random_prompts(1, 100, "abc"), BLOCK)
    tally = replay_one_tier(trace, HostTier(20), Meter("", trace.blocks))
    assert tally.loaded == tally.hit and tally.hit.tokens == BLOCK * tally.hit_blocks


@pytest.mark.parametrize("offload", ["lazy", "eager"])
def test_behind_a_device_only_what_the_host_adds_was_loaded(offload):
    trace = trace_of(["abcd", "abcdef", "stuvwxyz", "abcdef"], BLOCK)
    tally = replay_two_tiers(trace, HostTier(100), DeviceTier(8, offload), Meter("", trace.blocks))
    assert tally.hit == work((0, 4 * BLOCK), (0, 6 * BLOCK))
    assert tally.loaded.tokens == BLOCK * tally.loaded_blocks > 0
    start = 6 * BLOCK - tally.loaded.tokens  # the device had the blocks before
    assert tally.loaded == work((start, 6 * BLOCK))
