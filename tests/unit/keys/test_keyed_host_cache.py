"""An engine with an index of its own puts blocks by keys, looks them up and loads them: stories with real bytes."""

import weakref
from collections import deque

import pytest
import torch

from cpu_prefix_cache import (
    POLICIES,
    ChunkLocal,
    ConfigurationError,
    KVGroup,
    MisuseError,
    Prefix,
    Window,
    keys_and_values,
)
from cpu_prefix_cache.by_keys import CopyFailed, KeyedHostCache
from cpu_prefix_cache.deciding import Direction
from cpu_prefix_cache.testing import CorruptingCopier, LateCopier, MeddlingCopier
from tests.support.keyed_engine import GROUPS, KeyedEngine, keys
from tests.support.simulated_driver import SimulatedDriver, pins_host_caches
from tests.support.sinks import SinkGroup
from tests.support.threads import wait_until

PROMPT = keys(*range(6))
ALL = [[0, 1, 2, 3, 4, 5], [4, 5], [1]]  # attention of six keys, the window's of the last two, a state of the last
TAKEN_POLICIES = sorted(POLICIES.keys() - {"arc"})
ELSEWHERE = [[16, 15, 14, 13, 12, 11], [8, 7], [9]]


def test_blocks_come_back_by_their_keys():
    engine = KeyedEngine()
    engine.put(PROMPT, ALL)
    found = engine.host.lookup(PROMPT)
    assert found.lengths == [6] and found.longest == 6
    assert engine.loaded(PROMPT, ELSEWHERE)
    engine.host.release(found)
    engine.host.cache.check_valid()


def test_a_put_into_a_small_host_evicts_nothing_that_it_has_itself():
    """Else the windows that left for its attention would be copied again."""
    engine = KeyedEngine(GROUPS[:2], host_blocks=8)
    prompt, block_bytes = PROMPT[:4], engine.groups[0].group.block_bytes
    engine.put(prompt[:2], [[0, 1], [0, 1]])
    engine.put(keys("a", "b", "c"), [[2, 3, 4], []])
    before = engine.host.statistics().cache.bytes_stored
    engine.put(prompt, [[5, 6], [5, 6, 7, 8]])
    assert engine.host.statistics().cache.bytes_stored - before == 4 * block_bytes
    assert engine.loaded(prompt, [[9, 10], [9, 10, 11, 12]])


@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_a_damaged_block_of_any_group_is_seen(group):
    """The control of all stories here."""
    engine = KeyedEngine(wrap_copier=lambda copier, tensors: CorruptingCopier(copier, tensors, group))
    engine.put(PROMPT, ALL)
    assert engine.host.load(PROMPT, ELSEWHERE).wait()
    assert {name for name, _ in engine.wrong(PROMPT, ELSEWHERE)} == {GROUPS[group]}


def test_the_first_call_begins_to_pin_the_region(monkeypatch):
    """Until some of it is pinned the host has no room, and an engine that waits for room would wait for ever."""
    driver = SimulatedDriver()
    pins_host_caches(monkeypatch, driver)
    engine = KeyedEngine()
    assert not driver.order
    engine.put(PROMPT, ALL)
    wait_until(lambda: engine.host.statistics().ready_bytes == engine.host.statistics().host_bytes)
    engine.put(PROMPT, ALL)
    assert engine.host.lookup(PROMPT).longest == 6
    assert engine.loaded(PROMPT, ELSEWHERE)


def test_preparing_waits_for_the_region(monkeypatch):
    pins_host_caches(monkeypatch, SimulatedDriver())
    engine, seen = KeyedEngine(), []
    engine.host.prepare(lambda *progress: seen.append(progress))
    size = engine.host.statistics().host_bytes
    assert seen[-1] == (size, size)
    assert engine.host.put(PROMPT, ALL).wait()
    assert engine.host.lookup(PROMPT).longest == 6


# Lookups


def test_a_request_resumes_where_all_groups_have_what_that_takes():
    engine = KeyedEngine()
    engine.put(PROMPT, [ALL[0], [2, 3, 4, 5], []])
    engine.put(PROMPT[:4], [[], [], [1]])
    found = engine.host.lookup(PROMPT)
    assert list(found.by_group["attention"]) == [1, 2, 3, 4, 5, 6]
    assert list(found.by_group["window"]) == [4, 5, 6], "a window sees two blocks, and the third has one before it"
    assert list(found.by_group["state"]) == [4] == list(found.lengths)


def test_a_prompt_that_departs_finds_what_it_shares():
    engine = KeyedEngine(["attention"])
    engine.put(PROMPT, [ALL[0]])
    other = keys(0, 1, 2, "other", 4)
    assert list(engine.host.lookup(other).lengths) == [1, 2, 3]
    assert list(engine.host.lookup(keys("another")).lengths) == []


def test_a_window_before_the_first_key_is_the_engines():
    """As of one that has the beginning of the prompt on the device."""
    engine = KeyedEngine(["attention", "window"])
    engine.put(PROMPT, [ALL[0], [4, 5]])
    assert list(engine.host.lookup(PROMPT[4:]).lengths) == [1, 2]
    assert list(engine.host.lookup(PROMPT[3:]).lengths) == [3], "the block before it has no window"


def test_keys_in_flight_are_not_found_before_they_are_there():
    engine = KeyedEngine(["attention"], wrap_copier=LateCopier)
    handle = engine.host.put(PROMPT, [ALL[0]])
    assert handle.ok is None and engine.host.lookup(PROMPT).longest == 0
    assert handle.wait() and engine.host.lookup(PROMPT).longest == 6


# Puts


def test_a_prompt_may_come_in_portions_without_what_is_before():
    engine = KeyedEngine()
    engine.put(PROMPT[:2], [[0, 1], [0, 1], [1]])
    engine.put(PROMPT[2:], [[2, 3, 4, 5], [4, 5], [2]])
    assert list(engine.host.lookup(PROMPT).lengths) == [2, 6]
    assert engine.loaded(PROMPT, ELSEWHERE) and engine.loaded(PROMPT[3:], [[20, 19], [2], []])


def test_a_later_portion_may_come_first():
    engine = KeyedEngine(["attention"])
    engine.put(PROMPT[3:], [[3, 4, 5]])
    assert engine.host.lookup(PROMPT).longest == 0
    engine.put(PROMPT[:3], [[0, 1, 2]])
    assert engine.host.lookup(PROMPT).longest == 6 and engine.loaded(PROMPT, [ELSEWHERE[0]])


def test_nothing_is_copied_twice():
    engine = KeyedEngine(wrap_copier=LateCopier)
    engine.compute(PROMPT, ALL)
    first, again = (engine.host.put(PROMPT, ALL) for _ in range(2))
    assert again.is_done and again.ok and not first.is_done
    assert first.wait() and engine.host.put(PROMPT, ALL).is_done
    assert engine.host.statistics().cache.chunks_stored == 6


def test_a_prompt_that_goes_on_stores_what_is_new():
    engine = KeyedEngine(["attention"])
    engine.put(PROMPT[:4], [[0, 1, 2, 3]])
    engine.put(PROMPT, [ALL[0]])
    assert engine.host.statistics().cache.chunks_stored == 6
    assert engine.host.cache.pool.depth(engine.host.cache.pool.find(PROMPT[5])) == 6, "it hangs below what was there"


def test_blocks_of_a_window_without_its_chunk_are_left():
    engine = KeyedEngine(["attention", "window"])
    engine.put(PROMPT, [[], [4, 5]])
    assert engine.host.statistics().cache.checkpoints_stored == 0
    engine.host.cache.check_valid()


def test_states_need_no_attention():
    engine = KeyedEngine(["state"])
    engine.put(PROMPT, [[7]])
    assert list(engine.host.lookup(PROMPT).lengths) == [6]
    assert engine.loaded(PROMPT, [[3]])


def test_a_put_reports_whether_all_of_it_is_kept():
    engine = KeyedEngine(wrap_copier=LateCopier)
    put = engine.host.put(PROMPT, ALL)
    assert not put.is_kept
    assert put.wait() and put.is_kept
    assert engine.host.put(PROMPT, [[], [4, 5], []]).is_kept, "it was here"
    engine.host.reset()
    assert not put.is_kept


@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_a_put_without_room_for_all_of_it_is_not_kept(group):
    """The host has room for half of the prompt, or for no side of it."""
    engine = KeyedEngine(host_blocks=3 if group == 0 else 6)
    blocks = [ALL[0], *(ALL[at] if at == group else [] for at in range(1, len(GROUPS)))]
    put = engine.host.put(PROMPT, blocks)
    assert put.wait() and not put.is_kept


# Leases and room


def test_a_lease_keeps_all_that_it_names():
    engine = KeyedEngine(["attention"], host_blocks=8)
    engine.put(PROMPT, [ALL[0]])
    found = engine.host.lookup(PROMPT)
    for number in range(5):
        engine.put(keys("other", number, 2, 3), [[0, 1, 2, 3]])
        engine.host.cache.check_valid()
    assert engine.loaded(PROMPT, [ELSEWHERE[0]])
    engine.host.release(found)
    engine.put(keys("last", 1, 2, 3), [[0, 1, 2, 3]])
    assert engine.host.lookup(PROMPT).longest < 6


def test_sides_stay_with_their_lease():
    engine = KeyedEngine(host_blocks=14)
    engine.put(PROMPT, ALL)
    found = engine.host.lookup(PROMPT)
    for number in range(5):
        engine.put(keys("other", number), [[0, 1], [0, 1], [1]])
    assert found.longest == 6 and engine.loaded(PROMPT, ELSEWHERE)


def test_a_lease_is_released_once():
    engine = KeyedEngine(["attention"])
    for found in (engine.host.lookup(PROMPT), engine.host.lookup(keys("none"))):
        engine.host.release(found)
        with pytest.raises(MisuseError, match="released before"):
            engine.host.release(found)


def test_leases_that_nobody_releases_are_counted():
    engine = KeyedEngine(["attention"])
    engine.put(PROMPT, [ALL[0]])
    left = engine.host.lookup(PROMPT), engine.host.lookup(PROMPT[:2])
    engine.host.release(engine.host.lookup(PROMPT))
    assert engine.host.statistics().leases == 2
    engine.host.reset()
    assert engine.host.statistics().leases == 0 and engine.host.statistics().leases_left == 2
    engine.host.release(left[0])  # its owner need not know
    engine.put(PROMPT, [ALL[0]])
    engine.host.lookup(PROMPT)
    engine.host.close()
    assert engine.host.statistics().leases_left == 3


def test_chunks_that_were_used_are_evicted_last():
    engine = KeyedEngine(["attention"], host_blocks=8)
    engine.put(PROMPT[:4], [[0, 1, 2, 3]])
    engine.put(keys("other", 1, 2, 3), [[0, 1, 2, 3]])
    assert engine.loaded(PROMPT[:4], [[9, 8, 7, 6]])
    engine.put(keys("new", 1), [[0, 1]])
    assert engine.host.lookup(PROMPT).longest == 4
    assert engine.host.lookup(keys("other", 1, 2, 3)).longest == 2


@pytest.mark.parametrize("policy", TAKEN_POLICIES)
@pytest.mark.parametrize("wanted", [[[9, 8], [7, 6]], [[], [7, 6]]], ids=["with their chunks", "alone"])
def test_sides_that_were_used_are_evicted_last(policy, wanted):
    engine = KeyedEngine(["attention", "window"], host_blocks=9, policy=policy)
    for name in ("a", "b"):
        engine.put(keys(name, 1), [[0, 1], [0, 1]])
    assert engine.loaded(keys("a", 1), wanted)
    engine.put(keys("c", 1), [[0, 1], [0, 1]])
    assert engine.host.lookup(keys("a", 1)).longest == 2 and engine.host.lookup(keys("b", 1)).longest < 2
    engine.host.cache.check_valid()


def test_a_lease_keeps_portions_that_came_apart():
    engine = KeyedEngine(["attention"], host_blocks=8)
    engine.put(PROMPT[3:], [[3, 4, 5]])
    engine.put(PROMPT[:3], [[0, 1, 2]])
    found = engine.host.lookup(PROMPT)
    for number in range(5):
        engine.put(keys("other", number), [[0, 1]])
    assert found.longest == 6 and engine.loaded(PROMPT, [ELSEWHERE[0]])


# Loads


def test_a_part_is_loaded_behind_what_the_device_has():
    engine = KeyedEngine()
    engine.put(PROMPT, ALL)
    assert engine.loaded(PROMPT, [[9, 8], [2], []])
    assert engine.loaded(PROMPT, [[], [3, 2], [0]])


def test_a_load_of_what_is_gone_copies_nothing():
    engine = KeyedEngine()
    engine.put(PROMPT, ALL)
    engine.poison()
    for wanted, blocks in ((keys("none"), [[3], [], []]), (PROMPT, [[], [3, 2, 1], []]), (PROMPT[:5], [[], [], [4]])):
        handle = engine.host.load(wanted, blocks)
        assert handle.is_done and handle.ok is False and not handle.wait()
        with pytest.raises(CopyFailed, match="not here any more"):
            handle.hold_compute(0)
        with pytest.raises(CopyFailed, match="not here any more"):
            handle.layers[0].passed()
    assert all((part.rows == 0xDD).all() for group in engine.groups for part in group.parts)


def test_each_layer_has_an_event():
    engine = KeyedEngine(wrap_copier=LateCopier)
    engine.put(PROMPT, ALL)
    handle = engine.host.load(PROMPT, ELSEWHERE)
    assert len(handle.layers) == 3 and not handle.layers[0].passed()
    handle.layers[0].until_passed()
    assert handle.layers[2].passed(), "this copier moves all layers together"
    handle.hold_compute(2)
    assert handle.is_done and handle.ok and engine.wrong(PROMPT, ELSEWHERE) == []


# Failures


def fails_in(direction):
    """A copier that fails in this direction."""

    class Failing(MeddlingCopier):
        def copy(self, which, copies):
            if which is direction:
                raise RuntimeError("no luck")
            return super().copy(which, copies)

    return Failing


def test_a_failed_put_is_reported_and_finds_nothing():
    engine = KeyedEngine(wrap_copier=fails_in(Direction.STORE))
    handle = engine.host.put(PROMPT, ALL)
    assert not handle.wait() and handle.is_done and handle.ok is False
    assert engine.host.lookup(PROMPT).longest == 0
    engine.host.cache.check_valid()


def test_a_failed_load_is_reported_and_its_keys_are_forgotten():
    engine = KeyedEngine(wrap_copier=fails_in(Direction.LOAD))
    engine.put(PROMPT, ALL)
    handle = engine.host.load(PROMPT[:4], [[0, 1, 2, 3], [], []])
    with pytest.raises(CopyFailed):
        handle.hold_compute(0)
    with pytest.raises(CopyFailed):
        handle.layers[0].until_passed()
    assert not handle.wait() and handle.ok is False
    assert engine.host.lookup(PROMPT).longest == 0
    engine.host.cache.check_valid()


def test_a_load_that_fails_while_compute_waits_is_reported():
    failing = fails_in(Direction.LOAD)
    engine = KeyedEngine(wrap_copier=lambda copier, tensors: LateCopier(failing(copier, tensors)))
    engine.put(PROMPT, ALL)
    handle = engine.host.load(PROMPT, ELSEWHERE)
    with pytest.raises(CopyFailed):
        handle.hold_compute(0)
    assert not handle.wait() and handle.ok is False
    assert engine.host.lookup(PROMPT).longest == 0


def test_sides_whose_load_has_failed_are_forgotten():
    engine = KeyedEngine(wrap_copier=fails_in(Direction.LOAD))
    engine.put(PROMPT, ALL)
    assert not engine.host.load(PROMPT, [[], [8, 7], [9]]).wait()
    found = engine.host.lookup(PROMPT)
    assert list(found.by_group["attention"]) == [1, 2, 3, 4, 5, 6]
    assert found.by_group["window"] == found.by_group["state"] == []


def test_failures_in_a_row_turn_the_cache_off():
    engine = KeyedEngine(["attention"], wrap_copier=fails_in(Direction.LOAD))
    for number in range(5):
        engine.put(keys(number), [[0]])
        assert not engine.host.load(keys(number), [[1]]).wait()
    engine.host.poll()
    assert engine.host.cache.is_off
    assert engine.host.put(PROMPT, [ALL[0]]).is_done and engine.host.lookup(PROMPT).longest == 0
    assert engine.host.load(PROMPT, [ALL[0]]).ok is False


# New weights


def test_a_reset_forgets_all_and_what_is_under_way():
    engine = KeyedEngine(wrap_copier=LateCopier)
    engine.put(PROMPT, ALL)
    load, put = engine.host.load(PROMPT, ELSEWHERE), engine.host.put(keys("other"), [[0], [], []])
    engine.host.reset()
    assert not load.is_done, "it may still write"
    load.wait(), put.wait()
    assert load.ok is False and put.ok is False
    assert engine.host.lookup(PROMPT).longest == engine.host.lookup(keys("other")).longest == 0
    engine.put(PROMPT, ALL)
    assert engine.loaded(PROMPT, ELSEWHERE)


@pytest.mark.parametrize("revision", ["", 7])
def test_a_reset_to_what_is_no_revision_changes_nothing(revision):
    engine = KeyedEngine()
    engine.put(PROMPT, ALL)
    with pytest.raises(ConfigurationError, match="revision of a reset is a text"):
        engine.host.reset(revision)
    assert engine.loaded(PROMPT, ELSEWHERE)


def test_compute_does_not_go_on_with_a_load_from_before_a_reset():
    engine = KeyedEngine(wrap_copier=LateCopier)
    engine.put(PROMPT, ALL)
    handle = engine.host.load(PROMPT, ELSEWHERE)
    layers = handle.layers
    engine.host.reset()
    for has_ended in (False, True):
        assert handle.is_done is has_ended
        for passes in (
            layers[0].passed,
            layers[0].until_passed,
            handle.layers[0].passed,
            lambda: handle.hold_compute(0),
        ):
            with pytest.raises(CopyFailed, match="a reset came"):
                passes()
        assert not handle.wait()


# Options and misuse


def test_threads_copy_beside_the_engine():
    engine = KeyedEngine(threads=True)
    engine.put(PROMPT, ALL)
    handle = engine.host.load(PROMPT, ELSEWHERE)
    handle.hold_compute(0)
    assert handle.wait() and engine.wrong(PROMPT, ELSEWHERE) == []
    engine.host.close()


def test_coded_groups_come_back_bit_by_bit():
    engine = KeyedEngine(["attention", "window"], codec="exponent")
    engine.put(PROMPT, ALL[:2])
    assert engine.host.lookup(PROMPT).longest == 6 and engine.loaded(PROMPT, ELSEWHERE[:2])


@pytest.mark.parametrize("policy", TAKEN_POLICIES)
def test_every_other_policy_is_taken(policy):
    engine = KeyedEngine(host_blocks=20, policy=policy)
    for number in range(20):
        engine.put(keys(number % 7, 1, 2, 3), [[0, 1, 2, 3], [2, 3], [1]])
        engine.host.cache.check_valid()
    assert engine.loaded(keys(19 % 7, 1, 2, 3), [[9, 8, 7, 6], [8, 7], [9]])


def test_a_policy_of_whole_prompts_is_refused():
    with pytest.raises(ConfigurationError, match="take 'lru' or 'adaptive'"):
        KeyedEngine(policy="arc")


@pytest.mark.parametrize("options", [{"offload": "eager"}, {"strict": True}, {"store_after": 2}])
def test_options_of_requests_are_refused(options):
    with pytest.raises(ConfigurationError, match="for blocks by keys, which have policy, threads"):
        KeyedEngine(**options)


def test_options_are_one_value():
    with pytest.raises(ConfigurationError, match=r"options must be HostOptions\("):
        KeyedHostCache(KeyedEngine().groups, host_bytes=1 << 20, options={"policy": "lru"})


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ([[0], [1]], "one list for each of 3 groups"),
        ([[0] * 7, [], []], "last of 6 keys; got 7"),
        ([[0, 24], [], []], "has no block 24"),
        ([[0, -1], [], []], "has no block -1"),
        ([[0.5], [], []], "has no block 0.5"),
        ([[3], [], []], "has no block 3"),
    ],
)
def test_blocks_that_cannot_be_meant_are_refused(blocks, words):
    engine = KeyedEngine(null_block=3)
    with pytest.raises(MisuseError, match=words):
        engine.host.put(PROMPT, blocks)


def test_a_block_is_loaded_into_once():
    engine = KeyedEngine()
    with pytest.raises(MisuseError, match="'window' is given twice"):
        engine.host.load(PROMPT, [[0, 1], [2, 2], []])


@pytest.mark.parametrize(
    ("wrong", "words"), [([PROMPT[0]] * 2, "comes twice"), (["text"], "at least 16 bytes"), ([b"short"], "at least 16")]
)
def test_keys_are_digests(wrong, words):
    engine = KeyedEngine(["attention"])
    with pytest.raises(MisuseError, match=words):
        engine.host.lookup(wrong)


@pytest.mark.parametrize("wrong", [None, set(PROMPT), dict.fromkeys(PROMPT), deque(PROMPT), iter(PROMPT)])
def test_keys_are_a_list(wrong):
    engine = KeyedEngine(["attention"])
    for call in (engine.host.lookup, lambda keys: engine.host.put(keys, [[0]])):
        with pytest.raises(MisuseError, match="keys are a list"):
            call(wrong)


@pytest.mark.parametrize("wrong", [None, [0, 1], 7, [None]])
def test_blocks_are_lists(wrong):
    engine = KeyedEngine(["attention"])
    for call in (engine.host.put, engine.host.load):
        with pytest.raises(MisuseError, match="blocks are one list for each of 1 groups"):
            call(PROMPT, wrong)


@pytest.mark.parametrize("before", [-1, 1.5, None, True, "x"])
def test_keys_before_are_counted(before):
    engine = KeyedEngine(["attention", "window"])
    engine.put(PROMPT, [ALL[0], [4, 5]])
    with pytest.raises(MisuseError, match="before is a whole number"):
        engine.host.lookup(PROMPT[3:], before=before)


@pytest.mark.parametrize("layer", [-1, 3, 0.0, None])
def test_layers_exist(layer):
    engine = KeyedEngine()
    engine.put(PROMPT, ALL)
    handle = engine.host.load(PROMPT, ELSEWHERE)
    with pytest.raises(MisuseError, match="layers 0 to 2"):
        handle.hold_compute(layer)


def test_a_lease_is_released_by_its_cache():
    engine, other = KeyedEngine(["attention"]), KeyedEngine(["attention"])
    engine.put(PROMPT, [ALL[0]])
    found = engine.host.lookup(PROMPT)
    for wrong in (found, None):
        with pytest.raises(MisuseError, match="its own lookups"):
            other.host.release(wrong)
    assert engine.host.statistics().leases == 1
    engine.host.release(found)


@pytest.mark.parametrize(
    ("refused", "blocks"),
    [([bytes(20)] * 2, [[0, 1]]), ([bytes(20)], [[99]]), ([bytes(20), bytes([1] * 20)], [[1, 1]])],
    ids=["key twice", "block that does not exist", "block twice"],
)
def test_a_call_that_is_refused_leaves_no_trace(refused, blocks):
    engine = KeyedEngine(["attention"])
    with pytest.raises(MisuseError):
        engine.host.load(refused, blocks)
    engine.put(PROMPT, [ALL[0]])
    assert engine.host.lookup(PROMPT).longest == 6


@pytest.mark.parametrize("odd", [PROMPT[2] + bytes(1), "text"])
def test_keys_of_one_cache_have_one_length(odd):
    engine = KeyedEngine(["attention"])
    engine.host.lookup(PROMPT)
    with pytest.raises(MisuseError, match="digests of one length"):
        engine.host.put([PROMPT[0], odd, PROMPT[1]], [[0, 1, 2]])
    with pytest.raises(MisuseError, match="digests of one length"):
        engine.host.lookup([keys("other")[0] * 2])


def test_a_closed_cache_is_not_used():
    with KeyedEngine(["attention"]).host as host:
        region = weakref.ref(host._arena.blocks.untyped_storage())
        assert region() is not None
    assert region() is None
    with pytest.raises(MisuseError, match="was closed"):
        host.lookup(PROMPT)
    host.close()


def test_a_host_too_small_for_one_key_is_refused():
    with pytest.raises(ConfigurationError, match="at least what one key has"):
        KeyedEngine(host_blocks=1)


def test_prefix_groups_do_not_look_ahead():
    kv = torch.zeros(2, 1, 4, 4, 8)
    layout = [Prefix(keys_and_values(kv, block_dim=2), block_tokens=4, lookahead_tokens=1)]
    with pytest.raises(ConfigurationError, match="leave lookahead_tokens at 0"):
        KeyedHostCache(layout, host_bytes=1 << 20)


# Other kinds


def test_a_local_chunk_is_found_by_its_place_in_the_prompt():
    kv, local = torch.zeros(2, 1, 8, 4, 8), torch.zeros(2, 1, 8, 4, 8)
    layout = [
        Prefix(keys_and_values(kv, block_dim=2), block_tokens=4),
        ChunkLocal(keys_and_values(local, block_dim=2), block_tokens=4, window_tokens=12),
    ]
    host = KeyedHostCache(layout, host_bytes=1 << 20)
    assert host.put(PROMPT, [[0, 1, 2, 3, 4, 5], [4, 5]]).wait()
    assert list(host.lookup(PROMPT).lengths) == [3, 6], "a local chunk begins at keys 0, 3 and 6"
    assert list(host.lookup(PROMPT[4:], before=4).lengths) == [1, 2], "what is before them is the engine's"
    assert list(host.lookup(PROMPT[2:], before=2).lengths) == [1, 4]


def test_a_kind_with_a_hole_is_looked_up_block_by_block():
    kv = torch.zeros(2, 1, 8, 4, 8)
    parts = keys_and_values(kv, block_dim=2)
    group = SinkGroup(name="sink", block_tokens=4, block_bytes=256, window_tokens=5, sink_tokens=4)
    host = KeyedHostCache([KVGroup(group, parts)], host_bytes=1 << 20)
    assert host.put(PROMPT[:1], [[0]]).wait() and host.put(PROMPT, [[4, 5]]).wait()
    assert list(host.lookup(PROMPT).lengths) == [1, 5, 6], "after five keys it sees the fifth and the first"
    assert list(host.lookup(PROMPT[1:], before=1).lengths) == [4, 5]


def test_several_blocks_to_a_key_are_given_in_token_order():
    full, window = torch.zeros(2, 1, 8, 8, 8), torch.zeros(2, 1, 16, 4, 8)
    layout = [
        Prefix(keys_and_values(full, block_dim=2), block_tokens=8),
        Window(keys_and_values(window, block_dim=2), block_tokens=4, window_tokens=12),
    ]
    host = KeyedHostCache(layout, host_bytes=1 << 20)
    assert host.cache.planner.grid_tokens == 8
    for each in (full, window):
        each[:] = torch.arange(each.shape[2]).view(1, 1, -1, 1, 1)
    assert host.put(PROMPT[:3], [[0, 1, 2], [2, 3, 4, 5]]).wait()
    assert list(host.lookup(PROMPT).lengths) == [3]
    assert host.load(PROMPT[:3], [[5, 6, 7], [9, 8, 11, 10]]).wait()
    assert full[0, 0, 5:, 0, 0].tolist() == [0, 1, 2] and window[1, 0, 8:12, 3, 7].tolist() == [3, 2, 5, 4]
    with pytest.raises(MisuseError, match="has 2 blocks for each key"):
        host.put(PROMPT[:3], [[0, 1, 2], [2, 3, 4]])


def test_keys_that_do_not_follow_each_other_are_held_and_loaded_one_by_one():
    """A pin on the last of them would hold those before it in its own prompt alone."""
    engine = KeyedEngine(["attention"])
    engine.put(PROMPT[:2], [[0, 1]])
    engine.put(other := keys("other", "after"), [[2, 3]])
    mixed = [PROMPT[0], other[1]]
    found = engine.host.lookup(mixed)
    assert engine.loaded(mixed, [[8, 9]])
    cache = engine.host.cache
    assert all(node in cache.pool._forest.pins.protected() for node in cache.pool.find_all(mixed))
    engine.host.release(found)
    cache.check_valid()
