"""Prompts that a hint expects: the tier is read for them before their requests come, while nobody else needs it."""

import pytest

from cpu_prefix_cache import Hit, Pending
from cpu_prefix_cache.tiers import expected, tier_cache
from cpu_prefix_cache.tiers.questions import LATE_SECONDS
from property_tests.strategies import chain
from tests.unit.tiers.small_tier import GRID, SECONDS, Shared, chain_names, with_tier


@pytest.fixture(autouse=True)
def slices_of_two_chunks(monkeypatch):
    monkeypatch.setattr(tier_cache, "READ_BYTES", 2 * 4096)


def expects(engine, *prompts):
    for prompt in prompts:
        engine.cache.expected(chain(prompt), engine.now)


def here(engine, *prompts):
    return [set(chain_names(prompt)) <= engine.host for prompt in prompts]


def test_a_prompt_is_on_the_host_when_its_request_comes():
    engine = with_tier("abcd")
    expects(engine, "abcd")
    assert engine.cache.has_transfers, "an idle engine would not step"
    engine.works_off()
    assert here(engine, "abcd") == [True] and engine.seen.read_ahead == 1
    assert engine.asks_as("r", "abcd") == Hit(4 * GRID)
    engine.admits("r", "abcd")
    engine.works_off()
    assert engine.seen.asked == 0 and engine.is_at_rest()


def test_control_without_the_hint_the_request_waits():
    engine = with_tier("abcd")
    engine.works_off()
    assert here(engine, "abcd") == [False]
    assert isinstance(engine.asks_as("r", "abcd"), Pending)


def test_it_is_evicted_like_anything_else_if_nobody_comes():
    engine = with_tier("abcd")
    expects(engine, "abcd")
    engine.works_off()
    engine.host_forgets()
    assert engine.host == set() and engine.is_at_rest()


def test_blocks_in_use_stay():
    """All but a few blocks of the host are pinned, by requests that load."""
    engine = with_tier("abcd", host=8)
    engine.host_has("uvwxyz")
    pool = engine.cache.pool
    pin = pool.pin(pool.find(b"uvwxyz"))
    expects(engine, "abcd")
    engine.works_off()
    assert here(engine, "uvwxyz") == [True] and here(engine, "ab") == [True]
    pool.unpin(pin)


def test_one_slice_is_read_at_a_time():
    engine = with_tier("abcdef")
    expects(engine, "abcdef")
    engine.steps_below()
    assert len(engine.cache._promotions.slices) == 1
    engine.works_off()
    assert here(engine, "abcdef") == [True]


def test_a_request_that_waits_for_the_tier_comes_first_and_the_hint_after_it():
    engine = with_tier("abcdefgh", "stuv")
    expects(engine, "abcdefgh")
    engine.steps_below()
    assert isinstance(engine.asks_as("r", "stuv"), Pending)
    engine.steps_below()
    wanted = [want for _, want, _ in engine.cache._promotions.slices.values() if want.request.id == "r"]
    assert len(wanted) == 2, "it waits for the rest of the hint"
    engine.works()
    assert here(engine, "stuv", "abcdefgh") == [True, False]
    engine.admits("r", "stuv")
    engine.works_off()
    assert here(engine, "abcdefgh") == [True] and engine.seen.read_ahead == 1


def test_hints_promote_at_most_a_quarter_of_the_host_in_a_minute():
    engine = with_tier("abcd", "efgh", "ijkl")
    expects(engine, "abcd", "efgh", "ijkl")
    engine.works_off()
    assert here(engine, "abcd", "efgh", "ijkl") == [True, True, False]
    assert engine.is_at_rest(), "an idle engine steps for a hint that is not read"
    engine.now += expected.SECONDS
    expects(engine, "ijkl")
    engine.works_off()
    assert here(engine, "ijkl") == [True]


def test_a_hint_that_had_to_wait_for_long_is_forgotten():
    engine = with_tier("abcd", "stuv")
    assert isinstance(engine.asks_as("r", "stuv"), Pending)
    expects(engine, "abcd")
    engine.steps_below()
    engine.now += expected.SECONDS
    engine.cache.abandoned("r")
    engine.works_off()
    assert here(engine, "abcd") == [False] and engine.seen.read_ahead == 0 and engine.is_at_rest()


@pytest.mark.parametrize("prompt", ["", "zzzz"])
def test_a_hint_of_what_the_tier_does_not_have_changes_nothing(prompt):
    engine = with_tier("abcd")
    expects(engine, prompt)
    assert engine.steps_below() == []
    assert engine.seen.read_ahead == 0 and engine.is_at_rest()


def test_no_more_than_so_many_hints_wait():
    engine = with_tier("abcd")
    expects(engine, *["zzzz"] * expected.MOST, "abcd")
    engine.works_off()
    assert here(engine, "abcd") == [False]


def test_a_store_that_others_write_is_queried_first():
    engine = Shared(host=32)
    engine.others_have("abcd")
    expects(engine, "abcd")
    engine.steps_below()
    assert len(engine.asked) == 1 and engine.host == set()
    engine.answers()
    engine.works_off()
    assert here(engine, "abcd") == [True]


def test_a_hint_that_a_store_does_not_answer_is_no_request_without_an_answer():
    engine = Shared(host=32)
    expects(engine, "abcd")
    engine.steps_below()
    engine.now += SECONDS + LATE_SECONDS
    engine.steps_below()
    assert engine.asked == ["abcd"] and engine.seen.questions == engine.seen.unanswered == 0


def test_control_a_request_that_it_does_not_answer_is_one():
    engine = Shared(host=32)
    assert isinstance(engine.asks_as("r", "abcd"), Pending)
    engine.steps_below()
    engine.now += SECONDS + LATE_SECONDS
    engine.steps_below()
    assert engine.asked == ["abcd"] and engine.seen.questions == engine.seen.unanswered == 1


def test_a_reset_forgets_hints():
    engine = with_tier("abcd")
    expects(engine, "abcd")
    engine.steps_below()
    engine.cache.reset()
    engine.works_off()
    assert engine.host == set() and engine.is_at_rest() and not engine.cache._wants


def test_a_read_that_takes_longer_than_a_hint_lasts_ends():
    engine = with_tier("abcd", "efgh")
    expects(engine, "abcd")
    engine.steps_below()
    engine.now += expected.SECONDS
    expects(engine, "efgh")
    engine.works_off()
    assert here(engine, "ab", "abcd", "efgh") == [True, False, True] and not engine.cache._wants
