"""What the policies here share: uses of the cache, one mark per request, in rings from old to young.

One *touch* per request stands in a ring, oldest first, and names the deepest chunk that carries it:

    ring     T1 ---- T2 ---- T3            A --- B --- C     carry T1, T3, T3
             |               |                   `---- D     carries T1 ... until T3 came by A
             D               C

A request costs one move in the ring, however long it is. To evict is to take the oldest touch and walk up from its
chunk: each chunk that becomes childless and was not used since leaves at once, as part of the same run. One that was
used since has a touch of its own, further up the ring. A request that adds at several places has a touch for each, all
with one stamp. On one ring this gives the hit ratios of an LRU of single blocks whose tails are released first.

A touch stands in its ring while the chunk it names carries it and that chunk is not known to have children; one met
above children is taken out, as it cannot go before them, and put back when they are gone. (The second ring of ARC has
a rule of its own, see two_lists.py.)

The touch a chunk carries is its mark in the forest, which is all that a policy keeps for each chunk.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from cpu_prefix_cache.index.forest import NONE, Forest
from cpu_prefix_cache.messages.errors import InternalError


class Touch:
    """One request's use of the cache. `block` is the deepest chunk that carries it, while it stands in its ring."""

    __slots__ = ("block", "older", "ring", "stamp", "younger")

    older: "Touch | None"
    younger: "Touch | None"

    def __init__(self, stamp: int, ring: "Ring") -> None:
        self.stamp = stamp
        self.ring = ring
        self.block = NONE
        self.older = None
        self.younger = None


class Ring:
    """Touches by age, between the two sides of `end`.

    `coming` counts the chunks that are being written and will carry a touch of this ring, `size` those and all that do.
    """

    def __init__(self) -> None:
        self.end = Touch(0, self)
        self.end.older = self.end.younger = self.end
        self.size = 0
        self.coming = 0

    def __iter__(self) -> Iterator[Touch]:
        touch = linked(self.end.younger)
        while touch is not self.end:
            yield touch
            touch = linked(touch.younger)

    def expect(self, count: int) -> None:
        """So many chunks more are on their way here, or fewer, if negative."""
        self.coming += count
        self.size += count

    def enter_young(self, touch: Touch) -> None:
        """Put `touch` in its place, looking from the young end: past the requests admitted since it was made.

        Those are the ones that came while a request ran that stores first at its end.
        """
        place = linked(self.end.older)
        while place is not self.end and place.stamp > touch.stamp:
            place = linked(place.older)
        _enter_after(place, touch)

    def enter_old(self, touch: Touch) -> None:
        """Put `touch` in its place, looking from the old end, where the touches of parents belong."""
        place = linked(self.end.younger)
        while place is not self.end and place.stamp < touch.stamp:
            place = linked(place.younger)
        _enter_after(linked(place.older), touch)


class TouchPolicy:
    """Keeps one touch for every chunk. The base of LRU, which has one ring, and ARC, which has two."""

    def __init__(self, forest: Forest, rings: int) -> None:
        self._forest = forest
        self._mark: list[Any] = forest.mark
        self._rings = tuple(Ring() for _ in range(rings))
        self._stamp = 0

    def accepts(self, parent: int, incoming: Sequence[bytes], count: int) -> int:
        """All of them: what is used now is worth more than anything older."""
        return len(incoming)

    def removed(self, block: int) -> None:
        touch = self._carried(block)
        self._mark[block] = None
        touch.ring.size -= 1
        if touch.block == block:
            leave(touch)
        self._inherit(self._forest.parent[block], touch)

    def bared(self, block: int) -> None:
        touch = self._carried(block)
        if touch.older is not None and touch.block != block:
            touch = Touch(touch.stamp, touch.ring)  # its own stands elsewhere
            self._mark[block] = touch
        if touch.older is None:
            touch.block = block  # the deepest that is left of those that carry it
            touch.ring.enter_old(touch)

    def check_valid(self) -> None:
        forest = self._forest
        standing = set()
        for ring in self._rings:
            stamp = 0
            for touch in ring:
                assert touch.stamp >= stamp and touch.ring is ring, "touches are out of order"
                assert self._mark[touch.block] is touch, f"the touch of block {touch.block} is not its own"
                standing.add(touch.block)
                stamp = touch.stamp
            carrying = sum(isinstance(mark, Touch) and mark.ring is ring for mark in self._mark)
            assert ring.coming == sum(mark is ring for mark in self._mark), "chunks on their way are miscounted"
            assert ring.size == carrying + ring.coming, "the chunks of a ring are miscounted"
        for block, key in enumerate(forest.key):
            assert (key is not None) == isinstance(self._mark[block], Touch), f"block {block}: a key without a touch"
            if key is not None and not forest.children[block]:
                assert block in standing, f"childless block {block} cannot be found by eviction"

    def _carried(self, block: int) -> Touch:
        touch = self._mark[block]
        if not isinstance(touch, Touch):
            raise InternalError(f"block {block} holds no chunk")
        return touch

    def _branch_off(self, touch: Touch) -> None:
        """A request adds at a second place, a checkpoint say: what it added last goes on under a touch beside its own.

        As old, and one place younger, so that the place it adds at now goes first: it mostly is the deeper one.
        """
        beside = Touch(touch.stamp, touch.ring)
        beside.block = touch.block
        self._mark[touch.block] = beside
        _enter_after(touch, beside)

    def _inherit(self, parent: int, touch: Touch) -> None:
        """`parent` has lost a child that carried `touch`: it keeps the younger of that and its own."""
        if parent == self._forest.root:
            return
        if touch.stamp >= self._carried(parent).stamp:
            self._give(parent, touch)
        if not self._forest.children[parent]:
            self.bared(parent)

    def _give(self, block: int, touch: Touch) -> None:
        """Let `block` carry `touch`, and `touch` name it."""
        self._carry(block, touch)
        touch.block = block

    def _carry(self, block: int, touch: Touch) -> None:
        before = self._mark[block]
        if before is touch:
            return
        before.ring.size -= 1
        touch.ring.size += 1
        self._mark[block] = touch
        if before.block == block:
            leave(before)


def leave(touch: Touch) -> None:
    """Take a touch out of its ring, if it stands in it."""
    if touch.older is None or touch.younger is None:
        return
    touch.older.younger, touch.younger.older = touch.younger, touch.older
    touch.older = touch.younger = None


def linked(touch: Touch | None) -> Touch:
    """`touch`, which stands in a ring."""
    if touch is None:
        raise InternalError("a touch left the ring while it was being walked")
    return touch


def _enter_after(place: Touch, touch: Touch) -> None:
    younger = linked(place.younger)
    touch.older, touch.younger = place, younger
    place.younger = younger.older = touch
