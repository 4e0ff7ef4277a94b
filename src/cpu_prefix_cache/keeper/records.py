"""Records: what each slot of a region holds, in a second file beside it, for the keeper that comes next.

    committed     the records of its slots are written
    handed out    they are cleared first, so a slot that somebody writes has none
    keeper ends   both files live on in the engines that have them
    next keeper   reads the records, in the order in which they were committed: parents before children

    | checksum 4 | group 2 | block 2 | place 4 | serial 8 | name 32 | parent 32 |

               name                          parent                                 group, block     place
    chunk      its own                       that of the chunk above, or zeros      CHUNK, 0         of the slot in it
    piece      of the chunk in which it is   of the chunk below which it was first  of `PieceAt`     of the slot in it

A keeper may end between two bytes of a record. Then the checksum does not fit, and the slot is free. So are the others
of its chunk, or piece: one counts if all its records are there, as they were written, one after the other.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple
from zlib import crc32

from cpu_prefix_cache.messages.plan import Label
from cpu_prefix_cache.messages.tier import KEY_BYTES, Found

RECORD = struct.Struct(f"=IHHIQ{KEY_BYTES}s{KEY_BYTES}s")
HEADER = struct.Struct("=16sQQ")
HEADER_BYTES = 4096
MAGIC = b"cpc keeper rec 3"
NO_PARENT = bytes(KEY_BYTES)
CHUNK = 0xFFFF  # no group has this number
MOST_BLOCKS = 1 << 16  # of a chunk, which a record numbers
_CHECKED = 4  # bytes of the checksum, which it does not cover


class Run(NamedTuple):
    """Chunks that were committed one after the other, each below the one before, the first below that with the name
    `parent`. `slots` are those of all of them, chunk after chunk.
    """

    parent: bytes | None
    slots: Sequence[int]
    names: Sequence[bytes]


class _Record(NamedTuple):
    serial: int
    slot: int
    place: int
    name: bytes
    parent: bytes
    group: int = CHUNK
    block: int = 0

    @property
    def label(self) -> Label:
        return Label(self.name, self.parent, self.group, self.place, self.block, self.serial)


_Chunk = tuple[int, int, int, bytes, bytes]  # the first fields of a _Record, which would take longer


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

    def write(
        self,
        slots: Sequence[int],
        name: bytes,
        parent: bytes | None,
        group: int = CHUNK,
        block: int = 0,
    ) -> None:
        """These slots hold a chunk or a piece."""
        for place, slot in enumerate(slots):
            self._serial += 1
            packed = RECORD.pack(0, group, block, place, self._serial, name, parent or NO_PARENT)
            at = HEADER_BYTES + slot * RECORD.size
            checksum = crc32(packed[_CHECKED:]).to_bytes(_CHECKED, "little")
            self._memory[at : at + RECORD.size] = checksum + packed[_CHECKED:]

    def clear(self, slot: int) -> None:
        at = HEADER_BYTES + slot * RECORD.size
        self._memory[at : at + RECORD.size] = bytes(RECORD.size)

    def found(self, per_chunk: int, width: Callable[[int], int]) -> tuple[list[Run], list[Found]]:
        """All that is whole, in the order in which it was written, where a chunk has so many slots, and a piece of a
        group so many; 0: there is none. The next record comes after these.
        """
        chunks, pieces = self._whole()
        chunks.sort(key=itemgetter(0))
        pieces.sort()
        self._serial = max((each[-1][0] for each in (chunks, pieces) if each), default=0)
        if per_chunk > 1:
            records = [_Record(*each) for each in chunks]
            chunks = [each[:5] for item in _items(records, lambda _: per_chunk) for each in item]
        return _runs(chunks, per_chunk), [
            Found(first.label, tuple([each.slot for each in item]))
            for item in _items(pieces, width)
            for first in item[:1]
        ]

    def _whole(self) -> tuple[list[_Chunk], list[_Record]]:
        """The whole records of chunks, and of pieces, slot by slot."""
        contents = self._memory[HEADER_BYTES:]
        chunks, pieces = list[_Chunk](), list[_Record]()
        for slot, each in enumerate(RECORD.iter_unpack(contents)):
            checksum, group, block, place, serial, name, parent = each
            at = slot * RECORD.size
            if serial and checksum == crc32(contents[at + _CHECKED : at + RECORD.size]):
                if group == CHUNK:
                    chunks.append((serial, slot, place, name, parent))
                else:
                    pieces.append(_Record(serial, slot, place, name, parent, group, block))
        return chunks, pieces


def _items(records: Sequence[_Record], width: Callable[[int], int]) -> Iterator[Sequence[_Record]]:
    """The records of each chunk, or piece, of which all are there."""
    at = 0
    while at < len(records):
        first = records[at]
        item = records[at : at + width(first.group)]
        is_whole = len(item) == width(first.group) and all(
            (each.serial - first.serial, each.place) == (number, number) and each[3:] == first[3:]
            for number, each in enumerate(item)
        )
        if item and is_whole:
            yield item
        at += len(item) if item and is_whole else 1


def _runs(chunks: Sequence[_Chunk], per_chunk: int) -> list[Run]:
    """The records of whole chunks, in the order of their serials, run by run."""
    if not chunks:
        return []
    _, slots, _, names, parents = zip(*chunks, strict=True)
    if per_chunk > 1:
        names, parents = names[::per_chunk], parents[::per_chunk]
    hangs = zip(parents[1:], names, strict=False)
    begins = [at for at, (parent, above) in enumerate(hangs, 1) if parent != above]
    return [
        Run(
            None if parents[at] == NO_PARENT else parents[at],
            slots[at * per_chunk : end * per_chunk],
            names[at:end],
        )
        for at, end in pairwise([0, *begins, len(names)])
    ]
