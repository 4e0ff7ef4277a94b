"""Stores that read what the compute of their step overwrites, and stores that need not wait for the step before."""

import threading
from contextlib import contextmanager

import pytest

from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.streams import Passed
from cpu_prefix_cache.copier.worker import CopyWorker
from cpu_prefix_cache.messages.plan import Direction, GroupCopy, StepPlan, TransferPlan


class NotingCopier(Copier):
    """Notes what it is given and what compute waits for; events are numbered."""

    def __init__(self):
        self.events, self.after, self.behind, self.threads, self.hurried = 0, {}, [], set(), set()
        self.is_hurried = False

    def here(self):
        return self._event()

    def submit(self, direction, copies, after):
        block = copies[0].host_blocks[0]
        if block == 13:
            raise RuntimeError("the link is down")
        self.after[block] = after.number
        self.threads.add(threading.current_thread())
        if self.is_hurried:
            self.hurried.add(block)
        return self._event()

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
    assert copier.behind == [copier.after[5] + 1]
    worker.run(StepPlan(0, (store(1, 6),)))
    worker.drain()
    assert len(copier.behind) == 1 and copier.hurried == {5}


def test_a_store_that_fails_holds_nothing(worker, copier):
    worker.run(StepPlan(0, (store(0, 13, holds_compute=True), store(1, 6, holds_compute=True))))
    assert copier.behind == [copier.after[6] + 1]
    assert worker.report().failed == {0} and worker.report().done == {1}


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
