"""The copying half on one rank: carries out step plans and says, until it is heard, what became of them.

StepPlan  ->  run  ->  every transfer ends as done or failed, interrupts included (rule 11)
report    ->  all that has ended and no plan has called resolved yet, and how many host blocks are ready

There is one record for each transfer, from its plan until a plan calls it resolved:

    waiting  --taken up-->  being submitted  ---->  moving  --its event is passed-->  done
        |                          `--raised-->  failed  `--raised, or too late-->  failed
        `--cancelled-->  failed

A transfer is taken up or cancelled, and never both: that is the promise of a Future. Each direction has a thread, which
takes up its transfers in order; whatever is raised fails the transfer it is about, and the next one is taken up.
Without threads `run` submits them itself, and an interrupt goes on to the caller after it has failed its transfer.

A load has a deadline. One that has not begun by then never will: it has failed. One that is moving cannot be called
back: it is reported as late, so that nobody waits for it any more, and as failed when it has ended.

Who is told of the end of a load needs a while until it computes. `ends_soon` says which load is about to end, by the
pace of those before. Whoever goes by that asks before each plan whether it is `still_open`, and calls `hold_compute`
before anything reads what it loads.
"""

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.streams import Event, Passed
from cpu_prefix_cache.copier.switch_interval import short_switch_interval
from cpu_prefix_cache.memory.arena import HostArena
from cpu_prefix_cache.memory.ending import end_outside_of
from cpu_prefix_cache.messages.errors import MisuseError
from cpu_prefix_cache.messages.plan import VERSION, Direction, RankReport, StepPlan, TransferPlan

logger = logging.getLogger(__name__)

NAP_SECONDS = 100e-6
TELLING_BYTES = 16 << 20  # a load of so many says how fast loads are; smaller ones spend their time elsewhere
FASTEST = 1e-12  # seconds a byte: a load that took less has crossed no link
SLOWER = 1.1  # at most, from one load to the next: that one was late need not mean that the next will be
RATED_BYTES = 256 << 20  # a load of so many says how fast the link is, within a quarter: the last 62 MiB are not timed
RATED_LOADS = 3  # so many, of which the fastest counts, as any of them may have been held up


class AnnouncedLoadError(RuntimeError):
    """A load that was said to end soon has not ended well: its device blocks do not hold what they are taken for."""


@dataclass(slots=True, eq=False)
class _Copy:
    """One transfer. The thread of its direction sets what it finds when it takes it up, the worker's caller the rest.

    `submission` is waiting, running, cancelled, or over: then there is the `event` of the transfer's end, which nothing
    needs that copies nothing, or `submission` has what the copier raised.
    """

    transfer: TransferPlan
    submission: "Future[None]" = field(default_factory=Future)
    event: Event | None = None
    began: float = 0.0  # when its plan was, if anybody wants to know; all times are by the worker's clock, in seconds
    taken_up: float | None = None  # of a load in a thread
    submitted_in: float | None = None  # seconds since then, nearly to its end
    went_well: bool | None = None  # once it has ended
    is_late: bool = False


class CopyWorker:
    """Runs plans with one copier. One per rank, called by one thread.

    Loads are late after `load_seconds` seconds, by `clock`; None: never.

    With `threads`, stores and loads are submitted by a thread each, and `run` returns at once; a report says what has
    ended by then. Without, `run` submits them itself. `arena` is pinned from the first plan on, whatever is in it, and
    belongs to the worker: both end with `close`, at the latest when nobody keeps the worker, or with the process.

    A transfer without copies is done at once: this rank has no share of it.

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
    ) -> None:
        self._rank, self._copier, self._arena = rank, copier, arena
        self._load_seconds, self._clock, self._on_done = load_seconds, clock, on_done
        self._copies: dict[int, _Copy] = {}  # in the order of their plans
        self._seconds_per_byte: float | None = None  # of loads
        self._rated, self._bytes_per_second = 0, 0.0  # large loads, and the rate of the fastest
        self._threads = {each: _CopyThread(f"{each.value}-{rank}") for each in Direction if threads}
        self._closed = False
        self._end = partial(_end, os.getpid(), list(self._threads.values()), self._copies, arena)
        self._ending = weakref.finalize(self, self._end)

    def run(self, plan: StepPlan) -> None:
        """Begin one step's transfers, behind what compute has been given by now.

        Raises MisuseError for a plan of another version, before anything begins.
        """
        if plan.version != VERSION:
            raise MisuseError(f"this rank understands plans of version {VERSION}, got {plan.version}")
        is_timed = self._on_done is not None or self._load_seconds is not None
        new = {transfer.id: _Copy(transfer) for transfer in plan.transfers}
        try:
            if self._arena is not None:
                self._arena.register()
            self._collect()
            self._forget(plan)
            after = self._copier.here() if new else Passed()
            began = self._clock() if new and is_timed else 0.0
            self._copies |= new
            for id in self._copies.keys() & plan.cancelled:
                self._copies[id].submission.cancel()
            for copy in new.values():
                copy.began = began
                self._begin(copy, after)
        except BaseException:  # an interrupt leaves nothing that nobody will ever report
            for id, copy in new.items():
                self._copies.setdefault(id, copy).submission.cancel()
            raise

    def report(self) -> RankReport:
        self._collect()
        self._give_up()
        ready = None if self._arena is None else self._arena.ready_blocks
        done = frozenset(id for id, copy in self._copies.items() if copy.went_well)
        failed = frozenset(id for id, copy in self._copies.items() if copy.went_well is False)
        late = frozenset(id for id, copy in self._copies.items() if copy.is_late)
        rate = self._bytes_per_second if self._rated >= RATED_LOADS else None
        return RankReport(self._rank, done, failed, ready, late, rate)

    def ends_soon(self, seconds: float) -> set[int]:
        """The loads that have at most so many seconds to go, by the pace of those before, and half of their time behind
        them. None without threads. For the ledger they end when `report` says so.
        """
        pace, soon = self._seconds_per_byte, set[int]()
        for load in self._open_loads():  # one at a time is on the link
            if pace is None or load.taken_up is None or load.is_late:
                break
            gone, all_in_all = self._clock() - load.taken_up, load.transfer.num_bytes * pace
            if gone < max(all_in_all - seconds, all_in_all / 2):
                break
            soon.add(load.transfer.id)
        return soon

    def still_open(self, ids: Iterable[int]) -> set[int]:
        """Those of these loads that have not ended. To be asked before each plan, which may have an end forgotten.

        Raises AnnouncedLoadError if one has failed, or is late.
        """
        report = self.report()
        lost = sorted((report.failed | report.late).intersection(ids))
        if lost:
            raise AnnouncedLoadError(f"load {lost[0]}, said to be ending, has failed: what it loads would be used")
        return {id for id in ids if id in self._copies and self._copies[id].went_well is None}

    def hold_compute(self, ids: Iterable[int]) -> None:
        """Have what compute is given from here on run after these loads. Returns once they have been submitted.

        Raises AnnouncedLoadError if one has failed, or is late.
        """
        waiting = self.still_open(ids)
        while waiting:
            events = {id: event for id in waiting if (event := self._copies[id].event) is not None}
            for id, event in events.items():
                try:
                    self._copier.hold_compute(event)
                except Exception as error:
                    raise AnnouncedLoadError(f"load {id}, said to be ending, has failed: {error}") from error
            waiting = self.still_open(waiting - events.keys())
            if waiting:
                time.sleep(NAP_SECONDS)

    @property
    def is_busy(self) -> bool:
        """Whether a transfer has not ended, or nobody has asked for a report since."""
        return any(copy.went_well is None for copy in self._copies.values())

    def drain(self) -> None:
        """Until all that was begun has ended."""
        _drain(self._copies)

    def close(self) -> None:
        """End the threads and give the host region back, once all that was begun has ended. What comes later fails."""
        self._closed = True
        self._end()  # and again, if this is interrupted
        self._ending.detach()

    def _begin(self, copy: _Copy, after: Event) -> None:
        """Unless it is cancelled."""
        transfer = copy.transfer
        if transfer.failed or self._closed:
            copy.submission.cancel()
        elif not transfer.copies and not copy.submission.cancelled():
            copy.submission.set_result(None)
        elif self._threads:
            clock = self._clock if transfer.direction is Direction.LOAD else None
            self._threads[transfer.direction].jobs.put(partial(_submit, copy, self._copier, after, clock))
        else:
            _submit(copy, self._copier, after, None)

    def _open_loads(self) -> list[_Copy]:
        copies = self._copies.values()
        return [copy for copy in copies if copy.went_well is None and copy.transfer.direction is Direction.LOAD]

    def _collect(self) -> None:
        """See what has ended. Those of one direction do so in their order: behind one that moves nobody is asked."""
        moving = set[Direction]()
        for copy in self._copies.values():
            if copy.went_well is not None or (copy.event is not None and copy.transfer.direction in moving):
                continue
            went_well = _ended(copy)
            if went_well is None:
                moving.add(copy.transfer.direction)
                continue
            copy.went_well = went_well and not copy.is_late  # what came too late is of no use to anybody
            self._learn(copy)
            if copy.went_well and self._on_done is not None:
                self._on_done(copy.transfer, self._clock() - copy.began)

    def _learn(self, copy: _Copy) -> None:
        """How fast loads are; of stores nobody knows the seconds."""
        seconds, num_bytes = copy.submitted_in, copy.transfer.num_bytes
        if seconds is None or num_bytes < TELLING_BYTES or seconds < num_bytes * FASTEST:
            return
        taken = seconds / num_bytes
        known = taken if self._seconds_per_byte is None else self._seconds_per_byte
        self._seconds_per_byte = min(taken, known * SLOWER)
        if num_bytes >= RATED_BYTES:
            self._rated += 1
            self._bytes_per_second = max(self._bytes_per_second, 1 / taken)

    def _give_up(self) -> None:
        """End the wait for loads whose time is up."""
        if (limit := self._load_seconds) is None or not (loads := self._open_loads()):
            return
        now = self._clock()
        for load in loads:
            if not load.is_late and now >= load.began + limit:
                load.is_late = not load.submission.cancel()
                load.went_well = None if load.is_late else False
                logger.error("load %d has not ended in %s s and is given up", load.transfer.id, limit)

    def _forget(self, plan: StepPlan) -> None:
        resolved = set(plan.resolved)
        for id, copy in list(self._copies.items()):
            if copy.went_well is not None and (id < plan.resolved_below or id in resolved):
                del self._copies[id]


class _CopyThread(threading.Thread):
    """Does its `jobs` in order, until it is given None, whatever they raise: somebody waits for the next one. (An
    executor of the standard library takes 14 us to be given one, this 0.1.)"""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.start()

    def run(self) -> None:
        while (job := self.jobs.get()) is not None:
            try:
                with short_switch_interval():
                    job()
            except BaseException:  # no Exception: the record of the transfer has that already
                logger.exception("%s was interrupted", self.name)


def _submit(copy: _Copy, copier: Copier, after: Event, clock: Callable[[], float] | None) -> None:
    """What is raised is in the record; what is no Exception goes on, too."""
    try:
        if not copy.submission.set_running_or_notify_cancel():
            return
        if clock is not None:
            copy.taken_up = clock()
        event = copier.submit(copy.transfer.direction, copy.transfer.copies, after)
        if clock is not None and copy.taken_up is not None:
            copy.submitted_in = clock() - copy.taken_up
        copy.event = event  # last: from here on somebody may see the end
    except BaseException as error:  # whatever it is, the transfer must resolve (rule 11)
        copy.submission.set_exception(error)
        if not isinstance(error, Exception):
            raise
    else:
        copy.submission.set_result(None)


def _ended(copy: _Copy) -> bool | None:
    """Whether a transfer has ended well. None: not yet. False: also where nobody can tell any more."""
    if copy.event is None and not copy.submission.done():
        return None
    try:
        if copy.event is not None:  # it is there before the submission is over
            return copy.event.passed() or None
        if copy.submission.cancelled():
            return False
        error = copy.submission.exception()
    except Exception as raised:
        error = raised
    if error is not None:
        logger.error("transfer %d failed", copy.transfer.id, exc_info=error)
    return error is None  # it copied nothing


def _drain(copies: dict[int, _Copy]) -> None:
    for copy in list(copies.values()):
        try:
            if copy.event is None:
                copy.submission.exception()  # waits until it is over
            if copy.event is not None:
                copy.event.until_passed()
        except Exception:  # `report` will hear of it too, and say whom it concerns
            logger.debug("transfer %d cannot be waited for", copy.transfer.id, exc_info=True)


def _end(process: int, threads: Sequence[_CopyThread], copies: dict[int, _Copy], arena: HostArena | None) -> None:
    """See `close`."""

    def end() -> None:
        _drain(copies)
        for thread in threads:
            thread.jobs.put(None)
            thread.join()
        if arena is not None:
            arena.close()

    if os.getpid() == process:  # a fork has none of the threads, and would wait for them for ever
        end_outside_of(threads, end)
