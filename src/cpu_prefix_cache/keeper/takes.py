"""Takes: computed chunks, and the checkpoint after them, on their way from the device to the pool.

    held       the device keeps the blocks of what the pool may lack
    open       `take` went out
    granted    slots for what nobody has, or writes: it shrinks to that, which is copied by the ranks
    again      another engine, or another request, is writing some of it: sent again in the next step
    dropped    the pool has them, or has no room, or the keeper is gone or too slow: the hold ends

Where the pool may lack chunks still, `lost` hears from which one on: they can be taken again.

Blocks are held for TAKE_SECONDS at most after the step that computed them, however long that took, and until a write
has ended.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cpu_prefix_cache.keeper.answers import NO_SLOTS, Granted
from cpu_prefix_cache.keeper.messenger import Messenger
from cpu_prefix_cache.keeper.protocol import Kind, Message
from cpu_prefix_cache.offload.device import Device

TAKE_SECONDS = 0.5


@dataclass(slots=True, eq=False)
class Take:
    """Chunks `first` and following of the prompt with these keys, `blocks[i]` of each, and of each piece of the
    checkpoint after the last of them, if it is to be stored, `pieces[i]`; under one hold. The deadline is set when
    time passes: what is known of the time before may be from before a long step.
    """

    id: int
    connection: int
    keys: Sequence[bytes]
    first: int
    blocks: Sequence[Sequence[int]]
    pieces: Sequence[Sequence[int]] | None
    hold: Any
    lost: Callable[[int], None]
    deadline: float = math.inf
    granted: Granted = NO_SLOTS  # for all of it


class Takes:
    """Takes of one engine that are not written yet, by their numbers."""

    def __init__(self, messenger: Messenger, device: Device, slots_per_chunk: int) -> None:
        self._messenger, self._device = messenger, device
        self._slots_per_chunk = slots_per_chunk
        self._open: dict[int, Take] = {}
        self._again: list[Take] = []
        self.refused = 0  # chunks for which there was no room

    def __len__(self) -> int:
        return len(self._open) + len(self._again)

    def begin(
        self,
        id: int,
        keys: Sequence[bytes],
        first: int,
        pieces: Sequence[Sequence[int]] | None,
        lost: Callable[[int], None],
    ) -> int | None:
        """Hold what the device has of these chunks, from number `first` on, and ask. Where it ends; None if there is
        nothing to hold. With `pieces`, the device blocks of the checkpoint after them, all or nothing.
        """
        blocks = []
        for found in self._device.find_all(keys[first:]):
            if found is None:
                break
            blocks.append(found)
        is_lost = pieces is not None and first + len(blocks) < len(keys)
        if is_lost or not (blocks or pieces) or not self._messenger.is_up:
            return None
        above = self._device.find(keys[first - 1]) if first else None
        hold = self._device.hold([block for each in (*blocks, *(pieces or ())) for block in each], above or ())
        keys = tuple(keys[: first + len(blocks)])
        self._ask(Take(id, self._messenger.connection, keys, first, blocks, pieces, hold, lost))
        return len(keys)

    def answered(self, message: Message) -> Take | None:
        """A keeper has answered. The part of the take that may be written; None for nothing."""
        take = self._open.pop(message.id, None)
        if take is None:
            return None  # dropped meanwhile, and with it what was granted
        granted = Granted.of(message.numbers)
        if granted.all_slots and granted.first >= take.first:
            chunks, skipped = len(granted.slots) // self._slots_per_chunk, granted.first - take.first
            keys, blocks = take.keys[: granted.first + chunks], take.blocks[skipped : skipped + chunks]
            if len(keys) < len(take.keys):
                take.lost(len(keys))
            return replace(take, keys=keys, first=granted.first, blocks=blocks, granted=granted)
        if granted.try_again:
            self._again.append(take)
        elif granted.pieces is not None and not granted.all_slots:  # of the checkpoint other ones have all pieces
            self.end(take, 0, has_checkpoint=True)
        else:  # all is there, there is no room, or what comes before it has left the pool
            self.refused += 0 if granted.slots else len(take.keys) - granted.first
            self.drop(take)
            if granted.first < len(take.keys):
                take.lost(min(granted.first, take.first))
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
            take.deadline = min(take.deadline, now + TAKE_SECONDS)
            if now >= take.deadline or not is_up or take.connection != self._messenger.connection:
                self.drop(take)
                take.lost(take.first)

    def drop(self, take: Take) -> None:
        """Nothing, or nothing more, is written of it."""
        self.end(take, 0)
        self._open.pop(take.id, None)
        if take in self._again:
            self._again.remove(take)

    def end(self, take: Take, count: int, has_checkpoint: bool = False) -> None:
        """The first `count` granted chunks are written, and the checkpoint or not, and nothing reads the device blocks
        any more.
        """
        self._messenger.send(take.connection, Message(Kind.COMMIT, take.id, (count, has_checkpoint)))
        self._device.release(take.hold)

    def drop_all(self) -> None:
        for take in self._all():
            self.drop(take)

    def _all(self) -> list[Take]:
        return [*self._open.values(), *self._again]

    def _ask(self, take: Take) -> None:
        self._open[take.id] = take
        self._messenger.send(take.connection, Message(Kind.TAKE, take.id, (take.pieces is not None,), take.keys))
