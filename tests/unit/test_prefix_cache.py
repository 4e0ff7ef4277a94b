"""CPUPrefixCache, event by event. Any order of events is held by test_prefix_cache_machine.py."""

import pytest

from cpu_prefix_cache import ConfigurationError, Hit, Miss, MisuseError, Pending
from cpu_prefix_cache.deciding import (
    BlockPool,
    CPUPrefixCache,
    Direction,
    HybridChunkPlanner,
    PooledDevice,
    Request,
    Resolved,
)
from cpu_prefix_cache.offload.break_even import NEVER, least_tokens
from cpu_prefix_cache.offload.completion import FAILURES_IN_A_ROW
from cpu_prefix_cache.testing.engine import ATTENTION, GRID, Engine, cache_options, chain
from property_tests.models.engines import QueueSlots


@pytest.fixture
def engine():
    return Engine("eager")


def on_host_only(prompt, **options):
    """An engine whose host has a prompt that its device has not."""
    engine = Engine("eager", **options)
    engine.serves(prompt)
    engine.device_forgets()
    return engine


# lookup


def test_chunks_on_the_device_are_not_looked_up():
    """O8.26, S7.28"""
    engine = on_host_only("abc")
    assert engine.asks("abcd", n0=GRID) == Hit(3 * GRID, start=GRID)
    assert engine.asks("abcd", n0=3 * GRID) == Miss()
    assert engine.asks("abcd", n0=4 * GRID) == Miss()


def test_off_the_grid_a_load_begins_at_the_boundary_before():
    """L5.10, rule 8"""
    engine = on_host_only("abc")
    assert engine.asks("abcd", n0=GRID + 1) == Hit(3 * GRID, start=GRID)
    assert engine.asks("abcd", n0=3 * GRID + 1) == Miss()
    before = engine.cache.statistics().hit_tokens
    engine.cache.admit(Request("r", chain("abc"), 13), GRID + 1, 3 * GRID)
    assert engine.cache.statistics().hit_tokens - before == 2 * GRID - 1  # the device has the other
    destinations = engine.gpu.allocate(2)
    engine.cache.load("r", 3 * GRID, [destinations], 0.0)
    (load,) = engine.cache.step().transfers
    assert list(load.copies[0].device_blocks) == destinations


def test_an_empty_prompt_and_one_shorter_than_a_chunk_are_misses(engine):
    """L5.12"""
    engine.serves("a")
    assert engine.cache.lookup(Request("r", [], 0), 0, 0.0) == Miss()
    assert engine.cache.lookup(Request("r", [], GRID - 1), 0, 0.0) == Miss()


def test_a_second_request_waits_for_the_first_and_then_loads_its_own_copy():
    """S7.26, S7.29, L5.26"""
    engine = on_host_only("abc")
    engine.starts("first", "abc")
    answer = engine.asks("abc")
    assert isinstance(answer, Pending)
    engine.now = answer.deadline
    assert engine.asks("abc") == Hit(3 * GRID)
    assert engine.asks("abc", n0=GRID) == Hit(3 * GRID, start=GRID)
    second = engine.starts("second", "abc")
    assert engine.asks("abc") == Hit(3 * GRID)  # nobody waits for the second as well
    plan = engine.steps()
    assert [transfer.direction for transfer in plan.transfers] == [Direction.LOAD] * 2
    engine.reports([transfer.id for transfer in plan.transfers])
    assert engine.cache.statistics().chunks_loaded == 6 and second == plan.transfers[1].id


def test_where_nobody_waits_for_loads_a_second_request_loads_its_own_copy_at_once():
    engine = on_host_only("abc", waits_for_loads=False)
    engine.starts("first", "abc")
    assert engine.asks("abc") == Hit(3 * GRID)


def test_nobody_waits_for_a_load_that_ended():
    engine = on_host_only("ab")
    engine.starts("first", "ab")
    assert isinstance(engine.asks("ab"), Pending)
    engine.copies()
    assert engine.asks("ab") == Hit(2 * GRID)


# load


def test_a_load_pairs_host_chunks_with_their_destinations():
    engine = on_host_only("abc")
    id = engine.starts("r", "abcd")
    (plan,) = engine.steps().transfers
    host = tuple(engine.cache.pool.find(key) for key in chain("abc"))
    assert plan.id == id and plan.copies[0].host_blocks == host
    assert plan.copies[0].device_blocks == tuple(engine.slots["r"][:3])
    assert engine.reports([id]) == [Resolved(id, Direction.LOAD, "r", True)]


def test_no_copy_is_early_unless_the_device_frees_blocks_after_their_use():
    engine = on_host_only("ab")
    engine.starts("loads", "ab")
    engine.starts("computes", "xy")
    engine.computes("computes")
    assert [(each.direction, each.is_early) for each in engine.steps().transfers] == [
        (Direction.LOAD, False),
        (Direction.STORE, False),
    ]


def test_only_what_the_device_lacks_is_loaded():
    """L5.9"""
    engine = on_host_only("abc")
    engine.starts("short", "a", load=False)
    engine.computes("short")
    engine.starts("r", "abc")
    (plan,) = engine.steps().transfers
    assert plan.copies[0].host_blocks == tuple(engine.cache.pool.find(key) for key in chain("abc")[1:])


def test_a_plan_has_short_loads_before_long_ones_and_what_nobody_waits_for_last():
    engine = on_host_only("abcd")
    engine.serves("xy")
    engine.device_forgets()
    engine.starts("computes", "fg")
    long, short = engine.starts("long", "abcd"), engine.starts("short", "xy")
    engine.computes("computes")
    *loads, store = engine.steps().transfers
    assert store.direction is Direction.STORE and [each.id for each in loads] == [short, long]


def test_loads_that_a_step_waits_for_come_before_shorter_ones_that_requests_wait_for():
    engine = on_host_only("abcd")
    engine.serves("xy")
    engine.device_forgets()
    awaited, shorter = engine.starts("goes on", "abcd"), engine.starts("waits", "xy")
    engine.cache.goes_on("goes on")
    assert [each.id for each in engine.steps().transfers] == [awaited, shorter]


def test_bad_destinations_are_refused_before_anything_is_pinned():
    """S7.19, L5.32, rule 7"""
    engine = on_host_only("abc")
    engine.starts("r", "abc", load=False)
    slots = engine.slots["r"]
    for bad in ([], [slots[:2]], [[*slots, 9]], [slots[:2] + slots[:1]], [slots, slots]):
        with pytest.raises(MisuseError, match="destination"):
            engine.cache.load("r", 3 * GRID, bad, 0.0)
    assert engine.cache.statistics().pool.pinned == 0
    engine.cache.load("r", 3 * GRID, [slots], 0.0)


def interrupt(*_):
    raise KeyboardInterrupt


def test_a_load_that_is_interrupted_pins_nothing(monkeypatch):
    engine = on_host_only("abc")
    engine.starts("r", "abc", load=False)
    monkeypatch.setattr(engine.cache.edge.offload, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.cache.load("r", 3 * GRID, [engine.slots["r"]], 0.0)
    assert engine.cache.statistics().pool.pinned == 0
    monkeypatch.undo()
    engine.cache.load("r", 3 * GRID, [engine.slots["r"]], 0.0)
    assert engine.cache.statistics().pool.pinned == 1


def test_a_store_that_is_interrupted_pins_nothing(engine, monkeypatch):
    """It hangs below a chunk that is on the host, which would never leave."""
    engine.serves("a")
    engine.starts("r", "ab")
    engine.computes("r")
    monkeypatch.setattr(engine.cache.pool, "take", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.cache.step()
    assert engine.cache.statistics().pool.pinned == 0


def test_the_null_block_is_no_destination():
    """S7.4, O8.24"""
    device = QueueSlots(4)
    cache = CPUPrefixCache(
        HybridChunkPlanner([ATTENTION], max_model_len=100), device, host_blocks=4, **cache_options(offload="eager")
    )
    cache.pool.commit(cache.pool.allocate(2), chain("ab"), cache.pool.root, cache.pool.touch(None))
    cache.admit(Request("r", chain("ab"), 9), 0, 2 * GRID)
    with pytest.raises(MisuseError, match="null"):
        cache.load("r", 2 * GRID, [[1, 0]], 0.0)
    assert cache.load("r", 2 * GRID, [[1, 2]], 0.0) == 0


def test_a_load_is_refused_when_it_makes_no_sense():
    engine = on_host_only("abc")
    engine.starts("r", "abc", load=False)
    slots = engine.slots["r"]
    for boundary in (0, GRID + 1, 4 * GRID):
        with pytest.raises(MisuseError, match="rule 6"):
            engine.cache.load("r", boundary, [slots], 0.0)
    with pytest.raises(MisuseError, match="not admitted"):
        engine.cache.load("stranger", GRID, [slots[:1]], 0.0)
    engine.cache.load("r", GRID, [slots[:1]], 0.0)
    with pytest.raises(MisuseError, match="loading already"):
        engine.cache.load("r", GRID, [slots[:1]], 0.0)


def test_a_load_whose_source_is_gone_fails_like_any_other():
    """S7.2, rule 7: no plan has a missing source, and the failure comes back from the ranks."""
    engine = on_host_only("abc")
    request = Request("r", chain("abc"), 13)
    assert engine.cache.lookup(request, 0, 0.0) == Hit(3 * GRID)
    engine.cache.pool.withdraw(engine.cache.pool.find(b"abc"))
    blocks = engine.gpu.allocate(3)
    engine.cache.admit(request, 0, 3 * GRID)
    id = engine.cache.load("r", 3 * GRID, [blocks], 0.0)
    (plan,) = engine.steps().transfers
    assert plan.failed and plan.copies == () and plan.num_bytes == 0
    assert engine.reports(failed=[id]) == [Resolved(id, Direction.LOAD, "r", False)]
    assert engine.host == {"a", "ab"}  # what is still there is as good as before


def test_sources_that_are_gone_are_no_copies_that_fail():
    """However many in a row: the cache goes on."""
    engine = on_host_only("abc")
    for number in range(FAILURES_IN_A_ROW):
        prompt = f"{number}bc"
        engine.serves(prompt)
        engine.cache.pool.withdraw(engine.cache.pool.find(prompt.encode()))
        engine.cache.admit(Request("r", chain(prompt), 13), 0, 3 * GRID)
        blocks = engine.gpu.allocate(3)
        id = engine.cache.load("r", 3 * GRID, [blocks], 0.0)
        assert [transfer.failed for transfer in engine.steps().transfers] == [True]
        engine.reports(failed=[id])
        engine.gpu.abort(blocks)
        engine.cache.finished("r", 0)
    assert not engine.cache.is_off and engine.asks("abc") == Hit(3 * GRID)


def test_the_source_of_a_load_stays_until_the_copy_has_ended():
    """S7.2"""
    engine = on_host_only("abc", host=3)
    id = engine.starts("r", "abc")
    engine.steps()
    engine.starts("other", "xyz")
    engine.computes("other")
    assert engine.steps().transfers == ()  # no room: all of the host is being read
    assert engine.host == {"a", "ab", "abc"}
    engine.reports([id])
    engine.ends("other")
    engine.copies()
    assert engine.host == {"x", "xy", "xyz"}


def test_the_destinations_of_a_load_are_held_until_the_copy_has_ended():
    """S7.13, L5.24: an aborted request does not free what is still written to."""
    engine = on_host_only("abc")
    id = engine.starts("r", "abc")
    slots = engine.slots["r"]
    engine.steps()
    engine.ends("r", 3)
    assert all(engine.gpu.is_pinned(slot) for slot in slots)
    engine.reports([id])
    assert not any(engine.gpu.is_pinned(slot) for slot in slots) and engine.is_at_rest()


def test_a_failed_load_is_withdrawn_so_that_nothing_loops():
    """S7.24, O8.35, L5.20"""
    engine = on_host_only("abc")
    engine.serves("x")
    id = engine.starts("r", "abc")
    engine.steps()
    assert engine.reports(failed=[id]) == [Resolved(id, Direction.LOAD, "r", False)]
    assert engine.asks("abc") == Miss() and engine.host == {"x"}
    engine.computes("r")
    engine.copies()
    assert engine.asks("abc") == Hit(3 * GRID)  # recomputed, and stored again (L5.14)


def test_a_late_load_is_over_for_everybody_but_its_blocks():
    """S7.24, rule 10: requests that waited get an answer; the copy may still write, so its destinations stay held."""
    engine = on_host_only("abc")
    engine.serves("x")
    id = engine.starts("r", "abc")
    slots = list(engine.slots["r"])
    engine.steps()
    assert engine.reports(late=[id]) == [] == engine.reports(late=[id])
    assert engine.asks("abc") == Miss() and engine.host - {"abc", "ab", "a"} == {"x"}
    engine.preempts("r")
    assert all(engine.gpu.is_pinned(slot) for slot in slots)
    assert engine.reports(failed=[id]) == [Resolved(id, Direction.LOAD, "r", False)]
    assert not any(engine.gpu.is_pinned(slot) for slot in slots) and engine.is_at_rest()


def test_a_late_load_that_ends_well_is_late_all_the_same():
    engine = on_host_only("abc")
    id = engine.starts("r", "abc")
    engine.steps()
    assert engine.reports(late=[id]) == []
    assert engine.reports(done=[id]) == [Resolved(id, Direction.LOAD, "r", False)]
    assert engine.asks("abc") == Miss()


def test_nobody_waits_beyond_its_deadline_for_a_load_whose_source_was_withdrawn():
    """Another load had read the chunk above it, and failed. Where loads exchange nothing, what is gone is computed."""
    engine = on_host_only("abc")
    above = engine.starts("one", "a")
    engine.cache.admit(Request("two", chain("abc"), 3 * GRID + 1), GRID, 3 * GRID)
    engine.cache.load("two", 3 * GRID, [engine.gpu.allocate(2)], engine.now)
    engine.steps()
    engine.reports(late=[above])
    answer = engine.asks("abcd", n0=GRID)
    assert isinstance(answer, Pending) and not engine.host
    engine.now = answer.deadline
    assert engine.asks("abcd", n0=GRID) == Miss()


def test_five_copies_that_fail_one_after_another_turn_the_cache_off(engine, caplog):  # S7.45
    engine.serves("abc")
    for number in range(5):  # as docs/design.md has it
        assert engine.asks("abc") == Hit(3 * GRID)
        prompt = str(number)
        engine.starts(prompt, prompt)
        engine.computes(prompt)
        engine.reports(failed=[transfer.id for transfer in engine.steps().transfers])
        engine.leaves(prompt)
    assert engine.cache.is_off and "the host cache is off from now on" in caplog.text
    assert engine.asks("abc") == Miss()
    engine.serves("xyz")  # goes on
    assert engine.host == set()


def test_a_copy_that_works_in_between_is_bad_luck_forgotten(engine):
    for number in range(3 * FAILURES_IN_A_ROW):
        prompt = str(number)
        engine.starts(prompt, prompt)
        engine.computes(prompt)
        ids = [transfer.id for transfer in engine.steps().transfers]
        engine.reports(**{"done" if number % 3 == 0 else "failed": ids})
        engine.ends(prompt)
        engine.copies()
    assert not engine.cache.is_off


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_a_request_may_want_nothing_stored_for_its_sake(mode):
    engine = Engine(mode, device=4)
    request = Request("quiet", chain("abc"), 13, stores=False)
    engine.starts("quiet", "abc")
    engine.cache.finished("quiet", 0)
    engine.cache.admit(request, 0)
    engine.computes("quiet")
    engine.ends("quiet")
    for prompt in ("wxyz", "stuv"):
        engine.serves(prompt)
    assert not engine.host & {"a", "ab", "abc"}


def test_short_hits_are_misses_where_a_least_length_is_configured():
    engine = on_host_only("abc", min_load_tokens=2 * GRID)
    assert engine.asks("abc") == Hit(3 * GRID) and engine.asks("ab") == Hit(2 * GRID)
    assert engine.asks("a") == engine.asks("abc", n0=2 * GRID) == Miss()


def test_from_where_on_a_load_is_worth_it_follows_from_two_rates():
    engine = on_host_only("abc", min_load_tokens=None, ranks=1)
    assert engine.cache.min_load_tokens == 0
    engine.reports(load_bytes_per_second=1e9)
    assert engine.cache.min_load_tokens == 0  # nobody knows how fast it computes
    engine.cache.prefilled(100, 1.0)  # a step of few tokens measures nothing
    engine.cache.prefilled(10_000, 0.0)  # nor does a clock that stood still
    assert engine.cache.min_load_tokens == 0
    for _ in range(2):
        engine.cache.prefilled(10_000, 1.0)
    assert engine.cache.min_load_tokens == least_tokens(25, 1e9, 10_000)
    assert engine.asks("abc") == Miss()


def test_a_step_that_was_timed_wrongly_turns_no_hit_into_a_miss(caplog):
    """One of them seemed to compute everything sooner than any link, for ever, without a message."""
    engine = on_host_only("abc", min_load_tokens=None, ranks=1)
    engine.reports(load_bytes_per_second=1e9)
    for tokens in (1_000_000_000, 10_000, 10_000):
        engine.cache.prefilled(tokens, 1.0)
    assert engine.cache.min_load_tokens == least_tokens(25, 1e9, 10_000) and not caplog.records
    for _ in range(2):
        engine.cache.prefilled(1_000_000_000, 1.0)  # this device really computes faster than the link brings it
    assert engine.cache.min_load_tokens == NEVER
    for _ in range(40):
        engine.cache.prefilled(10_000, 1.0)  # and no more
    assert engine.cache.min_load_tokens == least_tokens(25, 1e9, 10_000)
    (warning,) = caplog.messages
    assert "nothing is loaded from the host" in warning and "min_load_tokens=0" in warning


def test_others_wait_for_a_load_as_long_as_the_slowest_rank_takes():
    """S7.25: by what ranks report, where any of them does."""
    engine = on_host_only("abc", ranks=1)
    engine.starts("first", "abc", load=True)
    usual = engine.asks("abc").deadline
    slow = on_host_only("abc", ranks=1)
    slow.reports(load_bytes_per_second=100.0)
    slow.starts("first", "abc", load=True)
    assert slow.asks("abc").deadline == pytest.approx(usual + 2 * 3 * 100 / 100.0)


def test_others_wait_for_a_load_behind_those_that_share_the_link_with_it():
    engine = on_host_only("abc", ranks=1)
    engine.serves("wx")
    engine.device_forgets()
    engine.reports(load_bytes_per_second=100.0)
    engine.starts("first", "abc", load=True)
    alone = engine.asks("abc").deadline
    engine.starts("second", "wx", load=True)
    assert engine.asks("wx").deadline == pytest.approx(alone + 2 * 2 * 100 / 100.0)


def test_the_slowest_link_of_all_ranks_decides_whether_a_load_is_worth_it():
    engine = on_host_only("abc", min_load_tokens=None, ranks=2)
    for _ in range(2):
        engine.cache.prefilled(10_000, 1.0)
    engine.reports(load_bytes_per_second=2e9)
    assert engine.cache.min_load_tokens == 0  # nobody knows of the other
    engine.reports(load_bytes_per_second=5e5, rank=1)
    assert engine.cache.min_load_tokens == least_tokens(25, 5e5, 10_000) > least_tokens(25, 2e9, 10_000)


@pytest.mark.parametrize("what", ["nothing", "a block is bad"])
def test_a_load_saves_no_block_that_was_declared_bad_after_its_hit_was_found(what):  # rule 13
    """ "abcd" is on the host alone, and "wxyz", which its load overwrites, on the device alone but for its end."""
    engine = Engine("lazy", device=8, host=7, hands_out_first=True)
    for prompt in ("abcd", "wxyz", "stuv"):
        engine.serves(prompt)
    bad = engine.gpu.find(b"wxy")
    request = engine.requests["r"] = Request("r", chain("abcd"), 4 * GRID + 1)
    assert engine.cache.lookup(request, 0, engine.now) == Hit(4 * GRID)
    if what == "a block is bad":
        engine.gpu.withdraw(bad)
        engine.cache.invalidated([bad])
    slots = engine.slots["r"] = engine.gpu.allocate(4)
    assert bad in slots
    engine.cache.admit(request, 0, 4 * GRID, engine.now)
    engine.cache.load("r", 4 * GRID, [slots], engine.now)
    plan = engine.steps()
    stores = [each for each in plan.transfers if each.direction is Direction.STORE]
    assert (bad in {block for each in stores for block in each.copies[0].device_blocks}) == (what == "nothing")


def test_a_store_below_a_withdrawn_prefix_meets_no_second_store():
    """The load of "ab" fails while "abc" is being stored: "abc" is stored anew, with its parents, and only once."""
    engine = on_host_only("ab")
    first = engine.starts("first", "ab")
    engine.steps()
    engine.now = 1.0
    second = engine.starts("second", "abc")
    engine.steps()
    engine.reports([second])
    engine.computes("second")
    (below,) = engine.steps().transfers
    engine.reports(failed=[first])
    engine.ends("second")
    (anew,) = engine.steps().transfers
    engine.reports([anew.id])
    engine.reports([below.id])
    assert engine.host == {"a", "ab", "abc"}
    engine.ends("first", 0)
    assert engine.is_at_rest()


def test_while_a_request_loads_nothing_of_it_counts_as_computed():
    """S7.13: an engine counts loaded tokens before they are there."""
    engine = on_host_only("ab")
    id = engine.starts("r", "abc")
    engine.steps()
    engine.fills("r", 3)  # the engine has written down the keys already
    engine.cache.computed("r", 3 * GRID)
    engine.cache.finished("r", 3 * GRID)
    assert engine.steps().transfers == ()
    engine.reports(failed=[id])
    engine.leaves("r")
    assert engine.copies() == [] and engine.host == set()


def test_a_request_that_comes_back_while_its_old_load_moves_is_a_new_one():
    """S7.16, O8.22, L5.15"""
    engine = on_host_only("ab")
    old = engine.starts("r", "ab")
    engine.steps()
    engine.preempts("r")
    engine.now = 1.0
    new = engine.starts("r", "ab")
    engine.steps()
    engine.reports([old])
    with pytest.raises(MisuseError, match="loading already"):
        engine.cache.load("r", 2 * GRID, [engine.slots["r"]], 0.0)
    engine.reports([new])
    engine.computes("r")
    engine.ends("r")
    engine.copies()
    assert engine.is_at_rest()


# admission and computing


def test_admitting_twice_changes_nothing(engine):
    """S7.20"""
    engine.starts("r", "ab")
    engine.computes("r")
    engine.cache.admit(engine.requests["r"], 0)
    assert engine.cache.statistics().running == 1
    assert engine.copies() == ["ab"]


def test_a_request_is_one_use_at_admission_whatever_lands_later():
    """Rule 3: nothing is ranked anew at completion or finish."""
    engine = Engine("eager", host=4)
    engine.starts("early", "ab")
    engine.starts("late", "xy")
    engine.computes("late")
    engine.copies()
    engine.computes("early")
    engine.copies()
    engine.ends("late")
    engine.ends("early")
    engine.serves("k")
    assert engine.host == {"a", "x", "xy", "k"}


def test_a_load_is_no_second_use():
    engine = on_host_only("ab", host=4)
    engine.starts("loads", "ab")
    engine.serves("xy")
    engine.copies()
    engine.ends("loads", 0)
    engine.serves("k")
    assert engine.host == {"a", "x", "xy", "k"}


def test_strangers_are_ignored(engine):
    engine.cache.computed("stranger", 100)
    engine.cache.preempted("stranger")
    engine.cache.finished("stranger", 100)
    assert engine.steps().transfers == () and engine.is_at_rest()


def test_a_decoding_request_is_due_when_it_can_cross_a_boundary(engine):
    engine.starts("r", "ab")
    engine.computes("r", 2)  # 8 of 9 tokens: still in prefill
    engine.steps()
    assert engine.cache.due() == ["r"]
    engine.cache.computed("r", 9)
    due = []
    for tokens in range(10, 18):
        engine.steps()
        due.append(engine.cache.due())
        for id in engine.cache.due():
            engine.cache.computed(id, tokens)
    assert due == [[], [], ["r"], [], [], [], ["r"], []]


def test_a_request_that_was_passed_over_stays_due(engine):
    """A step ended in which the engine reported nothing of it: it was loading, or not scheduled."""
    engine.starts("r", "ab")
    for _ in range(3):
        engine.steps()
        assert engine.cache.due() == ["r"]
    engine.computes("r", 2)
    engine.cache.computed("r", 9)
    engine.steps()
    assert engine.cache.due() == []
    engine.ends("r")
    engine.starts("s", "cd")
    engine.cache.reset()
    for due in (["s"], [], []):  # of one from before a reset nothing is stored
        engine.steps()
        assert engine.cache.due() == due


@pytest.fixture(params=["eager", "lazy"])
def decoding(request):
    """A request that has computed the two chunks of its prompt, and goes on with two more of its answer."""
    engine = Engine(request.param, host=32, asks_in_decode=False)
    engine.starts("x", "xbcd", extra=1 - 2 * GRID)
    engine.steps()
    engine.computes("x", 2)
    engine.cache.computed("x", 2 * GRID + 1)
    return engine


def test_decoding_requests_may_be_examined_at_their_end_only(decoding):
    for _ in range(100):
        decoding.steps()
        assert not decoding.cache.due()


def test_unexamined_chunks_of_a_decoding_request_are_stored_when_it_is_preempted(decoding):  # S7.16
    decoding.fills("x")
    decoding.cache.preempted("x", 4 * GRID - 1)
    decoding.leaves("x")
    decoding.copies()
    assert decoding.host == {"x", "xb", "xbc"}


def test_how_much_a_request_in_prefill_has_computed_nobody_guesses():
    """An engine knows how many tokens a preempted request had, and not how many of them it had computed."""
    engine = Engine("eager")
    engine.starts("x", "xbcd")
    engine.computes("x", 1)
    engine.fills("x")
    engine.cache.preempted("x", 4 * GRID)
    engine.leaves("x")
    engine.copies()
    assert engine.host == {"x"}


def test_unexamined_chunks_of_a_decoding_request_are_stored_after_it_ends(decoding):
    decoding.fills("x")
    decoding.ends("x")
    for prompt in "klmnopqrstuvwyz":
        decoding.serves(prompt)
    assert decoding.host >= {"x", "xb", "xbc", "xbcd"}


def test_a_request_that_comes_back_at_once_is_due_once(engine):
    """S7.16: preempted and resumed in the same step."""
    engine.starts("r", "ab")
    engine.preempts("r")
    engine.starts("r", "ab")
    engine.steps()
    assert engine.cache.due() == ["r"]


def test_a_load_without_a_source_that_is_late_too_withdraws_nothing_else():
    """It has read nothing, so nothing that is here is at fault."""
    engine = on_host_only("abc")
    request = Request("r", chain("abc"), 3 * GRID + 1)
    engine.cache.admit(request, 0, 3 * GRID)
    engine.cache.pool.withdraw(engine.cache.pool.find(b"abc"))
    load = engine.cache.load("r", 3 * GRID, [engine.gpu.allocate(3)], 0.0)
    assert engine.steps().transfers[0].failed
    engine.reports(late={load})
    engine.reports(failed=[load])
    assert engine.host == {"a", "ab"}


def test_a_second_load_that_fails_withdraws_only_what_it_has_read():
    """The first one's failure withdrew the prefix, and another request stored it anew meanwhile."""
    engine = on_host_only("ab")
    first, second = engine.starts("first", "ab"), None
    engine.now += 10.0  # longer than others wait for a load
    second = engine.starts("second", "ab")
    engine.steps()
    engine.reports(failed=[first])
    assert not engine.host
    engine.serves("ab")
    assert engine.host == {"a", "ab"}
    engine.reports(failed=[second])
    assert engine.host == {"a", "ab"}


def test_a_request_that_goes_on_before_its_load_ends_stores_its_chunks():
    engine = on_host_only("ab")
    load = engine.starts("r", "abc")
    engine.steps()
    engine.cache.goes_on("r")
    engine.cache.goes_on("stranger")
    engine.computes("r", 3)
    stores = engine.steps().transfers
    assert [engine.transfer(store.id).keys for store in stores] == [[b"abc"]]
    engine.ends("r")
    engine.reports({store.id for store in stores})
    assert engine.cache.statistics().loading == 1 and engine.host == {"a", "ab", "abc"}
    engine.reports({load})
    assert engine.is_at_rest()


# stores and how they land


def test_a_store_that_lands_before_its_parents_waits_for_it(engine):
    """Rule 3, L5.49"""
    engine.starts("r", "abc")
    ids = engine.stores_chunk_by_chunk("r", 3)
    engine.reports([ids[2]])
    engine.reports([ids[1]])
    assert engine.host == set()
    engine.reports([ids[0]])
    assert engine.host == {"a", "ab", "abc"}
    engine.ends("r")
    assert engine.is_at_rest()


def test_one_report_may_bring_a_whole_chain(engine):
    engine.starts("r", "abc")
    ids = engine.stores_chunk_by_chunk("r", 3)
    assert [each.id for each in engine.reports(ids)] == ids
    assert engine.host == {"a", "ab", "abc"}


@pytest.mark.parametrize("landed", [True, False])
def test_stores_that_follow_a_failed_store_fail_with_it(engine, landed):
    engine.starts("r", "ab")
    ids = engine.stores_chunk_by_chunk("r", 2)
    if landed:
        engine.reports([ids[1]])
    engine.reports(failed=[ids[0]])
    engine.reports([ids[1]])
    assert engine.host == set() and engine.cache.statistics().pool.free == 16
    engine.ends("r")
    assert engine.copies() == ["ab"]  # and the end of the request tries again
    assert engine.is_at_rest()


def test_the_keys_of_a_store_are_those_of_its_planning(engine):
    """S7.10, rule 13: the engine's list may change while the bytes move."""
    keys = chain("ab")
    engine.starts("r", "ab")
    engine.requests["r"] = Request("r", keys, 9)
    engine.cache.finished("r", 0)
    engine.cache.admit(engine.requests["r"], 0)
    engine.computes("r")
    (plan,) = engine.steps().transfers
    keys[1] = b"other"
    engine.reports([plan.id])
    assert engine.host == {"a", "ab"}


def test_two_ranks_must_both_have_copied():
    """S7.7, O8.25, L5.27"""
    engine = Engine("eager", ranks=2)
    engine.starts("r", "ab")
    engine.computes("r")
    (plan,) = engine.steps().transfers
    assert engine.reports([plan.id], rank=1) == engine.reports([plan.id], rank=1) == []
    assert engine.host == set()
    assert engine.reports([plan.id], rank=0) == [Resolved(plan.id, Direction.STORE, None, True)]
    assert engine.host == {"a", "ab"}
    assert engine.reports([plan.id], rank=0) == []
    with pytest.raises(MisuseError, match="rank 2"):
        engine.reports([], rank=2)


def test_one_rank_that_fails_fails_the_load_for_all():
    """L5.30"""
    engine = on_host_only("ab", ranks=2)
    id = engine.starts("r", "ab")
    engine.steps()
    engine.reports([id], rank=0)
    assert engine.reports(failed=[id], rank=1) == [Resolved(id, Direction.LOAD, "r", False)]
    assert engine.host == set()


def test_a_store_that_read_a_bad_block_registers_nothing(engine):
    """Rule 13: nor does what hangs below it. What is stored afterwards, does."""
    engine.starts("r", "ab")
    ids = engine.stores_chunk_by_chunk("r", 2)
    engine.cache.invalidated([engine.slots["r"][0]])
    engine.starts("x", "x")
    engine.computes("x")
    ids += [transfer.id for transfer in engine.steps().transfers]
    engine.reports(ids)
    assert engine.host == {"x"}


@pytest.mark.parametrize("bad", [0, 1])
def test_a_store_of_what_was_computed_over_a_bad_block_registers_nothing(engine, bad):
    """The host has the first chunk already, so the store reads only what comes behind it. Control: no bad block."""
    engine.serves("a")
    engine.starts("r", "abc")
    engine.computes("r")
    (plan,) = engine.steps().transfers
    assert engine.slots["r"][0] not in plan.copies[0].device_blocks
    engine.cache.invalidated(engine.slots["r"][:bad])
    engine.reports([plan.id])
    assert engine.host == ({"a"} if bad else {"a", "ab", "abc"})


# reset


def test_after_a_reset_nothing_old_is_found_and_nothing_in_flight_registers():
    """S7.40, O8.25"""
    engine = on_host_only("ab")
    load = engine.starts("loads", "ab")
    engine.starts("stores", "xy")
    engine.computes("stores")
    (_, store) = engine.steps().transfers
    engine.cache.reset()
    assert engine.host == set() and engine.cache.epoch == 1 and engine.asks("ab") == Miss()
    plan = engine.steps()
    assert plan.cancelled == (load,) and plan.epoch == 1
    assert engine.steps().cancelled == ()
    assert engine.reports([load, store.id]) == [
        Resolved(load, Direction.LOAD, "loads", False),
        Resolved(store.id, Direction.STORE, None, False),
    ]
    assert engine.host == set()
    engine.ends("loads", 0)
    engine.ends("stores", 0)
    assert engine.is_at_rest()


def test_a_load_that_was_not_sent_yet_is_sent_and_cancelled():
    """S7.41: so that it comes back from the ranks like any other."""
    engine = on_host_only("ab")
    load = engine.starts("r", "ab")
    engine.cache.reset()
    plan = engine.steps()
    assert [transfer.id for transfer in plan.transfers] == list(plan.cancelled) == [load]
    assert engine.reports(failed=[load])[0].ok is False


def test_a_cancelled_load_takes_nothing_of_the_new_epoch_with_it():
    engine = on_host_only("ab")
    load = engine.starts("r", "ab")
    engine.steps()
    engine.cache.reset()
    engine.gpu.reset()
    engine.serves("ab")
    assert engine.host == {"a", "ab"}
    engine.reports(failed=[load])
    assert engine.host == {"a", "ab"}


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_requests_from_before_a_reset_store_no_more(mode):
    """S7.17 departs from this on purpose: what such a request computes continues from KV of the old epoch."""
    engine = Engine(mode, device=4, max_tokens=2 * GRID)
    engine.starts("old", "abc")
    engine.computes("old", 1)
    engine.cache.reset()
    engine.computes("old", 2)
    engine.steps()
    engine.cache.due()
    engine.computes("old", 3)
    engine.ends("old", 3)
    assert engine.copies() == engine.copies() == [] and engine.host == set()

    engine.starts("preempted", "xy")
    engine.computes("preempted")
    engine.cache.reset()
    engine.preempts("preempted")
    assert engine.copies() == [] and engine.is_at_rest()


def test_a_reset_of_a_reset_does_no_harm(engine):
    engine.serves("ab")
    engine.cache.reset()
    engine.cache.reset()
    engine.gpu.reset()
    assert engine.cache.epoch == 2
    engine.serves("ab")
    assert engine.host == {"a", "ab"}


# leases, size, configuration


@pytest.mark.parametrize("boundary", [-GRID, GRID + 1, 3 * GRID])
def test_only_a_boundary_of_the_request_is_reserved(boundary):
    engine = on_host_only("abc")
    with pytest.raises(MisuseError, match="rule 6"):
        engine.cache.reserve(Request("r", chain("ab"), 100), boundary)


def test_a_reserved_prefix_stays_until_it_is_released_exactly_once():
    """L5.25, L5.39"""
    engine = on_host_only("ab", host=2)
    lease = engine.reserves("ab")
    engine.serves("xy")
    assert engine.host == {"a", "ab"}
    engine.cache.release(lease)
    with pytest.raises(MisuseError, match="released before"):
        engine.cache.release(lease)
    engine.serves("xy")
    engine.serves("xyz")
    assert "ab" not in engine.host


def test_incomplete_prefixes_cannot_be_reserved():
    engine = on_host_only("ab")
    assert engine.reserves("abc") is None and engine.reserves("") is None


def test_the_host_is_used_as_far_as_every_rank_has_prepared_it():
    """S7.46"""
    engine = Engine("eager", host=8, ranks=2, ready_blocks=0)
    engine.serves("ab")
    assert engine.host == set()
    engine.reports(ready_blocks=8)
    assert engine.cache.statistics().pool.ready == 0
    engine.reports(ready_blocks=1, rank=1)
    assert engine.cache.statistics().pool.ready == 1
    engine.serves("ab")
    assert engine.host == {"a"}
    engine.reports(ready_blocks=99, rank=1)
    assert engine.cache.statistics().pool.ready == 8


@pytest.mark.parametrize("ending", ["ends", "preempts"])
def test_chunks_left_behind_by_a_request_are_stored_as_the_host_becomes_ready(ending: str):
    """Ranks report after their step, so after an idle time the first prompt meets a host as it was long ago."""
    engine = Engine("eager", host=8, ready_blocks=1)
    engine.starts("r", "abc")
    engine.computes("r")
    getattr(engine, ending)("r")
    assert engine.copies() == ["a"] and engine.copies() == []
    engine.reports(ready_blocks=2)
    assert engine.copies() == [], "two are missing"
    engine.reports(ready_blocks=3)
    assert engine.cache.has_transfers, "the engine may have nothing else to step for"
    assert engine.copies() == ["abc"] and engine.copies() == []
    assert engine.is_at_rest()


def test_nothing_is_evicted_for_what_is_tried_again_before_the_host_is_whole():
    engine = Engine("eager", host=9, ready_blocks=2)
    engine.serves("abc")
    engine.serves("xyz")
    assert engine.host == {"x", "xy"}, "of each there was room for two"
    for ready, host in ((4, {"x", "xy"}), (5, {"x", "xy", "a", "ab", "abc"})):
        engine.reports(ready_blocks=ready)
        engine.copies()
        assert engine.host == host
    engine.reports(ready_blocks=9)
    engine.copies()
    assert engine.host == {"x", "xy", "xyz", "a", "ab", "abc"}


def test_no_more_waits_for_room_than_the_device_can_have():
    """A rank that cannot prepare all of its region never makes the host whole."""
    for mode in ("eager", "lazy"):
        engine = Engine(mode, device=8, host=8, ready_blocks=0)
        for number in range(50):
            id = f"{number:02}"
            engine.starts(id, "".join(chr(0x4E00 + 3 * number + at) for at in range(3)))
            engine.computes(id)
            engine.preempts(id)
            engine.copies()
        assert 0 < len(engine.cache.edge.offload._left) <= 8 // 3


class NotGoneOver(dict):
    def values(self):
        raise AssertionError("all that wait for room were looked at")


def test_a_request_that_is_left_costs_no_look_at_the_others_that_are():  # rule 16
    engine = Engine("eager", device=8, host=8, ready_blocks=0)
    offload = engine.cache.edge.offload
    offload._left = NotGoneOver()
    for prompt in ("abc", "xyz", "pqr", "abc"):
        engine.serves(prompt)
    assert [*offload._left] == ["pqr", "abc"] and offload._left_chunks == 6


def test_nothing_is_tried_again_while_the_host_does_not_grow(monkeypatch):
    engine, tried = Engine("eager", host=9, ready_blocks=2), list[str]()
    for prompt in ("abc", "xyz", "pqrs"):
        engine.serves(prompt)
    store = engine.cache.edge.offload._store_ended

    def again(running):
        tried.append(running.keys[-1].decode())
        store(running)

    monkeypatch.setattr(engine.cache.edge.offload, "_store_ended", again)
    for ready, now in ((2, ""), (4, ""), (5, "abc"), (5, ""), (8, "xyz"), (9, "pqrs"), (9, "")):
        before = len(tried)
        engine.reports(ready_blocks=ready)
        engine.copies()
        assert "".join(tried[before:]) == now, f"{ready} blocks are ready"


def test_evicted_or_reset_chunks_are_not_stored_as_the_host_becomes_ready():
    for forgets in ("device_forgets", "resets"):
        engine = Engine("eager", host=8, ready_blocks=0)
        engine.serves("abc")
        engine.device_forgets() if forgets == "device_forgets" else engine.cache.reset()
        engine.reports(ready_blocks=8)
        assert engine.copies() == [] and engine.host == set()


def test_lazy_looks_again_as_the_host_becomes_ready():
    engine = Engine("lazy", device=6, host=8, ready_blocks=0, ahead_blocks=2)
    engine.serves("abcd")
    engine.serves("xy")  # from here on "abcd" leaves next
    assert engine.copies() == []
    engine.reports(ready_blocks=8)
    assert engine.copies() == ["abcd"] and engine.copies() == []


def test_lazy_too_stores_what_was_preempted_as_the_host_becomes_ready():
    engine = Engine("lazy", device=6, host=8, ready_blocks=0, ahead_blocks=2)
    engine.starts("r", "abcd")
    engine.computes("r")
    engine.preempts("r")  # and two empty blocks leave before its own
    assert engine.copies() == []
    engine.reports(ready_blocks=8)
    assert engine.copies() == ["abcd"] and engine.copies() == []


def test_settled_transfers_need_not_be_reported_again():
    engine = Engine("eager", ranks=2)
    engine.starts("r", "ab")
    engine.computes("r", 1)
    (first,) = engine.steps().transfers
    engine.reports([first.id], rank=0)
    assert engine.steps().resolved_below == first.id
    engine.reports([first.id], rank=1)
    assert engine.steps().resolved_below == first.id + 1


def test_a_device_of_several_groups_has_destinations_group_by_group():
    """O8.19: chunk by chunk on the host, group by group in the plan."""
    from cpu_prefix_cache.deciding import KVCacheCoordinator, PrefixGroup

    draft = PrefixGroup(name="draft", block_tokens=2, block_bytes=300_000)
    target = PrefixGroup(name="target", block_tokens=4, block_bytes=1_200_000)
    planner = HybridChunkPlanner([draft, target], max_model_len=100)
    pool = BlockPool(2 * planner.host_blocks_per_chunk, blocks_per_chunk=planner.host_blocks_per_chunk)
    chunks = pool.allocate(2)
    copies = KVCacheCoordinator(planner, pool).chunk_copies(chunks, [[10, 11, 12, 13], [20, 21]])
    assert [copy.device_blocks for copy in copies] == [(10, 11, 12, 13), (20, 21)]
    hosts = [[pool.blocks_of([chunk]) for chunk in chunks], [piece.host_blocks for piece in planner.pieces]]
    assert copies[0].host_blocks == tuple(b for chunk in hosts[0] for b in chunk[: hosts[1][0]])
    assert copies[1].host_blocks == tuple(b for chunk in hosts[0] for b in chunk[hosts[1][0] :])


@pytest.mark.parametrize(
    "wrong",
    [
        {"offload": "never"},
        {"ranks": 0},
        {"max_tokens": 0},
        {"decode_tokens": 0},
        {"policy": "mru"},
        {"ahead_blocks": 0},
        {"ahead_blocks": 5},
    ],
)
def test_configuration_is_checked_at_the_door(wrong):
    planner = HybridChunkPlanner([ATTENTION], max_model_len=100)
    with pytest.raises(ConfigurationError):
        CPUPrefixCache(planner, PooledDevice(BlockPool(4)), **cache_options(**{"host_blocks": 4, **wrong}))


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_a_retry_leaves_what_is_due_of_the_same_request_admitted_again(mode: str):
    engine = Engine(mode, device=16, host=8, ready_blocks=0)
    engine.starts("r", "ab")
    engine.computes("r")
    engine.preempts("r")
    engine.copies()
    engine.starts("r", "abcdef")
    engine.computes("r")
    engine.reports(ready_blocks=8)
    due = engine.cache.edge.offload._due
    assert "r" in due, "the retry of the request that was preempted took the store of the one that runs"
