"""Hundreds of requests over a tier whose reads are late, fail, and are refused; with everything else going wrong, too.

Users and accidents are those of test_stress.py. Each test counts what happened, and fails if one of the things it is
about did not happen.
"""

import pytest

from cpu_prefix_cache.offload.completion import FAILURES_IN_A_ROW
from cpu_prefix_cache.tiers.tier_cache import PAUSE_SECONDS
from tests.vllm.engine import Engine
from tests.vllm.fake_tier import FakeTier
from tests.vllm.test_groups import MODELS
from tests.vllm.test_stress import FEW, live_through

FAULTS = dict(failure_rate=0.02, refusal_rate=0.02, slowest=12)
WANTED = (
    "hit",
    "pending",
    "loads done",
    "loads failed",
    "stores planned",
    "reads planned",
    "writes planned",
    "resets",
    "aborts while WAITING",
    "aborts while RUNNING",
)
PROMPTS = [list(range(at, at + 40)) for at in range(0, 400, 40)]
RANKS = dict(ranks=2, asynchronous=True)


@pytest.mark.parametrize(
    ("model", "offload", "more"),
    [
        ("full", "lazy", {}),
        ("full", "eager", {}),
        ("full", "eager", RANKS),
        ("latent", "eager", RANKS | dict(tensor_parallel=True)),
        ("full, window", "lazy", {}),
        ("full, window", "eager", RANKS),
        ("full, state", "eager", {}),
        ("full 8, full", "lazy", RANKS),
    ],
    ids=lambda each: "" if each == {} else "ranks" if each == RANKS else None if isinstance(each, str) else "shared",
)
def test_whatever_becomes_of_reads_no_request_reads_wrong_kv_and_nothing_leaks(tmp_path, model, offload, more):
    size = dict(device_blocks=24 + 24 * len(MODELS[model]), host_blocks=100, tier_slots=220)
    options = dict(tier={"offload": offload}, tier_faults=FAULTS, failure_rate=0.03, seed=1)
    awaited = FEW if model == "full" else 0
    engine = Engine(tmp_path, groups=MODELS[model], offload="lazy", sync_load_bytes=awaited, **size, **options, **more)
    live_through(engine, requests=600)
    statistics = engine.half.tier.tier_statistics()
    print(sorted(engine.counts.items()), statistics)
    engine.check_nothing_leaked()
    missing = [what for what in WANTED if not engine.counts[what]]
    assert not missing, f"this never happened: {missing}"
    assert bool(engine.counts["loads computed on"]) == bool(awaited)
    assert min(statistics.hit_tokens, statistics.late, statistics.refused) > 0
    assert statistics.cache.loads_failed > 0 or statistics.cache.stores_failed > 0
    assert not engine.cache.is_off


@pytest.fixture
def engine(tmp_path):
    """The tier has what the host has no room for."""
    engine = Engine(tmp_path, offload="eager", host_blocks=30, tier={"offload": "eager"}, slowest=1)
    for prompt in PROMPTS:
        engine.run(prompt, max_tokens=1)
    return engine


def fail_always(engine, rate=1.0):
    for rank in engine.ranks:
        rank.tier.failure_rate = rate


def test_a_tier_that_fails_is_left_alone_for_a_while_and_the_host_goes_on(engine):
    fail_always(engine)
    for prompt in PROMPTS * 3:
        engine.run(prompt, max_tokens=1)
    tier = engine.half.tier
    assert tier.tier_statistics().state == "paused" and not engine.cache.is_off
    assert tier.tier_statistics().cache.loads_failed <= 2 * FAILURES_IN_A_ROW
    hits = engine.counts["hit"]
    engine.run(PROMPTS[-1], max_tokens=1)
    assert engine.counts["hit"] >= hits
    fail_always(engine, 0.0)
    engine.now += PAUSE_SECONDS + 1
    engine.step()
    assert tier.tier_statistics().state == "open"
    before = tier.tier_statistics().hit_tokens
    for prompt in PROMPTS * 2:
        engine.run(prompt, max_tokens=1)
    assert tier.tier_statistics().hit_tokens > before
    engine.check_nothing_leaked()


def test_a_request_whose_read_does_not_end_is_computed(engine):
    (rank,) = engine.ranks
    rank.tier.slowest, rank.tier.random = 10_000, Slowest()
    late = engine.half.tier.tier_statistics().late
    began = engine.now
    ids = [engine.submit(prompt, max_tokens=1) for prompt in PROMPTS[:2]]
    while any(id in engine.requests for id in ids):
        engine.step()
    assert engine.half.tier.tier_statistics().late > late
    assert engine.now - began < 1
    for move in rank.tier.moves.values():
        move.steps_left = 0
    engine.check_nothing_leaked()


class Slowest:
    def random(self):
        return 1.0

    def randrange(self, stop):
        return stop - 1


def test_an_idle_engine_goes_on_until_everything_is_written(tmp_path):
    engine = Engine(tmp_path, offload="eager", host_blocks=160, tier={"offload": "eager"}, slowest=1)
    for prompt in PROMPTS[:4]:
        engine.submit(prompt, max_tokens=1)
    engine.drain()
    below = engine.half.tier.below
    (rank,) = engine.ranks
    assert isinstance(rank.tier, FakeTier) and not below.demotion.num_waiting
    assert all(below.pool.find(key) is not None for prompt in PROMPTS[:4] for key in engine.keys(prompt))
    assert len(rank.tier.slots) == below.pool.statistics().cached


def test_an_engine_at_its_start_steps_until_the_tier_is_open(tmp_path):
    engine = Engine(tmp_path, tier={"offload": "lazy"})
    assert engine.half.has_transfers()
    engine.drain()
    assert engine.half.tier.tier_statistics().state == "open" and not engine.half.has_transfers()


def test_after_a_reset_reads_that_were_under_way_bring_nothing(engine):
    (rank,) = engine.ranks
    rank.tier.slowest = 40
    engine.submit(PROMPTS[0], max_tokens=1)
    while not rank.tier.written_by_loads:
        engine.step()
    engine.reset()
    assert engine.half.tier.tier_statistics().cache.pool.cached == 0
    engine.drain()
    generation = rank.tier.first_generation
    assert generation > 0 and min(slot.label.generation for slot in rank.tier.slots.values()) < generation
    assert engine.run(PROMPTS[0], max_tokens=1)[:40] == PROMPTS[0]
    engine.check_nothing_leaked()
