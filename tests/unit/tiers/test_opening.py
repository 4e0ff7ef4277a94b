"""A tier that is not open on all ranks: the host is served alone, and slots of the tier are taken in when it opens."""

import pytest

from cpu_prefix_cache import Hit, Miss, Pending
from tests.unit.tiers.small_tier import Shared, Tiered


@pytest.fixture(params=[1, 2])
def engine(request):
    """An engine whose tier has "abc", and cannot be opened by the last rank."""
    engine = Tiered(ranks=request.param)
    engine.tier_has("abc")
    engine.restarts(shut=[request.param - 1])
    return engine


def test_until_then_it_is_paused_and_the_host_is_served(engine):
    engine.host_has("xy")
    assert engine.seen.state == "paused"
    assert isinstance(engine.asks_as("one", "abcd"), Miss), "nobody waits"
    assert isinstance(engine.asks_as("other", "xy"), Hit)
    assert not engine.steps_below() and not engine.cache.has_transfers, "an idle engine need not step"
    assert engine.below == set()


def test_a_repeated_report_changes_nothing(engine):
    for _ in range(3):
        engine.reports_below()
        engine.works()
    assert engine.seen.state == "paused"


def test_it_is_read_and_written_as_soon_as_all_ranks_have_it(engine):
    engine.host_has("xy")
    engine.opens(*engine.ranks)
    assert engine.seen.state == "open" and engine.below == {"a", "ab", "abc"}
    engine.works_off()
    assert "xy" in engine.below
    assert isinstance(engine.asks_as("one", "abcd"), Pending)
    engine.works_off()
    assert engine.admits("one", "abcd").boundary == 12


def test_a_late_report_from_before_does_not_shut_it_again(engine):
    engine.opens(*engine.ranks)
    engine.shut = set(engine.ranks)
    engine.reports_below()
    assert engine.seen.state == "open"


def test_slots_from_before_a_reset_are_not_taken_in_later(engine):
    """The rank that opens then does not know of the reset from its files."""
    engine.works()
    engine.cache.reset()
    engine.works()
    engine.opens(*engine.ranks)
    engine.works()
    assert engine.seen.state == "open" and engine.below == set()
    engine.tier_has("pq")
    assert engine.below == {"p", "pq"}


def test_control_without_the_reset_it_is_taken_in(engine):
    engine.works()
    engine.opens(*engine.ranks)
    engine.works()
    assert engine.below == {"a", "ab", "abc"}


def test_a_store_that_was_down_at_the_start_is_queried_once_it_is_up():
    engine = Shared()
    engine.shut = {0}
    engine.begins()
    engine.others_have("abc")
    assert isinstance(engine.asks_as("one", "abcd"), Miss) and engine.asked == []
    engine.opens(0)
    assert isinstance(engine.is_told("two", "abcd"), Pending)
    engine.works_off()
    assert isinstance(engine.asks_as("two", "abcd"), Hit)


def test_a_tier_that_never_opens_remembers_nothing_of_what_the_host_evicts():
    engine = Tiered(host=2, slots=8, device=2)
    engine.restarts(shut=[0])
    for number in range(50):
        engine.host_has(chr(200 + number))
        engine.steps_below()
    assert engine.cache.pool.statistics().evictions >= 40
    assert len(engine.cache.pool._forest.departed) <= 2
