"""The record of one transfer on one rank, from its plan until a plan calls it resolved, and how it is seen to end.

One thread at a time asks a copier's event. Where that raises, the transfer has failed.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field

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
    sections: list[Event] = field(default_factory=list)  # of a load that holds compute: the ends of those submitted
    after: Event = field(default_factory=Passed)  # it touches device blocks only then
    began: float = 0.0  # when its plan came, by the worker's clock in seconds, if it is needed
    is_begun: bool = False  # it is in the queue of its thread, or was
    taken_up: float | None = None  # of a load in a thread; None for an exchange: its pace is not that of other loads
    submitted_in: float | None = None  # seconds from then until it was submitted, which is nearly its end
    went_well: bool | None = None  # None: it has not ended
    is_late: bool = False
    unfit: tuple[int, ...] = ()  # of a store that went well, perhaps submitted with others: as of its event
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
        end = self._of_section
        return self._well(ended(self.copy)) is not None or (end is not None and bool(self._asked(end.passed)))

    def until_passed(self) -> None:
        end = None if self.section is None else self._submitted()
        if end is None:
            _until_ended(self.copy)
        else:
            self._asked(end.until_passed)
        self._well(ended(self.copy))

    def submitted(self) -> Event:
        """The copier's own event, which streams of a device can wait for. Waits until there is one."""
        end = self._submitted()
        self._well(ended(self.copy))
        return end or self.copy.event or Passed()

    @property
    def _of_section(self) -> Event | None:
        sections = self.copy.sections
        return sections[self.section] if self.section is not None and self.section < len(sections) else None

    def _submitted(self) -> Event | None:
        """Wait until that has been submitted. The section's end, or that of the last; without sections None."""
        if self.section is None:
            with suppress(CancelledError):
                self.copy.submission.exception()
        while self._of_section is None and not self.copy.submission.done():
            time.sleep(NAP_SECONDS)
        return self._of_section or next(reversed(self.copy.sections), None)

    def hold(self, hold: Callable[[Event], object]) -> None:
        """Have compute wait for it: `hold` is given the copier's own event. An error that it meets is a failure."""
        event = self.submitted()
        self._asked(lambda: hold(event))

    def _asked(self, ask: Callable[[], object]) -> object:
        """The answer of an event of the copier. What it raises is a failure."""
        with self.copy.looking:
            try:
                return ask()
            except Exception as error:
                note_failure(self.copy, error)
        return self._well(False)

    def _well(self, went_well: bool | None) -> bool | None:
        if went_well is False:
            raise CopyFailed(f"transfer {self.copy.transfer.id} has failed")
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
