"""The copying half: every transfer of a plan ends as done or failed, and is reported until a plan settles it."""

import gc
import os
import threading
import time
from contextlib import contextmanager
from threading import Semaphore

import pytest

from cpu_prefix_cache import MisuseError
from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.early import EarlyEnds
from cpu_prefix_cache.copier.events import Event, Passed
from cpu_prefix_cache.copier.worker import CopyWorker
from cpu_prefix_cache.deciding import Direction, GroupCopy, RankReport, StepPlan, TransferPlan
from cpu_prefix_cache.messages.plan import VERSION
from tests.support.simulated_driver import SLICE, SimulatedDriver, pinned_arena
from tests.support.threads import eventually


class CountingCopier(Copier):
    """Counts the copies submitted, and fails while it is `broken`."""

    def __init__(self) -> None:
        self.copied = 0
        self.broken = False

    def here(self):
        return Passed()

    def submit(self, direction, copies, after):
        if self.broken:
            raise RuntimeError("the link is down")
        self.copied += 1
        return Passed()


COPIES = (GroupCopy(0, (1,), (2,)),)


def plan(*ids, failed=False, direction=Direction.LOAD, copies=COPIES, **fields):
    return StepPlan(0, tuple(TransferPlan(id, direction, copies, 0, failed) for id in ids), **fields)


@pytest.fixture
def copier():
    return CountingCopier()


@pytest.fixture
def worker(copier):
    return CopyWorker(3, copier)


def test_copied_transfers_are_reported_done(worker, copier):
    worker.run(plan(0, 1))
    assert worker.report().rank == 3
    assert worker.report().done == {0, 1}
    assert copier.copied == 2


def test_a_report_is_repeated_until_a_plan_settles_it(worker):
    worker.run(plan(0, 1))
    worker.run(plan(2))
    assert worker.report().done == {0, 1, 2}
    worker.run(plan(resolved_below=2))
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


def test_a_transfer_that_copies_nothing_here_is_done_at_once(worker, copier):
    worker.run(plan(0, copies=()))
    worker.run(plan(1, copies=(), failed=True))
    worker.run(plan(2, copies=(), cancelled=(2,)))
    assert worker.report().done == {0} and worker.report().failed == {1, 2}
    assert copier.copied == 0


def test_a_plan_of_another_version_is_refused_whole(worker, copier):
    with pytest.raises(MisuseError, match="version"):
        worker.run(plan(0, version=VERSION + 1))
    assert copier.copied == 0


def test_transfers_settled_one_by_one_are_not_repeated_either(worker):
    worker.run(plan(0, 1, 2))
    worker.run(plan(resolved_below=1, resolved=(2,)))
    assert worker.report().done == {1}


def test_an_interrupt_leaves_nothing_that_nobody_will_report(worker, copier):
    def interrupted(direction, copies, after):
        raise KeyboardInterrupt

    worker.run(plan(0))
    copier.submit = interrupted
    with pytest.raises(KeyboardInterrupt):
        worker.run(plan(1, 2))
    assert worker.report().done == {0}
    assert worker.report().failed == {1, 2}


# With threads


class HeldCopier(CountingCopier):
    """Every submission waits until it is let through; its events pass once they are in `ended`."""

    def __init__(self):
        super().__init__()
        self.began = Semaphore(0)
        self.let_through = Semaphore(0)
        self.ended = set()
        self.threads = set()

    def submit(self, direction, copies, after):
        self.threads.add((direction, threading.current_thread().name))
        self.began.release()
        assert self.let_through.acquire(timeout=10)
        super().submit(direction, copies, after)
        return HeldEvent(self.ended, self.copied - 1)


class HeldEvent(Event):
    def __init__(self, ended, number):
        self.ended, self.number = ended, number

    def passed(self):
        if (self.number, "broken") in self.ended:
            raise RuntimeError("the device is gone")
        return self.number in self.ended

    def until_passed(self):
        while not self.passed():
            time.sleep(0.001)


@pytest.fixture
def held():
    return HeldCopier()


@pytest.fixture
def threaded(held):
    worker = CopyWorker(0, held, threads=True)
    yield worker
    held.ended.update(range(20))
    for _ in range(20):
        held.let_through.release()
    worker.close()


def test_run_returns_while_a_transfer_is_being_submitted(threaded, held):
    threaded.run(plan(0))
    assert held.began.acquire(timeout=10)
    assert not threaded.report().done
    held.let_through.release()
    assert eventually(lambda: held.copied == 1) and not threaded.report().done  # submitted, not ended
    held.ended.add(0)
    assert eventually(lambda: threaded.report().done == {0})


def test_a_load_does_not_wait_for_the_submission_of_stores(threaded, held):
    threaded.run(plan(0, 1, direction=Direction.STORE))
    threaded.run(plan(2))
    assert held.began.acquire(timeout=10) and held.began.acquire(timeout=10)
    assert {direction for direction, _ in held.threads} == set(Direction)
    assert len({name for _, name in held.threads}) == 2


def test_a_transfer_without_copies_here_waits_for_nothing(threaded, held):
    threaded.run(plan(0))
    threaded.run(plan(1, copies=()))
    assert threaded.report().done == {1}
    held.let_through.release()
    held.ended.add(0)
    assert eventually(lambda: threaded.report().done == {0, 1})


def test_a_load_that_is_cancelled_while_it_waits_is_not_begun(threaded, held):
    threaded.run(plan(0, 1))
    assert held.began.acquire(timeout=10)
    threaded.run(plan(cancelled=(1,)))
    held.let_through.release()
    assert eventually(lambda: threaded.report().failed == {1})
    held.ended.add(0)
    assert eventually(lambda: threaded.report().done == {0})
    assert held.copied == 1


# Loads that overwrite what a store reads

STORE = TransferPlan(0, Direction.STORE, COPIES, 0)
LOAD_AFTER = TransferPlan(1, Direction.LOAD, COPIES, 0, after=(0,))


def test_a_load_begins_when_the_store_of_what_it_overwrites_has_ended(threaded, held):
    threaded.run(StepPlan(0, (STORE, LOAD_AFTER)))
    assert held.began.acquire(timeout=10)
    held.let_through.release()
    assert eventually(lambda: held.copied == 1)  # it is submitted, and has not ended
    assert not held.began.acquire(timeout=0.05)
    held.ended.add(0)
    assert held.began.acquire(timeout=10)
    held.let_through.release()
    held.ended.add(1)
    assert eventually(lambda: threaded.report().done == {0, 1})


@pytest.mark.parametrize("failing", ["at once", "on the link"])
def test_a_load_begins_also_when_the_store_before_it_has_failed(threaded, held, failing):
    held.broken = failing == "at once"
    threaded.run(StepPlan(0, (STORE, LOAD_AFTER)))
    held.let_through.release()
    assert held.began.acquire(timeout=10)
    if failing == "on the link":
        held.ended.add((0, "broken"))
    assert eventually(lambda: threaded.report().failed == {0})
    held.broken = False
    held.let_through.release()
    held.ended.update((0, 1))
    assert eventually(lambda: 1 in threaded.report().done | threaded.report().failed)
    assert threaded.report().failed == {0}


def test_a_load_can_be_cancelled_while_it_waits_for_a_store(threaded, held):
    threaded.run(StepPlan(0, (STORE, LOAD_AFTER)))
    assert held.began.acquire(timeout=10)
    threaded.run(plan(cancelled=(1,)))
    held.let_through.release()
    held.ended.add(0)
    assert eventually(lambda: threaded.report() == RankReport(0, frozenset({0}), frozenset({1})))
    assert held.copied == 1


def test_a_store_that_compute_cannot_wait_for_fails_once_its_copy_has_ended(worker, copier, monkeypatch):
    """Others may be given its host blocks then."""
    ended = []

    class Moving(Passed):
        def until_passed(self):
            ended.append(worker.report().failed)

    def refuse(event):
        raise RuntimeError("no stream can wait")

    monkeypatch.setattr(copier, "submit", lambda *arguments: Moving())
    monkeypatch.setattr(copier, "hold_compute", refuse)
    worker.run(StepPlan(0, (TransferPlan(0, Direction.STORE, COPIES, 0, holds_compute=True),)))
    assert worker.report().failed == {0} and ended == [frozenset()]


def test_a_store_that_ended_long_ago_holds_nothing_up(threaded, held):
    threaded.run(StepPlan(0, (LOAD_AFTER,)))
    assert held.began.acquire(timeout=10)


def test_without_threads_such_a_load_is_submitted_after_its_store(copier):
    worker = CopyWorker(0, copier)
    worker.run(StepPlan(0, (STORE, LOAD_AFTER)))
    assert worker.report().done == {0, 1}


def test_the_copier_is_notified_while_a_load_waits_for_a_store(threaded, held, monkeypatch):
    said = []

    @contextmanager
    def awaiting():
        said.append("waits")
        yield
        said.append("has waited")

    monkeypatch.setattr(held, "awaiting_stores", awaiting)
    threaded.run(StepPlan(0, (STORE, LOAD_AFTER)))
    held.let_through.release()
    assert eventually(lambda: said == ["waits"])
    held.ended.add(0)
    assert eventually(lambda: said == ["waits", "has waited"])


class SlowToFail(Event):
    """Raises once, for the first thread that looks, and is passed from then on. The engine's thread is slow to look."""

    def __init__(self):
        self.engine, self.has_raised = threading.get_ident(), False
        self.looked, self.raised = threading.Event(), threading.Event()

    def passed(self):
        if threading.get_ident() == self.engine:
            self.looked.set()
            self.raised.wait(0.2)  # the load's thread looks meanwhile, if it may
        has_raised, self.has_raised = self.has_raised, True
        if not has_raised:
            self.raised.set()
            raise RuntimeError("the device is gone")
        return True

    def until_passed(self):
        self.looked.wait(0.2)
        self.passed()


def test_a_store_that_fails_is_not_done_though_a_load_waits_for_its_end_too():
    """Two threads look at its event, which raises once."""
    copier, event = CountingCopier(), SlowToFail()
    copier.submit = lambda direction, copies, after: event if direction is Direction.STORE else Passed()
    worker = CopyWorker(0, copier, threads=True)
    worker.run(StepPlan(0, (STORE, LOAD_AFTER)))
    assert eventually(lambda: worker.report() == RankReport(0, frozenset({1}), frozenset({0})))
    worker.close()


# Deadlines


@pytest.fixture
def punctual(held):
    """A worker whose clock is set by hand, and the clock."""
    now = [0.0]
    worker = CopyWorker(0, held, threads=True, load_seconds=30, clock=lambda: now[0])
    yield worker, now
    held.ended.update(range(20))
    for _ in range(20):
        held.let_through.release()
    worker.close()


def test_a_load_that_has_not_begun_in_time_never_does(punctual, held):
    worker, now = punctual
    worker.run(plan(0, 1))
    assert held.began.acquire(timeout=10)  # load 0 is being submitted, and 1 waits for that
    now[0] = 31
    report = worker.report()
    assert report.failed == {1} and report.late == {0}
    held.ended.add(0)
    held.let_through.release(2)
    worker.drain()
    assert held.copied == 1


def test_a_load_that_moves_is_late_until_it_has_ended_and_then_has_failed(punctual, held):
    worker, now = punctual
    worker.run(plan(0))
    held.let_through.release()
    assert eventually(lambda: held.copied == 1)
    now[0] = 29
    assert not worker.report().late
    now[0] = 30
    assert worker.report().late == {0} and not worker.report().failed
    held.ended.add(0)
    report = worker.report()
    assert report.failed == {0} and not report.done
    worker.run(plan(resolved_below=1))
    assert not worker.report().late and not worker.report().failed


def test_a_load_that_ended_in_time_and_was_looked_at_late_is_done(punctual, held):
    worker, now = punctual
    worker.run(plan(0))
    held.ended.add(0)
    held.let_through.release()
    worker.drain()
    now[0] = 100
    report = worker.report()
    assert report.done == {0} and not report.late


def test_stores_have_no_deadline(punctual, held):
    worker, now = punctual
    worker.run(plan(0, direction=Direction.STORE))
    now[0] = 100
    assert not worker.report().late and not worker.report().failed


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.filterwarnings("error")
def test_a_copy_thread_survives_whatever_is_raised(threaded, held, error):  # rule 10
    def failing(direction, copies, after):
        raise error("out of resources")

    works, held.submit = held.submit, failing
    threaded.run(plan(0))
    assert eventually(lambda: threaded.report().failed == {0})
    held.submit = works
    held.let_through.release()
    threaded.run(plan(1))
    held.ended.add(0)
    assert eventually(lambda: threaded.report().done == {1})


def test_a_transfer_whose_end_cannot_be_seen_has_failed_and_the_others_have_not(threaded, held):
    threaded.run(plan(0, 1))
    held.let_through.release()
    held.let_through.release()
    held.ended.add((0, "broken"))
    assert eventually(lambda: threaded.report().failed == {0})
    held.ended.add(1)
    assert eventually(lambda: threaded.report().done == {1})


class RaisingOnce(Passed):
    """It moves when it is looked at first, and raises then: once, for the driver reports its error to one caller."""

    def __init__(self):
        self.looks = 0

    def passed(self):
        self.looks += 1
        if self.looks == 2:
            raise RuntimeError("the device is gone")
        return self.looks > 2


def announced(worker):
    """Compute would run behind load 0."""
    with pytest.raises(RuntimeError, match="has failed, and the engine relies on"):
        EarlyEnds(worker, worker._copier).hold_compute({0})


@pytest.mark.parametrize("look", [CopyWorker.report, CopyWorker.drain, CopyWorker.close, announced])
def test_a_failure_that_is_raised_once_is_noted_by_whoever_sees_it(worker, copier, look):
    copier.submit = lambda direction, copies, after: RaisingOnce()
    worker.run(plan(0))
    look(worker)
    assert worker.report().failed == {0} and not worker.report().done


@pytest.mark.parametrize("end", [CopyWorker.close, lambda worker: None])
def test_a_failure_that_nobody_asks_for_is_logged_at_the_end(copier, end, caplog):
    worker = CopyWorker(0, copier)
    copier.submit = lambda direction, copies, after: RaisingOnce()
    worker.run(plan(0))
    end(worker)
    del worker
    gc.collect()
    assert [record.getMessage() for record in caplog.records] == ["transfer 0 failed: the device is gone"]


def test_a_failure_is_logged_once(worker, copier, caplog):
    copier.submit = lambda direction, copies, after: RaisingOnce()
    worker.run(plan(0))
    worker.close()
    worker.report()
    assert len(caplog.records) == 1


def test_settled_transfers_are_forgotten(worker, copier):
    worker.run(plan(0, 1, 2, 3, cancelled=(2, 9)))
    worker.run(plan(4, failed=True))
    assert worker.report().failed == {2, 4}
    worker.run(plan(resolved_below=3, resolved=(4,)))
    assert set(worker._copies) == {3}


@pytest.mark.parametrize("end", ["drain", "close"])
def test_drain_and_close_wait_until_all_has_ended(threaded, held, end):
    threaded.run(plan(0, 1))
    ender = threading.Thread(target=getattr(threaded, end))
    ender.start()
    held.let_through.release()
    held.let_through.release()
    assert eventually(lambda: held.copied == 2)
    held.ended.add(0)
    ender.join(0.05)
    assert ender.is_alive()  # the second is still moving
    held.ended.add(1)
    ender.join(10)
    assert not ender.is_alive() and threaded.report().done == {0, 1}


def test_closing_again_does_nothing_and_later_transfers_fail(threaded):
    for _ in range(3):
        threaded.close()
    threaded.run(plan(7))
    assert threaded.report().failed == {7}
    threaded.drain()


def test_a_fork_waits_for_no_threads(threaded, held, monkeypatch):
    """They are not there: its own end would never come."""
    threaded.run(plan(0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        threaded.close()
    assert threaded.is_busy
    held.let_through.release()


def test_a_worker_that_nobody_keeps_ends_its_threads():
    worker = CopyWorker(5, CountingCopier(), threads=True)
    assert {name.split("-")[0] for name in names_of_rank(5)} == {"store", "load"}
    del worker
    gc.collect()
    assert not names_of_rank(5)


def names_of_rank(rank):
    """Names of the threads of its worker."""
    names = (thread.name for thread in threading.enumerate())
    return [name for name in names if name.split("_")[0] in (f"store-{rank}", f"load-{rank}")]


def test_a_worker_that_is_collected_in_its_own_copy_thread_ends_its_threads():
    """Where CPython collects garbage nobody chooses, and a thread cannot wait for its own end."""
    dropped, came_back = threading.Event(), threading.Event()

    class Collecting(CountingCopier):
        def submit(self, direction, copies, after):
            assert dropped.wait(10)
            gc.collect()
            came_back.set()
            return super().submit(direction, copies, after)

    gc.disable()
    try:
        cycle = [CopyWorker(6, Collecting(), threads=True)]
        cycle.append(cycle)
        cycle[0].run(plan(0))
        del cycle
        dropped.set()
        assert came_back.wait(10)
        assert eventually(lambda: not names_of_rank(6))
    finally:
        gc.enable()


def test_all_of_a_plan_goes_behind_the_same_point_of_compute(copier):
    asked, given = [], []
    copier.here = lambda: asked.append(1) or Passed()
    copier.submit = lambda direction, copies, after: given.append(after) or Passed()
    CopyWorker(0, copier).run(plan(0, 1, 2))
    assert len(asked) == 1 and len(set(map(id, given))) == 1


def test_a_report_that_is_interrupted_is_made_again(worker, copier):
    class Interrupted(Passed):
        def passed(self):
            del Interrupted.passed
            raise KeyboardInterrupt

    copier.submit = lambda direction, copies, after: Interrupted()
    worker.run(plan(0, 1))
    with pytest.raises(KeyboardInterrupt):
        worker.report()
    assert worker.report().done == {0, 1}


# Loads that are about to end

MEGA = 1 << 20


@pytest.fixture
def paced(held):
    """A worker whose first load, of 64 MiB, took 10 s; its second, of 32 MiB, was begun at second 100."""
    worker = CopyWorker(0, held, threads=True, load_seconds=60, clock=lambda: worker.now)
    for id, worker.now, num_bytes in ((0, 0.0, 64 * MEGA), (1, 100.0, 32 * MEGA)):
        worker.run(StepPlan(0, (TransferPlan(id, Direction.LOAD, COPIES, num_bytes),)))
        assert held.began.acquire(timeout=10)
        if id == 0:
            worker.now = 10.0
            end(held, 0)
            assert eventually(lambda: worker.report().done == {0})
    yield worker
    held.let_through.release(10)
    held.ended.update(range(10))
    worker.close()


@pytest.fixture
def early(paced, held):
    return EarlyEnds(paced, held, clock=lambda: paced.now)


def end(held, what=1):
    held.let_through.release()
    held.ended.add(what)


def test_the_end_of_a_load_is_predicted_from_earlier_loads(paced, early):
    paced.now = 104.5
    assert early.ends_soon(0.4) == set()
    assert early.ends_soon(0.6) == {1}
    assert paced.report().done == {0}


def test_the_end_of_a_load_is_not_predicted_before_half_of_it_is_over(paced, early):
    paced.now = 102.4
    assert early.ends_soon(1000) == set()
    paced.now = 102.6
    assert early.ends_soon(1000) == {1}


def test_compute_held_for_a_predicted_end_waits_for_the_load(paced, early, held):
    threading.Timer(0.05, end, [held]).start()
    early.hold_compute({1})
    assert held.copied == 2
    assert paced.report().done == {0, 1}
    early.hold_compute({0, 1})


def test_once_it_is_submitted_compute_alone_waits(paced, early, held):
    """Where it can: a staged copier has the engine's stream wait."""
    behind = []
    held.hold_compute = lambda event: behind.append(event.number)
    threading.Timer(0.05, held.let_through.release).start()
    early.hold_compute({1})
    assert behind == [1] and paced.report().done == {0}


def test_a_load_that_fails_is_an_error_for_who_went_by_it(paced, early, held):
    held.let_through.release()
    held.ended.add((1, "broken"))
    with pytest.raises(RuntimeError, match="load 1 has failed, and the engine relies on"):
        early.hold_compute({1})
    assert paced.report().failed == {1}


def test_an_announced_load_that_fails_raises_until_the_next_plan_settles_it(paced, early, held):
    assert early.still_open({0, 1}) == {1}
    held.let_through.release()
    held.ended.add((1, "broken"))
    assert eventually(lambda: paced.report().failed == {1})
    with pytest.raises(RuntimeError, match="load 1 has failed, and the engine relies on"):
        early.still_open({1})
    paced.run(StepPlan(0, (), resolved=(1,)))
    assert early.still_open({1}) == set()


def test_a_load_that_has_not_ended_by_its_deadline_is_an_error_for_who_went_by_it(paced, early):
    paced.now = 161.0
    with pytest.raises(RuntimeError, match="has failed, and the engine relies on"):
        early.hold_compute({1})
    assert early.ends_soon(1000) == set()


def test_loads_that_have_not_begun_are_not_predicted(paced, early):
    paced.run(StepPlan(0, (TransferPlan(2, Direction.LOAD, COPIES, MEGA),)))
    paced.now = 104.9
    assert early.ends_soon(1000) == {1}


def test_one_slow_load_does_not_change_much(paced, early, held):
    paced.now = 120.0  # for 5 s of link
    end(held)
    assert eventually(lambda: paced.report().done == {0, 1})
    paced.now = 200.0
    paced.run(StepPlan(0, (TransferPlan(2, Direction.LOAD, COPIES, 64 * MEGA),)))
    assert held.began.acquire(timeout=10)
    paced.now = 210.5
    assert early.ends_soon(0.4) == set()  # a tenth slower than the fastest
    paced.now = 210.7
    assert early.ends_soon(0.4) == {2}


def test_one_load_that_took_no_time_does_not_change_much(paced, early, held):
    paced.now = 100.0 + 1e-6
    end(held)
    assert eventually(lambda: paced.report().done == {0, 1})
    paced.run(StepPlan(0, (TransferPlan(2, Direction.LOAD, COPIES, 64 * MEGA),)))
    assert held.began.acquire(timeout=10)
    paced.now += 1
    assert early.ends_soon(1) == set()


def test_before_a_load_has_ended_nobody_knows(threaded, held):
    threaded.run(StepPlan(0, (TransferPlan(0, Direction.LOAD, COPIES, 64 * MEGA),)))
    assert held.began.acquire(timeout=10)
    assert EarlyEnds(threaded, held).ends_soon(1e9) == set()


def load_of(worker, held, id, num_bytes, seconds):
    worker.now = 1000.0 * id
    worker.run(StepPlan(0, (TransferPlan(id, Direction.LOAD, COPIES, num_bytes),)))
    assert held.began.acquire(timeout=10)
    worker.now += seconds
    end(held, held.copied)
    assert eventually(lambda: id in worker.report().done)
    return worker.report().load_bytes_per_second


def test_the_rate_of_the_link_is_measured_by_three_large_loads(held):
    """The fastest of them does; of smaller ones a large part is not timed."""
    worker = CopyWorker(0, held, threads=True, clock=lambda: worker.now)
    told = [
        load_of(worker, held, id, num_bytes, seconds)
        for id, (num_bytes, seconds) in enumerate(
            [(256 * MEGA, 8.0), (128 * MEGA, 1.0), (256 * MEGA, 2.0), (256 * MEGA, 4.0), (256 * MEGA, 16.0)]
        )
    ]
    worker.close()
    assert told == [None, None, None, 128 * MEGA, 128 * MEGA]


# The host region


@pytest.fixture
def driver():
    return SimulatedDriver()


def test_the_host_region_is_pinned_from_the_first_plan_on_even_an_empty_one(copier, driver):
    worker = CopyWorker(0, copier, pinned_arena(driver))
    assert worker.report().ready_blocks == 0 and not driver.order
    driver.gate = Semaphore(3)
    worker.run(plan())
    assert eventually(lambda: worker.report().ready_blocks == 3 * SLICE // 30_000)
    driver.gate.release(10)
    assert eventually(lambda: worker.report().ready_blocks == 10)
    assert driver.registered
    worker.close()
    assert not driver.registered


def test_the_region_is_closed_after_the_copies_have_ended(held, driver):
    arena = pinned_arena(driver)
    arena.wait_until_ready()
    worker = CopyWorker(0, held, arena, threads=True)
    seen = []
    unregister = driver.unregister
    driver.unregister = lambda address: seen.append(held.copied) or unregister(address)
    worker.run(plan(0))
    held.ended.add(0)
    threading.Timer(0.05, held.let_through.release).start()
    worker.close()
    assert set(seen) == {1} and not driver.registered


def test_a_plan_whose_beginning_fails_is_reported_as_failed(copier, driver, monkeypatch):
    class NoMoreThreads:
        def __init__(self, **_):
            raise RuntimeError("can't start new thread")

    arena = pinned_arena(driver)
    worker = CopyWorker(0, copier, arena)
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", NoMoreThreads)
        with pytest.raises(RuntimeError):
            worker.run(plan(0, 1))
    assert worker.report().failed == {0, 1}
    arena.close()


def test_a_close_that_is_interrupted_can_be_made_again(held, driver, monkeypatch):
    arena = pinned_arena(driver)
    arena.wait_until_ready()
    worker = CopyWorker(7, held, arena, threads=True)
    held.let_through.release()
    worker.run(plan(0))
    with monkeypatch.context() as patch:
        patch.setattr(HeldEvent, "until_passed", interrupted)
        with pytest.raises(KeyboardInterrupt):
            worker.close()
    assert names_of_rank(7) and driver.registered
    held.ended.add(0)
    worker.close()
    assert not names_of_rank(7) and not driver.registered


def interrupted(event):
    raise KeyboardInterrupt


def test_a_worker_without_a_region_reports_no_ready_blocks(worker):
    assert worker.report().ready_blocks is None
