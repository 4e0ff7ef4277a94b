"""A server that speaks for Redis, until a test has it lie: answers that no Redis gives.

A lie is a function of the connection and of the words of a command. One that goes on for ever ends when the server is
stopped, or the client has gone.
"""

import socket
import threading
import time
from contextlib import suppress

VALUE_BYTES = 200_000
CHUNK = 1 << 18
LOGIN = (b"AUTH", b"SELECT")


class Liar:
    """Listens at `port`. `lie` is one of LIES, or None; `about` has the commands to which it lies, None: to all."""

    def __init__(self):
        self.values = {}
        self.lie = None
        self.about = None
        self.connections = set()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._listen, daemon=True).start()

    def url(self):
        return f"redis://:secret@127.0.0.1:{self.port}/1"

    def begin(self, lie, about=None):
        self.lie, self.about = lie, about

    def stop(self):
        self.begin(None)

    def drop(self):
        """Close all connections, as a server that is started again."""
        for each in list(self.connections):
            each.shut()

    def close(self):
        self.stop()
        self._listening.close()
        self.drop()

    def lies_to(self, command):
        return self.lie is not None and (self.about is None or command in self.about)

    def _listen(self):
        while True:
            try:
                accepted, _ = self._listening.accept()
            except OSError:
                return
            connection = _Connection(self, accepted)
            self.connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        with suppress(OSError, ValueError):
            while (words := connection.words()) is not None:
                if self.lies_to(words[0]):
                    LIES[self.lie](connection, words)
                else:
                    self._answer(connection, words)
        self.connections.discard(connection)
        connection.shut()

    def _answer(self, connection, words):
        command, *rest = words
        if command == b"GET":
            value = self.values.get(rest[0])
            connection.send(b"$-1\r\n" if value is None else b"$%d\r\n%s\r\n" % (len(value), value))
        elif command == b"SET":
            self.values[rest[0]] = rest[1]
            connection.send(b"+OK\r\n")
        elif command in (b"EXISTS", b"DEL"):
            there = [key for key in rest if key in self.values]
            if command == b"DEL":
                for key in there:
                    del self.values[key]
            connection.send(b":%d\r\n" % len(there))
        else:
            connection.send(b"+PONG\r\n" if command == b"PING" else b"+OK\r\n")


class _Connection:
    def __init__(self, liar, accepted):
        self._liar = liar
        self._socket = accepted
        self._lie = None
        self._file = accepted.makefile("rb")

    def words(self):
        line = self._file.readline()
        if not line:
            return None
        words = []
        for _ in range(int(line[1:])):
            words.append(self._file.read(int(self._file.readline()[1:])))
            self._file.read(2)
        return words

    def send(self, *parts):
        for part in parts:
            self._socket.sendall(part)

    def shut(self):
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def go_on(self, part, pause=0.0):
        """Send this again and again."""
        lie = self._liar.lie
        while self._liar.lie == lie:
            if part:
                self._socket.sendall(part)
            time.sleep(pause)


def sends(*parts):
    return lambda connection, words: connection.send(*parts)


def goes_on(begin, part, pause=0.0):
    def lie(connection, words):
        connection.send(begin)
        connection.go_on(part, pause)

    return lie


def ends(begin):
    def lie(connection, words):
        connection.send(begin)
        connection.shut()

    return lie


def echoes(connection, words):
    connection.send(b"*%d\r\n" % len(words), *(b"$%d\r\n%s\r\n" % (len(word), word) for word in words))


VALUE = b"\x55" * VALUE_BYTES
HEAD = b"$%d\r\n" % VALUE_BYTES
LIES = {
    "is silent": goes_on(b"", b"", 0.05),
    "closes": ends(b""),
    "closes within a line": ends(b"$20"),
    "closes within a value": ends(HEAD + VALUE[:1000]),
    "a byte now and then, without a line": goes_on(b"", b"a", 0.05),
    "a byte now and then, in a line": goes_on(b"+", b"1", 0.05),
    "a byte now and then, in a value": goes_on(HEAD, b"x", 0.01),
    "an endless line": goes_on(b"+", b"a" * CHUNK),
    "an endless number": goes_on(b":", b"1" * CHUNK),
    "an endless error": goes_on(b"-ERR ", b"e" * CHUNK),
    "a value of 100 GB": goes_on(b"$100000000000\r\n", bytes(CHUNK)),
    "an array of 1,000,000,000": goes_on(b"*1000000000\r\n", b":1\r\n" * (CHUNK // 4)),
    "100,000 nested arrays": sends(b"*1\r\n" * 100_000),
    "a push": sends(b">2\r\n$10\r\ninvalidate\r\n*0\r\n"),
    "a number of 5,000 digits": sends(b":" + b"9" * 5000 + b"\r\n"),
    "a size of 5,000 digits": sends(b"$" + b"9" * 5000 + b"\r\n"),
    "a size below 0": sends(b"$-5\r\n"),
    "a number below 0": sends(b":-5\r\n"),
    "a number above what was asked for": sends(b":1000000\r\n"),
    "a digit that is none": sends(b"$\xb2\r\n"),
    "a value that is too short": sends(b"$5\r\nhello\r\n"),
    "a value that is too long": sends(b"$%d\r\n" % (VALUE_BYTES + 1), VALUE, b"!\r\n"),
    "a value that goes on": sends(HEAD, VALUE, b"xx"),
    "two values for one": sends(HEAD, VALUE, b"\r\n", HEAD, VALUE, b"\r\n"),
    "two answers for one": sends(b":1\r\n:1\r\n"),
    "wrong bytes": sends(HEAD, VALUE, b"\r\n"),
    "OK to everything": sends(b"+OK\r\n"),
    "no array": sends(b"*-1\r\n"),
    "RESP3's nothing": sends(b"_\r\n"),
    "an empty line": sends(b"\r\n"),
    "a line that ends otherwise": goes_on(b"+OK\n", b"", 0.05),
    "the question": echoes,
    "a web server": ends(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n<html></html>"),
    "a mail server": sends(b"220 mail.example ESMTP\r\n"),
    "TLS": ends(b"\x15\x03\x03\x00\x02\x02\x46"),
    "noise": sends(bytes(range(256)) * 300),
}
# Lies that an engine may go on with: nothing but a wrong answer in the right form.
POLITE = {
    "wrong bytes",
    "a value that is too short",
    "a value that is too long",
    "a number above what was asked for",
    "OK to everything",
}
# One of each kind: time, memory, form, bytes left over, another protocol.
FEW = (
    "is silent",
    "a byte now and then, in a line",
    "an endless line",
    "a value of 100 GB",
    "100,000 nested arrays",
    "a number of 5,000 digits",
    "two values for one",
    "wrong bytes",
    "closes within a value",
    "a web server",
)
