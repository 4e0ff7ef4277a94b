"""Threads get their turn at Python sooner while somebody copies, and then it is as it was."""

import sys

import pytest

from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.queues import Passed
from cpu_prefix_cache.copier.turns import TURN_SECONDS, short_turns
from cpu_prefix_cache.copier.worker import CopyWorker
from cpu_prefix_cache.plan import Direction, GroupCopy, StepPlan, TransferPlan


@pytest.fixture(autouse=True)
def interval():
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.004)
    yield 0.004
    sys.setswitchinterval(before)


def is_short():
    return sys.getswitchinterval() == pytest.approx(TURN_SECONDS)


def test_turns_are_short_until_the_last_one_leaves(interval):
    with short_turns():
        with short_turns():
            assert is_short()
        assert is_short()
    assert sys.getswitchinterval() == pytest.approx(interval)


def test_an_error_inside_leaves_too(interval):
    with pytest.raises(OSError, match="no memory"), short_turns():
        raise OSError("no memory")
    assert sys.getswitchinterval() == pytest.approx(interval)


def test_turns_that_are_shorter_already_stay_as_they_are():
    sys.setswitchinterval(0.00005)
    with short_turns():
        assert sys.getswitchinterval() == pytest.approx(0.00005)
    assert sys.getswitchinterval() == pytest.approx(0.00005)


def test_what_somebody_else_sets_meanwhile_stays():
    with short_turns():
        sys.setswitchinterval(0.003)
    assert sys.getswitchinterval() == pytest.approx(0.003)


def test_what_somebody_sets_back_later_to_ours_does_not_stay_for_good(interval):
    with short_turns():
        ours = sys.getswitchinterval()
        sys.setswitchinterval(0.001)
    sys.setswitchinterval(ours)  # its own section has ended after ours
    with short_turns():
        pass
    assert sys.getswitchinterval() == pytest.approx(interval)


class Noting(Copier):
    """Notes how long turns are when it is asked to copy, and fails."""

    def here(self):
        return Passed()

    def submit(self, direction, copies, after):
        self.was_short = is_short()
        raise OSError("this one copies nothing")


@pytest.mark.parametrize("threads", [True, False])
def test_a_thread_that_submits_has_them_short_and_one_that_was_called_leaves_them_alone(threads, interval):
    copier = Noting()
    worker = CopyWorker(0, copier, threads=threads)
    worker.run(StepPlan(0, (TransferPlan(0, Direction.STORE, (GroupCopy(0, (1,), (2,)),), 0),)))
    worker.close()
    assert copier.was_short == threads
    assert sys.getswitchinterval() == pytest.approx(interval)
