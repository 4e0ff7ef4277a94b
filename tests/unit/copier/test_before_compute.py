"""Stores that read what the compute of their step overwrites, and stores that need not wait for the step before."""

import threading
from contextlib import contextmanager

import pytest

from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.events import Event, Passed
from cpu_prefix_cache.copier.worker import CopyWorker
from cpu_prefix_cache.messages.plan import Direction, GroupCopy, StepPlan, TransferPlan
from tests.support.threads import eventually


class NotingCopier(Copier):
    """Notes what it is given and what compute waits for; events are numbered."""

    def __init__(self):
        self.events = 0
        self.after = {}
        self.behind = []
        self.threads = set()
        self.hurried = set()
        self.is_hurried, self.ends = False, {}

    def here(self):
        return self._event()

    def submit(self, direction, copies, after):
        for block in copies[0].host_blocks:
            if block == 13:
                raise RuntimeError("the link is down")
            self.after[block] = after.number
            self.hurried |= {block} if self.is_hurried else set()
        self.threads.add(threading.current_thread())
        event = self._event()
        self.ends |= dict.fromkeys(copies[0].host_blocks, event.number)
        return event

    @contextmanager
    def awaiting_stores(self):
        self.is_hurried = True
        yield
        self.is_hurried = False

    def hold_compute(self, event):
        self.behind.append(event.number)

    def _event(self):
        event = Passed()
        event.number = self.events
        self.events += 1
        return event


def store(id, block, **fields):
    return TransferPlan(id, Direction.STORE, (GroupCopy(0, (block,), (1,)),), 0, **fields)


@pytest.fixture
def copier():
    return NotingCopier()


@pytest.fixture(params=[False, True], ids=["no threads", "threads"])
def worker(copier, request):
    worker = CopyWorker(0, copier, threads=request.param)
    yield worker
    worker.close()


def test_compute_waits_for_the_stores_that_hold_it_and_for_no_others(worker, copier):
    """They are submitted when `run` returns: before anything of the step is computed."""
    worker.run(StepPlan(0, (store(0, 5, holds_compute=True),)))
    assert copier.threads == {threading.current_thread()} and copier.hurried == {5}
    assert copier.behind == [copier.ends[5]]
    worker.run(StepPlan(0, (store(1, 6),)))
    worker.drain()
    assert len(copier.behind) == 1 and copier.hurried == {5}


def test_they_are_submitted_as_one_and_each_resolves(worker, copier):
    worker.run(StepPlan(0, tuple(store(id, 20 + id, holds_compute=True) for id in range(5))))
    assert copier.events == 3 and copier.behind == [1]  # before, the stores, and behind them
    assert worker.report().done == set(range(5))


def test_early_stores_that_fail_hold_no_compute(worker, copier):
    worker.run(
        StepPlan(0, (store(0, 13, holds_compute=True), store(1, 6, holds_compute=True, is_early=True), store(2, 7)))
    )
    worker.drain()
    assert copier.behind == [copier.ends[6]]
    assert worker.report().failed == {0} and worker.report().done == {1, 2}


def test_a_failure_that_is_raised_once_fails_all_of_them(worker, copier):
    class Raising(Passed):
        looks = 0

        def passed(self):
            self.looks += 1
            if self.looks == 1:
                raise RuntimeError("the device is gone")
            return True

    copier.submit = lambda direction, copies, after: Raising()
    copier.hold_compute = lambda event: None
    worker.run(StepPlan(0, tuple(store(id, id, holds_compute=True) for id in range(3))))
    assert worker.report().failed == {0, 1, 2}


def test_where_compute_cannot_be_held_they_have_failed(worker, copier):
    def broken(event):
        raise RuntimeError("the device is gone")

    copier.hold_compute = broken
    worker.run(StepPlan(0, (store(0, 5, holds_compute=True),)))
    assert worker.report().failed == {0}


def test_an_early_store_waits_for_what_was_given_before_the_step_before(worker, copier):
    worker.run(StepPlan(0, (store(0, 5), store(1, 6, is_early=True))))
    worker.drain()
    first = copier.after[5]
    assert copier.after[6] == first  # no plan came before: who knows what has run
    worker.run(StepPlan(0, (store(2, 7), store(3, 8, is_early=True))))
    worker.drain()
    assert copier.after[7] > first == copier.after[8]


def test_after_a_plan_of_nothing_it_waits_for_all(worker, copier):
    worker.run(StepPlan(0, (store(0, 5),)))
    worker.drain()
    worker.report()
    worker.run(StepPlan(0, (), resolved_below=1))  # from here on nothing is to be copied
    worker.run(StepPlan(0, (), resolved_below=1))
    worker.run(StepPlan(0, (store(1, 6, is_early=True),)))
    worker.drain()
    assert copier.after[6] == copier.events - 2  # the last before its own


def test_an_exchange_with_a_store_that_holds_compute_is_refused(worker, copier):
    """It would have to be read before the load begins, and to be written after it has been read."""
    load = TransferPlan(0, Direction.LOAD, (GroupCopy(0, (1,), (1,)),), 0, after=(1,))
    worker.run(StepPlan(0, (load, store(1, 1, after=(0,), holds_compute=True))))
    worker.drain()
    assert worker.report().failed == {0, 1} and not copier.behind


def test_the_end_of_a_store_is_seen_while_another_thread_submits(copier):
    held = threading.Event()
    usual, worker = copier.submit, CopyWorker(0, copier, threads=True)
    try:
        copier.submit = lambda direction, copies, after: (
            Waiting(held) if copies[0].host_blocks == (5,) else usual(direction, copies, after)
        )
        worker.run(StepPlan(0, (store(0, 5),)))
        eventually(lambda: worker._copies[0].event is not None)
        worker.run(StepPlan(0, (store(1, 6, holds_compute=True),)))
        assert worker.report().done == {1}
    finally:
        held.set()
        worker.close()


class Waiting(Event):
    def __init__(self, end):
        self.passed = end.is_set
