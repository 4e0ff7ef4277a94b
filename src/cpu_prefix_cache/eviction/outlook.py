"""In which order ARC would evict, if nothing came meanwhile. Changes nothing.

Each list is a heap of its ends (see two_lists.py), filled from its ring as the walk gets there, and with what becomes
an end as its children are passed. Lazy: n chunks cost n steps, whatever the pool holds.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence

from cpu_prefix_cache.eviction.touches import Touch, TouchRing
from cpu_prefix_cache.index.departures import Departures
from cpu_prefix_cache.index.forest import NONE, Forest

ONCE, AGAIN = 0, 1


class Outlook:
    """One walk. `forks`: how many children in T2 a chunk has, where it is more than one; `target`: p."""

    def __init__(self, forest: Forest, rings: Sequence[TouchRing], forks: Mapping[int, int], target: float) -> None:
        self._forest = forest
        self._forks = forks
        self._target = target
        self._size = rings[ONCE].size
        self._rings = rings
        self._ahead = [ring.younger for ring in rings]
        self._heaps: tuple[list[tuple[int, int]], ...] = ([], [])  # (stamp, block)
        self._departures = Departures(forest)
        self._gone_again: dict[int, int] = {}  # how many children in T2 of a chunk have left
        self._raised: dict[int, int] = {}  # the stamps that chunks in T2 inherit from children in T1

    def order(self) -> Iterator[int]:
        while True:
            block = NONE if self._size > self._target else self._leave_again(or_any=False)
            if block == NONE:
                block = self._leave_once()
            if block == NONE:
                block = self._leave_again(or_any=True)
            if block == NONE:
                return
            yield block

    def _leave_once(self) -> int:
        heap = self._heaps[ONCE]
        while self._has_front(ONCE):
            stamp, block = heapq.heappop(heap)
            if self._departures.may_leave(block):
                self._size -= 1
                self._pass(block, stamp, ONCE)
                return block
        return NONE

    def _leave_again(self, or_any: bool) -> int:
        heap = self._heaps[AGAIN]
        while self._has_front(AGAIN):
            stamp, block = heap[0]
            if self._raised.get(block, 0) > stamp:
                heapq.heapreplace(heap, (self._raised[block], block))
                continue
            if block not in self._forest.pins:
                if self._departures.may_leave(block):
                    heapq.heappop(heap)
                    self._pass(block, stamp, AGAIN)
                    return block
                if not or_any:
                    return NONE
            heapq.heappop(heap)
        return NONE

    def _has_front(self, which: int) -> bool:
        """Whether there are ends left in a list; if so the oldest is the first of its heap."""
        heap, touch = self._heaps[which], self._ahead[which]
        if touch is not self._rings[which] and (not heap or touch.stamp < heap[0][0]):
            heapq.heappush(heap, (touch.stamp, touch.block))
            self._ahead[which] = touch.younger
        return bool(heap)

    def _pass(self, block: int, stamp: int, which: int) -> None:
        """`block` would leave now: its parent loses a child, inherits the stamp, and may become an end."""
        parent, bared = self._forest.parent[block], self._departures.leave(block)
        if parent == self._forest.root:
            return
        own: Touch = self._forest.mark[parent]
        if which == AGAIN:
            gone = self._gone_again[parent] = self._gone_again.get(parent, 0) + 1
            if gone == self._forks.get(parent, 1):
                heapq.heappush(self._heaps[AGAIN], (max(stamp, own.stamp), parent))
        elif own.ring is self._rings[AGAIN]:
            self._raised[parent] = max(stamp, self._raised.get(parent, 0))
        elif bared != NONE and (own.block != parent or own.stamp <= stamp):  # or it would come twice
            heapq.heappush(self._heaps[ONCE], (max(stamp, own.stamp), parent))
