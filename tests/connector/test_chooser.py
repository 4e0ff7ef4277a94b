"""Requests from the first query to the end of their loads, with a clock that the test sets."""

import math
import random
from collections import Counter

import pytest

from connector.multi.choice import Decision, Speed
from connector.multi.chooser import ERROR, Chooser
from connector.multi.loads import LOADS_REMEMBERED, SECONDS_REMEMBERED, Loads

FAST = Speed(rate=1e9, overhead=0.01)
DEADLINE = 0.5
MEGABYTE = 10**6


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def chooser_of(count, clock, deadline=DEADLINE):
    """A token takes a millisecond to compute, and has 1,000 bytes: a microsecond to load."""
    return Chooser([deadline] * count, [FAST] * count, 1000.0, lambda: 1000.0, clock)


def ask_and_admit(chooser, id, *tokens):
    choice = chooser.answered(id, tokens, 1000)
    assert not choice.waits_for
    return chooser.admitted(id, 0 if choice.winner is None else tokens[choice.winner])


# The cache that loads


def test_the_faster_one_loads_once_both_were_measured(clock):
    chooser = chooser_of(2, clock)
    first, second = (ask_and_admit(chooser, id, 900, 900) for id in "ab")
    assert (first.cache, second.cache) == (0, 1)  # the first has something to do already
    clock.now += 0.02
    chooser.ended([second])
    clock.now += 0.2
    chooser.ended([first])
    assert ask_and_admit(chooser, "c", 900, 900).cache == 1
    assert [count.wins for count in chooser.counts] == [1, 1]
    assert [count.tokens for count in chooser.counts] == [900, 900]


def test_one_with_more_tokens_loses_if_it_loads_too_slowly(clock):
    chooser = chooser_of(2, clock)
    slow = ask_and_admit(chooser, "a", 900, 0)
    clock.now += 0.95
    chooser.ended([slow])
    assert ask_and_admit(chooser, "b", 1000, 200).cache == 1
    assert ask_and_admit(chooser, "c", 1000, 0) is None  # computing is as fast


def test_the_queue_of_one_sends_requests_to_the_other(clock):
    chooser = chooser_of(2, clock)
    loads = [ask_and_admit(chooser, str(number), 500, 500) for number in range(10)]
    assert Counter(load.cache for load in loads) == {0: 5, 1: 5}


def test_a_choice_that_the_engine_does_not_take_is_not_loaded(clock):
    chooser = chooser_of(1, clock)
    assert chooser.answered("a", [500], 1000) == Decision(0, ())
    assert chooser.admitted("a", 0) is None
    assert chooser.admitted("a", 500) is None  # no query was made
    assert chooser.counts[0].queries == 1


# Caches that are waited for


def test_one_that_never_answers_costs_one_deadline(clock):
    chooser = chooser_of(2, clock)
    assert chooser.answered("a", [None, 100], 1000).waits_for == (0,)
    assert chooser.counts[0].pending == 1
    clock.now += DEADLINE - 0.01
    assert chooser.answered("a", [None, 100], 1000).waits_for == (0,)
    clock.now += 0.02
    assert ask_and_admit(chooser, "a", None, 100).cache == 1
    assert ask_and_admit(chooser, "b", None, 100).cache == 1  # and no other request waits
    assert chooser.counts[0].misses["late"] == 2
    assert chooser.counts[0].pending == 0


def test_it_is_waited_for_again_when_it_has_answered(clock):
    chooser = chooser_of(1, clock)
    chooser.answered("a", [None], 1000)
    clock.now += DEADLINE
    assert chooser.answered("a", [None], 1000) == Decision(None, ())
    assert chooser.answered("b", [0], 1000) == Decision(None, ())
    assert chooser.answered("c", [None], 1000).waits_for == (0,)
    assert chooser.answered("a", [None], 1000).waits_for == ()  # not by whom it has kept waiting
    assert chooser.answered("c", [None], 1000).waits_for == (0,)


def test_one_that_could_not_save_more_is_not_waited_for(clock):
    chooser = chooser_of(2, clock)
    assert chooser.answered("a", [None, 1000], 1000) == Decision(1, ())


def test_nobody_waits_longer_than_could_be_saved(clock):
    chooser = chooser_of(1, clock)
    assert chooser.answered("a", [None], 100).waits_for == (0,)
    clock.now += 0.1  # what computing takes
    assert chooser.answered("a", [None], 100).waits_for == ()
    assert chooser.answered("b", [None], 1000).waits_for == (0,)  # its deadline was not reached


# Failures


@pytest.mark.parametrize(("tokens", "reason"), [(0, "nothing"), (ERROR, "error")])
def test_a_cache_that_has_nothing_or_gives_no_answer_is_a_miss(clock, tokens, reason):
    chooser = chooser_of(2, clock)
    assert ask_and_admit(chooser, "a", tokens, 500).cache == 1
    assert chooser.counts[0].misses[reason] == chooser.counts[0].queries == 1


def test_a_cache_whose_load_failed_is_not_chosen_again_for_the_request(clock):
    chooser = chooser_of(2, clock)
    load = ask_and_admit(chooser, "a", 900, 500)
    load.has_failed = True
    clock.now += 5
    chooser.ended([load])
    assert ask_and_admit(chooser, "a", 900, 500).cache == 1
    assert ask_and_admit(chooser, "b", 900, 500).cache == 0  # its speed was not measured
    assert chooser.counts[0].misses["failed"] == 1
    assert chooser.counts[0].queries == 2
    chooser.gone("a")
    assert ask_and_admit(chooser, "a", 900, 0).cache == 0


def test_nothing_is_remembered_of_requests_that_are_gone(clock):
    chooser = chooser_of(2, clock)
    chooser.answered("asked", [None, 100], 1000)
    aborted, failing = (ask_and_admit(chooser, id, 500, 500) for id in ("aborted", "failing"))
    for id in ("asked", "aborted", "failing"):
        chooser.gone(id)
    failing.has_failed = True
    chooser.ended([aborted, failing])
    assert not (chooser._asked or chooser._admitted or chooser._failed)
    assert [count.pending for count in chooser.counts] == [0, 0]
    assert not any(loads._under_way for loads in chooser._loads)


@pytest.mark.parametrize("seed", range(20))
def test_every_question_ends_in_one_way(clock, seed):
    """Each cache wins, misses, or has lost to somebody, by a count of its own."""
    rng = random.Random(seed)
    chooser, lost = chooser_of(3, clock), Counter()
    for number in range(200):
        id, load = str(number), None
        while load is None:
            tokens = [rng.choice([None, ERROR, 0, 100, 500, 900]) for _ in range(3)]
            choice = chooser.answered(id, tokens, 1000)
            clock.now += rng.random()
            if choice.waits_for:
                continue
            unheard = set(chooser._failed.get(id, ()))
            rivals = set(range(3)) - {choice.winner} - unheard
            lost.update(at for at in rivals if tokens[at] is not None and tokens[at] > 0)
            load = chooser.admitted(id, 0 if choice.winner is None else tokens[choice.winner])
            if load is None:
                break
            load.has_failed = rng.random() < 0.3
            chooser.ended([load])
            if load.has_failed:
                load = None
        chooser.gone(id)
    for at, count in enumerate(chooser.counts):
        assert count.queries == count.wins + sum(count.misses.values()) + lost[at]
    assert all(count.wins for count in chooser.counts)


# How fast


def load_alone(loads, clock, num_bytes, seconds):
    loads.asked(clock.now, num_bytes, clock.now)
    began, clock.now = clock.now, clock.now + seconds
    loads.ended([began], clock.now)
    clock.now += 1


def test_rate_and_overhead_are_found_from_loads_of_different_sizes(clock):
    loads = Loads(FAST)
    for size in (1, 10, 50, 100, 400) * 6:
        load_alone(loads, clock, size * MEGABYTE, 0.05 + size * MEGABYTE / 5e9)
    speed = loads.speed(clock.now)
    assert speed.rate == pytest.approx(5e9, rel=0.1)
    assert speed.overhead == pytest.approx(0.05, rel=0.1)


def test_loads_that_wait_for_each_other_are_not_counted_twice(clock):
    """Ten at once take as long as one of ten times the size."""
    loads = Loads(FAST)
    for id in range(10):
        loads.asked(id, 100 * MEGABYTE, clock.now)
    assert loads.speed(clock.now).queue_bytes == 1000 * MEGABYTE
    total = 0.0
    for id in range(10):
        clock.now += 0.1
        total += loads.ended([id], clock.now)
        assert loads.speed(clock.now).overhead < 0.02  # nor is the next one late
    assert total == pytest.approx(1.0)
    assert loads.speed(clock.now).rate == pytest.approx(1e9, rel=0.15)


def test_a_line_that_falls_is_taken_for_no_rate_at_all(clock):
    loads = Loads(FAST)
    load_alone(loads, clock, MEGABYTE, 0.5)
    for _ in range(5):
        load_alone(loads, clock, 100 * MEGABYTE, 0.001)
    speed = loads.speed(clock.now)
    assert speed.rate == math.inf and speed.overhead > 0


def test_a_cache_that_was_slow_once_is_tried_again(clock):
    loads = Loads(FAST)
    load_alone(loads, clock, 100 * MEGABYTE, 60.0)
    assert loads.speed(clock.now).rate < 2e6
    clock.now += SECONDS_REMEMBERED
    assert loads.speed(clock.now).rate == 1e9
    loads.asked("try", 100 * MEGABYTE, clock.now)
    assert loads.speed(clock.now).rate < 2e6  # by one load only
    clock.now += 0.11
    loads.ended(["try"], clock.now)
    assert loads.speed(clock.now).rate == pytest.approx(1e9)


def test_one_whose_loads_do_not_end_is_not_chosen_any_more(clock):
    chooser = chooser_of(2, clock)
    stuck = ask_and_admit(chooser, "a", 900, 0)
    clock.now += 0.5
    assert ask_and_admit(chooser, "b", 900, 500).cache == 1
    clock.now += 0.5
    assert ask_and_admit(chooser, "c", 900, 0) is None
    chooser.ended([stuck])
    clock.now += SECONDS_REMEMBERED + 1
    assert ask_and_admit(chooser, "d", 900, 500).cache == 0


def test_old_loads_are_forgotten(clock):
    loads = Loads(FAST)
    for seconds in [1.0] + [0.02] * LOADS_REMEMBERED:
        load_alone(loads, clock, 10 * MEGABYTE, seconds)
    assert loads.speed(clock.now).rate == pytest.approx(1e9)
