"""Free blocks, kept as runs of neighbours, because a copy to neighbouring blocks is a copy to one address range.

>>> free = FreeRuns()
>>> free.put([0, 1, 2, 3, 7, 8])
>>> free.take(2)  # the run that fits best, not the first
[7, 8]
>>> free.put([7])
>>> free.take(4), free.take(1), len(free)
([0, 1, 2, 3], [7], 0)
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise

from sortedcontainers import SortedDict, SortedList

from cpu_prefix_cache.messages.errors import MisuseError


class FreeRuns:
    """A set of block ids that gives out ascending neighbours. O(log runs) for each run touched."""

    def __init__(self) -> None:
        self._length_at = SortedDict()  # first block of a run -> its length
        self._by_length = SortedList()  # (length, first block) of the same runs
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, block: object) -> bool:
        at = self._length_at.bisect_right(block) - 1
        if at < 0:
            return False
        first, length = self._length_at.peekitem(at)
        return bool(block < first + length)

    def put(self, blocks: Iterable[int]) -> None:
        """Add `blocks`, in ascending order."""
        for first, end in _runs(blocks):
            self.put_run(first, end)

    def put_run(self, first: int, end: int) -> None:
        """Add the blocks from `first` up to `end`, of which there is one at least. O(log runs)."""
        at = self._length_at.bisect_left(first)
        if at < len(self._length_at):
            after, length = self._length_at.peekitem(at)
            if after < end:
                raise MisuseError(f"block {after} is free already")
            if after == end:
                self._drop_run(after, length)
                end += length
        if at > 0:
            before, length = self._length_at.peekitem(at - 1)
            if before + length > first:
                raise MisuseError(f"block {first} is free already")
            if before + length == first:
                self._drop_run(before, length)
                first = before
        self._add_run(first, end - first)

    def clear(self) -> None:
        """Remove all. O(runs)."""
        self._length_at.clear()
        self._by_length.clear()
        self._count = 0

    def take(self, count: int) -> list[int]:
        """Remove and return `count` blocks, ascending: the smallest run that holds them, else the longest runs."""
        if count > self._count:
            raise MisuseError(f"{count} blocks were to be taken, but only {self._count} are free")
        taken: list[int] = []
        while len(taken) < count:
            wanted = count - len(taken)
            fits = self._by_length.bisect_left((wanted, -1))
            length, first = self._by_length[fits if fits < len(self._by_length) else -1]
            self._drop_run(first, length)
            if length > wanted:
                self._add_run(first + wanted, length - wanted)
            taken.extend(range(first, first + min(length, wanted)))
        taken.sort()
        return taken

    def remove(self, blocks: Iterable[int]) -> None:
        """Remove these very blocks. Raises MisuseError, and removes nothing, when one of them is not here or twice."""
        runs = list(_runs(sorted(blocks)))
        places = [self._place(first, end) for first, end in runs]
        if None in places or any(run[0] < before[1] for before, run in pairwise(runs)):
            raise MisuseError(f"blocks of {runs} are not free, or come twice")
        for first, end in runs:
            start, length = self._length_at.peekitem(self._length_at.bisect_right(first) - 1)
            self._drop_run(start, length)
            if first > start:
                self._add_run(start, first - start)
            if end < start + length:
                self._add_run(end, start + length - end)

    def _place(self, first: int, end: int) -> int | None:
        """The first block of the run of free blocks that has all of [first, end)."""
        at = self._length_at.bisect_right(first) - 1
        if at < 0:
            return None
        start, length = self._length_at.peekitem(at)
        return start if end <= start + length else None

    def __iter__(self) -> Iterator[int]:
        """Every free block, ascending."""
        for first, length in self._length_at.items():
            yield from range(first, first + length)

    def _add_run(self, first: int, length: int) -> None:
        self._length_at[first] = length
        self._by_length.add((length, first))
        self._count += length

    def _drop_run(self, first: int, length: int) -> None:
        del self._length_at[first]
        self._by_length.remove((length, first))
        self._count -= length


def _runs(blocks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Ascending blocks as ranges of neighbours.

    >>> list(_runs([1, 2, 3, 7]))
    [(1, 4), (7, 8)]
    """
    first = end = -1
    for block in blocks:
        if block == end:
            end += 1
            continue
        if end > first:
            yield first, end
        first, end = block, block + 1
    if end > first:
        yield first, end
