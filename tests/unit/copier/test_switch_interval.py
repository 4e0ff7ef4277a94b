"""Python's switch interval is short while somebody copies, and then as it was."""

import sys

import pytest

from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.events import Passed
from cpu_prefix_cache.copier.switch_interval import INTERVAL_SECONDS, short_switch_interval
from cpu_prefix_cache.copier.worker import CopyWorker
from cpu_prefix_cache.messages.plan import Direction, GroupCopy, StepPlan, TransferPlan


@pytest.fixture(autouse=True)
def interval():
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.004)
    yield 0.004
    sys.setswitchinterval(before)


def is_short():
    return sys.getswitchinterval() == pytest.approx(INTERVAL_SECONDS)


def test_it_is_short_until_the_last_one_leaves(interval):
    with short_switch_interval():
        with short_switch_interval():
            assert is_short()
        assert is_short()
    assert sys.getswitchinterval() == pytest.approx(interval)


def test_an_error_inside_leaves_too(interval):
    with pytest.raises(OSError, match="no memory"), short_switch_interval():
        raise OSError("no memory")
    assert sys.getswitchinterval() == pytest.approx(interval)


def test_one_that_is_shorter_already_stays_as_it_is():
    sys.setswitchinterval(0.00005)
    with short_switch_interval():
        assert sys.getswitchinterval() == pytest.approx(0.00005)
    assert sys.getswitchinterval() == pytest.approx(0.00005)


def test_an_interval_that_another_sets_meanwhile_stays():
    with short_switch_interval():
        sys.setswitchinterval(0.003)
    assert sys.getswitchinterval() == pytest.approx(0.003)


def test_our_interval_set_back_later_by_another_does_not_stay_for_good(interval):
    with short_switch_interval():
        ours = sys.getswitchinterval()
        sys.setswitchinterval(0.001)
    sys.setswitchinterval(ours)  # its own section has ended after ours
    with short_switch_interval():
        pass
    assert sys.getswitchinterval() == pytest.approx(interval)


class Noting(Copier):
    """Notes how long the interval is when a copy is submitted, and fails."""

    def here(self):
        return Passed()

    def submit(self, direction, copies, after):
        self.was_short = is_short()
        raise OSError("this one copies nothing")


@pytest.mark.parametrize("threads", [True, False])
def test_a_thread_that_submits_has_it_short_and_one_that_was_called_leaves_it_alone(threads, interval):
    copier = Noting()
    worker = CopyWorker(0, copier, threads=threads)
    worker.run(StepPlan(0, (TransferPlan(0, Direction.STORE, (GroupCopy(0, (1,), (2,)),), 0),)))
    worker.close()
    assert copier.was_short == threads
    assert sys.getswitchinterval() == pytest.approx(interval)
