"""The record of one transfer on one rank, from its plan until a plan calls it resolved, and how it is seen to end.

One thread at a time asks a copier's event. Where that raises, the transfer has failed.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field

from cpu_prefix_cache.copier.shared_events import Shared
from cpu_prefix_cache.copier.streams import NAP_SECONDS, Event, Passed
from cpu_prefix_cache.messages.errors import CopyFailed
from cpu_prefix_cache.messages.plan import TransferPlan

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class CopyRecord:
    """One transfer. The thread that submits it sets `event`, `taken_up` and `submitted_in`.
    When `submission` is over, it has what the copier raised, or there is an `event`, unless nothing is copied."""

    transfer: TransferPlan
    submission: "Future[None]" = field(default_factory=Future)
    event: Event | None = None  # of the transfer's end
    sections: list[Shared] = field(default_factory=list)  # of a load that holds compute: the ends of those submitted
    after: Event = field(default_factory=Passed)  # it touches device blocks only then
    began: float = 0.0  # when its plan came, by the worker's clock in seconds, if it is needed
    is_begun: bool = False  # it is in the queue of its thread, or was
    taken_up: float | None = None  # of a load in a thread; None for an exchange: its pace is not that of other loads
    submitted_in: float | None = None  # seconds until it was submitted, which is nearly its end; of several its share
    went_well: bool | None = None  # None: it has not ended
    is_late: bool = False
    unfit: tuple[int, ...] = ()  # once it went well: as of its event, which others may share
    looking: threading.Lock = field(default_factory=threading.Lock)  # held by the one thread that queries the event


def ended(copy: CopyRecord) -> bool | None:
    """Whether a transfer has ended well; None: it has not ended, or another thread waits for its end and will note a
    failure. If that cannot be found out, it has failed.
    """
    if copy.event is None and not copy.submission.done():
        return None
    if not copy.looking.acquire(blocking=False):
        return None
    try:
        if copy.went_well is not None:  # the thread that waited has noted it
            return copy.went_well
        if copy.event is not None:  # set before the submission is over
            return copy.event.passed() or None
        if copy.submission.cancelled():
            return False
        error = copy.submission.exception()
        if error is not None:
            note_failure(copy, error)
        return error is None  # it copied nothing
    except Exception as error:
        note_failure(copy, error)
        return False
    finally:
        copy.looking.release()


def note_failure(copy: CopyRecord, error: BaseException) -> None:
    """Note it where it is seen: an event need not raise again."""
    copy.went_well = False
    is_expected = isinstance(error, OSError)  # an error of a disk or a server: its message is enough
    logger.error("transfer %d failed: %s", copy.transfer.id, error, exc_info=None if is_expected else error)


def await_ended(copies: Iterable[CopyRecord]) -> None:
    for copy in copies:
        _until_ended(copy)


def _until_ended(copy: CopyRecord) -> None:
    with copy.looking:
        if copy.went_well is not None:
            return
        try:
            if copy.event is None:
                copy.submission.exception()  # waits until it is over
            if copy.event is not None:
                copy.event.until_passed()
        except CancelledError:
            return  # `report` sees it too
        except Exception as error:
            note_failure(copy, error)


@dataclass(frozen=True, slots=True)
class EndOf(Event):
    """The end of a transfer, perhaps not submitted yet, or of its first sections up to this one. A failure is raised
    again and again.
    """

    copy: CopyRecord
    section: int | None = None

    def passed(self) -> bool:
        if self._well(ended(self.copy)) is not None:
            return True
        end = self._of_section
        return end is not None and bool(self._answer(end.passed))

    def until_passed(self) -> None:
        if self.section is None or (end := self._submitted()) is None:
            _until_ended(self.copy)
        else:
            self._answer(end.until_passed)
        self._well(ended(self.copy))

    def hold(self, hold: Callable[[Event], object]) -> None:
        """Have compute wait for it, once it has been submitted: `hold` is given the copier's own event, because streams
        wait for no other. An error that it meets is a failure.
        """
        end = self._submitted()
        self._well(ended(self.copy))
        try:
            if end is not None:
                hold(end.own if isinstance(end, Shared) else end)
        except Exception as error:
            if isinstance(end, Shared):  # of a section, and others may be in flight
                end.note(error)
            else:
                note_failure(self.copy, error)
            raise self._failure from error

    @property
    def _of_section(self) -> Event | None:
        sections = self.copy.sections
        return sections[self.section] if self.section is not None and self.section < len(sections) else None

    def _submitted(self) -> Event | None:
        """Wait until that has been submitted. Its event, or that of the last section; None: nothing is copied."""
        submission = self.copy.submission
        while (end := self._of_section) is None and not submission.done():
            time.sleep(NAP_SECONDS)
        if end is None:
            self._well(None if not submission.cancelled() and submission.exception() is None else False)
            end = next(reversed(self.copy.sections), None)
        return end or self.copy.event

    def _answer(self, ask: Callable[[], bool | None]) -> bool | None:
        """The answer about a section. If that has failed others may be in flight, so the load has not failed yet."""
        try:
            return ask()
        except Exception as error:
            raise self._failure from error

    @property
    def _failure(self) -> CopyFailed:
        return CopyFailed(f"transfer {self.copy.transfer.id} has failed")

    def _well(self, went_well: bool | None) -> bool | None:
        if went_well is False:
            raise self._failure
        return went_well


@dataclass(frozen=True, slots=True)
class EndOfAll(Event):
    """The end of transfers that may not have begun yet, or of sections of them. `ends` are theirs, or None before they
    begin, unless that is to be awaited.
    """

    ends: Callable[[bool], Sequence[EndOf] | None]

    def passed(self) -> bool:
        ends = self.ends(False)
        return ends is not None and all(end.passed() for end in ends)

    def until_passed(self) -> None:
        for end in self.ends(True) or ():
            end.until_passed()
