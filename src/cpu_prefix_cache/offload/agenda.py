"""Which running requests may have crossed a boundary, and in which step: nobody goes through all of them (rule 18)."""

from typing import Protocol


class Entry(Protocol):
    """Something with a next step, in `due`; 0: none."""

    due: int

    @property
    def id(self) -> str: ...


class Agenda:
    """Entries by the step they are due in. One that is put off, or ended, is left where it stood and skipped."""

    def __init__(self) -> None:
        self.step = 0  # the last that began
        self._ids: dict[int, list[str]] = {}

    def begin_step(self) -> None:
        self._ids.pop(self.step, None)
        self.step += 1

    def put(self, entry: Entry, steps: int) -> None:
        """It is due in so many steps."""
        due = self.step + steps
        if due != entry.due:
            entry.due = due
            self._ids.setdefault(due, []).append(entry.id)

    def ids(self) -> list[str]:
        """Those that were put down for this step, once each, whether they still are or not."""
        return list(dict.fromkeys(self._ids.get(self.step, ())))
