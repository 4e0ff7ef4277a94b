"""Least recently used, over requests rather than blocks: one ring of touches (see touches.py)."""

import heapq
from collections.abc import Iterator, Sequence

from cpu_prefix_cache.eviction.touches import Touch, TouchPolicy, renew
from cpu_prefix_cache.index.forest import NONE, Forest
from cpu_prefix_cache.index.leftovers import Leftovers
from cpu_prefix_cache.messages.errors import InternalError


class Lru(TouchPolicy):
    """Evicts what the longest-gone request used, its tail first. See EvictionPolicy."""

    def __init__(self, forest: Forest) -> None:
        super().__init__(forest, rings=1)
        (self._ring,) = self._rings

    def admitted(self, deepest: int, keys: Sequence[bytes], now: float | None) -> Touch:
        self._stamp += 1
        touch = Touch(self._stamp, self._ring)
        if deepest != NONE:
            self._carry(deepest, touch)
            self._ring.enter_young(touch, deepest)
        return touch

    def renewed(self, blocks: Sequence[int]) -> None:
        self._stamp += 1
        last, touch = NONE, Touch(self._stamp, self._ring)
        for block in blocks:
            begins = last == NONE or self._forest.parent[last] != block  # not the same prompt, from its end up
            if begins:
                touch = Touch(self._stamp, self._ring)
            self._carry(block, touch)
            if begins and not self._forest.children[block]:
                self._ring.enter_young(touch, block)
            last = block

    def cleared(self, writing: Sequence[int], left: Leftovers) -> None:
        super().cleared(writing, left)
        (self._ring,) = self._rings

    def inserted(self, blocks: Sequence[int], touch: Touch) -> None:
        renew(touch, self._ring)
        if touch.block != NONE and not self._forest.children[touch.block]:
            self._branch_off(touch)
        for block in blocks:
            self._mark[block] = touch
        self._ring.size += len(blocks)
        if touch.block == NONE:
            self._ring.enter_young(touch, blocks[-1])
        touch.block = blocks[-1]

    def evict(self, count: int, incoming: Sequence[bytes] = ()) -> list[int]:
        ring = self._ring
        ring.passed = ring
        victims: list[int] = []
        while len(victims) < count:
            run = self._take_childless(ring, count - len(victims))
            if not run:
                raise InternalError(f"{count} chunks were to be evicted, but only {len(victims)} can go")
            self._evict_run(run)
            victims += run
        return victims

    def soonest_evicted(self) -> Iterator[int]:
        forest, marks, ring = self._forest, self._mark, self._ring
        gone: dict[int, int] = {}  # how many children of a chunk come before it in this order
        bared: list[tuple[int, int]] = []  # (stamp, block) of parents that this walk made childless; a heap
        touch = ring.younger
        while bared or touch is not ring:
            if bared and (touch is ring or bared[0][0] < touch.stamp):
                stamp, block = heapq.heappop(bared)
            else:
                stamp, block = touch.stamp, touch.block
                touch = touch.younger
            while forest.children[block] == gone.get(block, 0) and not forest.pins[block]:
                yield block
                block = forest.parent[block]
                gone[block] = gone.get(block, 0) + 1
                if block == forest.root:
                    break
                own = marks[block]
                if own.stamp > stamp:
                    if own.block == NONE and forest.children[block] == gone[block]:
                        heapq.heappush(bared, (own.stamp, block))  # as `bared` puts its touch back into the ring
                    break
