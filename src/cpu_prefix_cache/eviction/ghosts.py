"""Ghosts: what is remembered of chunks that are gone. Two lists, oldest first, and one table to find a key in.

A ghost is a row in a few arrays, and the rows of one list are linked from old to young; row 0 and row 1 close the two
rings. The table is a row of buckets, and the ghosts of one bucket are linked too. Rows that were given up are used
again first, so there are as many as there ever were ghosts at once.

This takes 21 bytes a ghost and 8 to 16 of buckets for each expected one. Dictionaries of keys take 190 a ghost, a third
of it for the key, and are rebuilt now and then, which at a million keys stops the caller. Of a key only Python's 64-bit
hash is kept: among a million ghosts one lookup in 10^13 finds a wrong one, which costs a chunk in the wrong list.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence

from cpu_prefix_cache.forest import NONE


class Ghosts:
    """`counts[which]` keys in list 0 and in list 1. All operations are O(1), for about as many keys as `expected`."""

    def __init__(self, expected: int) -> None:
        self.counts = [0, 0]
        buckets = 2 << (expected - 1).bit_length()
        self._mask = buckets - 1
        self._bucket = array("i", [NONE]) * buckets  # its youngest row
        self._hash = array("q", [0, 0])
        self._same_bucket = array("i", [NONE, NONE])  # the next row in the bucket; of a row given up, the next such
        self._older = array("i", [0, 1])
        self._younger = array("i", [0, 1])
        self._list = bytearray([0, 1])
        self._given_up = NONE

    def find(self, key: bytes) -> int:
        """Which list has the key; NONE if neither does."""
        wanted, hashes, following = hash(key), self._hash, self._same_bucket
        row = self._bucket[wanted & self._mask]
        while row != NONE and hashes[row] != wanted:
            row = following[row]
        return NONE if row == NONE else self._list[row]

    def first_ghost(self, keys: Sequence[bytes], start: int) -> int:
        """Where in `keys[start:]` the first key is that a list has; `len(keys)` if none is."""
        buckets, mask, hashes, following = self._bucket, self._mask, self._hash, self._same_bucket
        for at in range(start, len(keys)):
            wanted = hash(keys[at])
            row = buckets[wanted & mask]
            while row != NONE:
                if hashes[row] == wanted:
                    return at
                row = following[row]
        return len(keys)

    def add(self, which: int, keys: Iterable[bytes]) -> None:
        """Add keys, the oldest first, at the young end of a list. They are in neither."""
        buckets, mask, hashes, following = self._bucket, self._mask, self._hash, self._same_bucket
        older, younger, lists = self._older, self._younger, self._list
        youngest, given_up, count = older[which], self._given_up, 0
        for key in keys:
            value = hash(key)
            bucket = value & mask
            if given_up == NONE:
                row = self._new_row()
            else:
                row = given_up
                given_up = following[row]
            hashes[row] = value
            following[row] = buckets[bucket]
            lists[row] = which
            older[row] = youngest
            buckets[bucket] = younger[youngest] = youngest = row
            count += 1
        younger[youngest], older[which] = which, youngest
        self._given_up = given_up
        self.counts[which] += count

    def take(self, key: bytes) -> int:
        """Remove a key. The list that had it; NONE if neither did."""
        wanted, hashes, following = hash(key), self._hash, self._same_bucket
        bucket = wanted & self._mask
        row, before = self._bucket[bucket], NONE
        while row != NONE and hashes[row] != wanted:
            row, before = following[row], row
        if row == NONE:
            return NONE
        if before == NONE:
            self._bucket[bucket] = following[row]
        else:
            following[before] = following[row]
        older, younger = self._older[row], self._younger[row]
        self._younger[older], self._older[younger] = younger, older
        following[row], self._given_up = self._given_up, row
        which = self._list[row]
        self.counts[which] -= 1
        return which

    def drop_oldest(self, which: int, count: int) -> None:
        """Remove the `count` oldest keys of a list that has as many."""
        buckets, mask, hashes, following = self._bucket, self._mask, self._hash, self._same_bucket
        younger, given_up = self._younger, self._given_up
        row = younger[which]
        for _ in range(count):
            bucket = hashes[row] & mask
            place = buckets[bucket]
            if place == row:
                buckets[bucket] = following[row]
            else:
                while following[place] != row:
                    place = following[place]
                following[place] = following[row]
            following[row] = given_up
            given_up = row
            row = younger[row]
        younger[which], self._older[row] = row, which
        self._given_up = given_up
        self.counts[which] -= count

    def renew(self, which: int, keys: Sequence[bytes]) -> None:
        """As many `drop_oldest`, then `add`, in one list that has as many: their rows stay linked as they are."""
        if not keys:
            return
        buckets, mask, hashes, following = self._bucket, self._mask, self._hash, self._same_bucket
        older, younger = self._older, self._younger
        youngest, oldest = older[which], younger[which]
        younger[youngest], older[oldest] = oldest, youngest  # a ring without its end, which goes in further on
        row = oldest
        for key in keys:
            bucket = hashes[row] & mask
            place = buckets[bucket]
            if place == row:
                buckets[bucket] = following[row]
            else:
                while following[place] != row:
                    place = following[place]
                following[place] = following[row]
            hashes[row] = value = hash(key)
            bucket = value & mask
            following[row] = buckets[bucket]
            buckets[bucket] = row
            row = younger[row]
        before = older[row]
        younger[before] = older[row] = which
        older[which], younger[which] = before, row

    def hashes(self, which: int) -> list[int]:
        """What is kept of the keys of a list, the oldest first. For tests."""
        return [self._hash[row] for row in self._rows(which)]

    def check_valid(self) -> None:
        """Assert every rule this class keeps. For tests: O(rows)."""
        linked = []
        for which in (0, 1):
            rows = list(self._rows(which))
            assert self.counts[which] == len(rows), "ghosts are miscounted"
            for row in rows:
                assert self._list[row] == which, f"ghost {row} is in the wrong list"
                assert self._younger[self._older[row]] == row, f"ghost {row} is linked one way only"
            linked += rows
        found = []
        for bucket, row in enumerate(self._bucket):
            while row != NONE:
                assert self._hash[row] & self._mask == bucket, f"ghost {row} is in the wrong bucket"
                found.append(row)
                row = self._same_bucket[row]
        assert sorted(found) == sorted(linked), "a ghost cannot be found"
        assert len({self._hash[row] for row in found}) == len(found), "a key is remembered twice"

    def _rows(self, which: int) -> Iterator[int]:
        row = self._younger[which]
        while row != which:
            yield row
            row = self._younger[row]

    def _new_row(self) -> int:
        for column in (self._hash, self._same_bucket, self._older, self._younger, self._list):
            column.append(0)
        return len(self._hash) - 1
