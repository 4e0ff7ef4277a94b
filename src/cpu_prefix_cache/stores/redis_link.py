"""A connection to a Redis server: connected, encrypted and logged in by a deadline, however the server behaves.

The server is given AUTH and SELECT, where the URL needs them, and nothing else: without HELLO it speaks the
protocol that `Resp` reads. All of its answers are read by `Resp`, which bounds their time and their memory.
"""

import ipaddress
import select
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from cpu_prefix_cache.stores.redis_url import RedisAddress
from cpu_prefix_cache.stores.resp import LATE, Refused, Resp, command, resp_over

CLOSED = "the store is closed"
NO_LOGIN = "what answers there gave no answer of a Redis server to AUTH"
_shut_down = socket.socket.shutdown  # of the socket itself below TLS, while another thread reads


class Link:
    """Used by one call at a time; another thread may `interrupt` it."""

    def __init__(self, address: RedisAddress) -> None:
        self._address = address
        self._socket: socket.socket | None = None
        self._resp: Resp | None = None
        self._is_interrupted = False

    def until(self, deadline: float) -> Resp:
        """Connected, and logged in. Raises OSError."""
        if self._resp is None:
            self._resp = self._logged_in(self._connected(deadline), deadline)
        self._check()
        self._resp.deadline = deadline
        return self._resp

    @property
    def is_silent(self) -> bool:
        """Whether nothing is left to be read: the server has not closed it, nor sent more than its answers."""
        if self._socket is None or self._resp is None or not self._resp.is_read:
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def interrupt(self) -> None:
        """End what another thread does with it, with ConnectionError."""
        self._is_interrupted = True
        if self._socket is not None:
            with suppress(OSError):  # it is not connected yet, or the server was faster
                _shut_down(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _connected(self, deadline: float) -> socket.socket:
        """To the first of its places that answers, each of which has its share of the time."""
        places = _places(self._address, deadline)
        for left, (family, place) in zip(range(len(places), 0, -1), places, strict=True):
            connected = self._take(socket.socket(family, socket.SOCK_STREAM))
            try:
                connected.settimeout(_left(deadline) / left)
                connected.connect(place)
            except OSError:
                connected.close()
                if left == 1:
                    raise
            else:
                break
        if family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tls = self._address.tls
        return connected if tls is None else self._encrypted(tls, connected, deadline)

    def _encrypted(self, context: ssl.SSLContext, plain: socket.socket, deadline: float) -> ssl.SSLSocket:
        tls = context.wrap_socket(plain, server_hostname=self._address.host, do_handshake_on_connect=False)
        self._take(tls)
        tls.settimeout(_left(deadline))
        try:
            tls.do_handshake()
        except ssl.SSLCertVerificationError:
            raise
        except ssl.SSLError as failed:
            why = failed.reason or failed
            raise ConnectionError(f"what answers there speaks no TLS, or another version of it ({why})") from failed
        return tls

    def _logged_in(self, connected: socket.socket, deadline: float) -> Resp:
        resp, address = resp_over(connected), self._address
        resp.deadline = deadline
        password = address.password()
        if address.user or password:
            resp.send(command("AUTH", *filter(None, [address.user]), password))
            _check_login(resp)
        if address.database:
            resp.send(command("SELECT", str(address.database)))
            resp.expect(b"+OK")
        return resp

    def _take(self, new: socket.socket) -> socket.socket:
        self._socket = new
        self._check()
        return new

    def _check(self) -> None:
        if self._is_interrupted:
            raise ConnectionError(CLOSED)


def answers_without_tls(address: RedisAddress, seconds: float) -> bool:
    """Whether a server that does not answer to TLS answers as Redis does without it. It waits for ever for the end of
    what it takes for a command.
    """
    deadline = time.monotonic() + seconds
    try:
        with socket.create_connection((address.host, address.port), seconds) as plain:
            resp = Resp(plain)
            resp.deadline = deadline
            resp.send(command("PING"))
            return resp.line().startswith((b"+PONG", b"-NOAUTH", b"-NOPERM", b"-DENIED", b"-LOADING"))
    except OSError:
        return False


def _places(address: RedisAddress, deadline: float) -> Sequence[tuple[socket.AddressFamily, Any]]:
    """Where the server may be: socket families and addresses, of which there is one at least."""
    if address.path:
        return [(socket.AF_UNIX, address.path)]
    try:
        version = ipaddress.ip_address(address.host).version
    except ValueError:
        found = _resolved(address, deadline)
        return list(dict.fromkeys((family, place) for family, _, _, _, place in found))
    return [(socket.AF_INET if version == 4 else socket.AF_INET6, (address.host, address.port))]


def _resolved(address: RedisAddress, deadline: float) -> list[Any]:
    """In a thread of its own: the system's resolver takes as long as it likes."""
    answer = Future[list[Any]]()

    def ask() -> None:
        try:
            answer.set_result(socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM))
        except Exception as failed:
            answer.set_exception(failed)

    left = _left(deadline)
    threading.Thread(target=ask, daemon=True, name="store-resolver").start()
    try:
        return answer.result(left)
    except TimeoutError as late:
        raise TimeoutError(f"nobody knew the address of {address.host!r} in time") from late


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(LATE)
    return left


def _check_login(resp: Resp) -> None:
    """An unknown answer may repeat the password, and is not shown."""
    try:
        line = resp.line()
    except ConnectionError:
        raise ConnectionError(NO_LOGIN) from None
    if line == b"+OK":
        return
    code = line.partition(b" ")[0]
    if code == b"-WRONGPASS":
        raise Refused(b"-WRONGPASS user or password is wrong, or the user is disabled")
    if code == b"-ERR":
        raise Refused(b"-ERR to AUTH: it knows no password of this user, no user, or no such command")
    if code in (b"-LOADING", b"-DENIED", b"-MASTERDOWN", b"-BUSY"):
        raise Refused(code)
    raise ConnectionError(NO_LOGIN)
