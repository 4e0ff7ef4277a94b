"""Events that several transfers have in common, or that several ask."""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from cpu_prefix_cache.copier.events import Event


class Shared(Event):
    """The event `own` of a copier, which one thread at a time asks. Whoever asks this learns of a failure, though that
    is raised once."""

    def __init__(self, own: Event) -> None:
        self.own, self._asking = own, threading.Lock()
        self._error: Exception | None = None

    def passed(self) -> bool:
        """False also while another thread asks, or waits."""
        if not self._asking.acquire(blocking=False):
            return False
        try:
            if self._error is not None:
                raise self._error
            return self.own.passed()
        except Exception as error:
            self._error = error
            raise
        finally:
            self._asking.release()

    def until_passed(self) -> None:
        with self._asking:
            try:
                if self._error is not None:
                    raise self._error
                self.own.until_passed()
            except Exception as error:
                self._error = error
                raise

    def hold(self, hold: Callable[[Event], object]) -> None:
        """`hold` is given the copier's own event, because streams wait for no other. What it raises is a failure."""
        try:
            if self._error is not None:
                raise self._error
            hold(self.own)
        except Exception as error:
            self._error = error
            raise

    @property
    def reads(self) -> Event:
        return self.own.reads

    def unfit(self) -> Sequence[int]:
        return self.own.unfit()


class EndOfSections(Event):
    """Passed when all sections are, and they are all that is in flight: if one has failed, it is raised only then."""

    def __init__(self, ends: Sequence[Shared]) -> None:
        self._ends = ends

    def passed(self) -> bool:
        errors, are_passed = list[Exception](), True
        for end in self._ends:
            try:
                are_passed &= end.passed()
            except Exception as error:
                errors.append(error)
        if are_passed and errors:
            raise errors[0]
        return are_passed

    def until_passed(self) -> None:
        for end in self._ends:
            with suppress(Exception):  # raised below, when none is in flight
                end.until_passed()
        self.passed()
