"""Stores pause for loads, and not for ever."""

import threading

import pytest

from cpu_prefix_cache.copier.loads_first import PATIENCE_SECONDS, REGAINED, STEP_SECONDS, LoadsFirst


class Clock:
    """Moves when somebody sleeps."""

    def __init__(self):
        self.now = 0.0
        self.meanwhile = lambda: None

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.meanwhile()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def loads(clock):
    return LoadsFirst(clock=clock, sleep=clock.sleep)


def waits(loads, clock):
    """For how long a store does, before a slice."""
    before = clock.now
    loads.pause()
    return clock.now - before


@pytest.fixture
def end(loads):
    """A thread of its own has begun to submit a load; this ends it."""
    taken = loads.loading()
    thread = threading.Thread(target=taken.__enter__)
    thread.start()
    thread.join()
    return lambda: taken.__exit__(None, None, None)


def test_without_loads_nobody_waits(loads, clock):
    assert waits(loads, clock) == 0


def test_a_store_waits_until_the_load_is_submitted_and_used(loads, clock, end):
    def later():
        if clock.now >= 0.1:
            clock.meanwhile = lambda: None
            end()

    clock.meanwhile = later
    assert waits(loads, clock) == pytest.approx(0.1 + STEP_SECONDS, abs=2e-3)
    assert waits(loads, clock) == 0


def test_its_patience_has_an_end(loads, clock, end):
    assert waits(loads, clock) == pytest.approx(PATIENCE_SECONDS, abs=2e-3)
    assert waits(loads, clock) < 2e-3


def test_its_patience_comes_back_with_time(loads, clock, end):
    waits(loads, clock)
    clock.now += 1
    assert waits(loads, clock) == pytest.approx(REGAINED, abs=2e-3)
    clock.now += 100 * PATIENCE_SECONDS
    assert waits(loads, clock) == pytest.approx(PATIENCE_SECONDS, abs=2e-3)


def test_a_thread_that_submits_both_gives_way_to_nobody(loads, clock):
    with loads.loading():
        pass
    assert waits(loads, clock) == 0


def test_a_load_that_fails_is_over_too(loads, clock):
    def fail():
        with pytest.raises(RuntimeError), loads.loading():
            raise RuntimeError

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    assert waits(loads, clock) == pytest.approx(STEP_SECONDS, abs=2e-3)


def test_a_store_that_a_load_waits_for_waits_for_no_load_before(loads, clock, end):
    end()
    with loads.awaiting():
        assert waits(loads, clock) == 0
    assert waits(loads, clock) == pytest.approx(STEP_SECONDS, abs=2e-3)
