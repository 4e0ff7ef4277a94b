"""Messages between engines and the keeper of their pool, and how they cross a socket.

    engine                                           keeper
    hello      keys: namespace; numbers: block       welcome   numbers: blocks, the number of this engine
               bytes, its number, if it had one,     refused   keys: a sentence
               and its groups (shape.py)
    run        keys: of a prompt, from its first;    reading   numbers: for how many microseconds; then, in time:
               numbers: nanoseconds of prefill       ran       numbers: what is there, and leased (answers.py)
               for a chunk, 0 if not known
    take       keys: the same, all computed;         took      numbers: what may be written (answers.py)
               numbers: is there the checkpoint
               after the last of them, too
    commit     numbers: how many chunks were           -       of the take with this id, from its first chunk on
               written, and whether the checkpoint
    release    -                                       -       of the run with this id
    name       keys: namespace                         -       the engine's weights have changed
    count      -                                       counted numbers: of the pool's slots (counts.py)

`run`, `take` and `count` have an id, which the engine counts up and the answer repeats. `reading` comes if a store
below the pool is queried, and if the tier has more of the prompt than the pool. A file descriptor goes with `hello` and
`welcome`. Messages of one socket are carried out in their order, so a `release` may be sent before the answer.

    | length 4 | version 1 | kind 1 | bytes of a key 2 | id 8 | numbers 4 | keys 4 | numbers, 8 each | keys |

Both ends are on one machine, so numbers have its byte order. A message is as good as two calls of the C library here;
a package for it would save nothing that was measured.
"""

import struct
from array import array
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from cpu_prefix_cache.messages.errors import PrefixCacheError
from cpu_prefix_cache.messages.tier import KEY_BYTES

VERSION = 4
HEADER = struct.Struct("=IBBHQII")
NUMBER_BYTES = 8
MOST_BYTES = 64 << 20  # of a message: keys of two million chunks
NAMESPACE_BYTES = 16
NOBODY = 0  # no engine has this number
NUM_COUNTED = 9  # numbers of a `counted`
MICROSECOND = 1e-6
MOST_MICROSECONDS = 60_000_000  # for which a question waits for what is below the pool


class Kind(IntEnum):
    """Kind of a message."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    RUN = 4
    RAN = 5
    TAKE = 6
    TOOK = 7
    COMMIT = 8
    RELEASE = 9
    NAME = 10
    COUNT = 11
    COUNTED = 12
    READING = 13


class Message(NamedTuple):
    """One message. All `keys` have one length."""

    kind: Kind
    id: int = 0
    numbers: Sequence[int] = ()
    keys: Sequence[bytes] = ()


class _Shape(NamedTuple):
    """Contents of an engine's message of one kind: so many numbers, or more, and keys of so many bytes, one of them or
    any.
    """

    numbers: int
    key_bytes: int = 0
    is_prompt: bool = False
    may_have_more: bool = False


_SHAPES = {
    Kind.HELLO: _Shape(2, NAMESPACE_BYTES, may_have_more=True),
    Kind.RUN: _Shape(1, KEY_BYTES, is_prompt=True),
    Kind.TAKE: _Shape(1, KEY_BYTES, is_prompt=True),
    Kind.COMMIT: _Shape(2),
    Kind.RELEASE: _Shape(0),
    Kind.NAME: _Shape(0, NAMESPACE_BYTES),
    Kind.COUNT: _Shape(0),
}
ANSWERS = {Kind.RUN: Kind.RAN, Kind.TAKE: Kind.TOOK, Kind.COUNT: Kind.COUNTED}


class ProtocolError(PrefixCacheError):
    """The other end sends what this release does not understand, so the connection ends."""


class OtherVersion(ProtocolError):
    """The other end is of another release. It understands the header, and a refusal, in its own `version`."""

    def __init__(self, version: int) -> None:
        super().__init__(f"got a message of version {version}; this is version {VERSION}")
        self.version = version


def encoded(message: Message, version: int = VERSION) -> bytes:
    """The bytes of a message.

    >>> received = Received()
    >>> received.feed(encoded(Message(Kind.RUN, 7, (0,), (b"a" * 32, b"b" * 32))))
    >>> [(message.id, len(message.keys)) for message in received]
    [(7, 2)]
    """
    keys, numbers = b"".join(message.keys), array("Q", message.numbers).tobytes()
    width = len(message.keys[0]) if message.keys else 0
    length = HEADER.size + len(numbers) + len(keys)
    counts = len(message.numbers), len(message.keys)
    return HEADER.pack(length, version, message.kind, width, message.id, *counts) + numbers + keys


def check_asked(message: Message) -> None:
    """Raise ProtocolError unless this is what an engine may send."""
    shape, keys = _SHAPES.get(message.kind), message.keys
    if shape is None:
        raise ProtocolError(f"got {message.kind.name}, which engines do not send")
    least, most = (1, len(keys)) if shape.is_prompt else (bool(shape.key_bytes),) * 2
    numbers = len(message.numbers)
    is_right = numbers == shape.numbers or (shape.may_have_more and numbers > shape.numbers)
    is_right = is_right and least <= len(keys) <= most
    if not is_right or any(len(key) != shape.key_bytes for key in keys[:1]):
        raise ProtocolError(f"got {message.kind.name} with {len(message.numbers)} numbers and {len(keys)} keys")


def check_greeted(answer: Message) -> None:
    """Raise ProtocolError unless this is what a keeper may answer to a hello."""
    is_right = {Kind.WELCOME: len(answer.numbers) == 3, Kind.REFUSED: len(answer.keys) == 1}
    if not is_right.get(answer.kind, False):
        raise ProtocolError(f"the keeper began with {answer.kind.name} of {len(answer.numbers)} numbers")


class Received:
    """Bytes of one connection, as the messages that are complete. Raises ProtocolError for others."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, some: bytes) -> None:
        self._bytes += some

    def __iter__(self) -> Iterator[Message]:
        while (message := self._next()) is not None:
            yield message

    def _next(self) -> Message | None:
        buffer = self._bytes
        if len(buffer) < HEADER.size:
            return None
        length, version, kind, width, id, num_numbers, num_keys = HEADER.unpack_from(buffer)
        keys_begin = HEADER.size + NUMBER_BYTES * num_numbers
        is_whole = length == keys_begin + width * num_keys and bool(width) == bool(num_keys)
        is_whole = is_whole and (num_keys < 2 or width == KEY_BYTES)  # several are those of a prompt
        if version != VERSION:
            raise OtherVersion(version)
        if kind not in _KINDS or not is_whole:
            raise ProtocolError(f"got a message of kind {kind} that is none")
        if length > MOST_BYTES:
            raise ProtocolError(f"got a message of {length} bytes; the longest has {MOST_BYTES}")
        if len(buffer) < length:
            return None
        whole = bytes(buffer[:length])
        del buffer[:length]
        keys = [whole[at : at + width] for at in range(keys_begin, length, width)] if num_keys else []
        return Message(Kind(kind), id, array("Q", whole[HEADER.size : keys_begin]), keys)


_KINDS = frozenset(map(int, Kind))
