"""Least recently used, over requests rather than blocks: one ring of touches (see touches.py)."""

import heapq
from collections.abc import Iterator, Sequence

from cpu_prefix_cache.eviction.rings import members
from cpu_prefix_cache.eviction.touches import Touch, TouchPolicy, renew
from cpu_prefix_cache.index.departures import Departures
from cpu_prefix_cache.index.forest import NONE, Forest


class Lru(TouchPolicy):
    """Evicts what the longest-gone request used, its tail first. See EvictionPolicy."""

    def __init__(self, forest: Forest) -> None:
        super().__init__(forest, rings=1)
        (self._ring,) = self._rings

    def anew(self, forest: Forest) -> "Lru":
        other = Lru(forest)
        self._leave_to(other)
        return other

    def admitted(self, deepest: int, keys: Sequence[bytes], now: float | None, next_use: float | None = None) -> Touch:
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
            if begins and self._forest.child[block] == NONE:
                self._ring.enter_young(touch, block)
            last = block

    def inserted(self, blocks: Sequence[int], touch: Touch, *, ends_in_checkpoint: bool = False) -> None:
        renew(touch, self._ring)
        if touch.block != NONE and self._forest.child[touch.block] == NONE:
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
                break
            self._evict_run(run)
            victims += run
        return victims

    def soonest_evicted(self) -> Iterator[int]:
        marks, departures, touches = self._mark, Departures(self._forest), self._oldest_first()
        bared: list[tuple[int, int]] = []  # (stamp, block) of parents that this walk made childless; a heap
        touch = next(touches, None)
        while bared or touch is not None:
            if touch is None or (bared and bared[0][0] < touch.stamp):
                stamp, block = heapq.heappop(bared)
            else:
                stamp, block = touch.stamp, touch.block
                touch = next(touches, None)
            while block != NONE and departures.may_leave(block):
                yield block
                block = departures.leave(block)
                if block != NONE and (own := marks[block]).stamp > stamp:
                    if own.block == NONE:
                        heapq.heappush(bared, (own.stamp, block))  # as `bared` puts its touch back into the ring
                    break

    def _oldest_first(self) -> Iterator[Touch]:
        """All touches."""
        return members(self._ring)
