"""The record of one transfer on one rank, from its plan until a plan calls it resolved, and how it is seen to end.

Any thread may ask; the one that reports, or ends the worker, sees to it that a failure is logged once.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field

from cpu_prefix_cache.copier.events import NAP_SECONDS, Event, Passed, raise_failure
from cpu_prefix_cache.copier.shared_events import Shared
from cpu_prefix_cache.messages.errors import CopyFailed
from cpu_prefix_cache.messages.plan import TransferPlan

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class CopyRecord:
    """One transfer. The thread that submits it sets `event`, `taken_up` and `submitted_in`.
    When `submission` is over, it has what the copier raised, or there is an `event`, unless nothing is copied."""

    transfer: TransferPlan
    submission: "Future[None]" = field(default_factory=Future)
    event: Shared | None = None  # of the transfer's end
    sections: list[Shared] = field(default_factory=list)  # of a load that holds compute: the ends of those submitted
    after: Event = field(default_factory=Passed)  # it touches device blocks only then
    began: float = 0.0  # when its plan came, by the worker's clock in seconds, if it is needed
    is_begun: bool = False  # it is in the queue of its thread, or was
    taken_up: float | None = None  # of a load in a thread; None for an exchange: its pace is not that of other loads
    submitted_in: float | None = None  # seconds until it was submitted, which is nearly its end; of several its share
    went_well: bool | None = None  # None: no report has seen its end
    is_late: bool = False
    unfit: tuple[int, ...] = ()  # once it went well: as of its event, which others may share

    def passed(self) -> bool:
        """Whether it has ended well. Raises once it has failed, and CancelledError if it was cancelled."""
        if self.event is None and not self.submission.done():
            return False
        if self.event is not None:  # set before the submission is over
            return self.event.passed()
        raise_failure(self.submission.exception())
        return True  # it copied nothing

    def until_passed(self) -> None:
        if self.event is None:
            raise_failure(self.submission.exception())  # waits until it is over
        if self.event is not None:
            self.event.until_passed()

    def take_up(self, end: Event) -> bool:
        """It goes in portions and begins, with this end, unless it has been cancelled. May be called again."""
        if not self.submission.cancelled():
            # first: a submission that is over, and no event, is a transfer that copies nothing
            self.event = self.event or Shared(end)
            with suppress(InvalidStateError):
                self.submission.set_result(None)
        return not self.submission.cancelled()


def ended(copy: CopyRecord) -> bool | None:
    """Whether a transfer has ended well; None: it has not ended. A failure is logged."""
    try:
        return copy.passed() or None
    except CancelledError:
        return False
    except Exception as error:
        is_expected = isinstance(error, OSError)  # an error of a disk or a server: its message is enough
        logger.error("transfer %d failed: %s", copy.transfer.id, error, exc_info=None if is_expected else error)
        return False


def await_ended(copies: Iterable[CopyRecord]) -> None:
    """Wait for all, well or not: `report` sees which."""
    for copy in copies:
        with suppress(Exception):
            copy.until_passed()


@dataclass(frozen=True, slots=True)
class EndOf(Event):
    """The end of a transfer, perhaps not submitted yet, or of its first sections up to this one. A failure is raised
    again and again. If that of a section, others may be in flight, and the load has not failed yet.
    """

    copy: CopyRecord
    section: int | None = None

    def passed(self) -> bool:
        try:
            end = self._of_section
            return self._is_over() or (end is not None and end.passed())
        except Exception as error:
            raise self._failure from error

    def until_passed(self) -> None:
        try:
            if self.section is None or (end := self._submitted()) is None:
                self.copy.until_passed()
            else:
                end.until_passed()
            self._is_over()
        except Exception as error:
            raise self._failure from error

    def hold(self, hold: Callable[[Event], object]) -> None:
        """Have compute wait for it, once it has been submitted. An error that `hold` meets is a failure."""
        try:
            end = self._submitted()
            self._is_over()
            if end is not None:
                end.hold(hold)
        except Exception as error:
            raise self._failure from error

    def _is_over(self) -> bool:
        """Whether the whole transfer has ended well. Raises if it has failed."""
        if self.copy.went_well is False:  # or came too late
            raise self._failure
        return self.copy.passed()

    @property
    def _of_section(self) -> Shared | None:
        sections = self.copy.sections
        return sections[self.section] if self.section is not None and self.section < len(sections) else None

    def _submitted(self) -> Shared | None:
        """Wait until that has been submitted. Its event, or that of the last section; None: nothing is copied."""
        submission = self.copy.submission
        while (end := self._of_section) is None and not submission.done():
            time.sleep(NAP_SECONDS)
        if end is None:
            raise_failure(submission.exception())
            end = next(reversed(self.copy.sections), None)
        return end or self.copy.event

    @property
    def _failure(self) -> CopyFailed:
        return CopyFailed(f"transfer {self.copy.transfer.id} has failed")


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
