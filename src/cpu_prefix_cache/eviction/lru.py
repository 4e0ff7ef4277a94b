"""Least recently used, over requests rather than blocks: one ring of touches (see touches.py)."""

import heapq
from collections.abc import Iterator, Sequence

from cpu_prefix_cache.eviction.touches import Touch, TouchPolicy, leave, linked
from cpu_prefix_cache.index.forest import NONE, Forest
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
            self._give(deepest, touch)
            self._ring.enter_young(touch)
        return touch

    def announced(self, blocks: Sequence[int]) -> None:
        """Nothing: what is being written has no place in the ring."""

    def inserted(self, blocks: Sequence[int], touch: Touch) -> None:
        if touch.older is not None and not self._forest.children[touch.block]:
            self._branch_off(touch)
        for block in blocks:
            self._mark[block] = touch
        self._ring.size += len(blocks)
        touch.block = blocks[-1]
        if touch.older is None:
            self._ring.enter_young(touch)

    def retired(self, blocks: Sequence[int]) -> None:
        """Nothing: what was being written had no place in the ring."""

    def evict(self, count: int, incoming: Sequence[bytes] = ()) -> list[int]:
        children, pins = self._forest.children, self._forest.pins
        victims: list[int] = []
        older = end = self._ring.end
        while len(victims) < count:
            touch = linked(older.younger)
            if touch is end:
                raise InternalError(f"{count} chunks were to be evicted, but only {len(victims)} can go")
            if children[touch.block]:
                leave(touch)
            elif pins[touch.block]:
                older = touch
            else:
                victims += self._evict_run(touch, count - len(victims))
        return victims

    def soonest_evicted(self) -> Iterator[int]:
        forest, end = self._forest, self._ring.end
        gone: dict[int, int] = {}  # how many children of a chunk come before it in this order
        bared: list[tuple[int, int]] = []  # (stamp, block) of parents that this walk made childless; a heap
        touch = linked(end.younger)
        while bared or touch is not end:
            if bared and (touch is end or bared[0][0] < touch.stamp):
                stamp, block = heapq.heappop(bared)
            else:
                stamp, block = touch.stamp, touch.block
                touch = linked(touch.younger)
            while forest.children[block] == gone.get(block, 0) and not forest.pins[block]:
                yield block
                block = forest.parent[block]
                gone[block] = gone.get(block, 0) + 1
                if block == forest.root:
                    break
                own = self._carried(block)
                if own.stamp > stamp:
                    if own.older is None and forest.children[block] == gone[block]:
                        heapq.heappush(bared, (own.stamp, block))  # as `bared` puts its touch back into the ring
                    break

    def _evict_run(self, touch: Touch, count: int) -> list[int]:
        """Evict the chunk of `touch` and, up to `count`, the chunks above it that nobody else used since."""
        forest, touches = self._forest, self._mark
        parents, children, pinned = forest.parent, forest.children, forest.pinned
        block = touch.block
        parent = parents[block]
        run = [block]
        touches[block] = None
        while len(run) < count and children[parent] == 1 and parent not in pinned:
            own = touches[parent]
            if own is not touch:
                if own is None or own.stamp > touch.stamp:
                    break  # the root, or a chunk that was used since
                if own.block == parent:
                    leave(own)
            touches[parent] = None
            run.append(parent)
            parent = parents[parent]
        self._ring.size -= len(run)
        forest.remove_run(run)
        if touches[parent] is touch and not children[parent]:
            touch.block = parent
        else:
            leave(touch)
            self._inherit(parent, touch)
        return run
