"""Prompts as segments: runs of chunks that were always used together.

    requests      A B C D E F     A B C X Y         segments      [A B C] --- [D E F]
                                                                         `--- [X Y]

A segment is what one request used first, cut where a later one went on differently or ended. Of its chunks only the
first `resident` ones are here, as they leave from the end. A segment without any is a *ghost*: its keys known are the
first, the last and the last but one, and it is learned from all the same.

As keys are chained, a segment is found by its first key, and all of it matches when its last key does: a prompt costs a
few steps for each segment. Where a prompt leaves a segment is found by bisection among what is here. Beyond that it is
known only whether it left at the last chunk, as a conversation does whose last chunk was cut short; otherwise the
segment ends where it is here, and the rest of it is forgotten.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

from cpu_prefix_cache.eviction.ages import NEVER, Use
from cpu_prefix_cache.eviction.rings import Linked, new_ring, unlink
from cpu_prefix_cache.index.forest import NONE, Forest


class Segment(Linked):
    """`length` chunks, of which the first `resident` are here, the last of those in node `deepest`.

    Its last use was `use`, and made it of class `kind`. `turn` counts the prompts that had ended above, `ended` those
    that ended here, `children` the segments that have begun below. `gap` is how long the last use came after the one
    before, in the steps of `kinds.GAP_OF`; 0: it was the first. `depth` is how deep in its prompt it ended at first,
    and `level` that of its cost (levels.py).
    """

    __slots__ = (
        "children",
        "deepest",
        "depth",
        "ended",
        "first",
        "gap",
        "is_end",
        "kind",
        "last",
        "last_but_one",
        "length",
        "level",
        "resident",
        "ring",
        "turn",
        "use",
    )

    def __init__(self, keys: Sequence[bytes], start: int, stop: int) -> None:
        self.length = stop - start
        self.first, self.last = keys[start], keys[stop - 1]
        self.last_but_one = keys[stop - 2] if self.length > 1 else b""  # no key is empty
        self.resident = 0
        self.deepest = NONE
        self.use: Use = NEVER
        self.kind = NONE
        self.turn = 1
        self.ended = 0
        self.is_end = False
        self.children = 0
        self.gap = 0
        self.depth = stop
        self.level = 0
        self.ring: Segment | None = None  # the ring it stands in, by its end

    def extend(self, keys: Sequence[bytes]) -> None:
        """It goes on with these chunks."""
        self.length += len(keys)
        self.last_but_one = keys[-2] if len(keys) > 1 else self.last
        self.last = keys[-1]


def segment_ring() -> Segment:
    """The end of a ring of segments that has no members yet."""
    return new_ring(Segment((b"",), 0, 1))


def enter(ring: Segment, segment: Segment) -> None:
    """Stand as the youngest of a ring, and in no other any more."""
    if segment.ring is not None:
        segment.older.younger, segment.younger.older = segment.younger, segment.older
    before = ring.older
    segment.older, segment.younger = before, ring
    before.younger = ring.older = segment
    segment.ring = ring


def leave(segment: Segment) -> None:
    """Stand in no ring any more, if in one."""
    if segment.ring is not None:
        unlink(segment)
        segment.older = segment.younger = segment.ring  # where it keeps nothing that is forgotten
        segment.ring = None


class Cut(NamedTuple):
    """A segment is `lower` now, without its first key if that is not known, and `upper` is what it begins with.

    `displaced` is a ghost that begins as `lower` does: one that was there before what was above it was forgotten.
    """

    upper: Segment
    lower: Segment
    displaced: Segment | None


class Segments:
    """All known segments, by their first keys."""

    def __init__(self, forest: Forest) -> None:
        self._forest = forest
        self._mark: list[Any] = forest.mark
        self._keys: list[Any] = forest.key  # bytes of what is here
        self._by_first: list[dict[bytes, Segment]] = [{} for _ in range(256)]  # see shards.py

    def find(self, key: bytes) -> Segment | None:
        """The segment that begins with this key."""
        return self._by_first[key[0]].get(key)

    def known(self) -> list[Segment]:
        """All of them."""
        return [segment for shard in self._by_first for segment in shard.values()]

    def anew(self, forest: Forest) -> None:
        """Go on with this forest, in which nothing is here of any segment."""
        self._forest, self._mark, self._keys = forest, forest.mark, forest.key

    def add(self, segment: Segment) -> None:
        self._by_first[segment.first[0]][segment.first] = segment

    def forget(self, segment: Segment) -> None:
        """It is known no more."""
        first = segment.first
        if first and self.find(first) is segment:
            del self._by_first[first[0]][first]

    def walk(self, keys: Sequence[bytes]) -> tuple[list[Segment], int, list[Cut]]:
        """The segments of a prompt from its beginning on, how many chunks those have, and which were cut for it."""
        by_first, stop, at = self._by_first, len(keys), 0
        path: list[Segment] = []
        cuts: list[Cut] = []
        while at < stop:
            key = keys[at]
            segment = by_first[key[0]].get(key)
            if segment is None:
                break
            end = at + segment.length
            if end <= stop and keys[end - 1] == segment.last:
                at = end
            else:
                length = self._common(segment, keys, at)
                cut = self._cut(segment, keys, at, length)
                cuts.append(cut)
                segment = cut.upper
                at += length
            path.append(segment)
        return path, at, cuts

    def _common(self, segment: Segment, keys: Sequence[bytes], at: int) -> int:
        """How many chunks, one or more, a prompt shares with a segment that it leaves or ends in."""
        left = len(keys) - at
        here = min(segment.resident, left)
        common = bisect_left(range(here), True, key=lambda more: not self._has(segment, keys[at + more]))
        if common < here or common == left:
            return common
        length = segment.length
        if left >= length - 1 and keys[at + length - 2] == segment.last_but_one:
            return length - 1
        return max(1, common)

    def _has(self, segment: Segment, key: bytes) -> bool:
        """Whether the chunk with this key is here, and of this segment."""
        node = self._forest.find(key)
        return node != NONE and self._mark[node] is segment

    def _cut(self, segment: Segment, keys: Sequence[bytes], at: int, length: int) -> Cut:
        """Cut a segment after `length` chunks, `keys` from `at` on. The new upper part; it is the lower one now."""
        upper = Segment(keys, at, at + length)
        upper.turn, upper.gap, upper.children = segment.turn, segment.gap, 1
        upper.is_end = segment.is_end and segment.length - length <= 1
        here = self._forest.path(segment.deepest, segment.resident)
        first = self._keys[here[length]] if len(here) > length else b""
        for block in here[:length]:
            self._mark[block] = upper
            upper.deepest = block
        upper.resident = min(len(here), length)
        self.add(upper)
        segment.resident -= upper.resident
        segment.length -= length
        if not segment.resident:
            segment.deepest = NONE
        if segment.length == 1:
            segment.last_but_one = b""
            first = first or segment.last
        other = self.find(first) if first else None
        if other is not None and other.resident:
            first, other = b"", None  # it has been taken to be of another segment
        segment.first = first
        if first:
            self.add(segment)
        return Cut(upper, segment, other)
