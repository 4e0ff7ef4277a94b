"""An engine's end of the keeper's socket, which a thread of its own owns: no step of the engine waits for it.

    up      messages are sent and answers collected, for the engine's own thread to take
    down    the keeper is gone; what is sent is dropped. The engine still uses what it was granted before
    again   a keeper listens, and nothing of the region is in use: hello, with both files, under the same number
    over    the keeper has refused this engine, or the engine has ended

A *connection* is numbered. What was granted in an earlier one may be used no more, since another keeper knows nothing
of it. `begin_use` and the next hello exclude each other.
"""

import logging
import os
import select
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack

from cpu_prefix_cache.keeper.answers import check_answered
from cpu_prefix_cache.keeper.protocol import ANSWERS, Kind, Message, ProtocolError, Received, encoded
from cpu_prefix_cache.keeper.shape import spelled
from cpu_prefix_cache.memory.ending import end_outside_of
from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.node.hello import READ_BYTES, RETRY_SECONDS, connect, greet
from cpu_prefix_cache.node.seat import Seat

logger = logging.getLogger(__name__)


class SocketMessenger:
    """For the engine that has this seat at the keeper at `path`, and this model. `name_of` gives the name of a
    revision's namespace; `revision` is that of its first hello.
    """

    def __init__(
        self,
        path: str,
        seat: Seat,
        planner: HybridChunkPlanner,
        name_of: Callable[[str | None], bytes],
        revision: str,
    ) -> None:
        self._path, self._seat, self._planner = path, seat, planner
        self._name_of, self._namespace = name_of, name_of(revision)
        self.num_slots = seat.num_slots
        self._lock = threading.Lock()
        self._unsent = deque[Message]()
        self._answers = deque[tuple[int, Message]]()
        self._uses = 0
        self._is_closed = False
        self._ending = threading.Event()
        self.connection = 1
        self.is_up = True
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, args=(seat.connected,), daemon=True, name="keeper-socket")
        self._thread.start()

    # The engine's thread

    def send(self, connection: int, message: Message) -> None:
        """Send soon. Dropped if that connection is not the one that there is now."""
        with self._lock:
            if not self.is_up or connection != self.connection:
                return
            self._unsent.append(message)
        os.eventfd_write(self._wake, 1)

    def answers(self) -> list[tuple[int, Message]]:
        """Answers since the last call, each with its connection."""
        return [self._answers.popleft() for _ in range(len(self._answers))]

    def begin_use(self, connection: int) -> bool:
        """Whether a copy of what was granted in that connection may begin. Then `end_use` follows."""
        with self._lock:
            if connection != self.connection:
                return False
            self._uses += 1
            return True

    def end_use(self) -> None:
        with self._lock:
            self._uses -= 1

    def rename(self, revision: str | None) -> None:
        """From now on everything is of this revision, also after the next hello."""
        with self._lock:
            self._namespace = self._name_of(revision)
            if self.is_up:
                self._send_name()

    def close(self) -> None:
        """No copy is under way. The seat is closed, too; may be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        self._ending.set()
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        self._seat.close()

    def close_after(self, region: object) -> None:
        """Close when nobody has this any more, which copies use, or when the process ends."""
        weakref.finalize(region, end_outside_of, [self._thread], os.getpid(), self.close)

    def _send_name(self) -> None:
        """With the lock held, so that the last name is the last that is sent."""
        self._unsent.append(Message(Kind.NAME, keys=(self._namespace,)))
        os.eventfd_write(self._wake, 1)

    # Its own thread

    def _run(self, connected: socket.socket | None) -> None:
        while connected is not None:
            with connected:
                try:
                    self._talk(connected)
                except (OSError, ProtocolError) as error:
                    if not self._ending.is_set():
                        logger.warning("the keeper at %s is gone (%s): what it kept is not found", self._path, error)
            with self._lock:
                self.is_up = False
                self._unsent.clear()
            connected = self._again()

    def _talk(self, connected: socket.socket) -> None:
        received, poll = Received(), select.poll()
        asked: dict[int, Message] = {}  # not answered yet, by their ids
        poll.register(connected, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while not self._ending.is_set():
            for file, _ in poll.poll():
                if file == self._wake:
                    os.eventfd_read(self._wake)
                    asked.update(self._send_all(connected))
                    continue
                some = connected.recv(READ_BYTES)
                if not some:
                    raise ConnectionResetError("its socket has ended")
                received.feed(some)
                for message in received:
                    question = asked.get(message.id)
                    check_answered(question, message, self.num_slots, self._planner)
                    if message.kind is not Kind.READING:
                        del asked[message.id]
                    self._answers.append((self.connection, message))
        self._send_all(connected)

    def _send_all(self, connected: socket.socket) -> dict[int, Message]:
        """Send what is unsent. The questions among it, by their ids."""
        with self._lock:
            sent = list(self._unsent)
            self._unsent.clear()
        if sent:
            connected.sendall(b"".join(map(encoded, sent)))
        return {message.id: message for message in sent if message.kind in ANSWERS}

    def _again(self) -> socket.socket | None:
        """The next connection; None where there will be none."""
        while not self._ending.wait(RETRY_SECONDS):
            try:
                connected = self._next_connection()
            except ConfigurationError as refused:
                logger.error("%s; nothing is found or kept from now on", refused)
                self._seat.leave()
                return None
            except (OSError, ProtocolError) as failed:
                logger.debug("the keeper at %s: %s", self._path, failed)
                continue
            if connected is not None:
                return connected
        return None

    def _next_connection(self) -> socket.socket | None:
        """None while the engine may not say hello."""
        with ExitStack() as undo:
            connected = undo.enter_context(connect(self._path))
            if not self._may_say_hello():
                return None
            self._hello(connected)
            undo.pop_all()
        logger.info("the keeper at %s is back", self._path)
        with self._lock:
            self.is_up = True
            self._send_name()  # it may have changed since hello was sent
        return connected

    def _may_say_hello(self) -> bool:
        """Whether nothing of the region is in use. From then on nothing that was granted before is."""
        with self._lock:
            if self._uses:
                return False
            self.connection += 1
            return True

    def _hello(self, connected: socket.socket) -> None:
        with self._lock:
            namespace = self._namespace
        numbers = (self._seat.block_bytes, self._seat.number, *spelled(self._planner))
        hello = Message(Kind.HELLO, numbers=numbers, keys=(namespace,))
        greet(connected, hello, self._seat.files, self._ending.is_set)
