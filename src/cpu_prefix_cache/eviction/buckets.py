"""Buckets: what is of one class and in one bin of ages, in the order in which it is to be evicted.

The *leaves* of a bucket, its segments that can be evicted from, stand in a ring, as they came. The rings are sorted by
*rank*: what a block is worth there (survival.py), and of equal ones the older bin first. A segment changes its bucket
when it is used, and when its use is old enough for the next bin (ages.py); a bucket changes its rank when its class is
learned anew.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from sortedcontainers import SortedList

from cpu_prefix_cache.eviction.ages import NEVER, Ages, Use
from cpu_prefix_cache.eviction.rings import members
from cpu_prefix_cache.eviction.segments import Segment, enter, leave, segment_ring
from cpu_prefix_cache.eviction.survival import BINS, Survival

# Classes are learned anew in rounds, one with each request, which takes 20 us. A round is so many requests.
ROUND, EARLY_ROUND = 200, 32
EARLY = 512  # requests
TOGETHER = 1.0  # second, half of the first bin: the error of an age
MOST_TOGETHER = 500  # requests: what they used grows old in one call

Rank = tuple[float, int, int]  # worth, bin from the last to the first, bucket: who has the least goes first


class Buckets:
    """`features[c]`: the levels of the features of class c (survival.py)."""

    def __init__(self, features: Sequence[tuple[int, ...]]) -> None:
        self._survival = Survival(features)
        self._ages = Ages(self._survival)
        self._rings: dict[int, Segment] = {}  # by bucket
        self._ranks: SortedList[Rank] = SortedList()  # of the rings that may have members
        self._ranked = bytearray(len(features) * BINS)  # by bucket: whether its rank is among them
        self._use = Use(0.0)  # the last one
        self._requests = self._next_round = 0
        self._to_learn: list[int] = []  # classes, the last one next

    def rank(self, segment: Segment) -> Rank:
        return self._rank(segment.kind * BINS + segment.use.bin)

    def ends(self) -> Iterator[tuple[Rank, int]]:
        """The deepest chunks of all leaves, by rank. Changes nothing."""
        for rank in self._ranks:
            for segment in members(self._rings[rank[2]]):
                yield rank, segment.deepest

    def begin(self, now: float) -> Use:
        """The use of what is used now; older uses move to their next bins.

        Requests within a second share a use, which bounds the work where there are many.
        """
        use = self._use
        if use.members and now - use.at < TOGETHER and use.shared_by < MOST_TOGETHER:
            use.shared_by += 1
            return use
        for grown in self._ages.grow_old(now):
            for segment in grown.leaves:
                self._stand(segment, grown)
        self._use = Use(now)
        self._ages.begin(self._use)
        return self._use

    def use(self, segment: Segment, kind: int, use: Use) -> None:
        """A segment has this use now, and is of this class. It was used before if it had another one."""
        before = segment.use
        self._ages.join(use, kind)
        if before is not NEVER:
            self._survival.reuses[segment.kind * BINS + before.bin] += 1
            self._ages.part(before, segment.kind, use.at)
        segment.use, segment.kind = use, kind
        if self._survival.begin(kind):
            self._learn(kind, use.at)
        if segment in before.leaves:
            del before.leaves[segment]
            self.enter(segment)

    def stand_beside(self, segment: Segment, other: Segment) -> None:
        """A new segment begins with the use and the class of another."""
        segment.use, segment.kind = other.use, other.kind
        self._ages.join(segment.use, segment.kind)

    def forget(self, segment: Segment, now: float) -> None:
        """A segment that is no leaf is not known any more."""
        self._ages.part(segment.use, segment.kind, now)

    def enter(self, segment: Segment) -> None:
        """A segment is a leaf from now on."""
        segment.use.leaves[segment] = None
        self._stand(segment, segment.use)

    def leave(self, segment: Segment) -> None:
        """A segment is no leaf any more."""
        leave(segment)
        del segment.use.leaves[segment]

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
        uses = set(self._ages.uses())
        for segment in known:
            use = segment.use
            assert use in uses, "a segment has a use that has ended"
            if segment in use.leaves:
                assert segment.ring is self._rings[segment.kind * BINS + use.bin], "a leaf stands in the wrong ring"
        kinds = Counter((segment.use, segment.kind) for segment in known)
        assert kinds == {(use, each): n for use in uses for each, n in use.members.items()}, "members are miscounted"
        ranked = {bucket for bucket, ranked in enumerate(self._ranked) if ranked}
        assert list(self._ranks) == sorted(map(self._rank, ranked)), "buckets are out of order"
        assert ranked >= {at for at, ring in self._rings.items() if ring.younger is not ring}, "a bucket is forgotten"

    def _stand(self, segment: Segment, use: Use) -> None:
        """Stand as the youngest in the ring of its bucket, and in no other."""
        bucket = segment.kind * BINS + use.bin
        ring = self._rings.get(bucket)
        if ring is None:
            ring = self._rings[bucket] = segment_ring()
        enter(ring, segment)
        if not self._ranked[bucket]:
            self._ranked[bucket] = True
            self._ranks.add(self._rank(bucket))

    def _learn(self, each: int, now: float) -> None:
        """Learn what the buckets of a class are worth now, and put them in their places."""
        first, stop = each * BINS, (each + 1) * BINS
        ranked = [bucket for bucket in range(first, stop) if self._ranked[bucket]]
        for bucket in ranked:
            self._ranks.remove(self._rank(bucket))
        self._survival.learn(each, now)
        for bucket in ranked:
            self._ranked[bucket] = self._rings[bucket].younger is not self._rings[bucket]
            if self._ranked[bucket]:
                self._ranks.add(self._rank(bucket))

    def _rank(self, bucket: int) -> Rank:
        return self._survival.worth[bucket], -(bucket % BINS), bucket
