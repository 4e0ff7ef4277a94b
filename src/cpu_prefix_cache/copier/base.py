"""The protocol that every copier keeps."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from cpu_prefix_cache.copier.events import Event
from cpu_prefix_cache.messages.errors import MisuseError
from cpu_prefix_cache.messages.plan import Direction, GroupCopy


class Copier(Protocol):
    """Moves pieces between device tensors and the host region. Bound to both when it is built."""

    knows_pieces: bool = False  # whether `num_pieces` answers

    def here(self) -> Event:
        """An event that is passed when all that the engine's compute has been given so far has run."""

    def submit(self, direction: Direction, copies: Sequence[GroupCopy], after: Event) -> Event:
        """Begin one transfer, whose device blocks are touched only after `after`, and return the event of its end.

        Raises MisuseError for bad ids before any byte moves (rule 14). When it raises anything, nothing of this
        transfer is in flight any more. One thread may submit loads and others stores. An event around that of another
        copier passes on what does not fit.
        """

    def awaiting_stores(self) -> AbstractContextManager[None]:
        """Entered by a thread while a load or compute waits for stores, or a load exchanges blocks with them:
        they are in a hurry then."""
        return nullcontext()

    def num_pieces(self, direction: Direction, copy: GroupCopy) -> int:
        """How many pieces a copy has, for an exchange (exchange.py). Raises MisuseError for what `submit` refuses, and
        here, as a copier need not exchange blocks."""
        raise MisuseError("this copier exchanges no blocks")

    def sections(self, group: int) -> Sequence[int]:
        """For each part of a group the section of `submit_sections` that brings it. Empty: of all groups the last."""
        return ()

    def submit_sections(self, copies: Sequence[GroupCopy], after: Event, submitted: Callable[[Event], object]) -> None:
        """As `submit`, a load that brings its pieces section by section. `submitted` is called with the event of each
        section's end when it has been submitted, at least once: the load ends with the last."""
        submitted(self.submit(Direction.LOAD, copies, after))

    def part_pieces(self, copy: GroupCopy) -> int:
        """How many pieces a part (`submit_part`) has that crosses fastest; 0: any."""
        return 0

    def submit_part(self, direction: Direction, copy: GroupCopy, after: Event) -> Event:
        """As `submit`, one of the parts of a transfer that are submitted one after the other."""
        return self.submit(direction, [copy], after)

    def behind(self, after: Event, stores: Sequence[Event]) -> Event:
        """An event for `submit` that comes after `after`, and after what these stores read on the device. It waits for
        them here: streams of a device can do so themselves."""
        for store in stores:
            store.until_passed()
        return after

    def hold_compute(self, event: Event) -> None:
        """Have what compute is given from now on run after `event`, which `submit` returned."""
        event.until_passed()

    def copy(self, direction: Direction, copies: Sequence[GroupCopy]) -> Event:
        """Carry out one transfer after all that compute has been given so far. Return its event when it has ended."""
        event = self.submit(direction, copies, self.here())
        event.until_passed()
        return event
