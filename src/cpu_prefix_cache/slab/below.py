"""Below: what holds the bytes of one rank below its host memory, a slab of files or values in a shared store."""

from collections.abc import Sequence
from ctypes import addressof, c_char
from typing import Protocol

from cpu_prefix_cache.messages.plan import Label


class Below(Protocol):
    """Place of host blocks, each of which goes to one of the `slots` slots, of `slot_bytes` bytes, under a label. Any
    number of threads may read and write, different slots at a time.

    `next_generation`: nothing that is served had it or a larger one when this was opened. What has a generation below
    `floor` is never served. `kept`: of what was refused, the values whose bytes were wrong, and that were not deleted
    from a store all the same (`stores/deletions.py`).
    """

    slots: int
    slot_bytes: int
    next_generation: int

    @property
    def floor(self) -> int: ...

    @property
    def kept(self) -> int: ...

    def bind(self, memory: memoryview) -> None:
        """All views of later calls are in this host memory, whole host blocks from its begin."""

    def advance(self, floor: int, revision: str | None = None) -> None:
        """Raise the floor, at once: it waits for no disk and no server, and does not fail. From now on the weights have
        this revision, or one that nobody knows.
        """

    def write(self, slots: Sequence[int], views: Sequence[memoryview], labels: Sequence[Label]) -> None:
        """Write `views[i]` under `labels[i]`. When it raises, these slots hold nothing once they are forgotten."""

    def read(self, slots: Sequence[int], views: Sequence[memoryview], labels: Sequence[Label]) -> list[int]:
        """Read into `views[i]`. Returns the refused slots, whose bytes do not match `labels[i]`."""

    def forget(self, slots: Sequence[int]) -> None:
        """A store to these slots has failed: what it has written to some of them is not to be found."""

    def keep(self) -> None:
        """Let later processes know the floor. Called by a thread of the tier after `advance`; raises OSError."""

    def stop(self) -> None:
        """Calls that would never end by themselves end now, and no more are made."""

    def close(self) -> None:
        """No thread uses it any more. May be called again."""


def address_of(memory: memoryview) -> int:
    return addressof(c_char.from_buffer(memory))
