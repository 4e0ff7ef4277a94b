"""The simulation of many engines on one store adds up: hits by place, and the load on the store.

Conversations, each of some turns, whose prompts grow. Those of one engine do not fit into its host.
"""

import functools
import importlib
import random

import pytest

from cpu_prefix_cache.tools.replay.below import replay_three_tiers
from cpu_prefix_cache.tools.replay.meter import Meter
from cpu_prefix_cache.tools.replay.tiers import BelowTier, DeviceTier, HostTier
from cpu_prefix_cache.tools.replay.traces import Trace, TraceRequest

CONVERSATIONS = 12
REQUESTS = 60
TURN_BLOCKS = 2
BLOCK_TOKENS = 512
DEVICE, HOST = 24, 32  # blocks
FAST = ("--nic", "1e6", "--link", "1e6", "--names", "1e12", "--round-trip", "0")


@pytest.fixture(scope="module")
def fleet():
    return importlib.import_module("benchmarks.tiers.tiers_fleet")


def conversations():
    draw = random.Random(5)
    turns = [0] * CONVERSATIONS
    requests = []
    for at in range(REQUESTS):
        who = draw.randrange(CONVERSATIONS)
        turns[who] += 1
        keys = [f"{who:8}{block:8}".encode() for block in range(turns[who] * TURN_BLOCKS)]
        requests.append(TraceRequest(float(at), keys, len(keys) * BLOCK_TOKENS))
    return Trace(["made up"], BLOCK_TOKENS, requests)


@functools.cache
def simulated(fleet, engines, balancing, kind="spread", *options):
    trace = conversations()
    given = ["made up", "--device", str(DEVICE), "--host", str(HOST), "--requests", str(REQUESTS), *options]
    return fleet.fleet(trace, fleet.arguments(given), engines, balancing, kind)


def found(row):
    return row["device"] + row["host"] + row["from store"]


@pytest.mark.parametrize("balancing", ["random", "prefix"])
def test_no_more_is_found_than_was_there(fleet, balancing):
    row = simulated(fleet, 4, balancing)
    assert row["requests"] == 4 * REQUESTS
    assert 0 < row["from store"] < found(row) <= row["ideal"]
    assert 0 < row["saved"] < found(row)
    assert 0 < row["writes used"] < 1 and 0 < row["reads used"] < 1 and 0 < row["names used"] < 1


def test_one_engine_finds_what_a_replay_with_a_tier_finds(fleet):
    """The replay decides without a clock, without queries, and by LRU of all that was written."""
    trace = conversations()
    tiers = HostTier(HOST), DeviceTier(DEVICE, "eager", horizon=32), BelowTier(10_000, "eager")
    tally = replay_three_tiers(trace, *tiers, Meter("test", trace.blocks))
    row = simulated(fleet, 1, "random", "one", *FAST)
    assert found(row) == pytest.approx(tally.hit_blocks / trace.blocks)
    assert row["from store"] == pytest.approx(tally.below_hit_blocks / trace.blocks)


def test_control_a_store_that_holds_nothing_gives_nothing(fleet):
    row, without = (simulated(fleet, 1, "random", kind) for kind in ("one", "none"))
    assert without["from store"] == 0 == without["waited seconds"]
    assert found(without) < found(row)


def test_a_balancer_by_prefix_needs_the_store_less(fleet):
    by_chance, by_prefix = (simulated(fleet, 4, balancing) for balancing in ("random", "prefix"))
    assert by_prefix["from store"] < by_chance["from store"]
    assert by_prefix["read GB/s"] < by_chance["read GB/s"]
    assert by_prefix["ideal"] == by_chance["ideal"]


def test_a_store_with_little_room_finds_less(fleet):
    all_of_it, some = (simulated(fleet, 4, "random", "spread", *options) for options in ((), ("--capacity", "60")))
    assert 0 < some["from store"] < all_of_it["from store"]
    assert some["refused"] > 0 == all_of_it["refused"]


def test_a_link_that_is_too_slow_is_used_up_and_costs_hits_but_no_more_than_them(fleet):
    fast, slow = (simulated(fleet, 4, "random", "one", "--link", rate) for rate in ("1000", "1"))
    assert slow["writes used"] > 0.8 > fast["writes used"]
    assert slow["unsaved"] > 0 or slow["late"] > 0
    assert found(slow) < found(fast)


def test_a_slow_server_answers_late_and_its_requests_compute(fleet):
    row = simulated(fleet, 4, "random", "spread", "--names", "1000")
    assert row["unanswered"] > 0
    assert found(row) < found(simulated(fleet, 4, "random"))


HOT = ("--hot", "1", "--hot-blocks", "4")


def test_a_hot_prefix_is_read_by_machines_that_did_not_compute_it(fleet):
    hot, without = (simulated(fleet, 4, "random", kind, *HOT) for kind in ("spread", "none"))
    assert hot["hot GB"] > 0 == without["hot GB"]
    assert found(hot) > found(without) and hot["from store"] > 0
    assert simulated(fleet, 4, "random")["hot GB"] == 0


def test_a_hot_prefix_passes_one_link_and_costs_time_where_that_is_slow(fleet):
    slow, fast = (simulated(fleet, 4, "random", "spread", *HOT, "--hot-link", rate) for rate in ("0.05", "1000"))
    assert slow["saved"] < fast["saved"]
    assert slow["hot GB"] <= fast["hot GB"]


def test_a_share_of_the_conversations_has_the_hot_prefix():
    users = importlib.import_module("benchmarks.tiers.tiers_fleet_users")
    trace = conversations()
    some = users.fronted(trace, 0.5, 4)
    pairs = zip(some.requests, trace.requests, strict=True)
    longer = {users.own_key(new): len(new.keys) - len(old.keys) for new, old in pairs}
    assert set(longer.values()) == {0, 4} and len(longer) == CONVERSATIONS
    assert users.fronted(trace, 0.0, 4) is trace
