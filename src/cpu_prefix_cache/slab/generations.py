"""Which generations a rank's records may have: two numbers, kept durably.

`last` is the highest range (`messages/generations.py`) that a record may be of; records below `floor` are never served
again. Both only grow. The floor holds at once in this process. It is on disk, as `last` is, before a record of a later
range is written.

After a reset the weights may be others, while the folder has the name of those that the process began with. So a reset
leaves a mark, and the next start serves nothing of before: what was written before the reset, nor after it. The mark is
with the numbers, or a copy of the folder might have these without it; and a file of its own, which older releases read.

Records of a later range than `last` are not of the moment of these numbers, as in a folder that was copied while it was
used: then nothing from before is served, either.
"""

import json
import os
import threading
from pathlib import Path
from typing import NamedTuple

from cpu_prefix_cache.messages.generations import MOST, begin_of, range_of
from cpu_prefix_cache.slab.durable import remove_durably, write_durably
from cpu_prefix_cache.slab.private import read_small

NAME = "generations"
MARK = "was-reset"


class KeptGenerations(NamedTuple):
    """The content of a folder; of a new one, all is to come."""

    floor: int = 0
    last: int = 0
    was_reset: bool = False


class Generations:
    """Generations in an open `folder`, with those `kept` on disk. `first` is the first generation that no record had
    when this was opened, and the range that it begins can be used once it is taken. `was_reset`: whether there was a
    reset since the last opening.
    """

    def __init__(self, folder: int, kept: KeptGenerations) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self.first = begin_of(kept.last + 1)
        self.was_reset = MARK in os.listdir(folder) or kept.was_reset
        self._is_marked = False
        self.floor = self.first if self.was_reset else kept.floor

    @property
    def is_floor_kept(self) -> bool:
        """Whether the floor is on disk."""
        return self._kept == self.floor

    def begin_after(self, generation: int) -> None:
        """Serve nothing from before: a record has this generation, of a later range than those kept."""
        self.first = self.floor = begin_of(range_of(generation) + 1)

    def take(self) -> None:
        """Take the range of `first`. Last in an opening: one that fails before leaves what the next one goes by."""
        self._write(self.floor, range_of(self.first))
        if self.was_reset:
            remove_durably(self._folder, MARK)

    def advance(self, floor: int) -> None:
        """Serve nothing below `floor` any more. In memory alone, and without the lock: another thread may have it, and
        wait for the disk."""
        self.floor = max(self.floor, floor)

    def keep(self, generation: int = 0) -> None:
        """On disk are the floor, and a range that `generation` is not beyond: other ranks may be at a later one."""
        with self._lock:
            floor, last = self.floor, max(self._last, range_of(max(self.floor, generation)))
            if floor > self._kept:
                write_durably(self._folder, MARK, b"")
                self._is_marked = True
            if floor > self._kept or last > self._last:
                self._write(floor, last)

    def _write(self, floor: int, last: int) -> None:
        content = {"floor": floor, "last": last, "was_reset": self._is_marked}
        write_durably(self._folder, NAME, json.dumps(content).encode())
        self._kept, self._last = floor, last


def read_generations(folder: int, where: Path) -> KeptGenerations | None:
    """None: it is not known which records may be served, so none may."""
    try:
        content = json.loads(read_small(folder, NAME, where) or b"")
        kept = KeptGenerations(content["floor"], content["last"], content.get("was_reset", False) is not False)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    is_whole = all(type(number) is int and number >= 0 for number in (kept.floor, kept.last))
    return kept if is_whole and kept.floor < MOST and begin_of(kept.last + 2) < MOST else None
