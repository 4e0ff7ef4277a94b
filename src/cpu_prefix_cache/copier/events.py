"""Events: points in streams of work, that other streams and the host wait for. Knows no torch."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

NAP_SECONDS = 80e-6  # with the delay that the system adds, a quarter of the time of a slice on the link


class Event(Protocol):
    """A point in a stream of work, passed when all that was submitted before it has run; from then on for good.

    An error raised by either method means that this work has failed, and that nothing of it is in flight any more. It
    may be raised once: afterwards the event may answer anything. So the caller that catches it notes the failure.
    """

    def passed(self) -> bool:
        """Whether it is passed. Waits for nothing."""

    def until_passed(self) -> None:
        """Return when it is passed. Here the caller naps and looks again."""
        while not self.passed():
            time.sleep(NAP_SECONDS)

    @property
    def reads(self) -> "Event":
        """An event, perhaps this one, that is passed when a store has read all of its device blocks."""
        return self

    def unfit(self) -> Sequence[int]:
        """Host blocks that do not hold what they should, once it has passed: of a store the first one of each piece
        that did not fit its coded form; of a tier's load the slots whose bytes do not match their labels."""
        return ()


def raise_failure(error: BaseException | None) -> None:
    """Raise what another thread met: of an interrupt, which was that thread's, a RuntimeError."""
    if isinstance(error, Exception):
        raise error
    if error is not None:
        raise RuntimeError(f"it was interrupted: {error!r}")


class Passed(Event):
    """The event of what has run already."""

    def passed(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Stored(Event):
    """`event`, of a store that has read its device blocks at `read`, and `find` for its `unfit`."""

    event: Event
    read: Event
    find: Callable[[], Sequence[int]]

    def passed(self) -> bool:
        return self.event.passed()

    def until_passed(self) -> None:
        self.event.until_passed()

    @property
    def reads(self) -> Event:
        return self.read

    def unfit(self) -> Sequence[int]:
        return self.find()


@dataclass(frozen=True, slots=True)
class AllOf(Event):
    """Passed when all of these are."""

    events: Sequence[Event]

    def passed(self) -> bool:
        return all(event.passed() for event in self.events)

    def until_passed(self) -> None:
        for event in self.events:
            event.until_passed()


@dataclass(frozen=True, slots=True)
class ReadsOf(Event):
    """The end of the reads of a store, which may not have been submitted yet: who waits waits for that, too."""

    store: Event

    def passed(self) -> bool:
        return self.store.passed()

    def until_passed(self) -> None:
        self.store.reads.until_passed()
