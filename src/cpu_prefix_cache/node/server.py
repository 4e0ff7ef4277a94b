"""Server: the sockets of a keeper. One thread, which answers each message before it reads the next.

    connected --hello--> waiting --welcome--> joined --its socket ends--> leaving --its lock is free--> gone
                            `--refused: another user, release, block size, shape or region, or too many engines

    no region --an engine hands one back, or nobody does in time and one is made--> open

Where an earlier keeper has left its socket behind, engines may still have its region. So that is waited for, for
`adopt_seconds`, before a new one is made. An engine says hello only when none of its copies is under way, so what it
had leased or was writing before is free.

The end of a socket says that an engine is about to be gone; the kernel's lock says that it is (`presence.py`), and
`settle_seconds` later no device of its process writes either. Then its slots are free. In a region that was handed
back no slot is handed out for as long, since an engine may have ended with the keeper before.
"""

import fcntl
import gc
import logging
import os
import select
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from cpu_prefix_cache.keeper.answers import Leased
from cpu_prefix_cache.keeper.counts import counted
from cpu_prefix_cache.keeper.fair_lru import MOST_ENGINES
from cpu_prefix_cache.keeper.keeper import Keeper
from cpu_prefix_cache.keeper.metrics import metrics_of, spelled
from cpu_prefix_cache.keeper.protocol import (
    MICROSECOND,
    NOBODY,
    VERSION,
    Kind,
    Message,
    OtherVersion,
    ProtocolError,
    Received,
    check_asked,
    encoded,
)
from cpu_prefix_cache.keeper.shape import planner_of, shared_shape
from cpu_prefix_cache.memory.shared_file import receive, user_of
from cpu_prefix_cache.messages.errors import ConfigurationError, MisuseError
from cpu_prefix_cache.messages.request import Pending
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.node import region as regions
from cpu_prefix_cache.node.hello import NUM_FILES, READ_BYTES
from cpu_prefix_cache.node.metrics_page import show
from cpu_prefix_cache.node.pool_tier import PoolTier
from cpu_prefix_cache.node.presence import is_present
from cpu_prefix_cache.node.region import Region
from cpu_prefix_cache.slab.tier import Tier

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.05  # while somebody is waited for
FULL_SECONDS = 1.0  # for which nobody is accepted after the system has refused
ADOPT_SECONDS, SETTLE_SECONDS = 5.0, 1.0
MOST_UNSENT = 64 << 20  # an engine that does not read its answers is left alone


class _Connection:
    """An engine's socket. `number` is NOBODY until it has joined; `hello` waits until there is a region."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.received = Received()
        self.unsent = bytearray()
        self.waits_to_send = False
        self.files: list[int] = []  # that came with hello
        self.hello: Message | None = None
        self.planner: HybridChunkPlanner | None = None  # of its hello
        self.number = NOBODY


class Server:
    """Keeps `host_bytes` bytes for the engines that connect at `path`. Raises ConfigurationError where it cannot.

    Who connects to `metrics`, a listener, is shown what all this comes to.
    """

    def __init__(
        self,
        path: str,
        host_bytes: int,
        *,
        adopt_seconds: float = ADOPT_SECONDS,
        settle_seconds: float = SETTLE_SECONDS,
        below: Tier | None = None,
        metrics: socket.socket | None = None,
    ) -> None:
        if below is not None:
            below.slots(host_bytes, 1)  # whatever size a slot will have
        self._host_bytes, self._settle_seconds, self._tier = host_bytes, settle_seconds, below
        self._lock = _locked(path)
        was_there = os.path.lexists(path)
        self._make_until = time.monotonic() + (adopt_seconds if was_there else 0.0)
        listeners = [(_listening(path), self._connected), *([] if metrics is None else [(metrics, self._show)])]
        self._listeners = {listener.fileno(): (listener, begin) for listener, begin in listeners}
        self._region: Region | None = None
        self._keeper: Keeper | None = None
        self._below: PoolTier | None = None
        self._connections: dict[int, _Connection] = {}  # by the descriptor of the socket
        self._joined: dict[int, _Connection] = {}  # by the number of the engine
        self._leaving = set[int]()
        self._gone_at: dict[int, float] = {}  # when the lock of one that is leaving, or absent, was first seen free
        self._full_until: float | None = None
        self._wakes: tuple[socket.socket, ...] = ()
        self._is_ended = False
        self._poll = select.poll()
        self._listen()

    def serve(self) -> None:
        """Serve until it is ended."""
        gc.freeze()  # the modules: looking through them took 32 ms, longer than a request waits for its answer
        while not self._is_ended:
            self.step()

    def end_by(self, sign: int) -> None:
        """Have a signal end `serve`, between two steps. Called by the first thread."""
        woken, wakes = self._wakes = socket.socketpair()
        self._poll.register(woken, select.POLLIN)
        wakes.setblocking(False)
        signal.set_wakeup_fd(wakes.fileno())
        signal.signal(sign, self._end)

    def _end(self, _signal: int, _frame: FrameType | None) -> None:
        self._is_ended = True

    def step(self) -> None:
        """Wait for what comes next, and answer it."""
        for file, events in self._poll.poll(self._milliseconds):
            if file in self._listeners:
                self._accept(*self._listeners[file])
            elif file in self._connections:
                self._serve(self._connections[file], events)
        if self._below is not None:
            self._step_below(self._below)
        if self._waits:
            self._tick(time.monotonic())

    def close(self) -> None:
        """Let all go. The socket's file stays: who comes next waits for what engines hand back."""
        for connection in list(self._connections.values()):
            self._close(connection)
        for listener, _ in self._listeners.values():
            listener.close()
        if self._below is not None:
            self._below.close()
        os.close(self._lock)

    # Engines that come and go

    @property
    def _milliseconds(self) -> int | None:
        """How long to wait for engines at most."""
        waits = [TICK_SECONDS] if self._waits else []
        if self._below is not None and (seconds := self._below.wait_seconds) is not None:
            waits.append(seconds)
        return int(min(waits) * 1000) if waits else None

    @property
    def _waits(self) -> bool:
        has_absent = self._keeper is not None and bool(self._keeper.absent)
        has_hello = any(each.hello for each in self._connections.values())
        return has_absent or has_hello or bool(self._leaving) or self._full_until is not None

    def _tick(self, now: float) -> None:
        if self._full_until is not None and now >= self._full_until:
            self._full_until = None
            self._listen()
        waiting = [each for each in self._connections.values() if each.hello is not None]
        if self._region is None and waiting and now >= self._make_until:
            self._make(waiting[0])
        for connection in waiting if self._region is not None else ():
            self._welcome(connection)
        if self._keeper is None or self._region is None:
            return
        for number in [*self._leaving, *self._keeper.absent]:
            if is_present(self._region.files[1], number):
                self._gone_at.pop(number, None)
            elif now >= self._gone_at.setdefault(number, now) + self._settle_seconds:
                if number != NOBODY:
                    logger.info("engine %d is gone", number)
                self._gone(number)

    def _gone(self, number: int) -> None:
        """Nothing of this engine's copies is under way any more."""
        self._gone_at.pop(number, None)
        if self._keeper is not None:
            self._keeper.absent.discard(number)
            if number in self._leaving:
                self._keeper.leave(number)
        self._leaving.discard(number)

    def _listen(self) -> None:
        for file in self._listeners:
            self._poll.register(file, select.POLLIN)

    def _accept(self, listener: socket.socket, begin: Callable[[socket.socket], None]) -> None:
        if self._full_until is not None:
            return
        try:
            connected, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # it is gone already
        except OSError as error:  # there are too many
            logger.warning("nobody is accepted for %.0f s: %s", FULL_SECONDS, error)
            for file in self._listeners:
                self._poll.unregister(file)  # else it is reported again at once
            self._full_until = time.monotonic() + FULL_SECONDS
            return
        begin(connected)

    def _show(self, connected: socket.socket) -> None:
        tier = None if self._below is None else self._below.statistics()
        show(connected, "" if self._keeper is None else spelled(metrics_of(self._keeper.keeper_statistics(), tier)))

    def _connected(self, connected: socket.socket) -> None:
        if user_of(connected) != os.geteuid():
            logger.warning(
                "a process of user %d was refused: a pool is for the engines of one user", user_of(connected)
            )
            connected.close()
            return
        connected.setblocking(False)
        self._connections[connected.fileno()] = _Connection(connected)
        self._poll.register(connected, select.POLLIN)

    def _close(self, connection: _Connection) -> None:
        self._poll.unregister(connection.socket)
        del self._connections[connection.socket.fileno()]
        connection.socket.close()
        _close_files(connection)
        if connection.number != NOBODY:
            del self._joined[connection.number]
            self._leaving.add(connection.number)

    def _make(self, first: _Connection) -> None:
        """A new region, for blocks of the size that the first engine has."""
        if first.hello is None or first.planner is None:
            return
        block_bytes, least = first.hello.numbers[0], first.planner.fewest_blocks
        try:
            if least * block_bytes > self._host_bytes:
                raise ConfigurationError(
                    f"a chunk and its checkpoint take {least} of them, and the pool has {self._host_bytes:,} bytes: "
                    "start a keeper with more"
                )
            region = regions.make(self._host_bytes, block_bytes, taken_here=self._tier is not None)
            self._open(region, first.planner)
        except (ConfigurationError, OSError, OverflowError, MemoryError) as error:
            self._refuse(first, f"no region has blocks of {block_bytes} bytes here: {error}")

    def _open(self, region: Region, planner: HybridChunkPlanner, absent: Sequence[int] = ()) -> None:
        """`absent`: beside engines that live, who may still write to it. NOBODY is for those that ended just now."""
        keeper = self._new_keeper(region, planner)
        keeper.absent.update(each for each in range(1, MOST_ENGINES + 1) if is_present(region.files[1], each))
        keeper.absent.update(absent)
        with _uncollected():
            found = keeper.recover()
        self._region, self._keeper = region, keeper
        logger.info("%d slots of %d bytes, %d of them found", region.num_slots, region.block_bytes, found)
        if region.num_slots != self._host_bytes // region.block_bytes:
            logger.warning("the region that was handed back has its own size: to change it, end all engines first")

    def _new_keeper(self, region: Region, planner: HybridChunkPlanner) -> Keeper:
        if self._tier is not None:
            try:
                self._below = PoolTier(self._tier, region, planner)
                return self._below.keeper
            except (ConfigurationError, OSError, OverflowError) as error:
                logger.error("nothing is below this pool: %s", error)
            except MemoryError:
                logger.error("nothing is below this pool: there is no memory for an index of so many slots")
        return Keeper(region.num_slots, region.records, planner)

    def _welcome(self, connection: _Connection) -> None:
        hello, planner, region, keeper = connection.hello, connection.planner, self._region, self._keeper
        if hello is None or planner is None or region is None or keeper is None:
            return
        connection.hello = None
        block_bytes, number = hello.numbers[:2]
        if (number or connection.files) and not region.is_in(connection.files):
            self._refuse(connection, "the keeper has another region by now; start the engine anew to join it")
            return
        if block_bytes != region.block_bytes:
            sentence = f"this pool has blocks of {region.block_bytes} bytes, and this model {block_bytes}"
            self._refuse(connection, f"{sentence}; give it a keeper of its own")
            return
        if shared_shape(planner) != shared_shape(keeper.planner):
            self._refuse(connection, "this pool has models of other groups; give this one a keeper of its own")
            return
        if number in self._joined:
            self._close(self._joined[number])
        if number in self._leaving:
            self._gone(number)
        number = number or self._free_number(region)
        if number == NOBODY:
            self._refuse(connection, f"this pool has {MOST_ENGINES} engines, as many as it takes")
            return
        _close_files(connection)
        keeper.join(number, hello.keys[0])
        self._gone_at.pop(number, None)
        connection.number = number
        self._joined[number] = connection
        answer = encoded(Message(Kind.WELCOME, numbers=(region.num_slots, region.block_bytes, number)))
        with suppress(OSError):
            socket.send_fds(connection.socket, [answer], list(region.files))

    def _free_number(self, region: Region) -> int:
        taken = {*self._joined, *self._leaving}
        free = (each for each in range(1, MOST_ENGINES + 1) if each not in taken)
        return next((each for each in free if not is_present(region.files[1], each)), NOBODY)

    def _refuse(self, connection: _Connection, sentence: str, version: int = VERSION) -> None:
        logger.warning("an engine was refused: %s", sentence)
        connection.hello = None
        _close_files(connection)
        self._send(connection, Message(Kind.REFUSED, keys=(sentence.encode(),)), version)

    # Messages

    def _serve(self, connection: _Connection, events: int) -> None:
        try:
            if events & select.POLLOUT:
                self._flush(connection)
            if events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                self._read(connection)
        except BlockingIOError:
            return  # the event was of an earlier socket with this number
        except (OSError, ProtocolError, MisuseError) as error:
            if isinstance(error, OtherVersion) and connection.number == NOBODY:
                self._refuse(connection, f"{error}; start the keeper and its engines of one release", error.version)
            elif not isinstance(error, OSError):
                logger.warning("engine %d is left alone: %s", connection.number, error)
            if connection.socket.fileno() in self._connections:
                self._close(connection)

    def _read(self, connection: _Connection) -> None:
        if connection.number == NOBODY:
            some, files = receive(connection.socket, READ_BYTES, NUM_FILES)
            connection.files += files
            if len(connection.files) > NUM_FILES:
                raise ProtocolError(f"it sends {len(connection.files)} files")
        else:
            some = connection.socket.recv(READ_BYTES)
        if not some:
            raise ConnectionResetError
        connection.received.feed(some)
        for message in connection.received:
            self._answer(connection, message)

    def _answer(self, connection: _Connection, message: Message) -> None:
        kind, id, numbers, keys = message
        engine, keeper = connection.number, self._keeper
        check_asked(message)
        if kind is Kind.HELLO and engine == NOBODY:
            self._greet(connection, message)
        elif keeper is None or engine == NOBODY:
            raise ProtocolError(f"got {kind.name} before {Kind.HELLO.name}")
        elif kind is Kind.RUN:
            self._send_run(connection, id, keeper.run(engine, id, keys, time.monotonic(), numbers[0]))
        elif kind is Kind.TAKE:
            granted = keeper.take(engine, id, keys, bool(numbers[0]))
            self._send(connection, Message(Kind.TOOK, id, granted.numbers))
        elif kind is Kind.COUNT:
            self._send(connection, Message(Kind.COUNTED, id, counted(keeper.statistics())))
        elif kind is Kind.COMMIT:
            keeper.commit(engine, id, numbers[0], bool(numbers[1]))
        elif kind is Kind.RELEASE:
            keeper.release(engine, id)
        elif kind is Kind.NAME:
            keeper.name(engine, keys[0])

    def _step_below(self, below: PoolTier) -> None:
        for engine, id, answer in below.step():
            connection = self._joined.get(engine)
            if connection is None:
                continue  # its socket has ended; it is gone when its lock is free
            try:
                if answer is None:
                    raise ProtocolError("it asks for several prompts as one")
                self._send_run(connection, id, answer)
            except ProtocolError as error:
                logger.warning("engine %d is left alone: %s", engine, error)
                self._close(connection)

    def _send_run(self, connection: _Connection, id: int, answer: Leased | Pending) -> None:
        if isinstance(answer, Pending):
            microseconds = max(0, int((answer.deadline - time.monotonic()) / MICROSECOND))
            self._send(connection, Message(Kind.READING, id, (microseconds,)))
        else:
            self._send(connection, Message(Kind.RAN, id, answer.numbers))

    def _greet(self, connection: _Connection, hello: Message) -> None:
        block_bytes, number, *shape = hello.numbers
        if not block_bytes or number > MOST_ENGINES:
            raise ProtocolError(f"engine {number} says hello with blocks of {block_bytes} bytes")
        connection.hello, connection.planner = hello, planner_of(shape)
        if self._region is None and connection.files:
            adopted = regions.adopt(connection.files, block_bytes, connection.planner.fewest_blocks)
            if adopted is not None:
                self._open(adopted, connection.planner, [NOBODY])
        self._tick(time.monotonic())

    def _send(self, connection: _Connection, message: Message, version: int = VERSION) -> None:
        connection.unsent += encoded(message, version)
        self._flush(connection)

    def _flush(self, connection: _Connection) -> None:
        waited = connection.waits_to_send
        with suppress(OSError):  # it is full, or at its end, which is seen when it is read
            del connection.unsent[: connection.socket.send(connection.unsent)]
        if len(connection.unsent) > MOST_UNSENT:
            raise ProtocolError("it does not read its answers")
        connection.waits_to_send = bool(connection.unsent)
        if connection.waits_to_send is not waited:
            self._poll.modify(connection.socket, select.POLLIN | (select.POLLOUT if connection.unsent else 0))


@contextmanager
def _uncollected() -> Iterator[None]:
    """Look for no garbage meanwhile: all that is made stays, and a fifth of the time went into looking through it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _listening(path: str) -> socket.socket:
    """The socket at `path`, whose file an earlier keeper may have left behind."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        if os.path.lexists(path):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise ConfigurationError(f"{path} is no socket; give the keeper a path of its own")
            os.unlink(path)
        before = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
    except OSError as error:
        listener.close()
        raise ConfigurationError(f"no socket can be made at {path}: {error.strerror or error}") from error
    listener.listen()
    listener.setblocking(False)
    return listener


def _locked(path: str) -> int:
    """A lock file beside the socket, which the kernel unlocks when this process ends."""
    try:
        file = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigurationError(f"no lock can be made at {path}.lock: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise ConfigurationError(f"another keeper serves {path}; end it first, or give this one another path") from None
    return file


def _close_files(connection: _Connection) -> None:
    for file in connection.files:
        os.close(file)
    connection.files.clear()
