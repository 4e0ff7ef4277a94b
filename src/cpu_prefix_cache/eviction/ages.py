"""Uses by their ages. What one request used has one age, so it grows old together.

The uses of each bin (survival.py) stand in a ring by time: to let time pass is to look at the oldest of each.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import chain, compress
from typing import TYPE_CHECKING

from cpu_prefix_cache.eviction.rings import Linked, insert_after, members, move_oldest, new_ring, unlink
from cpu_prefix_cache.eviction.survival import BINS, EDGES, Survival

if TYPE_CHECKING:
    from cpu_prefix_cache.eviction.segments import Segment

# In one call: so many uses go into the next bin, .2 ms, or fewer that have many leaves, each of which moves as well, so
# that it takes 1 ms at most. After a long pause it takes several calls to catch up.
MOST_MOVES = 200
LEAVES_OF_A_MOVE = 10


class Use(Linked):
    """The last use, at `at` seconds, by one request, or by `shared_by` that came within a second. Later ones have
    larger numbers.

    `members` counts its segments by class, `leaves` are those of them that can be evicted from, and `nodes` counts
    those of all of them.
    """

    __slots__ = ("at", "bin", "leaves", "members", "nodes", "number", "shared_by")

    def __init__(self, at: float, number: int = 0) -> None:
        self.at = at
        self.number = number
        self.bin = 0
        self.nodes = 0
        self.shared_by = 1
        self.members: dict[int, int] = {}
        self.leaves: dict[Segment, None] = {}


NEVER = Use(0.0)  # not used by any request yet


class Ages:
    """All uses that have members, and what `survival` knows of the time they spend in their buckets."""

    def __init__(self, survival: Survival) -> None:
        self._survival = survival
        self._rings = [new_ring(Use(0.0)) for _ in range(BINS)]  # of the uses in each bin
        self._steps = list(zip(range(BINS), EDGES[1:], self._rings, self._rings[1:], strict=False))

    def begin(self, use: Use) -> None:
        """Add a use that is the youngest of all."""
        insert_after(self._rings[0].older, use)

    def join(self, use: Use, each: int) -> None:
        """A segment of class `each` has this use as its last one."""
        use.members[each] = use.members.get(each, 0) + 1
        bucket = each * BINS + use.bin
        self._survival.inside[bucket] += 1
        self._survival.seconds[bucket] -= use.at + EDGES[use.bin]

    def part(self, use: Use, each: int, now: float) -> None:
        """A segment of class `each` has this use no more: it is used again, or forgotten."""
        bucket = each * BINS + use.bin
        self._survival.inside[bucket] -= 1
        self._survival.seconds[bucket] += now
        use.members[each] -= 1
        if not use.members[each]:
            del use.members[each]
            if not use.members:
                unlink(use)

    def grow_old(self, now: float) -> list[Use]:
        """Move uses that are old enough to the next bin. Returns those that have leaves."""
        moved: list[Use] = []
        inside, seconds, since = self._survival.inside, self._survival.seconds, self._survival.since
        moves = 0
        for bin, edge, ring, older in self._steps:
            use = ring.younger
            while use is not ring and now - use.at >= edge and moves < MOST_MOVES:
                moves += 1 + len(use.leaves) // LEAVES_OF_A_MOVE
                then = use.at + edge
                for each, count in use.members.items():
                    bucket = each * BINS + bin
                    left = then if then > since[each] else since[each]  # its lessons are not taken back
                    inside[bucket] -= count
                    seconds[bucket] += count * left
                    inside[bucket + 1] += count
                    seconds[bucket + 1] -= count * left
                if use.leaves:
                    moved.append(use)
                use.bin = bin + 1
                use = use.younger
            move_oldest(ring, use, older)
        return moved

    def younger(self, use: Use) -> Use | None:
        """The next younger use, also of one that has just ended. None: it is the youngest."""
        following, bin = use.younger, use.bin
        while following is self._rings[bin]:
            if not bin:
                return None
            bin -= 1
            following = self._rings[bin].younger
        return following

    def uses(self) -> Iterator[Use]:
        """From the oldest to the youngest."""
        return chain.from_iterable(map(members, reversed(self._rings)))

    def check_valid(self) -> None:
        """Assert that uses stand by age and are counted in their buckets. For tests."""
        before = NEVER
        inside = Counter[int]()
        for use in self.uses():
            assert use.at >= before.at and use.number > before.number, "uses are out of order"
            assert use.members, "a use is nobody's"
            before = use
            inside.update({each * BINS + use.bin: count for each, count in use.members.items()})
        for bin, ring in enumerate(self._rings):
            assert all(use.bin == bin for use in members(ring)), "a use stands in another bin than its own"
        counted = self._survival.inside
        used = compress(range(len(counted)), counted)  # a few of thousands
        assert {bucket: counted[bucket] for bucket in used} == inside, "what is in a bucket is miscounted"
