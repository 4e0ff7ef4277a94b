"""Requests that wait for their turn: the tier is read for them meanwhile. Any order: test_tier_machine.py."""

import pytest

from cpu_prefix_cache import Hit, Miss, Pending
from cpu_prefix_cache.deciding import CPUPrefixCache, Request
from cpu_prefix_cache.tiers import tier_cache
from property_tests.strategies import chain
from tests.unit.tiers.small_tier import GRID, Shared, chain_names, with_tier


@pytest.fixture(autouse=True)
def slices_of_two_chunks(monkeypatch):
    monkeypatch.setattr(tier_cache, "READ_BYTES", 2 * 4096)


def queues(engine, *prompts):
    for prompt in prompts:
        engine.cache.queued(Request(prompt, chain(prompt), len(prompt) * GRID + 1), engine.now)


def test_a_prompt_is_read_before_its_first_lookup():
    engine = with_tier("abcd")
    queues(engine, "abcd")
    engine.works()
    assert engine.host == set(chain_names("abcd"))
    assert engine.asks_as("abcd", "abcd") == Hit(4 * GRID)
    engine.admits("abcd", "abcd")
    engine.works_off()
    assert engine.seen.hit_tokens == 4 * GRID and engine.seen.asked == 1 and engine.is_at_rest()


def test_control_without_the_report_nothing_is_read_until_then():
    engine = with_tier("abcd")
    assert engine.steps_below() == [] and engine.host == set()


def test_it_stays_on_the_host_however_long_the_request_waits():
    engine = with_tier("abcd")
    queues(engine, "abcd")
    engine.works()
    engine.now += 1_000.0
    engine.works()
    engine.host_forgets()
    assert engine.asks_as("abcd", "abcd") == Hit(4 * GRID) and engine.seen.late == 0


def test_its_deadline_begins_with_the_first_lookup():
    engine = with_tier("abcd")
    queues(engine, "abcd")
    engine.steps_below()
    engine.now += 1_000.0
    answer = engine.asks_as("abcd", "abcd")
    assert isinstance(answer, Pending) and engine.now < answer.deadline < engine.now + 1
    engine.now = answer.deadline
    assert engine.asks_as("abcd", "abcd") == Miss() and engine.seen.late == 1


def test_its_deadline_begins_even_if_the_lookup_waits_for_a_load_of_another(monkeypatch):
    engine = with_tier("abcd")
    queues(engine, "abcd")
    engine.steps_below()
    with monkeypatch.context() as patched:
        patched.setattr(CPUPrefixCache, "lookup", lambda *_: Pending(engine.now + 1))
        engine.asks_as("abcd", "abcd")
    engine.now += 1_000.0
    assert engine.asks_as("abcd", "abcd") == Miss() and engine.seen.late == 1


def test_one_that_is_aborted_keeps_nothing():
    engine = with_tier("abcd")
    queues(engine, "abcd")
    engine.works()
    engine.cache.abandoned("abcd")
    engine.works_off()
    engine.host_forgets()
    assert engine.host == set() and engine.is_at_rest()


def test_a_prompt_that_the_device_has_is_not_read():
    engine = with_tier("abcd")
    engine.gpu.commit(engine.gpu.allocate(4), chain("abcd"), engine.gpu.root, engine.gpu.touch(None))
    queues(engine, "abcd")
    assert engine.steps_below() == []


def test_a_long_queue_is_read_as_room_becomes_free():
    """A quarter of the host, which is two prompts, is promoted and not admitted at most; first come, first served."""
    engine = with_tier("abcd", "efgh", "ijkl", "mnop")
    queues(engine, "abcd", "efgh", "ijkl", "mnop")
    engine.works_off()
    assert engine.host == {*chain_names("abcd"), *chain_names("efgh")}
    assert engine.admits("abcd", "abcd") == Hit(4 * GRID)
    engine.works_off()
    assert set(chain_names("ijkl")) <= engine.host and not set(chain_names("mnop")) & engine.host


def test_a_long_queue_is_noted_no_further_than_it_is_read():
    """So a step looks at no more wants, however many wait."""
    prompts = ["abcd", "efgh", "ijkl", "mnop"]
    engine = with_tier(*prompts)
    queues(engine, *prompts)
    engine.works_off()
    assert [*engine.cache._wants] == ["abcd", "efgh"] and engine.seen.asked == 0  # none was looked up


class Counted(dict):
    """Counts how often all of it is gone over."""

    times = 0

    def __iter__(self):
        self.times += 1
        return super().__iter__()


def times_over(wants):
    """The times that all wants are gone over: while as many prompts are queued, and in the step that reads them."""
    prompts = [chr(ord("a") + at) for at in range(wants)]
    engine = with_tier(*prompts, host=4 * wants)
    engine.cache._promotions.open = Counted()
    queues(engine, *prompts)
    queued = engine.cache._promotions.open.times
    engine.cache.step()
    assert len(engine.cache._promotions.open) == len(engine.cache._promotions.slices) == wants
    return queued, engine.cache._promotions.open.times - queued


def test_no_prompt_and_no_read_costs_a_look_at_all_that_wait():  # rule 16
    assert times_over(wants=20) == times_over(wants=2)


def test_a_prompt_that_computing_brings_sooner_is_left_until_it_is_looked_up():
    engine = with_tier("abcd")
    engine.measures(rate=100.0, prefill=1_000.0)
    engine.now = 1.0
    queues(engine, "abcd")
    assert engine.steps_below() == [] and engine.seen.declined == 0
    assert engine.asks_as("abcd", "abcd") == Miss() and engine.seen.declined == 1


def test_a_store_that_others_write_is_queried_at_once_and_read_when_it_has_answered():
    engine = Shared(host=32)
    engine.others_have("abcd")
    queues(engine, "abcd")
    engine.steps_below()
    assert engine.asked == ["abcd"]
    engine.answers()
    engine.works()
    assert engine.asks_as("abcd", "abcd") == Hit(4 * GRID)
    engine.admits("abcd", "abcd")
    engine.works_off()
    assert engine.is_at_rest()


def test_a_request_that_is_admitted_without_a_lookup_is_read_for_no_more():
    engine = with_tier("abcd", "efgh", "ijkl")
    queues(engine, "abcd", "efgh", "ijkl")
    engine.works_off()
    engine.cache.admit(Request("ijkl", chain("ijkl"), 4 * GRID + 1), 0, 0, engine.now)
    engine.cache.finished("ijkl", 0)
    for each in ("abcd", "efgh"):
        engine.cache.abandoned(each)
    engine.works_off()
    assert not engine.cache._promotions.open and not engine.cache._queued


def test_a_request_that_is_looked_up_out_of_turn_gets_the_room_of_those_that_wait():
    """As with priorities: what waits has all the room, and is put off, the last of them first."""
    engine = with_tier("abcd", "efgh", "ijkl")
    queues(engine, "abcd", "efgh")
    engine.works_off()
    assert isinstance(engine.asks_as("first", "ijkl"), Pending)
    engine.steps_below()
    engine.works()
    assert engine.asks_as("first", "ijkl") == Hit(4 * GRID) and engine.seen.late == 0
    assert [*engine.cache._queued] == ["efgh"] and engine.seen.asked == 1
    engine.admits("first", "ijkl")
    engine.works_off()
    for prompt in ("abcd", "efgh"):
        assert engine.admits(prompt, prompt) == Hit(4 * GRID)
    engine.works_off()
    assert engine.is_at_rest()


def test_a_tier_learns_the_hint_of_what_it_read_ahead(monkeypatch):
    engine, hints = with_tier("abcd"), []
    touch = engine.cache.below.pool.touch

    def note(deepest, keys=(), now=None, num_tokens=None, next_use=None):
        hints.append(next_use)
        return touch(deepest, keys, now, num_tokens, next_use)

    monkeypatch.setattr(engine.cache.below.pool, "touch", note)
    engine.cache.queued(Request("abcd", chain("abcd"), 4 * GRID + 1, next_use=30.0), engine.now)
    engine.works()
    assert engine.asks_as("abcd", "abcd") == Hit(4 * GRID)
    assert hints == [30.0]
