"""Hints of a request's next use: in its kv_transfer_params, or as actions of an orchestrator. None stops a request."""

from math import inf, isnan, nan

import pytest
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from connector.common.next_use import next_use_of
from connector.vllm.kv_hints import next_use_of_actions
from cpu_prefix_cache.deciding import HintStatistics
from cpu_prefix_cache.eviction.kinds import HINTED
from tests.vllm.engine import Engine

TOKENS = list(range(100, 140))


def envelope(*actions):
    """Pairs of a type and a payload."""
    return KvHintsEnvelope(
        "1.0", "m", [KvHintAction(str(at), kind, "1.0", each) for at, (kind, each) in enumerate(actions)]
    )


def served(folder, **given):
    """The bins of the hints that the chunks of one request have on the host, and what was counted."""
    engine = Engine(folder, offload="eager", host_blocks=64, policy="adaptive")
    engine.submit(TOKENS, **given)
    engine.drain()
    pool = engine.cache.pool
    nodes = [pool.find(key) for key in engine.keys(TOKENS)]
    assert nodes and None not in nodes, "it was not served, or not stored"
    bins = {HINTED.get(pool._policy._mark[node].kind) for node in nodes}
    return bins, engine.cache.statistics().hints


@pytest.mark.parametrize(
    ("given", "bin", "counted"),
    [
        ({}, None, HintStatistics()),
        ({"cpu_prefix_cache_next_use": 40}, 3, HintStatistics(accepted=1)),
        ({"cpu_prefix_cache_next_use": "never"}, 18, HintStatistics(accepted=1)),
        ({"cpu_prefix_cache_next_use": -1.5}, 0, HintStatistics(clipped=1)),
        ({"cpu_prefix_cache_next_use": "40"}, None, HintStatistics(malformed=1)),
        ({"cpu_prefix_cache_next_use": {"seconds": 40}}, None, HintStatistics(malformed=1)),
    ],
)
def test_a_request_has_the_time_until_its_next_use_in_its_params(tmp_path, given, bin, counted):
    assert served(tmp_path, params=given) == ({bin}, counted)


@pytest.mark.parametrize(
    ("actions", "bin", "counted"),
    [
        ([("kv.retain", {"ttl_seconds": 40.0, "priority": 3, "include_current_request": True})], 3, "accepted"),
        ([("kv.evict", {"execute_at": "request_completion"})], 18, "accepted"),
        ([("kv.retain", {"priority": 3})], None, "malformed"),
    ],
)
def test_an_orchestrator_attaches_it_as_an_action(tmp_path, actions, bin, counted):
    assert served(tmp_path, kv_hints=envelope(*actions)) == ({bin}, HintStatistics(**{counted: 1}))


def test_the_request_itself_has_the_last_word(tmp_path):
    hints = envelope(("kv.evict", {}))
    params = {"cpu_prefix_cache_next_use": 40}
    assert served(tmp_path, params=params, kv_hints=hints) == ({3}, HintStatistics(accepted=1))


RETAINED = [{"start": 0, "end": 32, "priority": 80, "duration": 60.0}, {"start": 32, "priority": 40, "duration": 9}]


@pytest.mark.parametrize(
    ("actions", "seconds"),
    [
        ([], None),
        ([("kv.fetch", {"block_hashes": [1]}), ("kv.prefetch", {})], None),
        ([("kv.fetch", {}), ("kv.retain", {"ttl_seconds": 5})], 5),
        ([("kv.retain", {"directives": RETAINED})], 60.0),
        ([("kv.retain", {"directives": [{"start": 0, "priority": 40}]})], nan),
        ([("kv.retain", {"directives": "all of it"})], nan),
        ([("kv.retain", {"ttl_seconds": "long"})], "long"),
        ([("kv.retain", {"ttl_seconds": 5, "include_current_request": False}), ("kv.release", {})], inf),
        ([("kv.demote", {})], 65_536.0),
        ([("kv.demote", {"ttl_seconds": 300})], 300),
    ],
)
def test_actions_become_a_time(actions, seconds):
    found = next_use_of_actions(envelope(*actions).actions)
    assert found == seconds or (isnan(found) and isnan(seconds))


def test_never_is_infinity():
    assert next_use_of({"cpu_prefix_cache_next_use": "never"}) == inf
    assert next_use_of({"cpu_prefix_cache_next_use": "Never"}) == "Never"  # which the cache counts as malformed
