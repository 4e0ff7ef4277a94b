"""The time that a transfer took on a rank: passed on once for each that ended well, and only with a callback."""

from itertools import count

import pytest

from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.events import Event, Passed
from cpu_prefix_cache.copier.worker import CopyWorker
from cpu_prefix_cache.deciding import Direction, GroupCopy, StepPlan, TransferPlan

COPIES = (GroupCopy(0, (1,), (2,)),)


class AnEvent(Event):
    """An event that passes when a test ends it."""

    def __init__(self):
        self.ended = False

    def passed(self):
        return self.ended

    def until_passed(self):
        assert self.ended


class EventCopier(Copier):
    def __init__(self):
        self.events, self.broken = [], False

    def here(self):
        return Passed()

    def submit(self, direction, copies, after):
        if self.broken:
            raise RuntimeError("the link is down")
        self.events.append(AnEvent())
        return self.events[-1]


class Timed:
    """A worker on a clock that a test sets, and the times that it passes on."""

    def __init__(self, **options):
        self.now, self.told = 100.0, []
        self.copier = EventCopier()
        self.worker = CopyWorker(0, self.copier, clock=lambda: self.now, on_done=self.hear, **options)

    def hear(self, transfer, seconds):
        self.told.append((transfer.id, transfer.direction, transfer.num_bytes, seconds))

    def begins(self, *ids, direction=Direction.LOAD, failed=False, **fields):
        transfers = tuple(TransferPlan(id, direction, COPIES, 1_000 + id, failed) for id in ids)
        self.worker.run(StepPlan(0, transfers, **fields))


@pytest.fixture
def timed():
    return Timed()


def test_seconds_run_from_the_plan_to_the_report_that_sees_the_end(timed):
    timed.begins(0, direction=Direction.STORE)
    timed.now = 100.5
    timed.worker.report()
    assert timed.told == []
    timed.copier.events[0].ended = True
    timed.now = 102.0
    timed.worker.report()
    assert timed.told == [(0, Direction.STORE, 1_000, 2.0)]


def test_each_time_is_passed_on_once_however_often_its_transfer_is_reported(timed):
    timed.begins(0, 1)
    for event in timed.copier.events:
        event.ended = True
    for _ in range(3):
        assert timed.worker.report().done == {0, 1}
    timed.begins(resolved_below=2)
    assert [id for id, *_ in timed.told] == [0, 1]


def test_all_of_a_plan_began_with_it(timed):
    timed.copier.here = lambda: setattr(timed, "now", 101.0) or Passed()
    submit = timed.copier.submit

    def slowly(direction, copies, after):
        timed.now += 3.0
        return submit(direction, copies, after)

    timed.copier.submit = slowly
    timed.begins(0, 1)
    for event in timed.copier.events:
        event.ended = True
    timed.worker.report()
    assert [seconds for *_, seconds in timed.told] == [6.0, 6.0]


def test_no_time_is_passed_on_of_transfers_that_failed_or_were_cancelled_or_never_began(timed):
    timed.copier.broken = True
    timed.begins(0)
    timed.copier.broken = False
    timed.begins(1, failed=True)
    timed.begins(2, cancelled=(2,))
    assert timed.worker.report().failed == {0, 1, 2}
    assert timed.told == []
    timed.begins(resolved_below=3)
    assert not timed.worker._copies, "what is over is kept for ever"


def test_no_time_is_passed_on_of_a_load_that_came_too_late():
    timed = Timed(load_seconds=5.0)
    timed.begins(0)
    timed.now = 106.0
    assert timed.worker.report().late == {0}
    timed.copier.events[0].ended = True
    assert timed.worker.report().failed == {0}
    assert timed.told == []


def test_nobody_reads_the_clock_for_nobody():
    reads = count()
    worker = CopyWorker(0, EventCopier(), clock=lambda: float(next(reads)))
    worker.run(StepPlan(0, (TransferPlan(0, Direction.LOAD, COPIES, 8),)))
    worker.report()
    assert next(reads) == 0
