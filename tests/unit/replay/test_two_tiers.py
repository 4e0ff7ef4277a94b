"""A device before the host: its hits and stores, and the hits of two slow LRUs."""

import pytest

from cpu_prefix_cache.tools.replay.at_eviction import replay_at_eviction
from cpu_prefix_cache.tools.replay.clairvoyant import replay_ideal
from cpu_prefix_cache.tools.replay.meter import Meter
from cpu_prefix_cache.tools.replay.tiers import DeviceTier, HostTier
from cpu_prefix_cache.tools.replay.two_tiers import ReplayEngine, replay_two_tiers
from tests.support.story import whole_prompts
from tests.unit.replay.traces import random_prompts, trace_of

MODES = ("lazy", "eager")


def replayed(trace, offload, host, device, policy="lru", horizon=400, **options):
    tiers = HostTier(host, policy, **options), DeviceTier(device, offload, horizon)
    return replay_two_tiers(trace, *tiers, Meter("test", trace.blocks))


class SlowTier:
    """An LRU of single blocks. Of those used by the same request the deepest goes first."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.last_use: dict[bytes, tuple[int, int]] = {}

    def run(self, keys, start=0):
        return next((at for at in range(start, len(keys)) if keys[at] not in self.last_use), len(keys))

    def use(self, keys, number):
        self.last_use.update({key: (number, -depth) for depth, key in enumerate(keys)})
        while len(self.last_use) > self.capacity:
            del self.last_use[min(self.last_use, key=self.last_use.__getitem__)]


def slow_eager(trace, host_blocks, device_blocks):
    """The host is used by who loads from it or adds to it. Hits and loads."""
    device, host = SlowTier(device_blocks), SlowTier(host_blocks)
    hits = loaded = 0
    for number, request in enumerate(trace.requests):
        on_device = device.run(request.keys)
        hit = host.run(request.keys, on_device) if host.run(request.keys) > on_device else on_device
        hits, loaded = hits + hit, loaded + hit - on_device
        device.use(request.keys, number)
        if hit > on_device or host.run(request.keys) < len(request.keys):
            host.use(request.keys, number)
    return hits, loaded


@pytest.mark.parametrize(("host", "device"), [(8, 8), (12, 8), (30, 10), (10, 30), (1_000, 8)])
@pytest.mark.parametrize("seed", range(4))
def test_eager_is_two_lrus_of_single_blocks(seed, host, device):
    trace = trace_of(random_prompts(seed, 300))
    tally = replayed(trace, "eager", host, device)
    assert (tally.hit_blocks, tally.loaded_blocks) == slow_eager(trace, host, device)


@pytest.mark.parametrize("offload", MODES)
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_with_a_host_that_holds_everything_nothing_is_computed_twice(offload, policy):
    trace = trace_of(random_prompts(1, 300))
    tally = replayed(trace, offload, 1_000, 40, policy)
    assert tally.hit_blocks == replay_ideal(trace).hit_blocks
    assert 0 < tally.loaded_blocks < tally.hit_blocks
    assert (tally.evictions, tally.lost_before_store) == (0, 0)


@pytest.mark.parametrize("offload", MODES)
def test_blocks_that_fit_on_the_device_are_never_loaded(offload):
    tally = replayed(trace_of(["abc", "abd", "abc"]), offload, 100, 16)
    assert (tally.hit_blocks, tally.loaded_blocks) == (2 + 3, 0)
    assert tally.stored_blocks == (4 if offload == "eager" else 0)


@pytest.mark.parametrize("offload", MODES)
def test_blocks_that_left_the_device_come_back_from_the_host(offload):
    tally = replayed(trace_of(["abcd", "stuv", "wxyz", "abcd"]), offload, 100, 8)
    assert (tally.hit_blocks, tally.loaded_blocks) == (4, 4)


@pytest.mark.parametrize("offload", MODES)
def test_a_prompt_longer_than_the_device_is_cut(offload):
    tally = replayed(trace_of(["abcdefgh", "abcdefgh"]), offload, 100, 5)
    assert tally.hit_blocks == 5


@pytest.mark.parametrize("offload", MODES)
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_every_request_leaves_the_engine_at_rest(offload, policy):
    trace = trace_of(["", *random_prompts(2, 60)])
    engine = ReplayEngine(trace, HostTier(12, policy), DeviceTier(9, offload))
    for request in trace.requests:
        engine.serve(request)
        engine.cache.check_valid()
        engine.gpu.check_valid()
        now, gpu = engine.cache.statistics(), engine.gpu.statistics()
        assert now.running == now.storing == now.loading == now.pool.pinned == gpu.pinned == gpu.writing == 0


def test_a_load_saves_what_it_overwrites(monkeypatch):
    """Prompts of eight blocks on a device of 32, where loads come at once and the rest is computed in small steps."""
    prompts = [letter * 8 for letter in "abcdefgh"]
    back = trace_of([*prompts, *(prompt + str(at) for prompt in prompts for at in range(3))])
    assert replayed(back, "lazy", 1_000, 32, horizon=1).lost_before_store == 0

    def new_cache(engine, planner, device, options):
        return whole_prompts(planner, device, **options)

    monkeypatch.setattr(ReplayEngine, "new_cache", new_cache)  # there it does not, so lazy must look ahead
    lost = [replayed(back, "lazy", 1_000, 32, horizon=horizon).lost_before_store for horizon in (1, 8)]
    assert lost[0] > lost[1] == 0


def test_stored_exactly_at_eviction_what_left_last_is_there():
    """The tail of a prompt leaves first: of a host of one block, its beginning is what is left."""
    trace = trace_of(["ab", "xy", "ab"])
    assert [replay_at_eviction(trace, host, 2).hit_blocks for host in (1, 2)] == [1, 2]


def test_stored_exactly_at_eviction_a_hit_may_be_partly_on_the_device():
    trace = trace_of(["abcd", "x", "abcd"])  # d leaves for x
    assert replay_at_eviction(trace, 1, 4).hit_blocks == 4


def test_stored_exactly_at_eviction_nothing_is_computed_twice_if_the_host_holds_everything():
    trace = trace_of(random_prompts(3, 300))
    assert replay_at_eviction(trace, 1_000, 8).hit_blocks == replay_ideal(trace).hit_blocks
