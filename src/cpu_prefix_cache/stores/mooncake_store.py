"""Mooncake Store: values move between registered memory of the machines, without a copy here; a master knows where.

    mooncake://MASTER:PORT?segment=4GiB&protocol=tcp

| option | | default |
|---|---|---|
| segment | how much memory of this process values of all are kept in; 0 is allowed | 0 |
| protocol, device | tcp, or rdma and its devices | tcp |
| host | this machine's address, as the others reach it | the one from which the master is reached |

Mooncake bounds its own calls, by variables of the environment that are set here unless they are set already. A transfer
cannot be given up, so a call with buffers ends by its timeout or some seconds later. A question for existence is given
up at its timeout; no other call is made until it has ended. A process whose master is gone takes some 10 s longer to
end.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import NamedTuple, Protocol, TypeVar
from urllib.parse import parse_qsl, urlsplit

from cpu_prefix_cache.messages.errors import ConfigurationError, TierUnavailable
from cpu_prefix_cache.messages.sizes import parse_bytes
from cpu_prefix_cache.slab.below import address_of
from cpu_prefix_cache.stores.keyed_store import Buffers, Got, KeyedStore

FORM = "mooncake://MASTER:PORT?segment=4GiB&protocol=tcp&host=ADDRESS&device=NAME"
# Measured: a call to a frozen master ends after 1.0 s, to a frozen data node after 2 to 12 s. With 1 s of no progress
# transfers between processes on a busy machine were given up.
BOUNDS = {
    "MC_RPC_TIMEOUT_MS": "1000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "500",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "1000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "3",
}
CONNECT_SECONDS = 5.0  # for the first connection to the master
LOCAL_BUFFER_BYTES = 16 << 20  # Mooncake's own, for calls that copy: we make none
CLOSE_SECONDS = 10.0  # that calls under way may take to end

PORTION = 16  # values to one of Mooncake's calls: gets at .95 of one call for all, with 8 at .88; see BOUNDS
NOT_THERE, TRANSFER_FAILED, NO_ANSWER = -704, -800, (-900, -901)  # a key; a data node; the master
NODE_SILENT = "a machine of the cluster that has these values, or should take them, does not answer"


class MooncakeStore(KeyedStore):
    """A client of the cluster at `url`. Raises ConfigurationError for a wrong URL, and TierUnavailable if it cannot
    become one: Mooncake does not document whether that will change.
    """

    def __init__(self, url: str) -> None:
        settings = _settings(url)
        self._master = settings.master
        try:
            with socket.create_connection(self._master, CONNECT_SECONDS) as link:
                host = settings.host or link.getsockname()[0]
            self._native = _set_up(settings, host)
        except OSError as failed:
            raise TierUnavailable(
                f"no Mooncake master can be used at {_text(self._master)}: {failed}. Start one there "
                f"(mooncake_master --rpc_port={self._master[1]}), or correct the URL: {FORM}"
            ) from failed
        self._is_doubtful = False  # whether the master did not answer last time
        self._calls, self._closed, self._ended = 0, False, threading.Condition()
        self._is_let_go = False
        self._asking = threading.Lock()

    def register(self, memory: memoryview) -> None:
        code = self._native.register_buffer(address_of(memory), memory.nbytes)
        if code:
            raise OSError(f"Mooncake cannot register {memory.nbytes} bytes of memory (code {code})")

    def exists(self, keys: Sequence[str], timeout: float) -> list[bool]:
        deadline = time.monotonic() + timeout
        if not self._asking.acquire(timeout=max(0.0, timeout)):
            raise TimeoutError("the master has not answered an earlier question")
        answer = Future[list[bool]]()
        asking = threading.Thread(target=self._ask, args=(list(keys), timeout, answer), name="mooncake-exists")
        try:
            asking.start()
        except BaseException:
            self._asking.release()
            raise
        return answer.result(max(0.0, deadline - time.monotonic()))

    def get_into(self, keys: Sequence[str], buffers: Sequence[Buffers], timeout: float) -> list[Got]:
        return self._in_portions(self._get, keys, buffers, timeout)

    def put_from(self, keys: Sequence[str], buffers: Sequence[Buffers], timeout: float) -> list[bool]:
        """Mooncake keeps the old value of a key, and reports that it took the new one."""
        return self._in_portions(self._put, keys, buffers, timeout)

    def delete(self, keys: Sequence[str], timeout: float) -> None:
        with self._call(timeout):
            self._check_master(self._native.batch_remove(list(keys), True))  # also while it is leased to a reader

    def close(self) -> None:
        """Waits for calls under way. Without its master Mooncake takes some 10 s, here or at exit."""
        with self._ended:
            self._closed = True
            is_still = self._ended.wait_for(lambda: not self._calls, CLOSE_SECONDS) and not self._is_let_go
            self._is_let_go |= is_still
        if is_still:
            self._native.close()

    def _get(self, keys: Sequence[str], buffers: Sequence[Buffers]) -> list[Got]:
        places, sizes = _places(buffers)
        got = self._native.batch_get_into_multi_buffers(list(keys), places, sizes)
        self._check_master(got)
        return [self._got(*each) for each in zip(keys, got, map(sum, sizes), strict=True)]

    def _got(self, key: str, code: int, nbytes: int) -> Got:
        """A value of another size fails as if its node did not answer; one whose node is given up for dead has none."""
        if code == nbytes:
            return Got.READ
        if code == NOT_THERE:
            return Got.MISSING
        size = self._native.get_size(key)
        if size >= 0 and size != nbytes:
            return Got.OTHER_SIZE
        if code == TRANSFER_FAILED:
            raise ConnectionError(NODE_SILENT)
        return Got.MISSING

    def _put(self, keys: Sequence[str], buffers: Sequence[Buffers]) -> list[bool]:
        put = self._native.batch_put_from_multi_buffers(list(keys), *_places(buffers))
        self._check_master(put)
        if TRANSFER_FAILED in put:
            raise ConnectionError(NODE_SILENT)
        return [code == 0 for code in put]

    def _in_portions(
        self, move: "_Move[_Result]", keys: Sequence[str], buffers: Sequence[Buffers], timeout: float
    ) -> "list[_Result]":
        """Raises TimeoutError between two portions."""
        deadline = time.monotonic() + timeout
        moved: list[_Result] = []
        with self._call(timeout):
            for begin in range(0, len(keys), PORTION):
                if time.monotonic() >= deadline:
                    raise TimeoutError("the values were not all moved in time")
                part = slice(begin, begin + PORTION)
                moved += move(keys[part], buffers[part])
        return moved

    def _ask(self, keys: list[str], timeout: float, answer: "Future[list[bool]]") -> None:
        try:
            with self._call(timeout):
                found = self._native.batch_is_exist(keys)
                self._check_master(found)
                answer.set_result([each == 1 for each in found])
        except Exception as failed:
            answer.set_exception(failed)
        finally:
            self._asking.release()

    @contextmanager
    def _call(self, timeout: float) -> Iterator[None]:
        with self._ended:
            if self._closed:
                raise ConnectionError("the store is closed")
            self._calls += 1
        try:
            if self._is_doubtful:  # Mooncake tries for 4.3 s to reach a master that is gone: a connection tells at once
                socket.create_connection(self._master, max(0.0, timeout)).close()
            yield
        finally:
            with self._ended:
                self._calls -= 1
                self._ended.notify_all()

    def _check_master(self, codes: Sequence[int]) -> None:
        self._is_doubtful = any(code in NO_ANSWER for code in codes)
        if self._is_doubtful:
            raise TimeoutError(f"the master at {_text(self._master)} does not answer")


class _Settings(NamedTuple):
    master: tuple[str, int]
    segment: int
    protocol: str
    host: str
    device: str


def _settings(url: str) -> _Settings:
    try:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
        known = {"segment": "0", "protocol": "tcp", "host": "", "device": ""}
        if parts.scheme != "mooncake" or not parts.hostname or not parts.port or parts.path.strip("/"):
            raise ValueError("master and port are missing, or something else is there")
        if unknown := options.keys() - known:
            raise ValueError(f"{', '.join(sorted(unknown))} is not known")
        chosen = {**known, **options}
        segment = parse_bytes(chosen["segment"])
    except ValueError as wrong:
        raise ConfigurationError(
            f"a Mooncake store is {FORM}, its options in any order or left out; {wrong}"
        ) from wrong
    return _Settings((parts.hostname, parts.port), segment, chosen["protocol"], chosen["host"], chosen["device"])


def _set_up(settings: _Settings, host: str) -> "_Native":
    """Raises OSError."""
    for name, value in BOUNDS.items():
        os.environ.setdefault(name, value)
    native: _Native = _native_class()()
    code = native.setup(
        host,
        "P2PHANDSHAKE",
        settings.segment,
        LOCAL_BUFFER_BYTES,
        settings.protocol,
        settings.device,
        _text(settings.master),
    )
    if code:
        raise ConnectionError(f"its client cannot begin (code {code}; {settings.segment} bytes by {settings.protocol})")
    return native


def _native_class() -> Callable[[], "_Native"]:
    """Raises ConfigurationError."""
    try:
        from mooncake.store import MooncakeDistributedStore
    except ModuleNotFoundError as missing:
        raise ConfigurationError(
            f"a store at mooncake:// needs Mooncake ({missing}): pip install mooncake-transfer-engine-non-cuda"
        ) from missing
    except ImportError as missing:
        raise ConfigurationError(
            f"Mooncake needs libraries of the system ({missing}): "
            "apt install libibverbs1 librdmacm1 libnl-3-200 libnl-route-3-200"
        ) from missing
    return MooncakeDistributedStore  # type: ignore[no-any-return]  # it has no types


_Result = TypeVar("_Result", Got, bool)
_Move = Callable[[Sequence[str], Sequence[Buffers]], list[_Result]]


class _Native(Protocol):
    """The part of Mooncake's client that is used. Codes are 0 or a size where a call succeeded, and negative where
    not."""

    def setup(
        self, host: str, metadata: str, segment: int, buffer: int, protocol: str, device: str, master: str
    ) -> int: ...
    def register_buffer(self, address: int, nbytes: int) -> int: ...
    def batch_is_exist(self, keys: list[str]) -> list[int]: ...
    def batch_get_into_multi_buffers(
        self, keys: list[str], at: list[list[int]], sizes: list[list[int]]
    ) -> list[int]: ...
    def batch_put_from_multi_buffers(
        self, keys: list[str], at: list[list[int]], sizes: list[list[int]]
    ) -> list[int]: ...
    def batch_remove(self, keys: list[str], force: bool) -> list[int]: ...
    def get_size(self, key: str) -> int: ...
    def close(self) -> int: ...


def _places(buffers: Sequence[Buffers]) -> tuple[list[list[int]], list[list[int]]]:
    return [[address_of(part) for part in each] for each in buffers], [
        [part.nbytes for part in each] for each in buffers
    ]


def _text(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
