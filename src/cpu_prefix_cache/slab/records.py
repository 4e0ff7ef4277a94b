"""The record of a slot: 128 bytes that identify the contents of the slot, or that are not whole.

    magic u32 | version u16 | group u8 | key length u8 | slot u32 | parent length u8, 3 spare | generation u64
    key 32 | parent 32 | xxh3-128 of the slot's bytes 16 | place u16 | block u16 | 12 spare | xxh3-64 of the above u64

Integers are little-endian. The last field is seeded with the namespace and the rank: the records of another rank,
which name the same slots and keys, are not whole here. A record that is cleared is all zeros.

The checksums find accidents. They keep nobody out who can write to the folder.
"""

import struct
from typing import NamedTuple

import xxhash

from cpu_prefix_cache.messages.errors import MisuseError
from cpu_prefix_cache.messages.generations import MOST
from cpu_prefix_cache.messages.plan import CHUNK, Label
from cpu_prefix_cache.messages.tier import KEY_BYTES

SIZE = 128
MAGIC = 0x31_42_4C_53  # "SLB1"
VERSION = 1
STORED_CHUNK = 0xFFFF  # CHUNK, as it is written
GENERATION_AT = 16  # where in a record it is, for the scan

_BODY = struct.Struct("<IHBBIB3xQ32s32s16sHH12x")
_CHECK = struct.Struct("<Q")

checksum = xxhash.xxh3_128_digest  # of a slot's bytes; releases Python's lock above 64 KiB (xxhash 4.1)


class Record(NamedTuple):
    slot: int
    label: Label
    checksum: bytes


def seed_of(namespace: bytes, rank: int, ranks: int) -> int:
    """Seed of the seals of one rank's records."""
    return xxhash.xxh3_64_intdigest(namespace + struct.pack("<II", rank, ranks))


def check_label(label: Label) -> None:
    """Raise MisuseError for a label that no record can hold."""
    if not 0 < len(label.key) <= KEY_BYTES or len(label.parent) > KEY_BYTES:
        raise MisuseError(
            f"keys on disk have up to {KEY_BYTES} bytes, got {len(label.key)} with a parent of {len(label.parent)}"
        )
    block_fits = label.block == CHUNK or 0 <= label.block < STORED_CHUNK
    if not (0 <= label.group < 1 << 8 and 0 <= label.place < 1 << 16 and block_fits):
        raise MisuseError(f"group {label.group}, place {label.place} or block {label.block} is out of a record's range")
    if not 0 <= label.generation < MOST:
        raise MisuseError(f"a generation is from 0 to {MOST - 1}, got {label.generation}")


def pack(record: Record, seed: int) -> bytes:
    """Its label has passed `check_label`."""
    slot, label, digest = record
    block = STORED_CHUNK if label.block == CHUNK else label.block
    ids = MAGIC, VERSION, label.group, len(label.key), slot, len(label.parent), label.generation
    body = _BODY.pack(*ids, label.key, label.parent, digest, label.place, block)
    return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body, seed))


def parse(data: bytes, seed: int) -> Record | None:
    """The record in these SIZE bytes; None: they are not whole, or of another version, namespace or rank."""
    body = data[: _BODY.size]
    fields = _BODY.unpack(body)
    magic, version, group, key_bytes, slot, parent_bytes, generation, key, parent, digest, place, block = fields
    if magic != MAGIC or version != VERSION or key_bytes > KEY_BYTES or parent_bytes > KEY_BYTES:
        return None
    if xxhash.xxh3_64_intdigest(body, seed) != _CHECK.unpack_from(data, _BODY.size)[0]:
        return None
    number = CHUNK if block == STORED_CHUNK else block
    label = Label(key[:key_bytes], parent[:parent_bytes], group, place, number, generation)
    return Record(slot, label, digest)
