"""Seat: the place of an engine in a pool: its socket, both files, its number, and its lock.

    taken      by the first hello
    handed on  from the process that copies, which vLLM starts first, to the other ranks, which copy, too, and last to
               the process that decides; all of them have the files and the lock, and the last one alone the socket
    closed     in one process

The lock is that of an open file, so it is free when the last process that has the seat has closed it, or has ended: an
engine is there as long as one of them may still copy.
"""

import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Self

from cpu_prefix_cache.keeper.protocol import NOBODY, Kind, Message, ProtocolError
from cpu_prefix_cache.memory.shared_file import receive, user_of
from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.node.hello import NUM_FILES, READ_BYTES, RETRY_SECONDS, SEND_SECONDS, close_files, connect, greet
from cpu_prefix_cache.node.presence import lock

TAKE_SECONDS = 60.0  # for which both sides wait for each other when they have met
_TAKEN = b"."
_NUMBERS = struct.Struct("=QQQ")  # of the seat, of slots, and of the bytes of one


@dataclass(slots=True, eq=False)
class Seat:
    """Number `number` in a pool of `num_slots` slots of `block_bytes` bytes."""

    connected: socket.socket
    files: tuple[int, ...]
    lock: int  # a descriptor (presence.py); -1: it was closed
    number: int
    num_slots: int
    block_bytes: int
    _offer: socket.socket | None = field(default=None, init=False)

    @classmethod
    def of(cls, path: str, namespace: bytes, block_bytes: int, shape: Sequence[int], *, connect_seconds: float) -> Self:
        """The seat that the keeper at `path` gives, for a model of this `shape`. Raises ConfigurationError where none
        answers in time, or it refuses this engine.
        """
        deadline = time.monotonic() + connect_seconds
        hello = Message(Kind.HELLO, numbers=(block_bytes, NOBODY, *shape), keys=(namespace,))
        while True:
            try:
                return cls._first(path, hello, deadline)
            except (OSError, ProtocolError) as failed:
                if time.monotonic() + RETRY_SECONDS > deadline:
                    raise ConfigurationError(
                        f"no keeper answers at {path} ({failed}); start one: cpu-prefix-cache keep "
                        f"--socket {path} --host-bytes ..."
                    ) from failed
                time.sleep(RETRY_SECONDS)

    @classmethod
    def _first(cls, path: str, hello: Message, deadline: float) -> Self:
        with ExitStack() as undo:
            connected = undo.enter_context(connect(path))
            welcome = greet(connected, hello, (), lambda: time.monotonic() > deadline)
            undo.callback(close_files, welcome.files)
            own = lock(welcome.files[1], welcome.number)
            undo.pop_all()
        return cls(connected, tuple(welcome.files), own, welcome.number, welcome.num_slots, hello.numbers[0])

    def give(self, address: str, note: bytes, takers: int = 1) -> None:
        """Hand it on, with a note, to so many processes of this user that take it at `address`, the last of which
        decides. A thread waits for them until this seat is closed: an engine that warms up may take long to begin.

        Raises ConfigurationError where somebody else is at that address.
        """
        offer = socket.socket(socket.AF_UNIX)
        try:
            offer.bind(f"\0{address}")
        except OSError as failed:
            offer.close()
            raise ConfigurationError(
                f"another process of this machine has the address {address} ({failed}), where this engine's worker "
                "gives its seat in the pool; start this engine again"
            ) from failed
        self._offer = offer
        offer.listen()
        threading.Thread(target=self._give, args=(offer, note, takers), daemon=True, name="keeper-seat").start()

    def _give(self, offer: socket.socket, note: bytes, takers: int) -> None:
        with suppress(OSError), offer:  # this seat was closed
            while takers:
                with offer.accept()[0] as taker:
                    takers -= self._is_taken_by(taker, note)
            self.connected.close()

    def _is_taken_by(self, taker: socket.socket, note: bytes) -> bool:
        """Whether it has the seat now. Some connect and go, to see who listens."""
        if user_of(taker) != os.geteuid():
            return False
        files = [self.connected.fileno(), *self.files, self.lock]
        taker.settimeout(TAKE_SECONDS)
        try:
            socket.send_fds(taker, [_NUMBERS.pack(self.number, self.num_slots, self.block_bytes)], files)
            taker.sendall(note)
            taker.shutdown(socket.SHUT_WR)
            return taker.recv(1) == _TAKEN
        except OSError:
            return False

    @classmethod
    def taken(cls, address: str, *, decides: bool = True) -> tuple[Self, bytes]:
        """The seat that another process of this engine gives, and its note. One that does not decide has no line to
        the keeper. Raises ConfigurationError.
        """
        with ExitStack() as undo, socket.socket(socket.AF_UNIX) as giver:
            files = list[int]()
            undo.callback(close_files, files)
            try:
                giver.settimeout(TAKE_SECONDS)
                giver.connect(f"\0{address}")
                some, new = receive(giver, _NUMBERS.size, NUM_FILES + 2)
                files += new
                note = b"".join(iter(lambda: giver.recv(READ_BYTES), b""))
                giver.sendall(_TAKEN)
            except OSError as failed:
                raise ConfigurationError(
                    f"this engine cannot get its seat in the pool from its worker ({failed}): both are processes of "
                    "one user, on one machine, and in containers of one network namespace"
                ) from failed
            if user_of(giver) != os.geteuid() or len(files) != NUM_FILES + 2 or len(some) != _NUMBERS.size:
                raise ConfigurationError("the worker of this engine has ended, or is of another user")
            undo.pop_all()
        line, *pool, own = files
        connected = socket.socket(fileno=line)
        connected.settimeout(SEND_SECONDS)
        if not decides:
            connected.close()
        return cls(connected, tuple(pool), own, *_NUMBERS.unpack(some)), note

    def close(self) -> None:
        """In this process. Nothing of the region is in use here; may be called again."""
        if self._offer is not None:
            with suppress(OSError):
                self._offer.shutdown(socket.SHUT_RDWR)  # the thread that waits there ends
            self._offer = None
        self.connected.close()
        self.leave()
        close_files(self.files)
        self.files = ()

    def leave(self) -> None:
        """The engine is there no more, as far as this process is concerned. May be called again."""
        own, self.lock = self.lock, -1
        if own >= 0:
            os.close(own)
