"""The two files of a pool, neither of which has a name: the region of its slots, and their records.

    made       by a keeper, for the first engine, which knows how large a block is
    adopted    by a keeper that has none, from an engine of the keeper before it

A keeper hands both to each engine, and every engine keeps both: so they live while anybody of the pool does. The keeper
looks into the region only for files below it, and engines look into the records never: there they have their presence
(`presence.py`) alone.
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

from cpu_prefix_cache.keeper.records import Records, records_bytes
from cpu_prefix_cache.memory import mapping, shared_file
from cpu_prefix_cache.messages.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Region:
    """`num_slots` slots of `block_bytes` bytes. `files` are descriptors: of the region, and of the records."""

    files: tuple[int, int]
    num_slots: int
    block_bytes: int
    records: Records
    claim: mmap.mmap | None = None  # others of this machine see how much memory it may take while this lives

    def memory(self) -> memoryview:
        """The slots, mapped here: [slots, bytes]."""
        region = mapping.map_shared(self.files[0], self.num_slots * self.block_bytes)
        return memoryview(region).cast("B", shape=[self.num_slots, self.block_bytes])

    def is_in(self, files: Sequence[int]) -> bool:
        """Whether these descriptors are of the same two files."""
        return [*map(_identity, files)] == [*map(_identity, self.files)]


def make(host_bytes: int, block_bytes: int, *, taken_here: bool = False) -> Region:
    """`taken_here`: the keeper writes to it, too, beside engines.

    Raises ConfigurationError where not even a block fits, or the machine has not so much memory.
    """
    num_slots = host_bytes // block_bytes
    if not num_slots:
        raise ConfigurationError(f"a block has {block_bytes} bytes, and the keeper was given {host_bytes}")
    file, claim = mapping.make_shared(num_slots * block_bytes, taken_here=taken_here)
    records_file = shared_file.make(records_bytes(num_slots))
    records = _records(records_file)
    records.begin(num_slots, block_bytes)
    return Region((file, records_file), num_slots, block_bytes, records, claim)


def adopt(files: Sequence[int], block_bytes: int, fewest: int) -> Region | None:
    """The region that an engine hands back, under descriptors of its own; None if these are no such files, of slots of
    so many bytes and at least as many as its model needs.
    """
    if len(files) != 2 or not all(map(shared_file.is_sealed, files)) or not os.fstat(files[1]).st_size:
        return None
    records = _records(files[1])
    shape = records.shape
    if shape is None or os.fstat(files[0]).st_size != shape[0] * shape[1]:
        return None
    if shape[0] < fewest or shape[1] != block_bytes:
        return None
    return Region((os.dup(files[0]), os.dup(files[1])), *shape, records)


def _records(file: int) -> Records:
    return Records(memoryview(mmap.mmap(file, os.fstat(file).st_size)))


def _identity(file: int) -> tuple[int, int]:
    status = os.fstat(file)
    return status.st_dev, status.st_ino
