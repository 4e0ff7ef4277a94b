"""Ghosts: what is remembered of chunks that are gone. Two lists, oldest first.

Chunks leave from the end of a prompt to its beginning, and come back from the beginning to the end. So a list is kept
as *runs*, each chunk in one being the parent of the one before it, and only the *top* of a run can be found:

    evicted        D, C, B          run  D C B     B is its top, and A, which is here, its parent
    come back      B                     D C       now C is: whoever has B, and asks for the next chunk, asks for C
    the oldest     D ends                C
    evicted        B                     C B       it is the parent of the top: the run goes on

That no chunk within a run is ever asked for follows from rule 3: a chunk comes below one that is here, or comes with
it and after it, and what is here or has come is no ghost. So a run loses chunks at its two ends only; and what a
prompt of strangers costs is one look at the tops, of which there are few.

Of a key only Python's 64-bit hash is kept: among a million ghosts one lookup in 10^13 finds a wrong one, which costs a
chunk in the wrong list, or a ghost that is not found. This takes 8 bytes a ghost and about 350 a run.
"""

from array import array
from collections.abc import Iterator, Sequence

from cpu_prefix_cache.forest import NONE

LONGEST_RUN = 4_096  # to end the oldest of a run moves the others: at most 32 KiB


class Run:
    """Hashes of keys, the oldest first; and of the parent of the last one, if that one had any."""

    __slots__ = ("above", "hashes", "older", "which", "younger")

    def __init__(self, which: int) -> None:
        self.which = which
        self.hashes = array("q")
        self.above: int | None = None
        self.older = self.younger = self


class Ghosts:
    """`counts[which]` keys, given by their hashes, in list 0 and in list 1."""

    def __init__(self) -> None:
        self.counts = [0, 0]
        self._ends = (Run(0), Run(1))  # each closes the ring of the runs of a list
        self._tops: dict[int, Run] = {}

    def first_ghost(self, wanted: Sequence[int], start: int) -> int:
        """Where in `wanted[start:]`, chunks one below the other, the first ghost is; `len(wanted)` if there is none.

        The chunk above `wanted[start]` is no ghost.
        """
        tops, end = self._tops, len(wanted)
        if start == end or wanted[start] in tops:
            return start
        if tops.keys().isdisjoint(wanted[start:]):
            return end
        return next(at for at in range(start, end) if wanted[at] in tops)

    def find(self, value: int) -> int:
        """The list that has a chunk whose parent is no ghost; NONE if neither does."""
        run = self._tops.get(value)
        return NONE if run is None else run.which

    def row(self, wanted: Sequence[int], start: int, most: int) -> tuple[int, int]:
        """The list that has the ghost `wanted[start]`, whose parent is none; and how many of `wanted` are its run's.

        Counts to `most`.
        """
        run = self._tops[wanted[start]]
        hashes, most = run.hashes, min(most, len(run.hashes), len(wanted) - start)
        count = 1
        while count < most and hashes[-1 - count] == wanted[start + count]:
            count += 1
        return run.which, count

    def take(self, value: int, count: int = 1) -> int:
        """Remove `count` ghosts: one whose parent is none, and those of its run below it. The list that had them."""
        run = self._tops.pop(value)
        run.above = run.hashes[-count]
        del run.hashes[-count:]
        if run.hashes:
            self._tops[run.hashes[-1]] = run
        else:
            _leave(run)
        self.counts[run.which] -= count
        return run.which

    def add(self, which: int, values: Sequence[int], above: int | None) -> None:
        """Add chunks, each the parent of the one before it, at the young end of a list. `above`: the last one's."""
        for at in range(0, len(values), LONGEST_RUN):
            end = at + LONGEST_RUN
            self._add_run(which, values[at:end], values[end] if end < len(values) else above)
        self.counts[which] += len(values)

    def drop_oldest(self, which: int, count: int) -> None:
        """Remove the `count` oldest chunks of a list that has as many."""
        self.counts[which] -= count
        while count:
            run = self._ends[which].younger
            if len(run.hashes) > count:
                del run.hashes[:count]
                return
            count -= len(run.hashes)
            self._tops.pop(run.hashes[-1], None)
            _leave(run)

    def hashes(self, which: int) -> list[int]:
        """What is kept of the keys of a list, the oldest first. For tests."""
        return [value for run in self._runs(which) for value in run.hashes]

    def check_valid(self) -> None:
        """Assert every rule this class keeps. For tests."""
        tops = {}
        for which in (0, 1):
            for run in self._runs(which):
                assert run.which == which and run.hashes, "a run is empty, or in the wrong list"
                assert run.younger.older is run, "a run is linked one way only"
                tops[run.hashes[-1]] = run
            assert self.counts[which] == len(self.hashes(which)), "ghosts are miscounted"
        assert tops == self._tops, "the top of a run cannot be found"
        everything = self.hashes(0) + self.hashes(1)
        assert len(set(everything)) == len(everything), "a key is remembered twice"

    def _add_run(self, which: int, values: Sequence[int], above: int | None) -> None:
        end = self._ends[which]
        run = end.older
        if run is not end and run.above == values[0] and len(run.hashes) + len(values) <= LONGEST_RUN:
            self._tops.pop(run.hashes[-1], None)
        else:
            run = Run(which)
            run.older, run.younger = end.older, end
            end.older.younger = end.older = run
        run.hashes.extend(values)
        run.above = above
        self._tops[values[-1]] = run

    def _runs(self, which: int) -> Iterator[Run]:
        run = self._ends[which].younger
        while run is not self._ends[which]:
            yield run
            run = run.younger


def _leave(run: Run) -> None:
    run.older.younger, run.younger.older = run.younger, run.older
