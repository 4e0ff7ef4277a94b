"""Redis or Valkey as a store: values go from and into the caller's buffers without a copy.

A connection is idle or in use by one call. It is dropped when a call fails on it, and all that are idle with it, since
what ended one has mostly ended the others. Commands that a user needs: GET, SET, EXISTS, DEL, PING.
"""

import ssl
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cpu_prefix_cache.messages.errors import ConfigurationError, TierUnavailable
from cpu_prefix_cache.stores.frame import PREFIX
from cpu_prefix_cache.stores.keyed_store import Buffers, Got, KeyedStore
from cpu_prefix_cache.stores.redis_link import CLOSED, Link, answers_without_tls
from cpu_prefix_cache.stores.redis_url import RedisAddress, parse_redis_url
from cpu_prefix_cache.stores.resp import NO_VALUE, Refused, Resp, command, commands, number, set_command

CONNECT_SECONDS = 5.0  # for the first connection, at construction
TLS_SECONDS = 1.0  # of these, after which it is asked whether the server speaks without TLS
AT_ONCE_BYTES = 1 << 20  # of a call, and one value at least: see docs/tiers.md
NEEDS = "it needs the commands GET, SET, EXISTS, DEL and PING"
APART = (f"{PREFIX}:a", f"{PREFIX}:b")  # no server of a cluster answers for both: they are in different slots
CLUSTER = (b"-CROSSSLOT", b"-MOVED", b"-CLUSTERDOWN")
ONE_VALUE = (b"-ERR", b"-OOM")  # refusals of one SET: too large, or no room; others are of all that a call asks
# Refusals at the start that end when somebody changes a configuration; others end by themselves.
FOR_GOOD = (b"-ERR", b"-NOAUTH", b"-WRONGPASS", b"-NOPERM", b"-DENIED")
TOO_MANY = b"-ERR max number of clients"


class RedisStore(KeyedStore):
    """Values as they are, under their keys. `url` has the form of `redis_url.py`.

    Raises ConfigurationError if the URL is wrong, the server refuses us or our certificate is not its own, or it is one
    of a cluster; and TierUnavailable if nobody answers, or not as Redis does.
    """

    def __init__(self, url: str) -> None:
        self._address = parse_redis_url(url)
        self._lock, self._closed = threading.Lock(), False
        self._idle: deque[Link] = deque()
        self._in_use: set[Link] = set()
        with _say_what_would_work(self._address):
            self._greet()

    def register(self, memory: memoryview) -> None:
        pass

    def exists(self, keys: Sequence[str], timeout: float) -> list[bool]:
        """Queries all keys by one command first, since mostly all or none are there."""
        if not keys:
            return []
        with self._link(timeout) as resp:
            resp.send(command("EXISTS", *keys))
            there = number(resp.line())
            if there in (0, len(keys)):
                return [there > 0] * len(keys)
            resp.send(commands("EXISTS", keys))
            return [number(resp.line()) > 0 for _ in keys]

    def get_into(self, keys: Sequence[str], buffers: Sequence[Buffers], timeout: float) -> list[Got]:
        with self._link(timeout) as resp:
            found: list[Got] = []
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
                number(resp.line())

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for link in self._in_use:
                link.interrupt()
        self._drop_idle()

    def _greet(self) -> None:
        """Raises OSError, and ConfigurationError for a server of a cluster."""
        if self._address.tls is not None:
            try:
                with self._link(TLS_SECONDS):
                    pass
            except TimeoutError:
                if answers_without_tls(self._address, TLS_SECONDS):
                    raise ConnectionError("it speaks without TLS: the URL begins with redis:// then") from None
        with self._link(CONNECT_SECONDS) as resp:
            resp.send(command("PING"))
            resp.expect(b"+PONG")
            resp.send(command("EXISTS", *APART))
            answer = resp.line()
            if answer.startswith(CLUSTER):
                raise ConfigurationError(
                    f"the server at {self._address.name} is one of a Redis Cluster "
                    f"({answer[1:200].decode(errors='replace')}), which spreads keys over its servers: give the URL of "
                    "a server that has all keys (cluster-enabled no)"
                )
            number(answer)

    @contextmanager
    def _link(self, timeout: float) -> Iterator[Resp]:
        """A connection for one call, which is over when the call fails."""
        deadline = time.monotonic() + timeout
        link = self._take_idle() or Link(self._address)
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

    def _take_idle(self) -> Link | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                link = self._idle.pop()
            if link.is_silent:
                return link
            link.close()

    def _enter(self, link: Link) -> None:
        with self._lock:
            if self._closed:
                raise ConnectionError(CLOSED)
            self._in_use.add(link)

    def _leave(self, link: Link) -> None:
        with self._lock:
            self._in_use.discard(link)

    def _keep(self, link: Link) -> None:
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


def _parts(values: Sequence[Buffers]) -> Iterator[slice]:
    """Splits a call into batches of about 1 MiB. Its values have about the same size."""
    count = max(1, AT_ONCE_BYTES // max(1, sum(each.nbytes for each in values[0]))) if values else 1
    return (slice(begin, begin + count) for begin in range(0, len(values), count))


def _get(resp: Resp, buffers: Buffers) -> Got:
    line = resp.line()
    if line == NO_VALUE:
        return Got.MISSING
    if line.startswith(b"-WRONGTYPE"):  # another's key, of another type
        return Got.OTHER_SIZE
    return Got.READ if resp.value(number(line, b"$"), buffers) else Got.OTHER_SIZE


def _took(line: bytes) -> bool:
    if line.startswith(ONE_VALUE):
        return False
    if line != b"+OK":
        raise Refused(line)
    return True


@contextmanager
def _say_what_would_work(address: RedisAddress) -> Iterator[None]:
    try:
        yield
    except OSError as failed:
        error = ConfigurationError if _is_for_good(failed) else TierUnavailable
        raise error(
            f"no Redis server can be used at {address.name} ({str(failed).rstrip('.')}). Start one there "
            "(redis-server, valkey-server), or correct address, user and password in the URL; "
            f"{NEEDS}, and rediss:// where it speaks TLS"
        ) from failed


def _is_for_good(failed: OSError) -> bool:
    """Whether trying again is in vain, until somebody changes a configuration."""
    if isinstance(failed, Refused):
        return failed.line.startswith(FOR_GOOD) and not failed.line.startswith(TOO_MANY)
    return isinstance(failed, ssl.SSLCertVerificationError | PermissionError)
