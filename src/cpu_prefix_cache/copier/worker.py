"""The copying half on one rank: one record (record.py) for each transfer, from its plan until it is resolved.

    waiting  --taken up-->  being submitted  ---->  moving  --its event is passed-->  done
        |                          `--raised-->  failed  `--raised, or too late-->  failed
        `--cancelled-->  failed

A Future sees to it that a transfer is taken up or cancelled, never both. Each direction has a thread, which takes up
its transfers in order; whatever is raised fails that transfer alone (rule 10). A load that overwrites what stores read
is taken up when these have ended, and so are the loads behind it; if they overwrite what it reads, they are submitted
in portions, in turn (exchange.py). Stores that hold compute are submitted as one by `run` itself, and fail together;
compute is given its step behind them. Without threads `run` submits transfers itself, and raises an interrupt again
once its transfer has failed.

Loads that hold compute are submitted as one, section by section (sections.py): compute may go on with each section.

A load has a deadline. A load that is still waiting then is cancelled. A load that is moving cannot be called back: it
is reported as late, and as failed when it has ended.

An engine may begin to compute before a load has ended (early.py).
"""

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import InvalidStateError
from contextlib import nullcontext, suppress
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.events import Event
from cpu_prefix_cache.copier.exchange import Exchange, exchanges
from cpu_prefix_cache.copier.job_thread import Job, begin_jobs
from cpu_prefix_cache.copier.pace import Pace
from cpu_prefix_cache.copier.record import CopyRecord, EndOf, await_ended, ended
from cpu_prefix_cache.copier.shared_events import EndOfSections, Shared
from cpu_prefix_cache.memory.ending import end_outside_of
from cpu_prefix_cache.messages.errors import MisuseError
from cpu_prefix_cache.messages.plan import VERSION, Direction, GroupCopy, RankReport, StepPlan, TransferPlan

if TYPE_CHECKING:
    from cpu_prefix_cache.memory.arena import HostArena

logger = logging.getLogger(__name__)


class CopyWorker:
    """Runs plans with one copier. One per rank, called by one thread. A transfer without copies is done at once.

    With `threads`, a thread each submits stores and loads, and `run` returns when it has submitted those that hold
    compute; without, `run` submits all. The `arena` is pinned from the first plan on, and closed with the worker: by
    `close`, or when the worker is collected, or when the process ends. A load is late `load_seconds` seconds after its
    plan, by `clock`; None: never. `on_done` is called with each transfer that ended well, and the seconds from its plan
    to the report that saw its end.
    """

    def __init__(
        self,
        rank: int,
        copier: Copier,
        arena: "HostArena | None" = None,
        *,
        threads: bool = False,
        load_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_done: Callable[[TransferPlan, float], object] | None = None,
    ) -> None:
        self._rank, self._copier, self._arena = rank, copier, arena
        self._load_seconds, self._clock, self._on_done = load_seconds, clock, on_done
        self._copies: dict[int, CopyRecord] = {}  # in the order of their plans
        self._here: Event | None = None  # as of the last plan; None if nothing was to be copied then
        self.pace = Pace()
        self._jobs = {each: SimpleQueue[Job | None]() for each in Direction if threads}
        self._closed = False
        own = [begin_jobs(f"{each.value}-{rank}", jobs.get) for each, jobs in self._jobs.items()]
        end = partial(_end, list(self._jobs.values()), own, self._copies, arena)
        self._end = partial(end_outside_of, own, os.getpid(), end)
        self._ending = weakref.finalize(self, self._end)

    def run(self, plan: StepPlan) -> None:
        """Begin one step's transfers, after all that compute has been given by now. MisuseError for another version."""
        if plan.version != VERSION:
            raise MisuseError(f"this rank understands plans of version {VERSION}, got {plan.version}")
        new = {transfer.id: CopyRecord(transfer) for transfer in plan.transfers}
        before, self._here = self._here, None
        try:
            if self._arena is not None:
                self._arena.register()
            if not new and not self._copies:
                return
            self._collect()
            self._forget(plan)
            self._here = here = self._copier.here()
            early = here if before is None else before
            is_timed = self._on_done is not None or self._load_seconds is not None
            began = self._clock() if new and is_timed else 0.0
            self._copies |= new
            for id in self._copies.keys() & plan.cancelled:
                self._copies[id].submission.cancel()
            exchanged = {} if self._closed else exchanges(plan.transfers, self._copier.knows_pieces)
            later = {store for stores in exchanged.values() for store in stores}  # they begin with another one
            for copy in new.values():
                copy.began, copy.after = began, early if copy.transfer.is_early else here
            holding = [copy for copy in new.values() if copy.transfer.holds_compute and copy.transfer.copies]
            first = [copy for copy in holding if _stores(copy) and copy.transfer.id not in later]
            for is_early in (True, False) if first and not self._closed else ():
                self._hold_compute([copy for copy in first if copy.transfer.is_early is is_early])
            if first and not self._closed:
                self._here = self._copier.here()  # what is early in the next plan comes after these, too
            together = [copy for copy in holding if not _stores(copy) and copy.transfer.id not in exchanged]
            later |= {copy.transfer.id for copy in together}
            for id, copy in new.items():
                if id not in later:
                    self._begin(copy, [new[store] for store in exchanged.get(id, ())])
            for is_early in (True, False):
                self._load_together([copy for copy in together if copy.transfer.is_early is is_early])
        except BaseException:  # copies that an interrupt keeps from being begun are reported as failed
            for id, copy in new.items():
                self._copies.setdefault(id, copy).submission.cancel()
            raise

    def report(self) -> RankReport:
        """Report what has ended and is not resolved, which loads are late, and how many host blocks are ready."""
        self._collect()
        self._end_late_loads()
        ready = None if self._arena is None else self._arena.ready_blocks
        rate = self.pace.bytes_per_second
        if not self._copies:
            return RankReport(self._rank, ready_blocks=ready, load_bytes_per_second=rate)
        done = frozenset(id for id, copy in self._copies.items() if copy.went_well)
        failed = frozenset(id for id, copy in self._copies.items() if copy.went_well is False)
        late = frozenset(id for id, copy in self._copies.items() if copy.is_late)
        unfit = tuple((id, copy.unfit) for id, copy in self._copies.items() if copy.unfit)
        return RankReport(self._rank, done, failed, ready, late, rate, unfit)

    def open_loads(self) -> list[CopyRecord]:
        """The loads that had not ended at the last plan or report, in the order of their plans."""
        copies = self._copies.values()
        return [copy for copy in copies if copy.went_well is None and copy.transfer.direction is Direction.LOAD]

    def end_of(self, id: int) -> EndOf:
        """The end of a transfer that was in a plan, and that no plan has had as resolved."""
        return EndOf(self._copies[id])

    @property
    def is_busy(self) -> bool:
        """Whether a transfer had not ended at the last plan or report."""
        return any(copy.went_well is None for copy in self._copies.values())

    def drain(self) -> None:
        """Wait until all transfers have ended."""
        _drain(self._copies)

    def close(self) -> None:
        """Wait until all transfers have ended, end the threads and close the arena. Later transfers fail. After an
        interrupt it may be called again."""
        self._closed = True
        self._end()
        self._ending.detach()

    def _begin(self, copy: CopyRecord, stores: Sequence[CopyRecord]) -> None:
        """Begin a transfer, and the stores that exchange blocks with it."""
        transfer = copy.transfer
        for each in (copy, *stores):
            each.is_begun = True
        named = [self._copies[id] for id in transfer.after if id in self._copies]
        before = [each for each in named if each.transfer.copies and not each.transfer.failed]
        if transfer.holds_compute and _stores(copy) and copy.submission.done():
            return
        if transfer.failed or self._closed:
            copy.submission.cancel()
        elif not transfer.copies and not copy.submission.cancelled():
            copy.submission.set_result(None)
        elif not all(each.is_begun for each in before):
            _refuse([copy, *stores], MisuseError(f"transfer {transfer.id} waits for one that begins after it"))
        elif any(store.transfer.holds_compute for store in stores):
            _refuse([copy, *stores], MisuseError(f"a store that load {transfer.id} waits for in turn holds no compute"))
        elif stores:
            self._exchange(copy, stores, before)
        elif self._jobs:
            clock = self._clock if transfer.direction is Direction.LOAD else None
            self._jobs[transfer.direction].put(partial(_submit, copy, before, self._copier, clock))
        else:
            _submit(copy, before, self._copier, None)

    def _load_together(self, loads: Sequence[CopyRecord]) -> None:
        """Submit loads that hold compute as one, section by section, behind the stores of what they overwrite."""
        for copy in loads:
            copy.is_begun = True
            if copy.transfer.failed or self._closed:
                copy.submission.cancel()
        before = [self._copies[id] for copy in loads for id in copy.transfer.after if id in self._copies]
        if any(each.transfer.direction is Direction.LOAD for each in before):
            _refuse(loads, MisuseError("a load that holds compute follows stores, and no load"))
        elif loads and self._jobs:
            self._jobs[Direction.LOAD].put(partial(_submit_sections, loads, before, self._copier, self._clock))
        elif loads:
            _submit_sections(loads, before, self._copier, None)

    def _hold_compute(self, stores: Sequence[CopyRecord]) -> None:
        """Submit stores as one, and have compute run after it: a decode step may have one of each request."""
        begun = [copy for copy in stores if copy.submission.set_running_or_notify_cancel()]
        if not begun:
            return
        event: Event | None = None
        try:
            with self._copier.awaiting_stores():
                event = self._copier.submit(Direction.STORE, _joined(begun), begun[0].after)
            self._copier.hold_compute(event.reads)
        except BaseException as error:
            if event is not None:
                with suppress(Exception):
                    event.until_passed()  # once it has failed, others may be given its host blocks
            _refuse(begun, error)
            if not isinstance(error, Exception):
                raise
        else:
            shared = Shared(event)
            for copy in begun:
                copy.event = shared
                copy.submission.set_result(None)

    def _exchange(self, load: CopyRecord, stores: Sequence[CopyRecord], before: Sequence[CopyRecord]) -> None:
        own = {load, *stores}
        exchange = Exchange(load, stores, [each for each in before if each not in own], self._copier)
        for direction, jobs in self._jobs.items():
            jobs.put(partial(exchange.submit, direction))
        if not self._jobs:
            exchange.submit(*Direction)

    def _collect(self) -> None:
        """See what has ended. What one thread submits in one direction ends in order: after one that moves no event is
        looked at.
        """
        moving = set[tuple[Direction, bool]]()
        for copy in self._copies.values():
            submitted_by = copy.transfer.direction, copy.transfer.holds_compute
            if copy.went_well is not None or (copy.event is not None and submitted_by in moving):
                continue
            went_well = ended(copy)
            if went_well is None:
                moving.add(submitted_by)
                continue
            if went_well and copy.event is not None:
                copy.unfit = tuple(copy.event.unfit())  # first: whatever interrupts this, it is not done without
            copy.went_well = went_well and not copy.is_late
            if copy.submitted_in is not None:
                self.pace.learn(copy.transfer.num_bytes, copy.submitted_in)
            if copy.went_well and self._on_done is not None:
                self._on_done(copy.transfer, self._clock() - copy.began)

    def _end_late_loads(self) -> None:
        """Cancel loads whose deadline has passed, or mark them as late if they have begun."""
        if (limit := self._load_seconds) is None or not (loads := self.open_loads()):
            return
        now = self._clock()
        for load in loads:
            if not load.is_late and now >= load.began + limit:
                load.is_late = not load.submission.cancel()
                load.went_well = None if load.is_late else False
                logger.error("load %d has not ended in %s s", load.transfer.id, limit)

    def _forget(self, plan: StepPlan) -> None:
        resolved = set(plan.resolved)
        for id, copy in list(self._copies.items()):
            if copy.went_well is not None and (id < plan.resolved_below or id in resolved):
                del self._copies[id]


def _submit(copy: CopyRecord, before: Sequence[CopyRecord], copier: Copier, clock: Callable[[], float] | None) -> None:
    """Submit a transfer, once those `before` have ended, unless it is cancelled by then. What is raised goes into its
    record; what is no Exception is raised."""
    try:
        if before:
            with copier.awaiting_stores() if copy.transfer.direction is Direction.LOAD else nullcontext():
                await_ended(before)
        if not copy.submission.set_running_or_notify_cancel():
            return
        if clock is not None:
            copy.taken_up = clock()
        event = copier.submit(copy.transfer.direction, copy.transfer.copies, copy.after)
        if clock is not None and copy.taken_up is not None:
            copy.submitted_in = clock() - copy.taken_up
        copy.event = Shared(event)  # last: from here on a report may see the end
    except BaseException as error:  # whatever it is, the transfer must resolve (rule 10)
        copy.submission.set_exception(error)
        if not isinstance(error, Exception):
            raise
    else:
        copy.submission.set_result(None)


def _submit_sections(
    loads: Sequence[CopyRecord], before: Sequence[CopyRecord], copier: Copier, clock: Callable[[], float] | None
) -> None:
    """As `_submit`, several loads as one."""
    try:
        with copier.awaiting_stores() if before else nullcontext():
            await_ended(before)
        begun = [copy for copy in loads if copy.submission.set_running_or_notify_cancel()]
        if begun:
            _submit_as_one(begun, copier, clock)
    except BaseException as error:
        _refuse(loads, error)
        if not isinstance(error, Exception):
            raise


def _submit_as_one(loads: Sequence[CopyRecord], copier: Copier, clock: Callable[[], float] | None) -> None:
    """Submit loads as one; where that raises, each by itself, as one of them may be the reason."""
    sections = list[Shared]()
    for copy in loads:
        copy.sections = sections
    begin = None if clock is None else clock()
    try:
        copier.submit_sections(_joined(loads), loads[0].after, lambda end: sections.append(Shared(end)))
    except Exception as error:
        if len(loads) == 1:
            _refuse(loads, error)
        else:
            for copy in loads:
                _submit_as_one([copy], copier, clock)
        return
    seconds = None if clock is None or begin is None else clock() - begin
    total = sum(copy.transfer.num_bytes for copy in loads)
    end = Shared(EndOfSections(sections))
    for copy in loads:
        copy.submitted_in = None if seconds is None or not total else seconds * copy.transfer.num_bytes / total
        copy.event = end
        copy.submission.set_result(None)


def _stores(copy: CopyRecord) -> bool:
    return copy.transfer.direction is Direction.STORE


def _joined(copies: Iterable[CopyRecord]) -> list[GroupCopy]:
    """Their pieces, group by group."""
    joined = dict[int, GroupCopy]()
    for each in (each for copy in copies for each in copy.transfer.copies):
        so_far = joined.get(each.group, GroupCopy(each.group, (), ()))
        joined[each.group] = GroupCopy(
            each.group, so_far.host_blocks + each.host_blocks, so_far.device_blocks + each.device_blocks
        )
    return list(joined.values())


def _refuse(copies: Iterable[CopyRecord], error: BaseException) -> None:
    for copy in copies:
        with suppress(InvalidStateError):  # it is cancelled
            copy.submission.set_exception(error)


def _drain(copies: dict[int, CopyRecord]) -> None:
    await_ended(list(copies.values()))


def _end(
    jobs: Iterable[SimpleQueue[Job | None]],
    threads: Iterable[threading.Thread],
    copies: dict[int, CopyRecord],
    arena: "HostArena | None",
) -> None:
    _drain(copies)
    for copy in list(copies.values()):  # for it may be that nobody reports any more
        if copy.went_well is None and ended(copy) is False:
            copy.went_well = False
    for queue in jobs:
        queue.put(None)
    for thread in threads:
        thread.join()
    if arena is not None:
        arena.close()
