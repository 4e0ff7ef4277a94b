"""Records: the chunk that each slot of a region holds, in a second file beside it, for the keeper that comes next.

    committed     the slot's record is written
    handed out    it is cleared first, so a slot that somebody writes has none
    keeper ends   both files live on in the engines that have them
    next keeper   reads the records, in the order in which they were committed: parents before children

    | checksum 4 | unused 4 | serial 8 | namespace 16 | key 32 | parent 32 |        parent: zeros for a first chunk

A keeper may end between two bytes of a record. Then the checksum does not fit, and the slot is free.
"""

import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple
from zlib import crc32

from cpu_prefix_cache.keeper.protocol import KEY_BYTES, NAMESPACE_BYTES

RECORD = struct.Struct(f"=I4xQ{NAMESPACE_BYTES}s{KEY_BYTES}s{KEY_BYTES}s")
HEADER = struct.Struct("=16sQQ")
HEADER_BYTES = 4096
MAGIC = b"cpc keeper rec 1"
NO_PARENT = bytes(KEY_BYTES)
_CHECKED = 4  # bytes of the checksum, which it does not cover


class Run(NamedTuple):
    """Chunks that were committed one after the other, each below the one before, the first below that with the key
    `parent`.
    """

    namespace: bytes
    parent: bytes | None
    slots: Sequence[int]
    keys: Sequence[bytes]


def records_bytes(num_slots: int) -> int:
    """The size of the file for so many slots."""
    return HEADER_BYTES + num_slots * RECORD.size


class Records:
    """The records in `memory`, the whole file."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._serial = 0

    def begin(self, num_slots: int, block_bytes: int) -> None:
        """A new file, which is all zeros, is that of so many slots."""
        HEADER.pack_into(self._memory, 0, MAGIC, num_slots, block_bytes)

    @property
    def shape(self) -> tuple[int, int] | None:
        """The number of slots, and the bytes of each; None if this is no file of records."""
        if len(self._memory) < HEADER_BYTES:
            return None
        magic, num_slots, block_bytes = HEADER.unpack_from(self._memory)
        is_ours = magic == MAGIC and block_bytes and len(self._memory) == records_bytes(num_slots)
        return (num_slots, block_bytes) if is_ours else None

    def write(self, slot: int, namespace: bytes, key: bytes, parent: bytes | None) -> None:
        self._serial += 1
        packed = RECORD.pack(0, self._serial, namespace, key, parent or NO_PARENT)
        at = HEADER_BYTES + slot * RECORD.size
        self._memory[at : at + RECORD.size] = crc32(packed[_CHECKED:]).to_bytes(_CHECKED, "little") + packed[_CHECKED:]

    def clear(self, slot: int) -> None:
        at = HEADER_BYTES + slot * RECORD.size
        self._memory[at : at + RECORD.size] = bytes(RECORD.size)

    def runs(self) -> list[Run]:
        """The records that are whole, in the order in which they were written. The next one is written after them."""
        found = list(self._whole())
        if not found:
            return []
        found.sort(key=itemgetter(0))
        serials, slots, namespaces, keys, parents = zip(*found, strict=True)
        self._serial = serials[-1]
        hangs = zip(namespaces[1:], parents[1:], namespaces, keys, strict=False)
        begins = [at for at, (here, parent, there, above) in enumerate(hangs, 1) if parent != above or here != there]
        return [
            Run(namespaces[at], None if parents[at] == NO_PARENT else parents[at], slots[at:end], keys[at:end])
            for at, end in pairwise([0, *begins, len(found)])
        ]

    def _whole(self) -> Iterator[tuple[int, int, bytes, bytes, bytes]]:
        """Serial, slot, namespace, key and parent of each whole record, slot by slot."""
        contents = self._memory[HEADER_BYTES:]
        for slot, (checksum, serial, namespace, key, parent) in enumerate(RECORD.iter_unpack(contents)):
            at = slot * RECORD.size
            if serial and checksum == crc32(contents[at + _CHECKED : at + RECORD.size]):
                yield serial, slot, namespace, key, parent
