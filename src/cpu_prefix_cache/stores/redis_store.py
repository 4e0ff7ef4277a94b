"""Redis or Valkey as a store: redis-py connects, by URL; values go from and into the caller's buffers without a copy.

    redis://:PASSWORD@HOST:6379/0    rediss://USER:PASSWORD@HOST:6380    unix:///run/redis/redis.sock?password=PASSWORD

A connection is idle or in use by one call. It is dropped when a call fails on it, and all that are idle with it, since
what ended one has mostly ended the others. Commands that a user needs: GET, SET, EXISTS, DEL, PING.
"""

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.stores.frame import PREFIX
from cpu_prefix_cache.stores.keyed_store import Buffers, KeyedStore
from cpu_prefix_cache.stores.resp import NO_VALUE, Resp, command, commands, resp_over, set_command

CONNECT_SECONDS = 5.0  # for the first connection, at construction
AT_ONCE_BYTES = 1 << 20  # of a call, and one value at least: see docs/tiers.md
NEEDS = "it needs the commands GET, SET, EXISTS, DEL and PING"
APART = (f"{PREFIX}:a", f"{PREFIX}:b")  # no server of a cluster answers for both: they are in different slots
CLUSTER = (b"-CROSSSLOT", b"-MOVED", b"-CLUSTERDOWN")
ONE_VALUE = (b"-ERR", b"-OOM")  # refusals of one SET: too large, or no room; others are of all that a call asks


_shut_down = socket.socket.shutdown  # of the socket itself below TLS, while another thread reads


class RedisStore(KeyedStore):
    """Values as they are, under their keys.

    Raises ConfigurationError if nothing at `url` answers as Redis does, or one server of a cluster does.
    """

    def __init__(self, url: str) -> None:
        self._server = _Server(url)
        self._lock, self._closed = threading.Lock(), False
        self._idle: deque[_Link] = deque()
        self._in_use: set[_Link] = set()
        with _say_what_would_work(self._server.name), self._link(CONNECT_SECONDS) as resp:
            resp.send(command("PING"))
            _expect(resp.line(), b"+PONG")
            resp.send(command("EXISTS", *APART))
            self._check_alone(resp.line())

    def register(self, memory: memoryview) -> None:
        pass

    def exists(self, keys: Sequence[str], timeout: float) -> list[bool]:
        """Asks for all keys by one command first, since mostly all or none are there."""
        if not keys:
            return []
        with self._link(timeout) as resp:
            resp.send(command("EXISTS", *keys))
            number = _number(resp.line())
            if number in (0, len(keys)):
                return [number > 0] * len(keys)
            resp.send(commands("EXISTS", keys))
            return [_number(resp.line()) > 0 for _ in keys]

    def get_into(self, keys: Sequence[str], buffers: Sequence[Buffers], timeout: float) -> list[bool]:
        with self._link(timeout) as resp:
            found: list[bool] = []
            for part in _parts(buffers):
                resp.send(commands("GET", keys[part]))
                found += [_get(resp, each) for each in buffers[part]]
            return found

    def put_from(self, keys: Sequence[str], buffers: Sequence[Buffers], timeout: float) -> list[bool]:
        with self._link(timeout) as resp:
            taken: list[bool] = []
            for part in _parts(buffers):
                for key, each in zip(keys[part], buffers[part], strict=True):
                    resp.send(*set_command(key, each))
                taken += [_took(resp.line()) for _ in keys[part]]
            return taken

    def delete(self, keys: Sequence[str], timeout: float) -> None:
        if keys:
            with self._link(timeout) as resp:
                resp.send(command("DEL", *keys))
                _number(resp.line())

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for link in self._in_use:
                link.interrupt()
        self._drop_idle()

    def _check_alone(self, answer: bytes) -> None:
        """Raise ConfigurationError if `answer`, to a question for APART, is that of a cluster."""
        if answer.startswith(CLUSTER):
            raise ConfigurationError(
                f"the server at {self._server.name} is one of a Redis Cluster ({answer[1:].decode(errors='replace')}), "
                "which spreads keys over its servers: give the URL of a server that has all keys (cluster-enabled no)"
            )
        _number(answer)

    @contextmanager
    def _link(self, timeout: float) -> Iterator[Resp]:
        """A connection for one call, which is over when the call fails."""
        deadline = time.monotonic() + timeout
        link = self._take_idle() or self._server.link()
        try:
            self._enter(link)
            yield link.until(deadline)
        except BaseException:
            self._leave(link)
            link.close()
            self._drop_idle()
            raise
        self._leave(link)
        self._keep(link)

    def _take_idle(self) -> "_Link | None":
        while True:
            with self._lock:
                if not self._idle:
                    return None
                link = self._idle.pop()
            if link.is_silent():
                return link
            link.close()

    def _enter(self, link: "_Link") -> None:
        with self._lock:
            if self._closed:
                raise ConnectionError("the store is closed")
            self._in_use.add(link)

    def _leave(self, link: "_Link") -> None:
        with self._lock:
            self._in_use.discard(link)

    def _keep(self, link: "_Link") -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(link)
                return
        link.close()

    def _drop_idle(self) -> None:
        with self._lock:
            dropped = list(self._idle)
            self._idle.clear()
        for link in dropped:
            link.close()


class _Server:
    """What a URL says: redis-py reads it."""

    def __init__(self, url: str) -> None:
        try:
            from redis import connection
        except ImportError as missing:
            raise ConfigurationError(
                f"a store at redis:// needs the package redis ({missing}): pip install redis"
            ) from missing
        try:
            options = connection.parse_url(url)
            self._kind = _with_socket(options.pop("connection_class", connection.Connection))
            self._options = {**options, "protocol": 2}
            self.link()
        except (TypeError, ValueError) as wrong:
            raise ConfigurationError(
                "a store is redis://[[USER]:PASSWORD@]HOST:PORT[/DATABASE], rediss:// with TLS, or unix:///SOCKET; "
                f"{wrong}"
            ) from wrong
        address = f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
        self.name = options.get("path", address)

    def link(self) -> "_Link":
        return _Link(self._kind(**self._options))


class _Link:
    """A connection of redis-py's: it connects and logs in, and its socket is used by `Resp` then."""

    def __init__(self, connection: Any) -> None:
        self._connection, self._is_interrupted = connection, False
        self._resp: Resp | None = None

    def until(self, deadline: float) -> Resp:
        """Connected. Raises OSError."""
        if self._resp is None:
            self._connect(deadline - time.monotonic())
            self._resp = resp_over(self._connection.connected)
        if self._is_interrupted:  # before there was a socket
            raise ConnectionError("the store is closed")
        self._resp.deadline = deadline
        return self._resp

    def is_silent(self) -> bool:
        """Whether nothing was sent to a connection that waits for nothing: else the server has closed it."""
        poll = select.poll()
        poll.register(self._connection.connected, select.POLLIN)
        return not poll.poll(0)

    def interrupt(self) -> None:
        """End what another thread does with it, with ConnectionError."""
        self._is_interrupted = True
        if self._connection.connected is not None:
            with suppress(OSError):  # the server was faster
                _shut_down(self._connection.connected, socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.disconnect()

    def _connect(self, seconds: float) -> None:
        from redis import exceptions

        if seconds <= 0:
            raise TimeoutError("there was no time to connect")
        self._connection.socket_timeout = self._connection.socket_connect_timeout = seconds
        try:
            self._connection.connect()
        except exceptions.TimeoutError as late:
            raise TimeoutError(str(late)) from late
        except exceptions.RedisError as failed:
            raise ConnectionError(str(failed)) from failed


def _with_socket(kind: type[Any]) -> type[Any]:
    """This kind of redis-py's connections, TCP, TLS or Unix, whose socket is known."""

    class WithSocket(kind):  # type: ignore[misc]
        connected: socket.socket | None = None

        def _connect(self) -> socket.socket:
            self.connected = super()._connect()
            return self.connected

    return WithSocket


def _parts(values: Sequence[Buffers]) -> Iterator[slice]:
    """What of a call is under way at a time. Its values have about the same size."""
    count = max(1, AT_ONCE_BYTES // max(1, sum(each.nbytes for each in values[0]))) if values else 1
    return (slice(begin, begin + count) for begin in range(0, len(values), count))


def _get(resp: Resp, buffers: Buffers) -> bool:
    line = resp.line()
    if line == NO_VALUE or line.startswith(b"-WRONGTYPE"):  # another's key, of another type
        return False
    return resp.value(_number(line, b"$"), buffers)


def _took(line: bytes) -> bool:
    if line.startswith(ONE_VALUE):
        return False
    _expect(line, b"+OK")
    return True


def _number(line: bytes, kind: bytes = b":") -> int:
    if not line.startswith(kind) or not line[1:].isdigit():
        raise _Refused(line)
    return int(line[1:])


def _expect(line: bytes, expected: bytes) -> None:
    if line != expected:
        raise _Refused(line)


class _Refused(ConnectionError):
    """An answer that refuses the call: NOAUTH, NOPERM, LOADING, READONLY; or what is no answer to it."""

    def __init__(self, line: bytes) -> None:
        super().__init__(f"the server answered {line[:200].decode(errors='replace')!r}")


@contextmanager
def _say_what_would_work(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as failed:
        raise ConfigurationError(
            f"no Redis server can be used at {name} ({str(failed).rstrip('.')}). Start one there (redis-server, "
            f"valkey-server), or correct address, user and password in the URL; {NEEDS}, and rediss:// where it speaks "
            "TLS"
        ) from failed
