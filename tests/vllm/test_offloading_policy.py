"""Our policies in vLLM's own CPU offloading manager.

Their tests of a policy hold of ours (no room taken from what is used, all or nothing, failed stores, resets,
events), and beside it what prefixes add: tails leave first, what was declined leaves before them, and hits are those of
`replay`.
"""

import json
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

import cpu_prefix_cache_vllm
from benchmarks.vllm.vllm_policies import hit_blocks
from connector.common import contract
from connector.vllm_offloading import AdaptivePolicy, interface
from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.tools.replay.meter import Meter
from cpu_prefix_cache.tools.replay.one_tier import replay_one_tier
from cpu_prefix_cache.tools.replay.tiers import HostTier
from cpu_prefix_cache.tools.replay.traces import read_traces
from tests.vllm.offloading import ADAPTIVE, ARC, LRU, OURS, POLICIES, Prompt, key, managed, policy_of, serve

CAPACITY = 800  # chunks

every_policy = pytest.mark.parametrize("policy", POLICIES)


# How vLLM finds them


@every_policy
def test_vllm_finds_a_policy_by_its_name_and_our_module(policy):
    found = CachePolicyFactory.get_cache_policy_cls(policy, OURS)
    assert found.__name__ == policy
    assert found(cache_capacity=4).get(key("a")) is None


def test_a_name_that_is_none_of_ours_is_none():
    with pytest.raises(AttributeError, match="no attribute 'adaptive'"):
        CachePolicyFactory.get_cache_policy_cls("adaptive", OURS)


def test_a_vllm_without_the_interface_is_refused_with_a_sentence(monkeypatch):
    class Before031:
        def touch(self): ...

    monkeypatch.setattr(contract, "resolve_name", lambda name: Before031)
    with pytest.raises(ConfigurationError, match=r"CachePolicy\.on_store_miss, .* take vLLM 0\.31 to 0\.33"):
        interface.check_interface()


def test_a_vllm_without_the_modules_is_refused_with_a_sentence(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(contract, "resolve_name", missing)
    with pytest.raises(ConfigurationError, match=r"take vLLM 0\.31 to 0\.33"):
        interface.check_interface()


@pytest.mark.parametrize("module", ["connector.vllm_offloading", OURS])
def test_importing_it_pulls_in_nothing_that_copies_or_needs_a_device(module):
    load = f"getattr(importlib.import_module({module!r}), 'AdaptivePolicy')"
    count = "json.dumps([*sys.modules]), torch.cuda.is_initialized()"
    program = f"import importlib, json, sys, torch; {load}; print({count})"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    modules, is_initialized = ran.stdout.strip().splitlines()[-1].rsplit(" ", 1)
    loaded = set(json.loads(modules))
    assert "connector.vllm_offloading.policy" in loaded
    assert (
        not {"connector.vllm", "cpu_prefix_cache.copying", "cpu_prefix_cache.copier", "cpu_prefix_cache.memory"}
        & loaded
    )
    assert is_initialized == "False"


# Their contract


@every_policy
def test_chunks_being_written_are_found_as_pending_and_then_as_a_hit(policy):
    manager = managed(4, policy)
    prompt = Prompt(manager, "ab")
    stored = manager.prepare_store(prompt.chunks(), prompt.context)
    assert [manager.lookup(each, prompt.context) for each in prompt.chunks()] == [LookupResult.HIT_PENDING] * 2
    manager.complete_store(stored.keys_to_store, prompt.context)
    assert prompt.hit == 2
    assert Prompt(manager, "abc").hit == 2


@every_policy
def test_resident_chunks_stay_while_room_is_made_for_what_follows_it(policy):
    manager = managed(4, policy)
    serve(manager, "ab")
    serve(manager, "x")
    assert Prompt(manager, "abcd").store() == "x"  # the older "ab" is offered with it
    assert Prompt(manager, "abcd").hit == 4


@every_policy
def test_nothing_that_a_transfer_uses_leaves(policy):
    manager = managed(4, policy)
    serve(manager, "ab")
    loading, writing = Prompt(manager, "ab"), Prompt(manager, "xy")
    manager.prepare_load(loading.chunks(), loading.context)
    stored = manager.prepare_store(writing.chunks(), writing.context)
    assert Prompt(manager, "z").store() is None
    assert policy_of(manager).evict(1, set()) is None
    manager.complete_load(loading.chunks(), loading.context)
    assert Prompt(manager, "z").store() == "b"
    assert Prompt(manager, "uvw").store() is None  # only "a" and "z" are idle
    manager.complete_store(stored.keys_to_store, writing.context)
    policy_of(manager).check_valid()


@every_policy
def test_a_chunk_that_is_loaded_twice_stays_until_both_have_ended(policy):
    manager = managed(2, policy)
    serve(manager, "ab")
    first, second = Prompt(manager, "ab"), Prompt(manager, "ab")
    for each in (first, second):
        manager.prepare_load(each.chunks(), each.context)
    manager.complete_load(first.chunks(), first.context)
    assert Prompt(manager, "z").store() is None
    manager.complete_load(second.chunks(), second.context)
    assert Prompt(manager, "z").store() == "b"


@every_policy
def test_too_few_victims_are_none_and_change_nothing(policy):
    manager = managed(4, policy)
    serve(manager, "abcd")
    keys = Prompt(manager, "abcd").chunks()
    assert policy_of(manager).evict(3, {keys[1]}) is None  # "b" holds "a", too
    assert Prompt(manager, "abcd").hit == 4
    assert [each for each, _ in policy_of(manager).evict(2, {keys[1]})] == [keys[3], keys[2]]


@every_policy
def test_no_victims_are_an_empty_list(policy):
    assert policy_of(managed(4, policy)).evict(0, set()) == []


@every_policy
def test_a_failed_store_leaves_nothing_behind_and_takes_nothing_else(policy):
    manager = managed(6, policy)
    serve(manager, "ab")
    prompt = Prompt(manager, "abcd")
    manager.prepare_store(prompt.chunks(), prompt.context)
    manager.complete_store(set(prompt.chunks()), prompt.context, success=False)
    assert prompt.hit == 2
    policy_of(manager).check_valid()
    assert Prompt(manager, "abcd").store() == ""
    assert Prompt(manager, "abcd").hit == 4


@every_policy
def test_chunks_below_a_failed_store_leave_first_and_serves_once_the_gap_is_filled(policy):
    manager = managed(6, policy)
    serve(manager, "z")
    writing, beside = Prompt(manager, "ab"), Prompt(manager, "abcd")
    manager.prepare_store(writing.chunks(), writing.context)
    beside.store(2)
    manager.complete_store(writing.chunks(), writing.context, success=False)
    policy_of(manager).check_valid()
    assert Prompt(manager, "abcd").hit == 0
    assert Prompt(manager, "vwxy").store() == "c"  # before "z", which is older
    assert Prompt(manager, "z").hit == 1


def test_loose_chunks_are_placed_when_the_gap_above_them_is_filled():
    manager = managed(6)
    writing, beside = Prompt(manager, "ab"), Prompt(manager, "abcd")
    manager.prepare_store(writing.chunks(), writing.context)
    beside.store(2)
    manager.complete_store(writing.chunks(), writing.context, success=False)
    assert policy_of(manager).num_loose == 2
    assert Prompt(manager, "abcd").store() == ""
    assert policy_of(manager).num_loose == 0
    assert Prompt(manager, "abcd").hit == 4


def test_loose_chunks_are_placed_when_a_request_hits_them():
    manager = managed(6)
    writing = Prompt(manager, "ab")
    manager.prepare_store(writing.chunks(), writing.context)
    Prompt(manager, "abcd").store(2)
    manager.complete_store(writing.chunks(), writing.context, success=False)
    serve(manager, "ab")
    assert policy_of(manager).num_loose == 2
    serve(manager, "abcd")
    assert policy_of(manager).num_loose == 0


@every_policy
def test_a_reset_empties_it_also_under_running_requests(policy):
    manager = managed(4, policy)
    running = Prompt(manager, "abcd")
    manager.prepare_store(running.chunks(0, 2), running.context)
    manager.reset_cache()
    policy_of(manager).check_valid()
    assert Prompt(manager, "ab").hit == 0
    assert running.store() == ""
    running.end()
    assert Prompt(manager, "abcd").hit == 4


@every_policy
def test_events_name_what_came_and_what_left(policy):
    manager = managed(2, policy, enable_events=True)
    serve(manager, "ab")
    serve(manager, "x")
    events = [(event.removed, [*event.keys]) for event in manager.take_events()]
    assert events == [(False, [key("a"), key("ab")]), (True, [key("ab")]), (False, [key("x")])]


@every_policy
def test_a_request_that_stores_nothing_counts_as_a_use(policy):
    manager = managed(4, policy)
    serve(manager, "ab")
    serve(manager, "xy")
    serve(manager, "ab")  # hits all of it
    assert serve(manager, "z") == "y"


def test_without_its_use_the_older_one_leaves():
    manager = managed(4)
    serve(manager, "ab")
    serve(manager, "xy")
    assert serve(manager, "z") == "b"


# Prefixes


def test_tails_leave_before_heads_whatever_their_age():
    manager = managed(6)
    serve(manager, "abcd")
    serve(manager, "xy")
    assert serve(manager, "vw") == "dc"
    assert Prompt(manager, "abcd").hit == 2


def test_a_request_that_goes_on_holds_what_it_stands_below():
    manager = managed(4)
    running = Prompt(manager, "abcd")
    running.store(0, 2)
    serve(manager, "xy")
    assert running.store(2, 4) == "yx"  # "ab" is older, and not offered with it


def test_a_chunk_whose_prefix_is_gone_leaves_first():
    manager = managed(4)
    running = Prompt(manager, "abcd")
    running.store(0, 2)
    assert serve(manager, "wxyz") == "ba"
    assert running.store(2, 3) == "z"
    assert policy_of(manager).num_loose == 1
    assert serve(manager, "v") == "c"


def test_keys_of_nobody_know_leave_first():
    manager = managed(2)
    nobody = ReqContext("external")  # without the places of its keys
    serve(manager, "a")
    stored = manager.prepare_store([key("x")], nobody)
    manager.complete_store(stored.keys_to_store, nobody)
    assert serve(manager, "b") == "x"


def test_declined_chunks_leave_before_anything_that_is_wanted(monkeypatch):
    manager = managed(4, ADAPTIVE)
    serve(manager, "abcd")
    pool = policy_of(manager)._kept._pool
    monkeypatch.setattr(pool, "choose", lambda parent, keys: 0)
    assert [serve(manager, text) for text in ("m", "n", "op")] == ["d", "m", "nc"]
    assert policy_of(manager).num_loose == 2
    assert Prompt(manager, "op").hit == 2  # while it is here


def test_without_a_refusal_they_leave_in_their_turn():
    manager = managed(4)
    serve(manager, "abcd")
    assert [serve(manager, text) for text in ("m", "n", "op")] == ["d", "c", "ba"]


def test_a_boundary_has_the_chunks_of_all_groups_and_victims_are_as_many_as_wanted():
    manager = managed(6)
    prompt = Prompt(manager, "ab", groups=2)
    assert prompt.store() == ""
    assert serve(manager, "xyz") == "b"  # of one group; that of the other is loose
    policy_of(manager).check_valid()
    assert policy_of(manager).num_loose == 1
    assert serve(manager, "v") == "b"


def test_a_boundary_without_one_of_its_chunks_is_completed_in_place():
    manager = managed(8)
    prompt = Prompt(manager, "ab", groups=2)
    first = [key("a", 0), key("ab", 0)]
    stored = manager.prepare_store(first, prompt.context)
    manager.complete_store(stored.keys_to_store, prompt.context)
    assert prompt.store() == ""
    policy_of(manager).check_valid()
    assert policy_of(manager).num_loose == 0
    assert all(manager.lookup(each, prompt.context) is LookupResult.HIT for each in prompt.chunks())


def test_a_failed_chunk_of_one_group_leaves_those_of_the_others():
    manager = managed(2)
    serve(manager, "a")
    prompt = Prompt(manager, "a", groups=2)
    stored = manager.prepare_store(prompt.chunks(), prompt.context)
    manager.complete_store(stored.keys_to_store, prompt.context, success=False)
    policy_of(manager).check_valid()
    assert Prompt(manager, "a").hit == 1
    assert Prompt(manager, "xy").store() == "a"  # which nothing uses any more


def test_a_release_that_names_the_request_of_each_chunk_is_served_as_well():
    policy = AdaptivePolicy(4)
    manager = managed(4)
    prompt = Prompt(manager, "a")
    (only,) = prompt.chunks()
    policy.on_request_access([only], prompt.context)  # 0.33 calls so
    policy.on_store_miss([only], prompt.context)
    policy.insert(only, SimpleNamespace(ref_cnt=-1, chunk_id=0), prompt.context)
    policy.check_valid()
    assert policy.get(only).chunk_id == 0
    assert policy.num_loose == 0


# Hits


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Conversations that come back, some often, and prompts that nobody repeats."""
    chance = random.Random(7)
    conversations = [[number * 1_000 + at for at in range(chance.randrange(4, 20))] for number in range(300)]
    rows = []
    for second in range(3_000):
        if chance.random() < 0.4:
            ids = [1_000_000 + second * 100 + at for at in range(chance.randrange(2, 30))]
        else:
            ids = conversations[min(int(chance.expovariate(0.01)), 299)]
            if chance.random() < 0.3 and len(ids) < 60:
                ids += [ids[-1] + 1 + at for at in range(3)]
        rows.append({"timestamp": second * 1_000, "input_length": 512 * len(ids), "hash_ids": list(ids)})
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_traces([str(path)], block_tokens=512, time_unit="ms")


def replayed(trace, policy):
    return replay_one_tier(trace, HostTier(CAPACITY, policy), Meter("", 1)).hit_blocks


@pytest.mark.parametrize(("policy", "name"), [(ADAPTIVE, "adaptive"), (ARC, "arc"), (LRU, "lru")])
def test_hits_are_those_of_a_replay_of_the_policy(trace, policy, name):
    """Within .3 points, and LRU to the block, where a step computes a fiftieth of what fits."""
    manager = managed(CAPACITY, policy)
    found, loose = hit_blocks(trace, manager, step_blocks=CAPACITY // 50)
    meant = replayed(trace, name)
    policy_of(manager).check_valid()
    assert loose <= CAPACITY // 50
    assert abs(found - meant) <= (0 if name == "lru" else 0.003 * trace.blocks)


def test_their_own_policies_find_less(trace):
    """So the hits are not those of any policy."""
    for theirs in ("lru", "arc"):
        found, _ = hit_blocks(trace, managed(CAPACITY, theirs), step_blocks=CAPACITY // 50)
        assert found < replayed(trace, "adaptive") - 0.02 * trace.blocks


def test_one_name_stands_for_each_of_ours():
    assert set(cpu_prefix_cache_vllm.POLICIES) == set(POLICIES)
