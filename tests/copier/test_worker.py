"""The copying half: every transfer of a plan ends as done or failed, and is said again until it is heard."""

import pytest

from cpu_prefix_cache import Direction, MisuseError, StepPlan, TransferPlan
from cpu_prefix_cache.copier.worker import CopyWorker


class Copier:
    """Counts what it is asked to copy, and fails when told to."""

    def __init__(self) -> None:
        self.copied = 0
        self.broken = False

    def copy(self, direction, copies):
        if self.broken:
            raise RuntimeError("the link is down")
        self.copied += 1


def plan(*ids, failed=False, **fields):
    return StepPlan(0, tuple(TransferPlan(id, Direction.LOAD, (), 0, failed) for id in ids), **fields)


@pytest.fixture
def copier():
    return Copier()


@pytest.fixture
def worker(copier):
    return CopyWorker(3, copier)


def test_what_was_copied_is_done(worker, copier):
    worker.run(plan(0, 1))
    assert worker.report().rank == 3
    assert worker.report().done == {0, 1}
    assert copier.copied == 2


def test_a_report_is_repeated_until_a_plan_says_it_is_settled(worker):
    worker.run(plan(0, 1))
    worker.run(plan(2))
    assert worker.report().done == {0, 1, 2}
    worker.run(plan(settled_below=2))
    assert worker.report().done == {2}


def test_an_exception_fails_its_transfer_and_no_other(worker, copier):  # S7.45
    copier.broken = True
    worker.run(plan(0))
    copier.broken = False
    worker.run(plan(1))
    assert worker.report().failed == {0}
    assert worker.report().done == {1}


def test_a_load_whose_source_was_gone_is_reported_as_failed(worker, copier):
    worker.run(plan(0, failed=True))
    assert worker.report().failed == {0}
    assert copier.copied == 0


def test_a_cancelled_load_is_not_started(worker, copier):
    worker.run(plan(0, 1, cancelled=(1,)))
    assert worker.report().done == {0}
    assert worker.report().failed == {1}
    assert copier.copied == 1


def test_a_plan_of_another_version_is_refused_whole(worker, copier):
    with pytest.raises(MisuseError, match="version"):
        worker.run(plan(0, version=2))
    assert copier.copied == 0


def test_what_is_settled_one_by_one_is_not_repeated_either(worker):
    worker.run(plan(0, 1, 2))
    worker.run(plan(settled_below=1, settled=(2,)))
    assert worker.report().done == {1}


def test_an_interrupt_leaves_nothing_that_nobody_will_report(worker, copier):
    def interrupted(direction, copies):
        raise KeyboardInterrupt

    worker.run(plan(0))
    copier.copy = interrupted
    with pytest.raises(KeyboardInterrupt):
        worker.run(plan(1, 2))
    assert worker.report().done == {0}
    assert worker.report().failed == {1, 2}
