"""A region that several processes map, in a file without a name: one makes it, and hands it to the others.

    make    the file is in memory, and its size sealed: nobody makes it shorter below those who have mapped it
    offer   at an address of 128 random bits, which the maker sends to the others in its own way
    take    the others come there, and get the file

Both sides check the user at the other end with the kernel, and refuse another one. So no file of another user
is taken for the region, and none gets at it; and when all have ended, nothing is left, however they ended. The address
is one of the network namespace (an abstract socket of Unix), which containers of one pod have in common.
"""

import errno
import fcntl
import os
import secrets
import socket
import struct
import sys
import time
from array import array

from cpu_prefix_cache.messages.errors import ConfigurationError

NO_EXECUTION = 8  # Linux 6.3, where a system may demand it; Python has no name for it
WAIT_SECONDS = 60.0  # ranks come from a common decision, at about the same time
_CREDENTIALS = struct.Struct("3i")  # process, user and group, as the kernel gives them


def make(num_bytes: int) -> int:
    """The descriptor of a new file of so many zeros, which take memory when used. Raises ConfigurationError."""
    if sys.platform != "linux":
        raise ConfigurationError("this system has no files without a name in memory; give each process its own region")
    try:
        file = _memory_file()
        os.ftruncate(file, num_bytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _seals())
    except OSError as failed:
        raise ConfigurationError(f"the system makes no shared region of {num_bytes} bytes: {failed}") from failed
    return file


def is_sealed(file: int) -> bool:
    """Whether nobody can change the size of this file, below those who have mapped it. Not so of a file on a disk."""
    try:
        return fcntl.fcntl(file, fcntl.F_GET_SEALS) & _seals() == _seals()
    except OSError:
        return False


class OfferedFile:
    """Where other processes of this user take a file."""

    def __init__(self, file: int) -> None:
        self._file, self.address = file, f"cpu-prefix-cache-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(f"\0{self.address}")
        self._socket.listen()

    def give(self, count: int, seconds: float = WAIT_SECONDS) -> None:
        """To so many processes, and to no other. Raises ConfigurationError if fewer come in time."""
        deadline, given = time.monotonic() + seconds, 0
        while given < count:
            try:
                self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
                with self._socket.accept()[0] as taker:
                    if user_of(taker) == os.geteuid():
                        socket.send_fds(taker, [b"."], [self._file])
                        given += 1
            except TimeoutError as late:
                raise ConfigurationError(
                    f"{count - given} of {count} ranks did not come for the shared region"
                ) from late

    def close(self) -> None:
        self._socket.close()


def take_file(address: str, seconds: float = WAIT_SECONDS) -> int:
    """The descriptor of the file that is offered there. Raises ConfigurationError."""
    try:
        with socket.socket(socket.AF_UNIX) as giver:
            giver.settimeout(seconds)
            giver.connect(f"\0{address}")
            if user_of(giver) != os.geteuid():
                raise ConfigurationError("the shared region is offered by another user; start all ranks as one user")
            _, files = receive(giver, 1, 1)
    except OSError as failed:
        raise ConfigurationError(
            f"this rank cannot get the shared region from the first one ({failed}): the ranks of a tensor-parallel "
            "group are processes of one user, on one machine, and in containers of one network namespace"
        ) from failed
    if not files:
        raise ConfigurationError("the first rank ended before this one had the shared region")
    return files[0]


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _memory_file() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("cpu-prefix-cache", flags | NO_EXECUTION)
    except OSError as failed:
        if failed.errno != errno.EINVAL:
            raise
    return os.memfd_create("cpu-prefix-cache", flags)


def receive(connected: socket.socket, num_bytes: int, num_files: int) -> tuple[bytes, list[int]]:
    """At most so many bytes and files. No program that is started here inherits them: it would keep an engine's lock.

    `socket.recv_fds` passes no flags on, up to Python 3.11 at least.
    """
    files = array("i")
    room = socket.CMSG_LEN(num_files * files.itemsize)
    some, others, _, _ = connected.recvmsg(num_bytes, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, sent in others:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            files.frombytes(sent[: len(sent) - len(sent) % files.itemsize])
    return some, list(files)


def user_of(connected: socket.socket) -> int:
    """At the other end, by the kernel's word."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])
