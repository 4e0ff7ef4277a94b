"""All records of a slab: in memory, and written through to their file by the threads of the tier.

    open    all of the file is read, once
    look    in memory alone: no page of the file can be missing, frozen or cut off
    clear   in memory, then in the file
    keep    in the file, then in memory

So what happens to the file in service is seen by the next process, which reads it, and never by this one.
"""

import os
import sys
from collections.abc import Iterator, Sequence

from cpu_prefix_cache.slab.records import SIZE

READ_BYTES = 64 << 20  # in one call


class RecordFile:
    """The records of `slots` slots in an open `file`, SIZE bytes each in `memory`; what the file lacks is empty.

    Raises OSError when it cannot be read. Any number of threads may use it, different slots at a time.
    """

    def __init__(self, file: int, slots: int) -> None:
        self._file, self.memory = file, bytearray(slots * SIZE)
        whole, at = memoryview(self.memory), 0
        while count := os.preadv(file, [whole[at : at + READ_BYTES]], at) if at < len(whole) else 0:
            at += count

    def of(self, slot: int) -> bytes:
        return bytes(self.memory[slot * SIZE : (slot + 1) * SIZE])

    def clear(self, slots: Sequence[int]) -> None:
        """At once for this process, whether or not this raises OSError; then in the file."""
        for slot in slots:
            self.memory[slot * SIZE : (slot + 1) * SIZE] = bytes(SIZE)
        for begin, end in runs(slots):
            self._write(slots[begin], bytes((end - begin) * SIZE))

    def keep(self, slots: Sequence[int], packed: Sequence[bytes]) -> None:
        """`packed[i]` is the record of `slots[i]` from now on. When it raises OSError, some of them may have it."""
        for begin, end in runs(slots):
            first, data = slots[begin], b"".join(packed[begin:end])
            self._write(first, data)
            self.memory[first * SIZE : first * SIZE + len(data)] = data

    def close(self) -> None:
        """Nothing is written any more: the number of the file may soon be another's."""
        self._file = -1

    def _write(self, first: int, data: bytes) -> None:
        begin, at = first * SIZE, 0
        while at < len(data):
            at += os.pwrite(self._file, data[at:], begin + at)


def runs(slots: Sequence[int], most: int = sys.maxsize) -> Iterator[tuple[int, int]]:
    """[begin, end) of slots that follow one another, at most so many of them.

    >>> list(runs([4, 5, 6, 9], most=2))
    [(0, 2), (2, 3), (3, 4)]
    """
    begin = 0
    for at in range(1, len(slots) + 1):
        if at == len(slots) or slots[at] != slots[at - 1] + 1 or at - begin == most:
            yield begin, at
            begin = at
