"""A connection to a Redis server, which a socket of the test plays: the deadline for it, and the errors that end it."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from cpu_prefix_cache.stores import redis_link
from cpu_prefix_cache.stores.redis_link import Link
from cpu_prefix_cache.stores.redis_store import RedisStore
from cpu_prefix_cache.stores.redis_url import parse_redis_url
from tests.stores.liars import LIES, Liar

SECONDS = 60.0  # longer than any of these tests


@pytest.fixture
def server():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def link_to(server, login="", rest=""):
    return Link(parse_redis_url(f"redis://{login}127.0.0.1:{server.getsockname()[1]}{rest}"))


def soon():
    return time.monotonic() + SECONDS


def answers(server, *parts):
    """Accept a connection, and send these."""

    def accept():
        accepted, _ = server.accept()
        kept.append(accepted)
        for part in parts:
            accepted.sendall(part)

    kept = []
    thread = threading.Thread(target=accept)
    thread.start()
    return thread, kept


def test_it_logs_in_with_the_credentials_of_the_url_and_nothing_else(server):
    thread, kept = answers(server, b"+OK\r\n+OK\r\n")
    link = link_to(server, "me:a%20word@", "/5")
    link.until(soon())
    thread.join()
    asked = kept[0].recv(1000)
    assert asked == (b"*3\r\n$4\r\nAUTH\r\n$2\r\nme\r\n$6\r\na word\r\n" + b"*2\r\n$6\r\nSELECT\r\n$1\r\n5\r\n")
    assert link.is_silent


def test_a_link_without_a_login_sends_nothing_first(server):
    thread, kept = answers(server)
    link = link_to(server)
    link.until(soon()).send(b"first")
    thread.join()
    assert kept[0].recv(1000) == b"first"


def test_a_link_connects_to_the_socket_file_of_a_url(tmp_path):
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        link = Link(parse_redis_url(f"unix://{path}"))
        link.until(soon()).send(b"first")
        accepted, _ = listening.accept()
        with closing(accepted):
            assert accepted.recv(1000) == b"first"
        link.close()


def test_bytes_beyond_an_answer_break_the_silence(server):
    """It may have come with the answer, or lie in the socket still."""
    thread, kept = answers(server, b"+OK\r\n")
    link = link_to(server, ":pw@")
    link.until(soon())
    thread.join()
    assert link.is_silent
    kept[0].sendall(b":1\r\n")
    assert link.until(soon()).line() == b":1" and link.is_silent
    kept[0].sendall(b":1\r\n:2\r\n")
    assert link.until(soon()).line() == b":1" and not link.is_silent


def test_a_host_that_has_no_address_in_time_ends_by_the_deadline(monkeypatch):
    hangs = threading.Event()
    monkeypatch.setattr(redis_link.socket, "getaddrinfo", lambda *_, **__: hangs.wait(SECONDS))
    try:
        with pytest.raises(TimeoutError, match="cache"):
            Link(parse_redis_url("redis://cache")).until(time.monotonic() + 0.1)
    finally:
        hangs.set()


def test_the_second_address_of_a_host_is_tried(server, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = closed.getsockname()
    found = [(socket.AF_INET, 0, 0, "", place) for place in (nobody, server.getsockname())]
    monkeypatch.setattr(redis_link.socket, "getaddrinfo", lambda *_, **__: found)
    link = Link(parse_redis_url("redis://cache"))
    link.until(soon())
    link.close()
    monkeypatch.setattr(redis_link.socket, "getaddrinfo", lambda *_, **__: found[:1] * 2)
    with pytest.raises(ConnectionRefusedError):
        Link(parse_redis_url("redis://cache")).until(soon())


def test_one_that_was_interrupted_before_it_began_does_not_connect(server):
    link = link_to(server)
    link.interrupt()
    with pytest.raises(ConnectionError, match="closed"):
        link.until(soon())


def test_calls_one_after_another_use_one_connection():
    with closing(Liar()) as liar, closing(RedisStore(liar.url())) as store:
        for _ in range(3):
            assert store.exists(["nothing"], SECONDS) == [False]
        assert len(liar.connections) == 1


def test_calls_of_no_keys_have_no_answers():
    with closing(Liar()) as liar, closing(RedisStore(liar.url())) as store:
        assert store.exists([], SECONDS) == store.get_into([], [], SECONDS) == store.put_from([], [], SECONDS) == []


def test_close_ends_a_call_that_waits_for_the_server(monkeypatch):
    asked = threading.Event()
    monkeypatch.setitem(LIES, "nothing yet", lambda connection, words: asked.set())
    with closing(Liar()) as liar, closing(RedisStore(liar.url())) as store, ThreadPoolExecutor(1) as threads:
        liar.begin("nothing yet")
        call = threads.submit(store.exists, ["key"], SECONDS)
        assert asked.wait(SECONDS)
        store.close()
        with pytest.raises(ConnectionError):
            call.result(SECONDS / 2)
        with pytest.raises(ConnectionError, match="closed"):
            store.exists(["key"], SECONDS)


def test_a_call_that_fails_ends_the_connections_that_wait_too():
    """The server may have gone without a word, and each of them would time out on its own."""
    with closing(Liar()) as liar, closing(RedisStore(liar.url())) as store:
        with store._link(SECONDS), store._link(SECONDS):
            pass
        with pytest.raises(TimeoutError), store._link(SECONDS):
            raise TimeoutError
        assert not store._idle
