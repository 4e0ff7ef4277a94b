"""Uses by their ages. What one request used has one age, so it grows old together.

All uses stand in one ring by time, so that those of one bin (survival.py) stand side by side, and the oldest of each
bin is known. To let time pass is to look at those few, whatever the pool holds.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cpu_prefix_cache.eviction.survival import BINS, EDGES, Survival

if TYPE_CHECKING:
    from cpu_prefix_cache.eviction.segments import Segment

# In one call: so many uses go into the next bin, .2 ms, or fewer that have many leaves, each of which moves as well, so
# that it takes 1 ms at most. After a long pause it takes several calls to catch up.
MOST_MOVES = 200
LEAVES_OF_A_MOVE = 10


class Use:
    """What was last used at `at` seconds, by one request, or by `shared_by` that came within a second.

    `members` counts its segments by class, and `leaves` are those of them that can be evicted from.
    """

    __slots__ = ("after", "at", "before", "bin", "leaves", "members", "shared_by")

    def __init__(self, at: float) -> None:
        self.at = at
        self.bin = 0
        self.shared_by = 1
        self.members: dict[int, int] = {}
        self.leaves: dict[Segment, None] = {}
        self.before = self.after = self


class Ages:
    """All uses that have members, and what `survival` knows of the time they spend in their buckets."""

    def __init__(self, survival: Survival) -> None:
        self._survival = survival
        self._end = Use(0.0)
        self._end.bin = -1
        self._oldest: list[Use | None] = [None] * BINS  # of those in each bin

    def __iter__(self) -> Iterator[Use]:
        """From the oldest to the youngest."""
        use = self._end.after
        while use is not self._end:
            yield use
            use = use.after

    def begin(self, use: Use) -> None:
        """It is the youngest of all."""
        end = self._end
        youngest = end.before
        use.before, use.after = youngest, end
        youngest.after = end.before = use
        if self._oldest[0] is None:
            self._oldest[0] = use

    def join(self, use: Use, each: int) -> None:
        """A segment of class `each` has this use as its last one."""
        use.members[each] = use.members.get(each, 0) + 1
        bucket = each * BINS + use.bin
        self._survival.inside[bucket] += 1
        self._survival.seconds[bucket] -= use.at + EDGES[use.bin]

    def part(self, use: Use, each: int, now: float) -> None:
        """A segment of class `each` has it no more: it is used again, or forgotten."""
        bucket = each * BINS + use.bin
        self._survival.inside[bucket] -= 1
        self._survival.seconds[bucket] += now
        members = use.members
        left = members[each] - 1
        if left:
            members[each] = left
            return
        del members[each]
        if not members:
            self._end_use(use)

    def grow_old(self, now: float) -> list[Use]:
        """Let uses into the next bin that are old enough. Those of them that have leaves."""
        moved: list[Use] = []
        inside, seconds, since = self._survival.inside, self._survival.seconds, self._survival.since
        oldest = self._oldest
        moves = 0
        for bin, edge in enumerate(EDGES[1:-1]):
            use = oldest[bin]
            while use is not None and now - use.at >= edge and moves < MOST_MOVES:
                moves += 1 + len(use.leaves) // LEAVES_OF_A_MOVE
                then = use.at + edge
                for each, count in use.members.items():
                    bucket = each * BINS + bin
                    left = then if then > since[each] else since[each]  # what was learned of it is not taken back
                    inside[bucket] -= count
                    seconds[bucket] += count * left
                    inside[bucket + 1] += count
                    seconds[bucket + 1] -= count * left
                if use.leaves:
                    moved.append(use)
                use.bin = bin + 1
                if oldest[bin + 1] is None:
                    oldest[bin + 1] = use
                use = oldest[bin] = use.after if use.after.bin == bin else None
        return moved

    def check_valid(self) -> None:
        """Assert that uses stand by age and are counted in their buckets. For tests."""
        at, bin = 0.0, BINS
        oldest: list[Use | None] = [None] * BINS
        inside = dict[int, int]()
        for use in self:
            assert use.at >= at and use.bin <= bin and use.members, "uses are out of order, or one is nobody's"
            at = use.at
            if use.bin < bin:
                bin, oldest[use.bin] = use.bin, use
            for each, count in use.members.items():
                inside[each * BINS + use.bin] = inside.get(each * BINS + use.bin, 0) + count
        assert oldest == self._oldest, "the oldest of a bin is not known"
        counted = {bucket: count for bucket, count in enumerate(self._survival.inside) if count}
        assert counted == inside, "what is in a bucket is miscounted"

    def _end_use(self, use: Use) -> None:
        if self._oldest[use.bin] is use:
            self._pass_on(use)
        use.before.after, use.after.before = use.after, use.before

    def _pass_on(self, use: Use) -> None:
        """The next one is the oldest of its bin."""
        self._oldest[use.bin] = use.after if use.after.bin == use.bin else None
