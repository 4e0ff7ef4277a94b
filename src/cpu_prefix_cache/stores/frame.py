"""The frame in front of every value in a shared store: what the value is, so that no store needs to be believed.

    magic u32 | version u16 | group u8 | key length u8 | place u16 | block u16 | 4 spare | length u64
    key 32 | namespace 32 | xxh3-128 of the bytes 16 | 24 spare

Integers are little-endian. A value is right if its frame is the one of its bytes and of the query: a frame
is never parsed. The checksum finds accidents, and keeps nobody out who can write to the store.

The name of a value is readable: `cpc:<namespace>:<key>:<group>.<place>.<block>`, in hexadecimal digits.
`block` is "c" for what every chunk has, and the number of a piece of a checkpoint in its chunk.
"""

import struct
from collections.abc import Callable

from cpu_prefix_cache.messages.plan import CHUNK, Label
from cpu_prefix_cache.slab import records

SIZE = 128
MAGIC = 0x31_4D_52_46  # "FRM1"
VERSION = 1
PREFIX = "cpc"  # of all names, so that an operator finds them in a store that others use, too

_FRAME = struct.Struct("<IHBBHH4xQ32s32s16s24x")

checksum: Callable[[memoryview], bytes] = records.checksum


def pack(label: Label, namespace: bytes, num_bytes: int, digest: bytes) -> bytes:
    """The frame of a value of `num_bytes` bytes with this digest. The label has passed `records.check_label`."""
    block = records.STORED_CHUNK if label.block == CHUNK else label.block
    ids = MAGIC, VERSION, label.group, len(label.key), label.place, block, num_bytes
    return _FRAME.pack(*ids, label.key, namespace, digest)


class Names:
    """The names of the values of one namespace, given by its digest of 32 bytes."""

    def __init__(self, namespace: bytes) -> None:
        self.namespace = namespace
        self._prefix = f"{PREFIX}:{namespace[:16].hex()}:"

    def of(self, key: bytes, group: int, place: int, block: int) -> str:
        return f"{self._prefix}{key.hex()}:{group}.{place}.{'c' if block == CHUNK else block}"

    def of_label(self, label: Label) -> str:
        return self.of(label.key, label.group, label.place, label.block)

    @property
    def of_nothing(self) -> str:
        """A name that no value has: to check whether the store answers."""
        return f"{self._prefix}none"
