"""How many bytes moved, and how fast: while several transfers are under way at once, their time counts once."""

import threading
import time
from collections.abc import Callable

WINDOW_BYTES = 32 << 20  # a rate is of so many bytes at least
FADING = 0.9  # what a window weighs when the next one has closed: half of a rate is of the last 200 MiB


class RateMeter:
    """Meter of one direction. All methods may be called by any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._under_way, self._since = 0, 0.0
        self._window_bytes, self._window_seconds = 0, 0.0
        self._faded_bytes, self._faded_seconds = 0.0, 0.0  # of all windows
        self.num_bytes, self.seconds = 0, 0.0
        self.bytes_per_second: float | None = None  # None: too few bytes

    def begin(self) -> None:
        """A transfer is under way from now on."""
        with self._lock:
            self._pass()
            self._under_way += 1

    def moved(self, num_bytes: int) -> None:
        with self._lock:
            self._pass()
            self.num_bytes += num_bytes
            self._window_bytes += num_bytes
            if self._window_bytes >= WINDOW_BYTES and self._window_seconds > 0:
                self._close_window()

    def end(self) -> None:
        with self._lock:
            self._pass()
            self._under_way -= 1

    def _pass(self) -> None:
        """Count the time since the last call, if a transfer was under way."""
        now = self._clock()
        if self._under_way:
            self.seconds += now - self._since
            self._window_seconds += now - self._since
        self._since = now

    def _close_window(self) -> None:
        """Slices end in bursts, so bytes and seconds fade apart: a mean of rates would be that of the bursts."""
        self._faded_bytes = self._faded_bytes * FADING + self._window_bytes
        self._faded_seconds = self._faded_seconds * FADING + self._window_seconds
        self.bytes_per_second = self._faded_bytes / self._faded_seconds
        self._window_bytes, self._window_seconds = 0, 0.0
