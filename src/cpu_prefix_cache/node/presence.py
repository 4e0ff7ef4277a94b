"""Presence: which engines live, by locks of the kernel on bytes of a file, one byte for each engine.

    engine     opens the file anew and locks its byte; the kernel unlocks it when the process ends, however it ends
    keeper     sees which bytes are locked, also those of engines that came to an earlier keeper

A lock belongs to the open file, so it means the same in every container and needs no process numbers. A child
that an engine forks shares it: the engine counts as there until that has ended, too.
"""

import fcntl
import os
import struct

from cpu_prefix_cache.messages.errors import ConfigurationError

_LOCK = struct.Struct("@hhqqi4x")  # type, whence, start, length, process


def lock(file: int, number: int) -> int:
    """This engine's lock, on the byte `number` of `file`, by a descriptor: it ends when that is closed, and all that
    other processes have of it. Raises ConfigurationError where it cannot be taken.
    """
    try:
        own = os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as failed:
        raise ConfigurationError(f"the records of the pool cannot be opened here: {failed}") from failed
    try:
        fcntl.fcntl(own, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0))
    except OSError as failed:
        os.close(own)
        raise ConfigurationError(f"engine {number} of the pool is locked by another one: {failed}") from failed
    return own


def is_present(file: int, number: int) -> bool:
    """Whether another process, or another opening of the file, has the lock of this number."""
    asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0)
    return bool(_LOCK.unpack(fcntl.fcntl(file, fcntl.F_OFD_GETLK, asked))[0] != fcntl.F_UNLCK)
