"""Room for all of a file at once, by fallocate(2) itself.

`os.posix_fallocate` of a C library writes a byte to each page where the file system cannot reserve room, which takes
hours for a large file. There the file is sparse: a disk that fills up is seen when it is written to.
"""

import ctypes
import errno
import os
from pathlib import Path

from cpu_prefix_cache.messages.errors import TierUnavailable

NO_ROOM = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
NOT_SUPPORTED = errno.EOPNOTSUPP, errno.ENOSYS

_libc = ctypes.CDLL(None, use_errno=True)


def allocate(file: int, num_bytes: int, where: Path) -> bool:
    """Give an open file this size. Whether the disk has reserved room for all of it.

    A shorter one is filled with zeros, which no checksum fits; a longer one is cut. Raises TierUnavailable where there
    is no room, and then it has its old size.
    """
    status, disk = os.fstat(file), os.fstatvfs(file)
    missing, room = num_bytes - status.st_blocks * 512, disk.f_bavail * disk.f_frsize
    if status.st_size < num_bytes and missing > room:  # a file system that compresses needs fewer for a full one
        raise _no_room(where, missing, room)
    try:
        if status.st_size > num_bytes:
            os.ftruncate(file, num_bytes)
        is_reserved = reserve(file, num_bytes)
        if not is_reserved:
            os.ftruncate(file, num_bytes)
    except OSError as error:
        if status.st_size < num_bytes:
            os.ftruncate(file, status.st_size)
        if error.errno not in NO_ROOM:
            raise
        raise _no_room(where, missing, room) from error
    return is_reserved


def reserve(file: int, num_bytes: int) -> bool:
    """Whether the file system can. Raises OSError where it has no room."""
    while _libc.fallocate(file, 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes)):
        code = ctypes.get_errno()
        if code in NOT_SUPPORTED:
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True


def _no_room(where: Path, missing: int, room: int) -> TierUnavailable:
    return TierUnavailable(
        f"{where} needs {missing / 1e9:.2f} GB more, and the disk has or allows less ({room / 1e9:.2f} GB are free); "
        "free some, or give the tier fewer bytes"
    )
