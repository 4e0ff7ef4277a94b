"""Events that several transfers have in common, or that several ask."""

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from cpu_prefix_cache.copier.streams import Event

Answer = TypeVar("Answer")


class Shared(Event):
    """The event `own` of a copier. Whoever asks learns of a failure, though that is raised once."""

    def __init__(self, own: Event) -> None:
        self.own, self._asking = own, threading.Lock()
        self._error: Exception | None = None

    def passed(self) -> bool:
        return self.ask(self.own.passed)

    def ask(self, question: Callable[[], Answer]) -> Answer:
        """The answer of the copier's event. What it raises is raised from then on."""
        with self._asking:
            if self._error is not None:
                raise self._error
            try:
                return question()
            except Exception as error:
                self._error = error
                raise

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
