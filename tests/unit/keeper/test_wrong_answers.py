"""A keeper that answers wrongly: its line ends, requests are computed, and the engine looks for the next one."""

import socket
import threading
from contextlib import closing, contextmanager, suppress

import pytest

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.keeper import questions
from cpu_prefix_cache.keeper.protocol import (
    HEADER,
    VERSION,
    Kind,
    Message,
    ProtocolError,
    Received,
    check_greeted,
    encoded,
)
from cpu_prefix_cache.node import region as regions
from cpu_prefix_cache.node.hello import greet
from tests.support.host_engine import CHUNK_BYTES, PATIENCE
from tests.unit.keeper.pool_engine import PoolEngine

SLOTS = 32


class WrongKeeper(threading.Thread):
    """Welcomes, and then gives to each message the answer that `answer` makes. It has had `connections` of them."""

    def __init__(self, path, answer):
        super().__init__(daemon=True)
        self.answer, self.connections, self.came_back = answer, 0, threading.Event()
        self.region = regions.make(SLOTS * CHUNK_BYTES, CHUNK_BYTES)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen()
        self.start()

    def run(self):
        while not self.came_back.is_set():
            with suppress(OSError), self.listener.accept()[0] as connected:  # it is closed by either end
                received = Received()
                while some := connected.recv(1 << 16):
                    received.feed(some)
                    for message in received:
                        self.gets(connected, message)

    def gets(self, connected, message):
        if message.kind is Kind.HELLO:
            self.connections += 1
            if self.connections > 1:
                self.came_back.set()
            welcome = encoded(Message(Kind.WELCOME, numbers=(SLOTS, CHUNK_BYTES, 1)))
            socket.send_fds(connected, [welcome], self.region.files)
        elif answer := self.answer(message):
            connected.sendall(answer if isinstance(answer, bytes) else encoded(answer))

    def close(self):
        self.came_back.set()
        self.listener.close()


@contextmanager
def one_answer(tmp_path, monkeypatch, answer):
    """A keeper and an engine that has served a prompt with this answer."""
    monkeypatch.setattr(questions, "ASK_SECONDS", 0.5)
    path = str(tmp_path / "kv.sock")
    with closing(WrongKeeper(path, answer)) as keeper, PoolEngine(f"unix:{path}") as engine:
        assert engine.serves("abcd") == 0
        engine.rests()
        yield keeper, engine


def ran(*numbers, kind=Kind.RAN, later=0):
    return lambda asked: Message(kind, asked.id + later, numbers) if asked.kind is Kind.RUN else None


def took(*numbers):
    def answer(asked):
        if asked.kind is Kind.RUN:
            return Message(Kind.RAN, asked.id, (0, 0))
        return Message(Kind.TOOK, asked.id, numbers) if asked.kind is Kind.TAKE else None

    return answer


@pytest.mark.parametrize(
    "answer",
    [
        ran(),
        ran(4, 4, 100, 101, 102, 103),
        ran(1, 1, SLOTS),
        ran(1, 1, 2**40),
        ran(20, 20, *range(20)),
        ran(2, 2, 3, 3),
        ran(1, 2, 3, 4),
        ran(2, 2, 3),
        ran(1, 1, 0, later=1),
        ran(0, 0, 0, kind=Kind.TOOK),
        ran(kind=Kind.WELCOME),
        ran(kind=Kind.READING),
        ran(2**40, kind=Kind.READING),
        lambda asked: Message(Kind.READING, asked.id, (1,)) if asked.kind is Kind.TAKE else ran(0, 0)(asked),
        took(),
        took(1),
        took(1, 0),
        took(0, 0, 1, 99),
        took(0, 0, 2, 3),
        took(0, 0, 2**63, 3),
        took(0, 2, 3, 3, 4, 5),
        took(0, 0, 4, *range(4), 1, 5),
        lambda asked: HEADER.pack(HEADER.size, VERSION, Kind.RAN, 0, asked.id, 0, 1),
    ],
)
def test_a_wrong_answer_ends_the_connection_and_the_engine_comes_back(tmp_path, monkeypatch, answer):
    with one_answer(tmp_path, monkeypatch, answer) as (keeper, _):
        assert keeper.came_back.wait(PATIENCE)


@pytest.mark.parametrize(
    "answer", [ran(0, 0), ran(1, kind=Kind.READING), took(0, 0, 4, *range(4)), took(1, 0, 0), took(0, 4, 0)]
)
def test_a_right_answer_does_not(tmp_path, monkeypatch, answer):
    """The control of the test above."""
    with one_answer(tmp_path, monkeypatch, answer) as (keeper, engine):
        assert keeper.connections == 1 and engine.host.cache._messenger.is_up


@pytest.mark.parametrize("greeting", [Message(Kind.WELCOME), Message(Kind.REFUSED), Message(Kind.RAN)])
def test_a_greeting_that_is_none_is_a_protocol_error(greeting):
    with pytest.raises(ProtocolError, match="the keeper began with"):
        check_greeted(greeting)


def test_a_refusal_that_is_no_text_is_one():
    """A thread that meets another error does not come back to the next keeper."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(encoded(Message(Kind.REFUSED, keys=(b"\xff",))))
        with pytest.raises(ConfigurationError, match="the keeper refuses"):
            greet(ours, Message(Kind.HELLO), (), lambda: False)
