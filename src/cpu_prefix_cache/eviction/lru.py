"""Least recently used, over requests rather than blocks.

One *touch* per request stands in a ring, oldest first, and names the deepest chunk that carries it:

    ring     T1 ---- T2 ---- T3            A --- B --- C     carry T1, T3, T3
             |               |                   `---- D     carries T1 ... until T3 came by A
             D               C

A request costs one move in the ring, however long it is. To evict is to take the oldest touch and walk up from its
chunk: each chunk that becomes childless and was not used since leaves at once, as part of the same run. One that was
used since has a touch of its own, further up the ring. On one list of touches this gives the hit ratios of an LRU of
single blocks whose tails are released first.

A touch stands in the ring while the chunk it names carries it and that chunk is not known to have children; one met
above children is taken out, as it cannot go before them, and put back when they are gone.
"""

import heapq
from collections.abc import Iterator, Sequence

from cpu_prefix_cache.errors import InternalError
from cpu_prefix_cache.forest import NONE, Forest


class Touch:
    """One request's use of the cache. `block` is the deepest chunk that carries it, while it stands in the ring."""

    __slots__ = ("block", "older", "stamp", "younger")

    older: "Touch | None"
    younger: "Touch | None"

    def __init__(self, stamp: int) -> None:
        self.stamp = stamp
        self.block = NONE
        self.older = None
        self.younger = None


class Lru:
    """Evicts what the longest-gone request used, its tail first. See EvictionPolicy."""

    def __init__(self, forest: Forest) -> None:
        self._forest = forest
        self._touch: list[Touch | None] = [None] * (forest.root + 1)
        self._ring = Touch(stamp=0)
        self._ring.older = self._ring.younger = self._ring
        self._stamp = 0

    def admitted(self, deepest: int) -> Touch:
        self._stamp += 1
        touch = Touch(self._stamp)
        if deepest != NONE:
            self._replace(deepest, touch)
            self._enter_young(touch)
        return touch

    def inserted(self, blocks: Sequence[int], touch: Touch) -> None:
        missing = max(blocks) + 1 - len(self._touch)
        self._touch.extend([None] * missing)
        if self._forest.parent[blocks[0]] != touch.block != NONE and self._touch[touch.block] is touch:
            self._branch_off(touch)
        for block in blocks:
            self._touch[block] = touch
        touch.block = blocks[-1]
        if touch.older is None:
            self._enter_young(touch)

    def removed(self, block: int) -> None:
        touch = self._take(block)
        self._inherit(self._forest.parent[block], touch)

    def bared(self, block: int) -> None:
        touch = self._carried(block)
        if touch.block != block:
            touch = Touch(touch.stamp)  # the other stands elsewhere
            self._replace(block, touch)
        if touch.older is None:
            self._enter_old(touch)

    def evict(self, count: int, incoming: Sequence[bytes] = ()) -> list[int]:
        children, pins = self._forest.children, self._forest.pins
        victims: list[int] = []
        older = self._ring
        while len(victims) < count:
            touch = _linked(older.younger)
            if touch is self._ring:
                raise InternalError(f"{count} chunks were to be evicted, but only {len(victims)} can go")
            if children[touch.block]:
                _leave(touch)
            elif pins[touch.block]:
                older = touch
            else:
                victims += self._evict_run(touch, count - len(victims))
        return victims

    def soonest_evicted(self) -> Iterator[int]:
        forest = self._forest
        gone: dict[int, int] = {}  # how many children of a chunk come before it in this order
        bared: list[tuple[int, int]] = []  # (stamp, block) of parents that this walk made childless; a heap
        touch = _linked(self._ring.younger)
        while bared or touch is not self._ring:
            if bared and (touch is self._ring or bared[0][0] < touch.stamp):
                stamp, block = heapq.heappop(bared)
            else:
                stamp, block = touch.stamp, touch.block
                touch = _linked(touch.younger)
            while forest.children[block] == gone.get(block, 0) and not forest.pins[block]:
                yield block
                block = forest.parent[block]
                gone[block] = gone.get(block, 0) + 1
                if block == forest.root:
                    break
                own = self._carried(block)
                if own.stamp > stamp:
                    if own.older is None and forest.children[block] == gone[block]:
                        heapq.heappush(bared, (own.stamp, block))  # as `_inherit` puts its touch back into the ring
                    break

    def check_valid(self) -> None:
        forest = self._forest
        standing = set()
        stamp, touch = 0, _linked(self._ring.younger)
        while touch is not self._ring:
            assert touch.stamp >= stamp, "touches are out of order"
            assert self._touch[touch.block] is touch, f"the touch of block {touch.block} is not its own"
            standing.add(touch.block)
            stamp, touch = touch.stamp, _linked(touch.younger)
        for block in range(forest.root):
            assert (forest.key[block] is None) == (self._touch[block] is None), f"block {block}: a key without a touch"
            if forest.key[block] is not None and not forest.children[block]:
                assert block in standing, f"childless block {block} cannot be found by eviction"

    def _evict_run(self, touch: Touch, count: int) -> list[int]:
        """Evict the chunk of `touch` and, up to `count`, the chunks above it that nobody else used since."""
        forest, touches = self._forest, self._touch
        parents, children, pins = forest.parent, forest.children, forest.pins
        block = touch.block
        parent = parents[block]
        run = [block]
        touches[block] = None
        while len(run) < count and children[parent] == 1 and not pins[parent]:
            own = touches[parent]
            if own is not touch:
                if own is None or own.stamp > touch.stamp:
                    break  # the root, or a chunk that was used since
                if own.block == parent:
                    _leave(own)
            touches[parent] = None
            run.append(parent)
            parent = parents[parent]
        forest.remove_run(run)
        if touches[parent] is touch and not children[parent]:
            touch.block = parent
        else:
            _leave(touch)
            self._inherit(parent, touch)
        return run

    def _inherit(self, parent: int, touch: Touch) -> None:
        """`parent` has lost a child that carried `touch`: it keeps the younger of that and its own."""
        if parent == self._forest.root:
            return
        if touch.stamp >= self._carried(parent).stamp:
            self._replace(parent, touch)
        own = self._carried(parent)
        if own.older is None and not self._forest.children[parent]:
            self._enter_old(own)

    def _branch_off(self, touch: Touch) -> None:
        """A request adds at a second place, a checkpoint say: what it added last goes on under a touch beside its own.

        As old, and one place younger, so that the place it adds at now goes first: it mostly is the deeper one.
        """
        beside = Touch(touch.stamp)
        self._touch[touch.block] = beside
        beside.block = touch.block
        if touch.older is not None:
            _enter_after(touch, beside)

    def _replace(self, block: int, touch: Touch) -> None:
        before = self._touch[block]
        if before is not None and before.block == block and before is not touch:
            _leave(before)
        self._touch[block] = touch
        touch.block = block

    def _take(self, block: int) -> Touch:
        touch = self._carried(block)
        self._touch[block] = None
        if touch.block == block:
            _leave(touch)
        return touch

    def _carried(self, block: int) -> Touch:
        touch = self._touch[block]
        if touch is None:
            raise InternalError(f"block {block} holds no chunk")
        return touch

    def _enter_young(self, touch: Touch) -> None:
        """Put `touch` in its place, looking from the young end: a few concurrent requests away at most."""
        place = _linked(self._ring.older)
        while place is not self._ring and place.stamp > touch.stamp:
            place = _linked(place.older)
        _enter_after(place, touch)

    def _enter_old(self, touch: Touch) -> None:
        """Put `touch` in its place, looking from the old end, where the touches of parents belong."""
        place = _linked(self._ring.younger)
        while place is not self._ring and place.stamp < touch.stamp:
            place = _linked(place.younger)
        _enter_after(_linked(place.older), touch)


def _enter_after(place: Touch, touch: Touch) -> None:
    younger = _linked(place.younger)
    touch.older, touch.younger = place, younger
    place.younger = younger.older = touch


def _leave(touch: Touch) -> None:
    if touch.older is None or touch.younger is None:
        return
    touch.older.younger, touch.younger.older = touch.younger, touch.older
    touch.older = touch.younger = None


def _linked(touch: Touch | None) -> Touch:
    if touch is None:
        raise InternalError("a touch left the ring while it was being walked")
    return touch
