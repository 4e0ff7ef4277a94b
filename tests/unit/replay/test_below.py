"""A tier below the host, with and without a device before it: its hits, and the time that reading them saves."""

from itertools import count

import pytest

from cpu_prefix_cache.tiers.tier_cache import HostDevice
from cpu_prefix_cache.tools.replay.below import ThreeTierEngine, replay_host_and_tier, replay_three_tiers
from cpu_prefix_cache.tools.replay.clairvoyant import replay_ideal
from cpu_prefix_cache.tools.replay.meter import Meter
from cpu_prefix_cache.tools.replay.seconds_saved import Rates
from cpu_prefix_cache.tools.replay.tiers import BelowTier, DeviceTier, HostTier
from cpu_prefix_cache.tools.replay.traces import TraceRequest
from cpu_prefix_cache.tools.replay.two_tiers import replay_two_tiers
from tests.unit.replay.traces import random_prompts, trace_of

MODES = ("lazy", "eager")
BLOCK_BYTES, BLOCK_TOKENS = 1000, 100


def meter(trace):
    return Meter("test", trace.blocks)


def two(trace, host, below, offload=None, policy="lru", rates=None):
    return replay_host_and_tier(trace, HostTier(host, policy), BelowTier(below, offload), meter(trace), rates)


def three(trace, host, device, below, offload=None, policy="lru", rates=None):
    tiers = HostTier(host, policy), DeviceTier(device, "eager"), BelowTier(below, offload)
    return replay_three_tiers(trace, *tiers, meter(trace), rates)


def rates(below_bytes, prefill=1_000.0):
    """Reading is as fast as computing at 10,000 bytes a second."""
    return Rates(prefill, below_bytes=below_bytes, block_bytes=BLOCK_BYTES, block_tokens=BLOCK_TOKENS)


@pytest.mark.parametrize("offload", MODES)
def test_a_host_above_a_tier_is_a_device_before_a_host(offload):
    trace = trace_of(random_prompts(1, 300))
    tally = two(trace, 8, 30, offload)
    same = replay_two_tiers(trace, HostTier(30), DeviceTier(8, offload), meter(trace))
    assert (tally.hit_blocks, tally.below_hit_blocks) == (same.hit_blocks, same.loaded_blocks)
    assert tally.below_stored_blocks == same.stored_blocks
    assert tally.loaded_blocks == tally.hit_blocks


@pytest.mark.parametrize("policy", ["lru", "arc", "adaptive"])
@pytest.mark.parametrize("replay", [two, lambda trace, host, below, *more: three(trace, host, 10, below, *more)])
def test_with_a_tier_that_holds_everything_nothing_is_computed_twice(replay, policy):
    trace = trace_of(random_prompts(1, 300))
    tally = replay(trace, 32, 1_000, "eager", policy)
    assert tally.hit_blocks == replay_ideal(trace).hit_blocks
    assert 0 < tally.below_hit_blocks < tally.hit_blocks


@pytest.mark.parametrize("offload", MODES)
def test_blocks_that_left_device_and_host_come_back_from_below(offload):
    prompts = [letter * 4 for letter in "abcdefghij"]
    tally = three(trace_of([*prompts, prompts[0]]), 16, 4, 100, offload)
    assert (tally.hit_blocks, tally.loaded_blocks, tally.below_hit_blocks) == (4, 4, 4)


def test_every_request_leaves_the_engine_at_rest():
    trace = trace_of(["", *random_prompts(2, 80)])
    engine = ThreeTierEngine(trace, HostTier(12), DeviceTier(9), BelowTier(40))
    for request in trace.requests:
        engine.serve(request)
        engine.tiered.check_valid()
        now = engine.tiered.statistics()
        assert now.running == now.storing == now.loading == 0


def test_a_prompt_beyond_what_may_be_promoted_is_promoted_in_part():
    """A quarter of the host may be: the rest is computed."""
    prompts = ["abcdefgh", "stuvwxyz", "ijklmnop", "12345678", "abcdefgh"]
    tally = three(trace_of(prompts), 8, 8, 100, "eager")
    assert tally.below_hit_blocks == 2


@pytest.mark.parametrize("replay", [two, lambda trace, host, below, **more: three(trace, host, 4, below, **more)])
def test_a_tier_slower_than_computing_is_not_read_and_its_blocks_are_missed(replay):
    trace = trace_of(random_prompts(3, 200, "abc"), BLOCK_TOKENS)
    always = replay(trace, 12, 1_000)
    fast, slow = (replay(trace, 12, 1_000, rates=rates(rate, prefill=100.0)) for rate in (1e6, 900.0))
    assert always.hit_blocks == fast.hit_blocks > slow.hit_blocks
    assert slow.below_loaded_blocks < fast.below_loaded_blocks / 15, "but for a little now and then"
    assert slow.declined > 0


@pytest.mark.parametrize(
    ("host", "below", "mode"),
    [
        (HostTier(10), BelowTier(99), "lazy"),
        (HostTier(10), BelowTier(100), "eager"),
        (HostTier(10, "arc"), BelowTier(20), "eager"),
        (HostTier(10, "arc"), BelowTier(20, "lazy"), "lazy"),
        (HostTier(10), BelowTier(20, "eager"), "eager"),
    ],
)
def test_a_tier_is_lazy_below_a_host_of_a_tenth_or_more_with_lru(host, below, mode):
    assert below.mode(host) == mode


@pytest.mark.parametrize("offload", MODES)
def test_a_step_reads_no_more_of_a_larger_host(offload, monkeypatch):
    """Counted are places that a step reads in the order of eviction of a full host. Every prompt is new."""
    in_order = HostDevice.soonest_evicted

    def most_read(host):
        read = [0]
        numbers = count()
        trace = trace_of(["a" * 256])
        monkeypatch.setattr(trace, "usable", lambda capacity: capacity)
        engine = ThreeTierEngine(trace, HostTier(host), DeviceTier(512), BelowTier(4 * host, offload))
        plan_below = engine.tiered.plan_below

        def counted(device):
            for place in in_order(device):
                read[-1] += 1
                yield place

        def one_step():
            read.append(0)
            return plan_below()

        monkeypatch.setattr(engine.tiered, "plan_below", one_step)
        for prompt in range(host // 256 + 30):
            if prompt == host // 256 + 10:
                monkeypatch.setattr(HostDevice, "soonest_evicted", counted)
            keys = [next(numbers).to_bytes(16, "big") for _ in range(256)]
            engine.serve(TraceRequest(0.0, keys, 256 * engine.block_tokens))
        monkeypatch.undo()
        return max(read)

    assert 0 < most_read(12_000) <= 1.5 * most_read(4_000)
