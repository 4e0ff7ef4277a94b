"""What every copier does."""

from collections.abc import Sequence
from typing import Protocol

from cpu_prefix_cache.copier.streams import Event
from cpu_prefix_cache.messages.plan import Direction, GroupCopy


class Copier(Protocol):
    """Moves pieces between device tensors and the host region. Bound to both when it is built."""

    def here(self) -> Event:
        """Where the engine's compute stands: passed when all it has been given so far has run."""

    def submit(self, direction: Direction, copies: Sequence[GroupCopy], after: Event) -> Event:
        """Begin one transfer, whose device blocks are touched only once `after` is passed. The event of its end.

        All ids are checked before any byte moves; MisuseError otherwise (rule 16). When it raises, whatever it raises,
        nothing of this transfer is under way any more. One thread may submit stores and another loads.
        """

    def hold_compute(self, event: Event) -> None:
        """Have what compute is given from here on run after `event`, which `submit` returned: here the caller waits."""
        event.until_passed()

    def copy(self, direction: Direction, copies: Sequence[GroupCopy]) -> None:
        """Carry out one transfer after all that compute has been given, and return when it has ended."""
        self.submit(direction, copies, self.here()).until_passed()
