"""The copying half on one rank: carries out step plans and says, until it is heard, what became of them.

StepPlan  ->  run  ->  every transfer ends as done or failed, interrupts included (rule 11)
report    ->  all that has ended and no plan has called settled yet, and how many host blocks are ready

A load has a deadline. One that has not begun by then never will: it has failed. One that is moving cannot be called
back: it is reported as late, so that nobody waits for it any more, and as failed when it has ended.

Who is told of the end of a load needs a while until it computes. `ends_soon` says which load is about to end, by the
pace of those before. Whoever goes by that asks before each plan whether it is `still_open`, and calls `hold_compute`
before anything reads what it loads.
"""

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.queues import Mark
from cpu_prefix_cache.copier.submitter import Submitter
from cpu_prefix_cache.memory.arena import HostArena
from cpu_prefix_cache.messages.errors import MisuseError
from cpu_prefix_cache.messages.plan import VERSION, Direction, RankReport, StepPlan, TransferPlan

logger = logging.getLogger(__name__)

NAP_SECONDS = 100e-6
TELLING_BYTES = 16 << 20  # a load of so many says how fast loads are; smaller ones spend their time elsewhere
FASTEST = 1e-12  # seconds a byte: a load that took less was of nothing on this rank
SLOWER = 1.1  # at most, from one load to the next: that one was late need not mean that the next will be


class AnnouncedLoadError(RuntimeError):
    """A load that was said to end soon has not ended well: its device blocks do not hold what they are taken for."""


class _Open(NamedTuple):
    """A transfer that has not ended, and when its plan began, if anybody wants to know."""

    transfer: TransferPlan
    began: float


class CopyWorker:
    """Runs plans with one copier. One per rank, called by one thread.

    Loads are late after `load_seconds`, by `clock`; None: never. `load_bytes_per_second`, if it is known, is passed on
    with every report.

    With `threads`, stores and loads are submitted by a thread each, and `run` returns at once; a report says what has
    ended by then. Without, `run` submits them itself. `arena` is pinned from the first plan on, whatever is in it, and
    belongs to the worker: both end with `close`.

    `on_done` is told of each transfer that ended well, and in how many seconds: from when its plan began until it was
    seen to have ended, which is when somebody asks for a report.
    """

    def __init__(
        self,
        rank: int,
        copier: Copier,
        arena: HostArena | None = None,
        *,
        threads: bool = False,
        load_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_done: Callable[[TransferPlan, float], object] | None = None,
        load_bytes_per_second: float | None = None,
    ) -> None:
        self._rank = rank
        self._copier = copier
        self._arena = arena
        self._cancelled: set[int] = set()
        self._submitters = {
            direction: Submitter(
                copier,
                self._cancelled.__contains__,
                f"{direction.value}-{rank}" if threads else None,
                clock if threads and direction is Direction.LOAD else None,
            )
            for direction in Direction
        }
        self._load_seconds = load_seconds
        self._clock = clock
        self._on_done = on_done
        self._load_bytes_per_second = load_bytes_per_second
        self._open: dict[int, _Open] = {}  # in their order
        self._late: set[int] = set()
        self._seconds_per_byte: float | None = None  # that loads took, until they were submitted: nearly to their end
        self._done: set[int] = set()
        self._failed: set[int] = set()
        # at exit at the latest
        self._ending = weakref.finalize(self, _end, os.getpid(), list(self._submitters.values()), arena)

    def run(self, plan: StepPlan) -> None:
        """Begin one step's transfers, behind what compute has been given by now.

        Raises MisuseError for a plan of another version, before anything begins.
        """
        if plan.version != VERSION:
            raise MisuseError(f"this rank understands plans of version {VERSION}, got {plan.version}")
        waiting = {transfer.id: transfer for transfer in plan.transfers}
        try:
            if self._arena is not None:
                self._arena.register()
            self._forget(plan)
            self._cancelled.update(plan.cancelled)
            after = self._copier.here() if waiting else None
            is_timed = self._on_done is not None or self._load_seconds is not None
            began = self._clock() if waiting and is_timed else 0.0
            for id, transfer in list(waiting.items()):
                if after is None or transfer.failed or id in plan.cancelled:
                    continue
                self._open[id] = _Open(transfer, began)
                try:
                    self._submitters[transfer.direction].put(transfer, after)
                finally:  # from here on the submitter says what became of it
                    del waiting[id]
        finally:  # an interrupt leaves nothing that nobody will ever report
            self._failed.update(waiting)

    def report(self) -> RankReport:
        self._collect()
        if self._give_up():
            self._collect()
        ready = None if self._arena is None else self._arena.ready_blocks
        ended = frozenset(self._done), frozenset(self._failed)
        return RankReport(self._rank, *ended, ready, frozenset(self._late), self._load_bytes_per_second)

    def ends_soon(self, seconds: float) -> set[int]:
        """The loads that have at most so many seconds to go, by the pace of those before, and half of their time behind
        them. None without threads. For the ledger they end when `report` says so.
        """
        pace, soon = self._seconds_per_byte, set[int]()
        for load, _ in self._open_loads():  # one at a time is on the link
            begun = self._submitters[Direction.LOAD].taken_up(load.id)
            if pace is None or begun is None or load.id in self._late:
                break
            gone, all_in_all = self._clock() - begun, load.num_bytes * pace
            if gone < max(all_in_all - seconds, all_in_all / 2):
                break
            soon.add(load.id)
        return soon

    def still_open(self, ids: Iterable[int]) -> set[int]:
        """Those of these loads that have not ended. To be asked before each plan, which may have an end forgotten.

        Raises AnnouncedLoadError if one has failed, or is late.
        """
        report = self.report()
        lost = sorted((report.failed | report.late).intersection(ids))
        if lost:
            raise AnnouncedLoadError(f"load {lost[0]}, said to be ending, has failed: what it loads would be used")
        return {id for id in ids if id in self._open}

    def hold_compute(self, ids: Iterable[int]) -> None:
        """Have what compute is given from here on run after these loads. Returns once they have been submitted.

        Raises AnnouncedLoadError if one has failed, or is late.
        """
        waiting = self.still_open(ids)
        while waiting:
            marks = {id: self._submitters[Direction.LOAD].mark(id) for id in waiting}
            submitted = {id: mark for id, mark in marks.items() if mark is not None}
            for id, mark in submitted.items():
                self._hold_compute(id, mark)
            waiting = self.still_open(waiting - submitted.keys())
            if waiting:
                time.sleep(NAP_SECONDS)

    def _hold_compute(self, id: int, mark: Mark) -> None:
        try:
            self._copier.hold_compute(mark)
        except Exception as error:
            raise AnnouncedLoadError(f"load {id}, said to be ending, has failed: {error}") from error

    @property
    def is_busy(self) -> bool:
        """Whether a transfer has not ended, or its end was not reported."""
        return any(submitter.is_busy for submitter in self._submitters.values())

    def drain(self) -> None:
        """Until all that was begun has ended."""
        for submitter in self._submitters.values():
            submitter.drain()

    def close(self) -> None:
        """End the threads and give the host region back, once all that was begun has ended."""
        self._ending()

    def _collect(self) -> None:
        for submitter in self._submitters.values():
            for id, went_well in submitter.ended():
                is_done = went_well and id not in self._late  # what came too late is of no use to anybody
                (self._done if is_done else self._failed).add(id)
                ended = self._open.pop(id, None)  # None: an interrupt has it said again
                if ended is not None:
                    self._learn(ended.transfer.num_bytes, submitter.submitted_in(id))
                    if is_done and self._on_done is not None:
                        self._on_done(ended.transfer, self._clock() - ended.began)

    def _learn(self, num_bytes: int, seconds: float | None) -> None:
        """How fast loads are; of stores nobody knows the seconds."""
        if seconds is None or num_bytes < TELLING_BYTES or seconds < num_bytes * FASTEST:
            return
        taken = seconds / num_bytes
        known = taken if self._seconds_per_byte is None else self._seconds_per_byte
        self._seconds_per_byte = min(taken, known * SLOWER)

    def _open_loads(self) -> list[_Open]:
        return [each for each in self._open.values() if each.transfer.direction is Direction.LOAD]

    def _give_up(self) -> bool:
        """End the wait for loads whose time is up. Whether there are any."""
        if self._load_seconds is None:
            return False
        waited_for = [each for each in self._open_loads() if each.transfer.id not in self._late]
        if not waited_for:
            return False
        now = self._clock()
        over = [each.transfer.id for each in waited_for if now >= each.began + self._load_seconds]
        for id in over:
            if not self._submitters[Direction.LOAD].abandon(id):
                self._late.add(id)
            logger.error("load %d has not ended in %s s and is given up", id, self._load_seconds)
        return bool(over)

    def _forget(self, plan: StepPlan) -> None:
        self._collect()
        settled = set(plan.settled)
        self._done = {id for id in self._done if id >= plan.settled_below} - settled
        self._failed = {id for id in self._failed if id >= plan.settled_below} - settled
        self._late = {id for id in self._late if id >= plan.settled_below} - settled
        self._cancelled -= {id for id in self._cancelled if id < plan.settled_below} | settled


def _end(process: int, submitters: Sequence[Submitter], arena: HostArena | None) -> None:
    if os.getpid() != process:
        return  # a fork has none of the threads, and would wait for them for ever
    for submitter in submitters:
        submitter.close()
    if arena is not None:
        arena.close()
