"""Values over a connection to a Redis server, from and into the buffers of the caller, until a deadline.

An answer is read in parts: its first line, and for a value then its bytes, which go from the socket straight into the
buffers. If a call fails in the middle, what is left of its answers would be taken for those of the next call. So such a
connection is not used again.
"""

import io
import socket
import time
from collections.abc import Sequence

from cpu_prefix_cache.stores.keyed_store import Buffers

LINE_BYTES = 1 << 16  # no answer's first line is longer; what speaks another protocol may never end one
READ_AHEAD_BYTES = 1 << 12  # what is read with a line, and copied: a small part of a value
SKIPPED_BYTES = 1 << 16  # at once, of a value of another size

NO_VALUE = b"$-1"


class Resp(io.RawIOBase):
    """A connected socket, for one call at a time. Any OSError of it is the end of the connection."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__()
        self.deadline = 0.0  # of the call, by time.monotonic
        self._socket = connected
        self._answers = io.BufferedReader(self, READ_AHEAD_BYTES)

    def send(self, *parts: bytes | memoryview) -> None:
        for part in parts:
            self._allow_what_is_left()
            self._socket.sendall(part)

    def line(self) -> bytes:
        """The first line of the next answer, without its end."""
        line = self._answers.readline(LINE_BYTES)
        if not line.endswith(b"\r\n"):
            raise ConnectionError("the server closed the connection" if not line else f"not an answer: {line[:80]!r}")
        return line[:-2]

    def value(self, size: int, buffers: Buffers) -> bool:
        """Read a value of this size, after its line. Whether the buffers have its size; else it is passed over."""
        fits = size == sum(each.nbytes for each in buffers)
        if fits:
            for each in buffers:
                if self._answers.readinto(each) < each.nbytes:
                    raise ConnectionError("the server closed the connection within a value")
        else:
            self._skip(size)
        if self.line():
            raise ConnectionError("a value is longer than the server said")
        return fits

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # typeshed's Buffer is newer than 3.11
        self._allow_what_is_left()
        return self._socket.recv_into(buffer)

    def _skip(self, size: int) -> None:
        while size:
            part = self._answers.read(min(size, SKIPPED_BYTES))
            if not part:
                raise ConnectionError("the server closed the connection within a value")
            size -= len(part)

    def _allow_what_is_left(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the server did not answer in time")
        self._socket.settimeout(left)


def command(*words: str) -> bytes:
    return _header(len(words)) + b"".join(_word(each) for each in words)


def set_command(key: str, buffers: Buffers) -> list[bytes | memoryview]:
    """The parts of a SET, of which the value's are the buffers themselves."""
    size = sum(each.nbytes for each in buffers)
    return [_header(3) + _word("SET") + _word(key) + b"$%d\r\n" % size, *buffers, b"\r\n"]


def _header(num_words: int) -> bytes:
    return b"*%d\r\n" % num_words


def _word(text: str) -> bytes:
    coded = text.encode()
    return b"$%d\r\n%s\r\n" % (len(coded), coded)


def commands(name: str, keys: Sequence[str]) -> bytes:
    """One command for each key, to be sent together."""
    return b"".join(command(name, key) for key in keys)
