"""Buckets: what is of one class and in one bin of ages, in the order in which it is to be evicted.

The *leaves* of a bucket, its segments that can be evicted from, stand in *rows*, as they came: one for each level of
what it costs to compute them again (levels.py). Rows are sorted by *rank*: what a block is worth there (survival.py)
times that cost, and of equal ones the older bin first. A segment changes its row when it is used, and when its use is
old enough for the next bin (ages.py); a row changes its rank when its class is learned anew.
"""

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter

from sortedcontainers import SortedKeyList

from cpu_prefix_cache.eviction.ages import NEVER, Ages, Use
from cpu_prefix_cache.eviction.levels import Levels
from cpu_prefix_cache.eviction.recency import Recency
from cpu_prefix_cache.eviction.rings import members, move
from cpu_prefix_cache.eviction.segments import Segment, enter, leave, segment_ring
from cpu_prefix_cache.eviction.survival import BINS, Survival

# Classes are learned anew in rounds, one with each request, which takes 20 us. A round is so many requests.
ROUND, EARLY_ROUND = 200, 32
EARLY = 512  # requests
TOGETHER = 1.0  # second, half of the first bin: the error of an age
MOST_TOGETHER = 500  # requests: what they used grows old in one call

Rank = tuple[float, int, int]  # worth, bin from the last to the first, row: who has the least goes first


class Buckets:
    """`features[c]`: the levels of the features of class c, `hinted`: those that are hints (survival.py). `levels`: of
    costs. `room`: for so many nodes.
    """

    def __init__(
        self, features: Sequence[tuple[int, ...]], hinted: Mapping[int, int], levels: Levels, room: int
    ) -> None:
        self._survival = Survival(features, hinted)
        self._ages = Ages(self._survival)
        self._levels = levels
        self._recency = Recency(room, self._ages.younger)
        self._width = len(levels.costs)
        self._rings = defaultdict[int, Segment](segment_ring)  # by row
        self._ranks: list[Rank] = []  # of the rings that may have members, in order
        self._ranked: list[dict[int, Rank]] = [{} for _ in features]  # by class, and by row: those that are among them
        self._by_age = SortedKeyList(key=attrgetter("number"))  # uses that have leaves
        self._use = NEVER  # the last one
        self._requests = self._next_round = 0
        self._to_learn: list[int] = []  # classes, the last one next

    @property
    def is_by_age(self) -> bool:
        """Whether what was used longest ago leaves first: as all costs the same, and an LRU would find enough."""
        return self._width == 1 and self._recency.is_enough

    def rank(self, segment: Segment) -> Rank:
        return (segment.use.number, 0, 0) if self.is_by_age else self._rank(self._row(segment))

    def ends(self) -> Iterator[tuple[Rank, int]]:
        """The deepest chunks of all leaves, by rank. Changes nothing."""
        if self.is_by_age:
            for use in self._by_age:
                for segment in use.leaves:
                    yield (use.number, 0, 0), segment.deepest
            return
        for rank in self._ranks:
            for segment in members(self._rings[rank[2]]):
                yield rank, segment.deepest

    def seek(self, segments: Sequence[Segment], *, is_hinted: bool) -> None:
        """A request is about to use these, of which some are new, and none is here below one that is not."""
        served = sum(segment.resident for segment in segments)
        self._recency.seek(((each.use, each.length) for each in segments), served, is_hinted=is_hinted)

    def resize(self, room: int) -> None:
        """There is room for so many nodes now."""
        self._recency.resize(room)

    def clear(self) -> None:
        """Nothing is here any more."""
        self._recency.clear()

    def begin(self, now: float) -> Use:
        """The use of what is used now; older uses move to their next bins.

        Requests within a second share a use, which bounds the work where there are many.
        """
        use = self._use
        if use.members and now - use.at < TOGETHER and use.shared_by < MOST_TOGETHER:
            use.shared_by += 1
            return use
        for grown in self._ages.grow_old(now):
            self._move_leaves(grown)
        self._use = Use(now, use.number + 1)
        self._ages.begin(self._use)
        self._recency.begin(self._use)
        return self._use

    def use(self, segment: Segment, kind: int, use: Use) -> None:
        """A segment has this use now, and is of this class. It was used before if it had another one."""
        if segment.use is NEVER:
            segment.level = self._levels.of(segment.depth)
        else:
            self._survival.reuses[segment.kind * BINS + segment.use.bin] += 1
        self._become(segment, kind, use)

    def follow(self, segment: Segment, above: Segment) -> None:
        """A segment that is known has the age and the class of the one above."""
        self._become(segment, above.kind, above.use)

    def lengthened(self, segment: Segment, chunks: int) -> None:
        """A segment has so many more chunks, none of which was known."""
        self._recency.add(segment.use, chunks)

    def stand_beside(self, segment: Segment, other: Segment) -> None:
        """A segment begins with the use and the class of another, of whose chunks it was cut."""
        segment.use, segment.kind = other.use, other.kind
        segment.level = self._levels.of(segment.depth)
        self._ages.join(segment.use, segment.kind)

    def forget(self, segment: Segment, now: float) -> None:
        """A segment that is no leaf is not known any more."""
        self._part(segment, now)

    def enter(self, segment: Segment) -> None:
        """A segment is a leaf from now on."""
        if not segment.use.leaves:
            self._by_age.add(segment.use)
        segment.use.leaves[segment] = None
        row = self._row(segment)
        ring = self._rings[row]
        if ring.younger is ring and row not in self._ranked[segment.kind]:
            self._begin_ranking(segment.kind, row)
        enter(ring, segment)

    def leave(self, segment: Segment) -> None:
        """A segment is no leaf any more."""
        leave(segment)
        self._is_no_leaf_of(segment.use, segment)

    def a_request_came(self) -> None:
        """Learn something: a little each time, so that no call takes long."""
        self._requests += 1
        if self._to_learn:
            self._learn(self._to_learn.pop(), self._use.at)
        elif self._requests >= self._next_round:
            self._to_learn = self._survival.begin_round(self._requests)
            self._next_round = self._requests + (EARLY_ROUND if self._requests < EARLY else ROUND)

    def check_valid(self, known: Sequence[Segment]) -> None:
        """Assert that each of these, which are all, is where it belongs. For tests."""
        self._ages.check_valid()
        self._survival.check_valid(self._use.at)
        self._recency.check_valid(self._ages.uses())
        uses = set(self._ages.uses())
        for segment in known:
            use = segment.use
            assert use in uses, "a segment has a use that has ended"
            if segment in use.leaves:
                assert segment.ring is self._rings[self._row(segment)], "a leaf stands in the wrong ring"
        assert [*self._by_age] == [use for use in self._ages.uses() if use.leaves], (
            "a use with leaves is not found by age"
        )
        kinds = Counter((segment.use, segment.kind) for segment in known)
        nodes = Counter[Use]()
        for segment in known:
            nodes[segment.use] += segment.length
        assert nodes == Counter({use: use.nodes for use in uses}), "the nodes of a use are miscounted"
        assert kinds == {(use, each): n for use in uses for each, n in use.members.items()}, "members are miscounted"
        ranked = {row for rows in self._ranked for row in rows}
        assert self._ranks == sorted(map(self._rank, ranked)), "rows are out of order"
        assert ranked >= {row for row, ring in self._rings.items() if ring.younger is not ring}, "a row is forgotten"

    def _become(self, segment: Segment, kind: int, use: Use) -> None:
        """A segment is of this class, and of the age of this use."""
        before, now = segment.use, self._use.at
        self._ages.join(use, kind)
        if before is not NEVER:
            self._part(segment, now)
        segment.use, segment.kind = use, kind
        self._recency.add(use, segment.length)
        if kind not in self._survival.known:
            self._survival.begin(kind)
            self._learn(kind, now)
        if segment in before.leaves:
            self._is_no_leaf_of(before, segment)
            self.enter(segment)

    def _part(self, segment: Segment, now: float) -> None:
        """A segment has its last use no more."""
        self._ages.part(segment.use, segment.kind, now)
        self._recency.add(segment.use, -segment.length)

    def _is_no_leaf_of(self, use: Use, segment: Segment) -> None:
        del use.leaves[segment]
        if not use.leaves:
            self._by_age.remove(use)

    def _move_leaves(self, use: Use) -> None:
        """A use is in the next bin, and so are its leaves, each as the youngest of its bucket."""
        rings, ranked, bin, width = self._rings, self._ranked, use.bin, self._width
        for segment in use.leaves:
            kind = segment.kind
            row = (kind * BINS + bin) * width + segment.level
            ring = segment.ring = rings[row]
            if ring.younger is ring and row not in ranked[kind]:
                self._begin_ranking(kind, row)
            move(segment, ring)

    def _begin_ranking(self, kind: int, row: int) -> None:
        rank = self._ranked[kind][row] = self._rank(row)
        insort(self._ranks, rank)

    def _learn(self, each: int, now: float) -> None:
        """Learn what the buckets of a class are worth now, and put them in their places."""
        ranked = self._ranked[each]
        self._ranked[each] = {}
        for rank in ranked.values():
            del self._ranks[bisect_left(self._ranks, rank)]
        self._survival.learn(each, now)
        for row in ranked:
            if self._rings[row].younger is not self._rings[row]:
                self._begin_ranking(each, row)

    def _row(self, segment: Segment) -> int:
        return (segment.kind * BINS + segment.use.bin) * self._width + segment.level

    def _rank(self, row: int) -> Rank:
        bucket, level = divmod(row, self._width)
        return self._survival.worth[bucket] * self._levels.costs[level], -(bucket % BINS), row
