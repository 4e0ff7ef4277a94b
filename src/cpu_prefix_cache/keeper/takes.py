"""Takes: computed chunks on their way from the device to the pool.

    held       the device keeps the blocks of the chunks that the pool may lack
    open       `take` went out
    granted    slots for those that nobody has, or writes: a *write*, which is copied by the ranks
    again      another engine, or another request, is writing the first of them: sent again in the next step
    dropped    the pool has them, or has no room, or the keeper is gone or too slow: the hold ends

Blocks are held for TAKE_SECONDS at most, and until a write has ended.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cpu_prefix_cache.keeper.messenger import Messenger
from cpu_prefix_cache.keeper.protocol import Kind, Message
from cpu_prefix_cache.offload.device import Device

TAKE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Take:
    """Chunks `first` and following of the prompt with these keys, `blocks[i]` of each, under one hold."""

    id: int
    connection: int
    keys: Sequence[bytes]
    first: int
    blocks: Sequence[Sequence[int]]
    hold: Any
    deadline: float


class Write(NamedTuple):
    """Chunks of a take from number `first` on, for which slots were granted."""

    take: Take
    first: int
    slots: Sequence[int]

    @property
    def keys(self) -> Sequence[bytes]:
        return self.take.keys[self.first : self.first + len(self.slots)]

    @property
    def blocks(self) -> list[int]:
        skipped = self.first - self.take.first
        return [block for chunk in self.take.blocks[skipped : skipped + len(self.slots)] for block in chunk]


class Takes:
    """Takes of one engine that are not written yet, by their numbers."""

    def __init__(self, messenger: Messenger, device: Device) -> None:
        self._messenger, self._device = messenger, device
        self._open: dict[int, Take] = {}
        self._again: list[Take] = []
        self.refused = 0  # chunks for which there was no room

    def __len__(self) -> int:
        return len(self._open) + len(self._again)

    def begin(self, id: int, keys: Sequence[bytes], first: int, now: float) -> int:
        """Hold what the device has of these chunks, from number `first` on, and ask. Where it ends."""
        blocks = []
        for found in self._device.find_all(keys[first:]):
            if found is None:
                break
            blocks.append(found)
        if not blocks or not self._messenger.is_up:
            return first
        above = self._device.find(keys[first - 1]) if first else None
        hold = self._device.hold([block for chunk in blocks for block in chunk], above or ())
        keys = tuple(keys[: first + len(blocks)])
        self._ask(Take(id, self._messenger.connection, keys, first, blocks, hold, now + TAKE_SECONDS))
        return len(keys)

    def answered(self, message: Message) -> Write | None:
        """A keeper has answered. What may be written; None for nothing."""
        take = self._open.pop(message.id, None)
        if take is None:
            return None  # dropped meanwhile, and with it what was granted
        try_again, first, *slots = message.numbers
        if slots and first >= take.first:
            return Write(take, first, slots)
        if try_again:
            self._again.append(take)
        else:  # all are there, there is no room, or what comes before them has left the pool
            self.refused += 0 if slots else len(take.keys) - first
            self.drop(take)
        return None

    def step(self, next_id: Iterator[int]) -> None:
        """Send again what was being written in the last step."""
        again, self._again = self._again, []
        for take in again:
            self._ask(replace(take, id=next(next_id)))

    def passed(self, now: float) -> None:
        """Time has come to `now`, in seconds."""
        is_up = self._messenger.is_up
        for take in self._all():
            if now >= take.deadline or not is_up or take.connection != self._messenger.connection:
                self.drop(take)

    def drop(self, take: Take) -> None:
        """Nothing, or nothing more, is written of it."""
        self.end(take, 0)
        self._open.pop(take.id, None)
        if take in self._again:
            self._again.remove(take)

    def end(self, take: Take, count: int) -> None:
        """The first `count` granted chunks are written, and nothing reads the device blocks any more."""
        self._messenger.send(take.connection, Message(Kind.COMMIT, take.id, (count,)))
        self._device.release(take.hold)

    def drop_all(self) -> None:
        for take in self._all():
            self.drop(take)

    def _all(self) -> list[Take]:
        return [*self._open.values(), *self._again]

    def _ask(self, take: Take) -> None:
        self._open[take.id] = take
        self._messenger.send(take.connection, Message(Kind.TAKE, take.id, keys=take.keys))
