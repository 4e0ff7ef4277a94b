"""Which generations a rank's records may have: two numbers, kept durably.

A generation is 64 bits: the decider numbers what it writes, and begins a range of 2**32 of them at each start and each
reset. `last` is the highest range that a record may be of; records below `floor` are never served again. Both only
grow, and have grown on disk before anything relies on it.
"""

import json
import threading
from pathlib import Path

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.slab.durable import write_durably

RANGE_BITS = 32


class Generations:
    """Raises ConfigurationError when the file is not what this class writes. `first` is the first generation that no
    record had when this was opened, and the range that it begins is taken."""

    def __init__(self, path: Path, *, is_new: bool) -> None:
        self._path, self._lock = path, threading.Lock()
        self.floor, self._last = (0, 0) if is_new else _read(path)
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
        write_durably(self._path, json.dumps({"floor": floor, "last": last}).encode())
        self._last = last


def _read(path: Path) -> tuple[int, int]:
    try:
        content = json.loads(path.read_bytes())
        floor, last = int(content["floor"]), int(content["last"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{path} does not say which records may be served ({error}); delete the folder {path.parent}"
        ) from error
    return floor, last
