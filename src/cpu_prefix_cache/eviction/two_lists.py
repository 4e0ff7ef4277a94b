"""T1 and T2 of ARC (see arc.py): two rings of touches over one forest.

A chunk is in the list whose touch it carries. T2 is closed under prefixes: who used a chunk again used what is above
it. So all below a chunk of T1 is in T1, but a chunk of T2 may have children in either list.

An *end* of a list is a chunk with no child in it. In T1 its touch is found as in any ring of touches.py. In T2 a touch
stands in the ring exactly while it names an end, which takes counting: a chunk of T2 that is no end has one child in
T2, or as many as `_forks` returns.

Victims are taken as a *run* of one list, each the parent of the one before it.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from cpu_prefix_cache.eviction.outlook import ONCE
from cpu_prefix_cache.eviction.touches import Touch, TouchPolicy, leave
from cpu_prefix_cache.index.forest import NONE, Forest


class ArcTouch(NamedTuple):
    """One request, with one stamp: `found` is in T2 for what it used again, `added` in T1 for what it used first."""

    found: Touch
    added: Touch


class TwoLists(TouchPolicy):
    """Moves chunks from T1 to T2 and takes victims from either. `Arc` decides which."""

    def __init__(self, forest: Forest) -> None:
        super().__init__(forest, rings=2)
        self._once, self._again = self._rings
        self._forks: dict[int, int] = {}  # how many children in T2 a chunk has, where it is more than one

    def admitted(
        self, deepest: int, keys: Sequence[bytes], now: float | None, next_use: float | None = None
    ) -> ArcTouch:
        self._stamp += 1
        touch = ArcTouch(Touch(self._stamp, self._again), Touch(self._stamp, self._once))
        if deepest != NONE:
            self._use_again(deepest, touch.found)
        return touch

    def check_valid(self) -> None:
        super().check_valid()
        forest = self._forest
        again = [block for block in forest.nodes() if self._is_again(block)]
        children = Counter(forest.parent[block] for block in again)
        del children[forest.root]
        assert set(children) <= set(again), "a chunk is in T2, its parent in T1"
        assert self._forks == {block: count for block, count in children.items() if count > 1}, "forks are miscounted"
        for block in again:
            assert self._is_end(block) == (block not in children), f"block {block} stands wrongly in T2"

    def _take(self, count: int, which: int, others: int) -> list[int]:
        """The next victims: a run of up to `count` from list `which`, or of at most `others` from the other one. None,
        if all are pinned.
        """
        once = self._once
        victims = self._take_childless(once, count) if which == ONCE else self._take_again(count, or_any=False)
        return victims or self._take_childless(once, others) or self._take_again(others, or_any=True)

    def _take_again(self, count: int, or_any: bool) -> list[int]:
        """A run from the oldest end of T2, none while that has children; `or_any`: from the oldest that has none."""
        forest, ring = self._forest, self._again
        while (touch := ring.passed.younger) is not ring:
            if touch.block not in forest.pins:
                if forest.child[touch.block] == NONE:
                    return self._take_run(touch, count)
                if not or_any:
                    return []
            ring.passed = touch
        return []

    def _inherit(self, parent: int, touch: Touch) -> None:
        if not self._is_again(parent):
            super()._inherit(parent, touch)
        elif touch.ring is self._again:
            left = self._forks.pop(parent, 1) - 1  # children in T2
            if left > 1:
                self._forks[parent] = left
            if touch.stamp >= self._mark[parent].stamp:
                self._carry(parent, touch)
            if not left:
                self.bared(parent)
        elif touch.stamp > self._mark[parent].stamp:
            was_end = self._is_end(parent)
            raised = Touch(touch.stamp, self._again)  # as young, but in its own list
            self._carry(parent, raised)
            if was_end:
                self._again.passed = self._again
                self._again.enter_old(raised, parent)

    def _use_again(self, block: int, touch: Touch) -> None:
        """A request used `block` again: let it carry `touch`, and move it and all that is above it to T2."""
        mark, parents, root, once, again = self._mark, self._forest.parent, self._forest.root, self._once, self._again
        above, moved = block, 0
        while above != root and (before := mark[above]).ring is once:
            stamp = before.stamp  # younger, where a later request used it before this one's chunks came
            mark[above] = touch if stamp <= touch.stamp else Touch(stamp, again)
            if before.block == above:
                leave(before)
            moved += 1
            above = parents[above]
        once.size -= moved
        again.size += moved
        is_end = above != block or self._is_end(block)
        if above == block:
            self._carry(block, touch)
        elif above != root and self._is_end(above):
            leave(mark[above])
        elif above != root:
            self._forks[above] = self._forks.get(above, 1) + 1
        if touch.block not in (NONE, block):
            self._branch_off(touch)  # what it names is an end still: the request found at a second place
        leave(touch)
        if is_end:
            self._again.enter_young(touch, block)

    def _is_again(self, block: int) -> bool:
        touch = self._mark[block]
        return touch is not None and touch.ring is self._again

    def _is_end(self, block: int) -> bool:
        """Whether a chunk of T2 has no child in T2: then, and only then, its touch stands and names it."""
        touch: Touch = self._mark[block]
        return touch.block == block
