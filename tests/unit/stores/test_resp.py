"""Answers of a server, byte by byte, and the bytes of them that reach the buffers: `Resp` over a pair of sockets."""

import socket
import threading
import time

import pytest

from cpu_prefix_cache.stores.resp import Refused, Resp, command, commands, number, set_command


@pytest.fixture
def server():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield _Server(ours, theirs)


class _Server:
    def __init__(self, ours, theirs):
        self.socket, self.resp = theirs, Resp(ours)
        self.resp.deadline = time.monotonic() + 60.0

    def send(self, *parts):
        for part in parts:
            self.socket.sendall(part)


def poisoned(*sizes):
    memory = memoryview(bytearray(b"\xee" * (sum(sizes) + 4 * len(sizes))))
    buffers, begin = [], 2
    for size in sizes:
        buffers.append(memory[begin : begin + size])
        begin += size + 4
    return memory, buffers


def test_words_and_values_are_counted_in_bytes():
    assert command("GET", "a:b") == b"*2\r\n$3\r\nGET\r\n$3\r\na:b\r\n"
    assert commands("GET", ["a", "bc"]) == b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n*2\r\n$3\r\nGET\r\n$2\r\nbc\r\n"
    parts = set_command("k", [memoryview(b"frame"), memoryview(b"\r\nbytes")])
    assert b"".join(parts) == b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$12\r\nframe\r\nbytes\r\n"


def test_a_value_comes_into_several_buffers_and_not_beside_them(server):
    memory, buffers = poisoned(3, 5000, 1)
    value = bytes(range(256)) * 20
    server.send(b"$5004\r\n" + value[:5004] + b"\r\n+next\r\n")
    assert server.resp.line() == b"$5004"
    assert server.resp.value(5004, buffers)
    assert b"".join(buffers) == value[:5004]
    assert bytes(memory).count(b"\xee\xee") >= 6 and memory[:2] == memory[5:7] == b"\xee\xee"
    assert server.resp.line() == b"+next"


def test_control_a_byte_that_the_server_changed_is_noticed(server):
    _, buffers = poisoned(3, 7)
    server.send(b"$10\r\n012345-789\r\n")
    assert server.resp.value(int(server.resp.line()[1:]), buffers)
    assert b"".join(buffers) != b"0123456789"


def test_a_value_comes_in_pieces(server):
    _, buffers = poisoned(10, 30_000)
    value = b"\r\n$-1\r\n" * 4300
    slowly = threading.Thread(
        target=lambda: [
            (server.send(piece), time.sleep(0.001))
            for piece in (b"$300", b"10\r", b"\n", value[:7], value[7:20_000], value[20_000:30_010], b"\r", b"\n")
        ]
    )
    slowly.start()
    assert server.resp.value(int(server.resp.line()[1:]), buffers)
    slowly.join()
    assert b"".join(buffers) == value[:30_010]


@pytest.mark.parametrize("size", [9, 11, 200_000])
def test_a_value_of_another_size_is_passed_over(server, size):  # tiers 1, 3
    memory, buffers = poisoned(4, 6)
    threading.Thread(target=server.send, args=(b"$%d\r\n" % size, bytes(size), b"\r\n:7\r\n")).start()
    assert not server.resp.value(int(server.resp.line()[1:]), buffers)
    assert memory == b"\xee" * len(memory)
    assert server.resp.line() == b":7"


@pytest.mark.parametrize("sent", [b"", b"$10", b"$10\r\n1234567", b"$10\r\n1234567890", b"$10\r\n1234567890\r"])
def test_a_connection_that_ends_within_an_answer_raises(server, sent):
    _, buffers = poisoned(10)
    server.send(sent)
    server.socket.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionError):
        server.resp.value(int(server.resp.line()[1:]), buffers)


def test_a_value_longer_than_announced_raises(server):
    _, buffers = poisoned(3)
    server.send(b"abcd\r\n")
    with pytest.raises(ConnectionError, match="longer"):
        server.resp.value(3, buffers)


@pytest.mark.parametrize("digits", [b"", b"-5", b"9" * 19, b"9" * 5000, b"\xb2", b" 5", b"5 ", b"0x5"])
def test_a_number_has_a_few_digits(digits):
    """Python takes the square of their number in time, and raises ValueError above 4,300."""
    for kind in b":", b"$":
        with pytest.raises(Refused):
            number(kind + digits, kind)
    assert number(b":" + b"9" * 18) == 10**18 - 1 and number(b"$007", b"$") == 7


def test_whether_all_has_been_read(server):
    assert server.resp.is_read
    server.resp.deadline = time.monotonic() + 60.0
    server.send(b":1\r\n:2\r\n")
    assert server.resp.line() == b":1" and not server.resp.is_read
    server.resp.deadline = time.monotonic() + 60.0
    assert server.resp.line() == b":2" and server.resp.is_read


def test_a_line_that_never_ends_raises(server):
    threading.Thread(target=server.send, args=(b"x" * 70_000,)).start()
    with pytest.raises(ConnectionError, match="not an answer"):
        server.resp.line()


def test_a_server_that_sends_byte_by_byte_does_not_prolong_the_call(server):  # tiers 28
    stop = threading.Event()

    def trickle():
        server.send(b"$1000000\r\n")
        while not stop.is_set():
            server.send(b"x")
            time.sleep(0.005)

    thread = threading.Thread(target=trickle)
    thread.start()
    server.resp.deadline = time.monotonic() + 0.2
    try:
        with pytest.raises(TimeoutError):
            server.resp.value(int(server.resp.line()[1:]), poisoned(1_000_000)[1])
    finally:
        stop.set()
        thread.join()


def test_a_server_that_reads_nothing_ends_a_put_by_its_deadline(server):
    server.resp.deadline = time.monotonic() + 0.1
    with pytest.raises(TimeoutError):
        server.resp.send(bytes(64 << 20))
    with pytest.raises(TimeoutError):
        server.resp.send(b"")
