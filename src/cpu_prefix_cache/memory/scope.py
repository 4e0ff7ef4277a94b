"""The scope in which a thread calls a driver: it works with one device, and leaves the captures of others alone."""

import ctypes
from abc import ABC, abstractmethod

RELAXED = 2  # the capture mode, by CUDA's and HIP's number, in which calls do not end captures of other threads


class Scope(ABC):
    """A context manager, see Driver.working_in. A class, because a generator takes three times as long."""

    __slots__ = ("_mode",)

    def __init__(self) -> None:
        self._mode = ctypes.c_int(RELAXED)

    def __enter__(self) -> None:
        self._enter_device()
        try:
            self._exchange(self._mode)
        except BaseException:
            self._leave_device()
            raise

    def __exit__(self, *error: object) -> None:
        try:
            self._exchange(self._mode)
        finally:
            self._leave_device()

    @abstractmethod
    def _exchange(self, mode: ctypes.c_int) -> None:
        """Set the thread's capture mode to `mode`, and `mode` to what it was."""

    @abstractmethod
    def _enter_device(self) -> None: ...

    @abstractmethod
    def _leave_device(self) -> None: ...
