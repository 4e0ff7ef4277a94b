"""Values over a connection to a Redis server, from and into the buffers of the caller, until a deadline.

An answer is read in parts: its first line, and for a value then its bytes, which go from the socket straight into the
buffers. If a call fails in the middle, what is left of its answers would be taken for those of the next call. So such a
connection is not used again.
"""

import io
import socket
import ssl
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cpu_prefix_cache.stores.keyed_store import Buffers

LINE_BYTES = 1 << 16  # no answer's first line is longer; what speaks another protocol may never end one
READ_AHEAD_BYTES = 1 << 12  # what is read with a line, and copied: a small part of a value
SKIPPED_BYTES = 1 << 16  # at once, of a value of another size

NO_VALUE = b"$-1"
LATE = "the server did not answer in time"
DIGITS = 18  # of a number, at most; Python takes the square of their number in time

_TIMEVAL = struct.Struct("@ll")  # seconds and microseconds, as the kernel takes a timeout


class Refused(ConnectionError):
    """An answer that refuses the call: NOAUTH, NOPERM, LOADING, READONLY; or what is no answer to it."""

    def __init__(self, line: bytes) -> None:
        super().__init__(f"the server answered {line[:200].decode(errors='replace')!r}")
        self.line = line


class Resp(io.RawIOBase):
    """A connected socket, for one call at a time. Any OSError of it is the end of the connection.

    The socket blocks, and the kernel knows the time that is left. So a value is one system call, and not one for each
    part of it that comes or goes.
    """

    def __init__(self, connected: socket.socket) -> None:
        super().__init__()
        self.deadline = 0.0  # of the call, by time.monotonic
        self._socket = connected
        self._answers = io.BufferedReader(self, READ_AHEAD_BYTES)
        connected.settimeout(None)

    def send(self, *parts: bytes | memoryview) -> None:
        rest = [memoryview(part) for part in parts]
        while rest:
            rest = _after(rest, self._send(rest))

    def line(self) -> bytes:
        """The first line of the next answer, without its end."""
        line = self._answers.readline(LINE_BYTES)
        if not line.endswith(b"\r\n"):
            raise ConnectionError("the server closed the connection" if not line else f"not an answer: {line[:80]!r}")
        return line[:-2]

    def expect(self, expected: bytes) -> None:
        line = self.line()
        if line != expected:
            raise Refused(line)

    @property
    def is_read(self) -> bool:
        """Whether all that came has been read. Called between two calls."""
        self.deadline = 0.0  # nothing more may come
        try:
            return not self._answers.peek(1)
        except TimeoutError:
            return True

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
        """Into a value all that is missing, into the memory of lines what there is."""
        self._allow_what_is_left(socket.SO_RCVTIMEO)
        with _late():
            return self._socket.recv_into(buffer, 0, socket.MSG_WAITALL if len(buffer) > READ_AHEAD_BYTES else 0)

    def _skip(self, size: int) -> None:
        while size:
            part = self._answers.read(min(size, SKIPPED_BYTES))
            if not part:
                raise ConnectionError("the server closed the connection within a value")
            size -= len(part)

    def _send(self, parts: Sequence[memoryview]) -> int:
        """How many of their bytes were sent."""
        self._allow_what_is_left(socket.SO_SNDTIMEO)
        with _late():
            return self._socket.sendmsg(parts)

    def _allow_what_is_left(self, option: int) -> None:
        left = max(1, int(1e6 * self._left()))  # 0 is for ever
        self._socket.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(*divmod(left, 1_000_000)))

    def _left(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(LATE)
        return left


class TlsResp(Resp):
    """Python's TLS waits by itself, and takes one buffer at a time."""

    def __init__(self, connected: ssl.SSLSocket) -> None:
        super().__init__(connected)
        self._tls = connected

    @property
    def is_read(self) -> bool:
        return super().is_read and not self._tls.pending()

    def _send(self, parts: Sequence[memoryview]) -> int:
        self._socket.settimeout(self._left())
        return self._socket.send(parts[0])

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # as above
        self._socket.settimeout(self._left())
        return self._socket.recv_into(buffer)


def resp_over(connected: socket.socket) -> Resp:
    return TlsResp(connected) if isinstance(connected, ssl.SSLSocket) else Resp(connected)


@contextmanager
def _late() -> Iterator[None]:
    """A kernel that has waited for the whole timeout reports that there is nothing yet."""
    try:
        yield
    except BlockingIOError as late:
        raise TimeoutError(LATE) from late


def number(line: bytes, kind: bytes = b":") -> int:
    """The number that a line of this kind has. Raises Refused."""
    if not line.startswith(kind) or not line[1:].isdigit() or len(line) > DIGITS + 1:
        raise Refused(line)
    return int(line[1:])


def command(*words: str) -> bytes:
    return _header(len(words)) + b"".join(_word(each) for each in words)


def set_command(key: str, buffers: Buffers) -> list[bytes | memoryview]:
    """The parts of a SET, of which the value's are the buffers themselves."""
    size = sum(each.nbytes for each in buffers)
    return [_header(3) + _word("SET") + _word(key) + b"$%d\r\n" % size, *buffers, b"\r\n"]


def _after(parts: Sequence[memoryview], sent: int) -> list[memoryview]:
    """Rest of the parts when so many bytes were sent."""
    rest: list[memoryview] = []
    for part in parts:
        if sent < part.nbytes:
            rest.append(part[sent:])
        sent = max(0, sent - part.nbytes)
    return rest


def _header(num_words: int) -> bytes:
    return b"*%d\r\n" % num_words


def _word(text: str) -> bytes:
    coded = text.encode()
    return b"$%d\r\n%s\r\n" % (len(coded), coded)


def commands(name: str, keys: Sequence[str]) -> bytes:
    """One command for each key, to be sent together."""
    return b"".join(command(name, key) for key in keys)
