"""Which generations a rank's records may have: two numbers, kept durably.

A generation is 64 bits: the decider numbers what it writes, and begins a range of 2**32 of them at each start and each
reset. `last` is the highest range that a record may be of; records below `floor` are never served again. Both only
grow. The floor holds at once in this process. It is on disk, as `last` is, before a record of a later range is written.
"""

import json
import threading
from collections.abc import Callable
from pathlib import Path

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.slab.durable import write_durably

RANGE_BITS = 32


class Generations:
    """Raises ConfigurationError when the file is not what this class writes. `first` is the first generation that no
    record had when this was opened, and the range that it begins is taken. `mark` is called before a floor is kept.
    """

    def __init__(self, path: Path, *, is_new: bool) -> None:
        self._path, self._lock = path, threading.Lock()
        self.floor, self._last = (0, 0) if is_new else _read(path)
        self.first = self._last + 1 << RANGE_BITS
        self.mark: Callable[[], object] = lambda: None
        self._kept = self.floor
        self._write(self.floor, self._last + 1)

    @property
    def is_floor_kept(self) -> bool:
        """Whether the floor is on disk."""
        return self._kept == self.floor

    def advance(self, floor: int) -> None:
        """Serve nothing below `floor` any more. In memory alone, and without the lock: another thread may have it, and
        wait for the disk."""
        self.floor = max(self.floor, floor)

    def keep(self, generation: int = 0) -> None:
        """On disk are the floor, and a range that `generation` is not beyond: other ranks may be at a later one."""
        with self._lock:
            floor, last = self.floor, max(self._last, max(self.floor, generation) >> RANGE_BITS)
            if floor > self._kept:
                self.mark()
            if floor > self._kept or last > self._last:
                self._write(floor, last)

    def _write(self, floor: int, last: int) -> None:
        write_durably(self._path, json.dumps({"floor": floor, "last": last}).encode())
        self._kept, self._last = floor, last


def _read(path: Path) -> tuple[int, int]:
    try:
        content = json.loads(path.read_bytes())
        floor, last = int(content["floor"]), int(content["last"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{path} does not say which records may be served ({error}); delete the folder {path.parent}"
        ) from error
    return floor, last
