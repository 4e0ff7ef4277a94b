"""Events that several transfers have in common, or that several ask."""

import threading
from collections.abc import Sequence

from cpu_prefix_cache.copier.streams import Event


class Shared(Event):
    """The event `own` of a copier. Whoever asks learns of a failure, though that is raised once."""

    def __init__(self, own: Event) -> None:
        self.own, self._asking = own, threading.Lock()
        self._error: Exception | None = None

    def passed(self) -> bool:
        with self._asking:
            if self._error is not None:
                raise self._error
            try:
                return self.own.passed()
            except Exception as error:
                self.note(error)
                raise

    def note(self, error: Exception) -> None:
        """This was raised about it, and is raised from then on."""
        self._error = error

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
