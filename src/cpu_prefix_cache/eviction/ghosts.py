"""Ghosts: what is remembered of chunks that are gone. Two lists, oldest first, and one table to find a key in.

A ghost is a row in a few arrays, and the rows of one list are linked from old to young; row 0 and row 1 close the two
rings. The table is a row of buckets, and the ghosts of one bucket are linked too. Rows that were given up are used
again first, so there are as many as there ever were ghosts at once.

This takes 21 bytes a ghost and 4 to 8 a bucket. Dictionaries of keys take 190 each, most of them for the key, and are
rebuilt now and then, which at a million keys stops the caller. Of a key only Python's 64-bit hash is kept: of a
million ghosts one in 10^13 lookups finds the wrong one, and the price is one chunk in the wrong list.
"""

from array import array

from cpu_prefix_cache.forest import NONE


class Ghosts:
    """`counts[which]` keys in list 0 and in list 1. All operations are O(1), for about as many keys as `expected`."""

    def __init__(self, expected: int) -> None:
        self.counts = [0, 0]
        buckets = 1 << (expected - 1).bit_length()
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

    def add(self, which: int, key: bytes) -> None:
        """Add a key at the young end of a list. It is in neither."""
        value = hash(key)
        bucket = value & self._mask
        youngest = self._older[which]
        row = self._given_up
        if row == NONE:
            row = len(self._hash)
            self._hash.append(value)
            self._same_bucket.append(self._bucket[bucket])
            self._older.append(youngest)
            self._younger.append(which)
            self._list.append(which)
        else:
            self._given_up = self._same_bucket[row]
            self._hash[row] = value
            self._same_bucket[row] = self._bucket[bucket]
            self._older[row] = youngest
            self._younger[row] = which
            self._list[row] = which
        self._bucket[bucket] = self._younger[youngest] = self._older[which] = row
        self.counts[which] += 1

    def discard(self, key: bytes) -> None:
        """Remove a key, if it is here."""
        wanted, hashes, following = hash(key), self._hash, self._same_bucket
        row = self._bucket[wanted & self._mask]
        while row != NONE and hashes[row] != wanted:
            row = following[row]
        if row != NONE:
            self._remove(row)

    def drop_oldest(self, which: int) -> None:
        """Remove the oldest key of a list that has one."""
        self._remove(self._younger[which])

    def check_valid(self) -> None:
        """Assert every rule this class keeps. For tests: O(rows)."""
        linked = []
        for which in (0, 1):
            row = self._younger[which]
            count = 0
            while row != which:
                assert self._list[row] == which, f"ghost {row} is in the wrong list"
                assert self._older[self._younger[row]] == row, f"ghost {row} is linked one way only"
                linked.append(row)
                row = self._younger[row]
                count += 1
            assert self.counts[which] == count, "ghosts are miscounted"
        found = []
        for bucket, row in enumerate(self._bucket):
            while row != NONE:
                assert self._hash[row] & self._mask == bucket, f"ghost {row} is in the wrong bucket"
                found.append(row)
                row = self._same_bucket[row]
        assert sorted(found) == sorted(linked), "a ghost cannot be found"
        assert len({self._hash[row] for row in found}) == len(found), "a key is remembered twice"

    def _remove(self, row: int) -> None:
        older, younger, following = self._older[row], self._younger[row], self._same_bucket
        self._younger[older], self._older[younger] = younger, older
        bucket = self._hash[row] & self._mask
        place = self._bucket[bucket]
        if place == row:
            self._bucket[bucket] = following[row]
        else:
            while following[place] != row:
                place = following[place]
            following[place] = following[row]
        following[row], self._given_up = self._given_up, row
        self.counts[self._list[row]] -= 1
