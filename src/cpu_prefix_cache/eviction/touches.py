"""Touches, which LRU and ARC share: one for each request, in a ring from old to young.

The chunks that a request used last carry its *touch*, as their mark in the forest. In the ring the touch names the
deepest of them:

    ring     T1 ---- T2        A --- B --- C     request 1 added A, B and C, then request 2 used A and added D:
             |       |         `---- D           B and C carry T1, A and D carry T2
             C       D

A request costs one move in the ring, however long it is. Eviction takes the chunk of the oldest touch and, as one run,
the chunks above it that become childless and carry no younger touch. A request that adds at several places has a touch
for each, all with one stamp. With one ring this evicts as an LRU of single blocks does that releases prompts from their
ends.

A touch whose chunk turns out to have children leaves the ring until these are gone. (The second ring of ARC has a rule
of its own, see two_lists.py.)
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from cpu_prefix_cache.eviction.base import EvictionPolicy
from cpu_prefix_cache.eviction.rings import Linked, insert_after, members, unlink
from cpu_prefix_cache.index.forest import NONE, SEVERAL, Forest


class Touch(Linked):
    """One request's use of the cache. `block` is the deepest chunk that carries it, NONE while it is in no ring."""

    __slots__ = ("block", "ring", "stamp")

    older: "Touch"
    younger: "Touch"

    def __init__(self, stamp: int, ring: "TouchRing") -> None:
        self.stamp = stamp
        self.ring = ring
        self.block = NONE
        self.older = self.younger = ring  # so that they keep no other touch alive


class TouchRing(Touch):
    """The end of a ring of touches, by age; its stamp is less than theirs.

    `coming` counts the chunks that are being written and will carry a touch of this ring, `size` those and all that do.
    While victims are taken, none can be had up to the touch `passed`.
    """

    __slots__ = ("coming", "passed", "size")

    def __init__(self) -> None:
        super().__init__(0, self)
        self.size = 0
        self.coming = 0
        self.passed: Touch = self

    def expect(self, count: int) -> None:
        """`count` more chunks are being written that will carry a touch of this ring; fewer, if negative."""
        self.coming += count
        self.size += count

    def enter_young(self, touch: Touch, block: int) -> None:
        """Put `touch`, which names `block` now, in its place, looking from the young end.

        A request that stores at its end comes late: others were admitted since its touch was made.
        """
        place = self.older
        while place.stamp > touch.stamp:
            place = place.older
        touch.block = block
        insert_after(place, touch)

    def enter_old(self, touch: Touch, block: int) -> None:
        """The same, before touches of its age, looking from both ends: the touches of parents belong near the old one,
        and those above evicted duplicates near the young one.
        """
        if self.passed.stamp >= touch.stamp:
            self.passed = self  # it enters behind the place up to which the ring was walked
        older: Touch = self
        younger = self.older
        while younger.stamp >= touch.stamp and older.younger.stamp < touch.stamp and older.younger is not self:
            older, younger = older.younger, younger.older
        touch.block = block
        insert_after(younger if younger.stamp < touch.stamp else older, touch)


class TouchPolicy(EvictionPolicy):
    """Keeps one touch for every chunk. The base of LRU, which has one ring, and ARC, which has two."""

    def __init__(self, forest: Forest, rings: int) -> None:
        self._forest = forest
        self._mark: list[Any] = forest.mark
        self._rings = tuple(TouchRing() for _ in range(rings))
        self._stamp = 0
        self._last: Touch = self._rings[0]  # of the chunks that were taken last

    def used_beside(self, nodes: Sequence[int]) -> None:
        for node in nodes:
            self.admitted(node, (), None)

    def removed(self, block: int) -> None:
        touch = self._mark[block]
        self._mark[block] = None
        touch.ring.size -= 1
        if touch.block == block:
            leave(touch)
        self._inherit(self._forest.parent[block], touch)

    def _leave_to(self, other: "TouchPolicy") -> None:
        """Another policy goes on. Its touches are younger, and those of this one keep one another alive no more."""
        other._stamp = self._stamp
        for ring in self._rings:
            for touch in list(members(ring)):
                leave(touch)

    def bared(self, block: int) -> None:
        touch = self._mark[block]
        if touch.block == block:
            return
        if touch.block != NONE:
            touch = self._mark[block] = Touch(touch.stamp, touch.ring)  # its own names another chunk
        touch.ring.enter_old(touch, block)

    def check_valid(self) -> None:
        forest, nodes, standing = self._forest, self._forest.nodes(), set()
        marks = {block: mark for block, mark in enumerate(self._mark) if mark is not None}
        sizes, coming = Counter(mark.ring for mark in marks.values()), Counter(marks.values())
        for ring in self._rings:
            stamp = 0
            for touch in members(ring):
                assert touch.stamp >= stamp and touch.ring is ring, "touches are out of order"
                assert marks.get(touch.block) is touch, f"the touch of block {touch.block} is not its own"
                standing.add(touch.block)
                stamp = touch.stamp
            assert ring.coming == coming[ring], "chunks on their way are miscounted"
            assert ring.size == sizes[ring], "the chunks of a ring are miscounted"
        carried = {block for block, mark in marks.items() if mark not in self._rings}
        assert carried == nodes.keys(), "a key has no touch, or a touch no key"
        for block in nodes:
            is_leaf = forest.child[block] == NONE
            assert not is_leaf or block in standing, f"childless block {block} cannot be found by eviction"

    def _take_childless(self, ring: TouchRing, count: int) -> list[int]:
        """The next run of victims in a ring of childless chunks, 1 to `count`; none if all are pinned."""
        touch = self._next_childless(ring)
        return [] if touch is None else self._take_run(touch, count)

    def _next_childless(self, ring: TouchRing) -> Touch | None:
        """The oldest touch of a ring that names a chunk without children and pins."""
        child, pinned = self._forest.child, self._forest.pins.linked
        while (touch := ring.passed.younger) is not ring:
            if child[touch.block] != NONE:
                leave(touch)
            elif touch.block in pinned:
                ring.passed = touch
            else:
                return touch
        return None

    def _take_run(self, touch: Touch, count: int) -> list[int]:
        """The chunk that `touch` names and those above it, up to `count`: unpinned, in its ring, not used since."""
        mark, parents, child = self._mark, self._forest.parent, self._forest.child
        ring, block, pinned = touch.ring, touch.block, self._forest.pins.linked
        run: list[int] = []
        while len(run) < count and child[block] != SEVERAL and block not in pinned:
            own = mark[block]
            if own is not touch:
                if own is None or own.ring is not ring or own.stamp > touch.stamp:
                    break  # the root, a chunk of the other ring, or one that was used since
                if own.block == block:
                    leave(own)
            mark[block] = None
            run.append(block)
            block = parents[block]
        ring.size -= len(run)
        self._last = touch
        return run

    def _evict_run(self, run: Sequence[int]) -> None:
        """Let the run that was taken last leave the forest; what it hung below inherits its touch."""
        parent, touch = self._forest.parent[run[-1]], self._last
        self._forest.remove_run(run)
        if self._mark[parent] is touch and self._forest.child[parent] == NONE and touch.ring is self._rings[0]:
            touch.block = parent
        else:
            leave(touch)
            self._inherit(parent, touch)

    def _branch_off(self, touch: Touch) -> None:
        """A request adds at a second place, such as a checkpoint: its last chunks go on under a touch beside its own.

        As old, and one place younger, so that the place it adds at now goes first: it mostly is the deeper one.
        """
        beside = self._mark[touch.block] = Touch(touch.stamp, touch.ring)
        beside.block = touch.block
        insert_after(touch, beside)

    def _inherit(self, parent: int, touch: Touch) -> None:
        """`parent` has lost a child that carried `touch`: it keeps the younger of that and its own."""
        if parent == self._forest.root:
            return
        if touch.stamp >= self._mark[parent].stamp:
            self._carry(parent, touch)
        if self._forest.child[parent] == NONE:
            self.bared(parent)

    def _carry(self, block: int, touch: Touch) -> None:
        """Let `block` carry `touch` from now on."""
        before = self._mark[block]
        if before is touch:
            return
        before.ring.size -= 1
        touch.ring.size += 1
        self._mark[block] = touch
        if before.block == block:
            leave(before)


def renew(touch: Touch, ring: TouchRing) -> None:
    """Before a touch is used: if it was made before a reset, it begins anew in the ring that followed."""
    if touch.ring is not ring:
        leave(touch)
        touch.older = touch.younger = touch.ring = ring


def leave(touch: Touch) -> None:
    """Take a touch out of its ring, if it is in it."""
    if touch.block != NONE:
        unlink(touch)
        touch.older = touch.younger = touch.ring
        touch.block = NONE
