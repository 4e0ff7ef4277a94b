"""Ghosts: what is remembered of chunks that were evicted. Two lists of keys, oldest first.

Chunks leave from the end of a prompt to its beginning, and come back from the beginning to the end. So a list is kept
as *runs*, each chunk in one being the parent of the one before it, and only the *top* of a run can be found:

    evicted        D, C, B          run  D C B     B is its top, and A, which is here, its parent
    come back      B                     D C       now C is the top
    the oldest     D ends                C
    evicted        B                     C B       it is the parent of the top: the run goes on

No chunk within a run is ever looked up: a chunk comes below one that is here, or after its parent (rule 3). So a run
loses chunks at its two ends only, and a prompt of strangers costs one look at the tops, of which there are few.

Keys are kept, about 72 bytes a ghost, as hashes of 8 bytes would make an eviction take a tenth longer.
"""

from collections.abc import Sequence

from cpu_prefix_cache.eviction.rings import Linked, insert_after, members, new_ring, unlink

LONGEST_RUN = 4_096  # to end the oldest of a run moves the others: at most 32 KiB


class GhostRun(Linked):
    """Keys, the oldest first; and that of the parent of the last one, if that one had any."""

    __slots__ = ("above", "keys", "which")

    def __init__(self, which: int) -> None:
        self.which = which
        self.keys: list[bytes] = []
        self.above: bytes | None = None


class Ghosts:
    """`counts[which]` keys in list 0 and in list 1."""

    def __init__(self) -> None:
        self.counts = [0, 0]
        self._ends = (new_ring(GhostRun(0)), new_ring(GhostRun(1)))  # each closes the ring of the runs of a list
        self._tops: dict[bytes, GhostRun] = {}

    def first_ghost(self, wanted: Sequence[bytes], start: int) -> int:
        """Where in `wanted`, a chain, the first ghost from `start` on is; its length if there is none.

        The chunk above `wanted[start]` is no ghost.
        """
        tops, end = self._tops, len(wanted)
        if start == end or wanted[start] in tops:
            return start
        if tops.keys().isdisjoint(wanted[start:]):
            return end
        return next(at for at in range(start, end) if wanted[at] in tops)

    def row(self, wanted: Sequence[bytes], start: int, most: int) -> tuple[int, int]:
        """The list of top ghost `wanted[start]`, and how many of `wanted` belong to its run, up to `most`."""
        run = self._tops[wanted[start]]
        keys, most = run.keys, min(most, len(run.keys), len(wanted) - start)
        count = 1
        while count < most and keys[-1 - count] == wanted[start + count]:
            count += 1
        return run.which, count

    def take(self, key: bytes, count: int = 1) -> int:
        """Remove `count` ghosts: one whose parent is none, and those of its run below it. The list that had them."""
        run = self._tops.pop(key)
        run.above = run.keys[-count]
        del run.keys[-count:]
        if run.keys:
            self._tops[run.keys[-1]] = run
        else:
            unlink(run)
        self.counts[run.which] -= count
        return run.which

    def add(self, which: int, keys: Sequence[bytes], above: bytes | None) -> None:
        """Add chunks, each the parent of the one before it, at the young end of a list. `above`: the last one's."""
        while len(keys) > LONGEST_RUN:
            self.add(which, keys[:LONGEST_RUN], keys[LONGEST_RUN])
            keys = keys[LONGEST_RUN:]
        if not keys:
            return
        end = self._ends[which]
        run = end.older
        if run is not end and run.above == keys[0] and len(run.keys) + len(keys) <= LONGEST_RUN:
            self._tops.pop(run.keys[-1], None)
        else:
            run = GhostRun(which)
            insert_after(end.older, run)
        run.keys.extend(keys)
        run.above = above
        self._tops[keys[-1]] = run
        self.counts[which] += len(keys)

    def drop_oldest(self, which: int, count: int) -> None:
        """Remove the `count` oldest chunks of a list that has as many."""
        self.counts[which] -= count
        while count:
            run = self._ends[which].younger
            if len(run.keys) > count:
                del run.keys[:count]
                return
            count -= len(run.keys)
            self._tops.pop(run.keys[-1], None)
            unlink(run)

    def keys(self, which: int) -> list[bytes]:
        """The keys of a list, the oldest first. For tests."""
        return [key for run in members(self._ends[which]) for key in run.keys]

    def check_valid(self) -> None:
        """Assert every rule this class keeps. For tests."""
        tops = {}
        for which in (0, 1):
            for run in members(self._ends[which]):
                assert run.which == which and run.keys, "a run is empty, or in the wrong list"
                assert run.younger.older is run, "a run is linked one way only"
                tops[run.keys[-1]] = run
            assert self.counts[which] == len(self.keys(which)), "ghosts are miscounted"
        assert tops == self._tops, "the top of a run cannot be found"
        everything = self.keys(0) + self.keys(1)
        assert len(set(everything)) == len(everything), "a key is remembered twice"
