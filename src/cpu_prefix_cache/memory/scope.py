"""The scope in which a thread calls a driver: it works with one device, and leaves the captures of others alone."""

import ctypes
from collections.abc import Callable

RELAXED = 2  # the capture mode, by CUDA's and HIP's number, in which calls do not end captures of other threads


def _stay() -> None: ...


class Scope:
    """A context manager, see Driver.working_in. A class, because a generator takes three times as long.

    `exchange` sets the thread's capture mode to one that it is given, and that to what it was. `enter` and `leave`:
    the device, if it is another than the thread's own.
    """

    __slots__ = ("_enter", "_exchange", "_leave", "_mode")

    def __init__(
        self,
        exchange: Callable[[ctypes.c_int], None],
        enter: Callable[[], None] = _stay,
        leave: Callable[[], None] = _stay,
    ) -> None:
        self._mode = ctypes.c_int(RELAXED)
        self._exchange, self._enter, self._leave = exchange, enter, leave

    def __enter__(self) -> None:
        self._enter()
        try:
            self._exchange(self._mode)
        except BaseException:
            self._leave()
            raise

    def __exit__(self, *error: object) -> None:
        try:
            self._exchange(self._mode)
        finally:
            self._leave()
