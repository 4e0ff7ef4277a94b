"""Hello: how the socket of an engine begins.

connect    to a keeper of the same user, by the kernel's word at both ends
greet      hello, with the files of the pool if the engine has them; welcome, with the files if not, or refused
"""

import os
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from cpu_prefix_cache.keeper.protocol import Kind, Message, ProtocolError, Received, check_greeted, encoded
from cpu_prefix_cache.memory.shared_file import receive, user_of
from cpu_prefix_cache.messages.errors import ConfigurationError

RETRY_SECONDS = 0.1
SEND_SECONDS = 1.0  # a keeper that reads nothing for so long is gone
READ_BYTES = 1 << 20
NUM_FILES = 2  # that go with a hello or a welcome: the region, and its records


class Welcome(NamedTuple):
    """The place of an engine in a pool of `num_slots` slots. `files` are those that it did not have."""

    num_slots: int
    number: int
    files: Sequence[int]


def connect(path: str) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX)
    connected.settimeout(SEND_SECONDS)
    try:
        connected.connect(path)
        if user_of(connected) != os.geteuid():
            raise ConfigurationError(f"the keeper at {path} is of another user; start both as one user")
    except BaseException:
        connected.close()
        raise
    return connected


def greet(connected: socket.socket, hello: Message, files: Sequence[int], is_late: Callable[[], bool]) -> Welcome:
    """Say hello, and wait for the answer. Raises ConfigurationError, with the keeper's sentence, where it refuses."""
    socket.send_fds(connected, [encoded(hello)], files)
    received, got = Received(), list[int]()
    connected.settimeout(RETRY_SECONDS)
    with ExitStack() as undo:
        undo.callback(close_files, got)
        while not is_late():
            try:
                some, new = receive(connected, READ_BYTES, NUM_FILES)
            except TimeoutError:
                continue
            got += new
            if not some:
                raise ConnectionResetError("it ended the connection, as one of another release does")
            received.feed(some)
            for message in received:
                check_greeted(message)
                if message.kind is Kind.REFUSED:
                    raise ConfigurationError(f"the keeper refuses: {message.keys[0].decode(errors='replace')}")
                if not files and len(got) != NUM_FILES:
                    raise ProtocolError(f"the keeper began with {len(got)} files")
                if not files:
                    undo.pop_all()
                connected.settimeout(SEND_SECONDS)
                return Welcome(message.numbers[0], message.numbers[2], () if files else got)
        raise ConnectionAbortedError("it did not answer in time")


def close_files(files: Iterable[int]) -> None:
    for file in files:
        os.close(file)
