"""Loads that hold compute: it waits for the section that it reads next, and for none of a load that has failed."""

import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest

from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.events import Event, Passed
from cpu_prefix_cache.copier.worker import CopyWorker
from cpu_prefix_cache.deciding import Direction, GroupCopy, StepPlan, TransferPlan
from cpu_prefix_cache.messages.errors import CopyFailed
from tests.support.threads import eventually

SECTIONS = 3


class End(Event):
    def __init__(self, name):
        self.name = name

    def passed(self):
        return True


class SectionCopier(Copier):
    """Loads that hold compute go section by section, each when the test lets it; compute waits for `behind`."""

    def __init__(self):
        self.behind, self.order, self.together = [], [], []
        self.allowed, self.usual = threading.Semaphore(0), threading.Semaphore(0)
        self.broken_at = self.poor = None

    def here(self):
        return Passed()

    def submit(self, direction, copies, after):
        if direction is Direction.LOAD:
            self.usual.acquire()
        self.order.append((direction, copies[0].host_blocks))
        return Passed()

    def submit_sections(self, copies, after, submitted):
        self.together.append([copy.host_blocks for copy in copies])
        if any(self.poor in copy.host_blocks for copy in copies):
            raise OSError("the link is down")
        for section in range(SECTIONS):
            self.allowed.acquire()
            if section == self.broken_at:
                raise OSError("the link is down")
            submitted(End(section))

    def hold_compute(self, event):
        if not isinstance(event, Passed):
            self.behind.append(event.name)  # of the copier's own: a stream can wait for no other


def load(id, block, **fields):
    return TransferPlan(id, Direction.LOAD, (GroupCopy(0, (block,), (block,)),), 100, **fields)


held = partial(load, holds_compute=True)


@pytest.fixture
def copier():
    return SectionCopier()


def waited(worker, copier, section=None, load=0):
    """Have compute wait for a section, or for all."""
    replace(worker.end_of(load), section=section).hold(copier.hold_compute)


@pytest.fixture
def worker(copier):
    worker = CopyWorker(0, copier, threads=True)
    yield worker
    copier.allowed.release(100)
    copier.usual.release(100)
    worker.close()


def in_background(call):
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_compute_goes_on_with_each_section_that_has_been_submitted(worker, copier):
    worker.run(StepPlan(0, (held(0, 5),)))
    for section in range(SECTIONS):
        waiting = in_background(partial(waited, worker, copier, section))
        waiting.join(0.02)
        assert waiting.is_alive() and copier.behind == list(range(section))
        copier.allowed.release()
        waiting.join()
    waited(worker, copier, 0)  # by another thread that computes half of the step
    waited(worker, copier)
    assert copier.behind == [0, 1, 2, 0, 2]


def test_the_sections_of_a_load_are_passed_one_after_the_other(worker, copier):
    worker.run(StepPlan(0, (held(0, 5),)))
    ends = [replace(worker.end_of(0), section=section) for section in range(SECTIONS)]
    for section in range(SECTIONS):
        assert [end.passed() for end in ends] == [at < section for at in range(SECTIONS)]
        copier.allowed.release()
        ends[section].until_passed()


def test_loads_of_one_step_come_together_and_each_resolves(worker, copier):
    worker.run(StepPlan(0, (held(0, 5), held(2, 7), load(1, 6))))
    copier.allowed.release(SECTIONS)
    copier.usual.release()
    waited(worker, copier, load=2)
    assert copier.together == [[(5, 7)]]
    eventually(lambda: worker.report().done == {0, 1, 2})


def test_they_come_after_the_stores_of_what_they_overwrite(worker, copier):
    """In sections, however large they are, and not portion by portion behind these stores."""
    store = TransferPlan(0, Direction.STORE, (GroupCopy(0, (3,), (5,)),), 100)
    copier.knows_pieces = True
    copier.allowed.release(SECTIONS)
    worker.run(StepPlan(0, (store, held(1, 5, after=(0,))._replace(num_bytes=1 << 30))))
    waited(worker, copier, load=1)
    assert copier.order == [(Direction.STORE, (3,))] and copier.together == [[(5,)]]


@pytest.mark.parametrize("broken_at", range(SECTIONS))
def test_compute_is_not_given_what_a_failed_load_was_to_bring(worker, copier, broken_at):
    copier.broken_at = broken_at
    worker.run(StepPlan(0, (held(0, 5),)))
    for section in range(broken_at):
        copier.allowed.release()
        waited(worker, copier, section)
    copier.allowed.release(SECTIONS)
    with pytest.raises(CopyFailed):
        waited(worker, copier, broken_at)
    with pytest.raises(CopyFailed):
        waited(worker, copier)


@pytest.mark.parametrize("lacks", [(), (GroupCopy(0, (5,), (5,)),)], ids=["its copies", "its source"])
def test_a_load_of_what_is_gone_has_failed(worker, copier, lacks):
    worker.run(StepPlan(0, (TransferPlan(0, Direction.LOAD, lacks, 0, failed=True, holds_compute=True),)))
    with pytest.raises(CopyFailed):
        waited(worker, copier)
    assert not copier.together


def test_where_compute_cannot_be_held_the_load_has_failed(worker, copier):
    def broken(event):
        raise OSError("the device is gone")

    copier.hold_compute = broken
    copier.allowed.release(SECTIONS)
    worker.run(StepPlan(0, (held(0, 5),)))
    with pytest.raises(CopyFailed):
        waited(worker, copier)
    assert worker.report().failed == {0}


def test_a_rank_that_has_nothing_of_a_load_does_not_wait(worker, copier):
    """As a stage of a pipeline without the layers of a group."""
    worker.run(StepPlan(0, (TransferPlan(0, Direction.LOAD, (), 0, holds_compute=True),)))
    waited(worker, copier)
    assert worker.report().done == {0} and not copier.together


def test_loads_of_a_worker_without_threads_have_come_when_it_has_run_the_plan(copier):
    worker = CopyWorker(0, copier)
    copier.allowed.release(SECTIONS)
    worker.run(StepPlan(0, (held(0, 5),)))
    assert worker.report().done == {0}
    waited(worker, copier, 1)
    assert copier.behind == [1]


def test_a_load_that_cannot_be_submitted_fails_alone(worker, copier):
    """Each of those that were to come with it comes by itself."""
    copier.poor = 7
    copier.allowed.release(2 * SECTIONS)
    worker.run(StepPlan(0, (held(0, 5), held(1, 7), held(2, 6))))
    eventually(lambda: worker.report().done == {0, 2})
    assert worker.report().failed == {1} and copier.together == [[(5, 7, 6)], [(5,)], [(7,)], [(6,)]]
    waited(worker, copier, 1, load=2)
    with pytest.raises(CopyFailed):
        waited(worker, copier, 1, load=1)


class RaisingOnce(End):
    """An event of work that has failed: whoever asks first learns of it."""

    def passed(self):
        if self.name == "failed":
            return True
        self.name = "failed"
        raise OSError("the device is gone")


def test_a_section_that_fails_is_a_failure_of_all_loads_that_it_was_of(worker, copier):
    copier.submit_sections = lambda copies, after, submitted: submitted(RaisingOnce(0))
    worker.run(StepPlan(0, (held(0, 5), held(1, 7))))
    for load in (0, 1, 0):
        with pytest.raises(CopyFailed):
            replace(worker.end_of(load), section=0).until_passed()
    assert worker.report().failed == {0, 1}


def test_compute_goes_on_with_no_section_that_was_seen_to_fail(worker, copier):
    ends = [RaisingOnce(0), Waiting(threading.Event())]
    copier.submit_sections = lambda copies, after, submitted: [*map(submitted, ends)]
    worker.run(StepPlan(0, (held(0, 5),)))
    end = replace(worker.end_of(0), section=0)
    assert eventually(lambda: worker.end_of(0).copy.event is not None)
    with suppress(CopyFailed):
        end.until_passed()
    try:
        with pytest.raises(CopyFailed):
            end.hold(copier.hold_compute)
        assert not copier.behind
    finally:
        ends[1].over.set()


def test_a_load_has_failed_when_nothing_of_it_is_in_flight(worker, copier):
    """Until then its blocks are its own, whatever is known of a section."""
    ends = [RaisingOnce(0), Waiting(threading.Event())]

    def submit_sections(copies, after, submitted):
        for end in ends:
            submitted(end)

    copier.submit_sections = submit_sections
    worker.run(StepPlan(0, (held(0, 5),)))
    with pytest.raises(CopyFailed):
        replace(worker.end_of(0), section=0).until_passed()
    assert not worker.report().failed
    ends[1].over.set()
    assert worker.report().failed == {0}


def test_a_question_waits_for_nobody_else_s_answer(worker, copier):
    over = threading.Event()
    copier.submit_sections = lambda copies, after, submitted: submitted(Waiting(over))
    worker.run(StepPlan(0, (held(0, 5),)))
    end = replace(worker.end_of(0), section=0)
    waiting = in_background(end.until_passed)
    begin = time.monotonic()
    assert not end.passed() and time.monotonic() < begin + 1
    over.set()
    waiting.join()
    assert end.passed()


def test_a_load_that_names_a_load_before_it_is_refused(worker, copier):
    copier.allowed.release(SECTIONS)
    worker.run(StepPlan(0, (held(0, 5), held(1, 6, after=(0,)))))
    eventually(lambda: worker.report().failed)
    assert copier.together == []


class Waiting(Event):
    def __init__(self, over):
        self.over = over

    def passed(self):
        return self.over.is_set()
