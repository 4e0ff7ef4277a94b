"""Which generations a rank's records may have: two numbers, kept durably.

A generation is 64 bits: the decider numbers what it writes, and begins a range of 2**32 of them at each start and each
reset. `last` is the highest range that a record may be of; records below `floor` are never served again. Both only
grow, and have grown on disk before anything relies on it.
"""

import json
import threading
from pathlib import Path
from typing import NamedTuple

from cpu_prefix_cache.slab.durable import write_durably
from cpu_prefix_cache.slab.private import read_small

NAME = "generations"
RANGE_BITS = 32
MOST = 1 << 63  # of a generation


class Kept(NamedTuple):
    """What a folder says; of a new one, all are to come."""

    floor: int = 0
    last: int = 0


class Generations:
    """In an open `folder`, which says what is `kept`. `first` is the first generation that no record had when this was
    opened, and the range that it begins is taken."""

    def __init__(self, folder: int, kept: Kept) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self.floor, self._last = kept
        self.first = self._last + 1 << RANGE_BITS
        self._keep(self.floor, self._last + 1)

    def advance(self, floor: int) -> None:
        """Serve nothing below `floor` any more, also after a restart."""
        with self._lock:
            if floor > self.floor:
                self.floor = floor  # at once, whether or not it can be kept
                self._keep(floor, max(self._last, floor >> RANGE_BITS))

    def admit(self, generation: int) -> None:
        """Called before a record has this generation: other ranks may be at a later range."""
        if generation >> RANGE_BITS > self._last:
            with self._lock:
                self._keep(self.floor, max(self._last, generation >> RANGE_BITS))

    def _keep(self, floor: int, last: int) -> None:
        write_durably(self._folder, NAME, json.dumps({"floor": floor, "last": last}).encode())
        self._last = last


def read_generations(folder: int, where: Path) -> Kept | None:
    """None: nothing says which records may be served, so none may."""
    try:
        content = json.loads(read_small(folder, NAME, where) or b"")
        kept = Kept(content["floor"], content["last"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    is_whole = all(type(number) is int and number >= 0 for number in kept)
    return kept if is_whole and kept.floor < MOST and kept.last + 2 << RANGE_BITS < MOST else None
