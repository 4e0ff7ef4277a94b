"""Least recently used over all engines, but an engine with more than half of the pool pays for what comes.

    all have about as much       the oldest chunk of all goes first: plain LRU
    engine 3 floods the pool     from half of it on, what it used longest ago goes; the others keep what they have

A chunk is counted for the engine that used it last, and stands in a ring of touches of that engine (touches.py). Chunks
of engines that have left go by their age, and one that is alone has no limit.

Slots are not counted, but chunks and checkpoints, as many as the pool holds of those that it has.

A smaller limit costs hits where engines are equal: of prompts that are large beside the pool, an engine now and then
has several times its equal part (docs/keeper.md).
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

from cpu_prefix_cache.eviction.lru import Lru
from cpu_prefix_cache.eviction.rings import members
from cpu_prefix_cache.eviction.touches import Touch, TouchPolicy
from cpu_prefix_cache.index.forest import Forest

MOST_ENGINES = 64


class FairLru(Lru):
    """See EvictionPolicy. `present` are the numbers of the engines that share so many slots, of which so many are
    `cached`.
    """

    def __init__(self, forest: Forest, num_slots: int, cached: Callable[[], int]) -> None:
        TouchPolicy.__init__(self, forest, rings=MOST_ENGINES + 1)
        self._num_slots, self._cached = num_slots, cached
        self._capacity = num_slots  # chunks and checkpoints, when something was evicted last
        self._ring = self._rings[0]
        self.present: set[int] = set()

    def serve(self, engine: int) -> None:
        """From now on this engine uses, and adds."""
        self._ring = self._rings[engine]

    def evict(self, count: int, incoming: Sequence[bytes] = ()) -> list[int]:
        if cached := self._cached():
            self._capacity = self._num_slots * len(self._forest) // cached
        rings = [ring for ring in self._rings if ring.size]
        for ring in rings:
            ring.passed = ring
        victims: list[int] = []
        while len(victims) < count:
            oldest = [touch for ring in rings if (touch := self._next_childless(ring)) is not None]
            above = [touch for touch in oldest if self._excess(touch) > 0]
            touch = min(above or oldest, key=lambda each: each.stamp, default=None)
            if touch is None:
                break
            most = count - len(victims)
            run = self._take_run(touch, min(most, self._excess(touch)) if above else most)
            self._evict_run(run)
            victims += run
        return victims

    def _oldest_first(self) -> Iterator[Touch]:
        """As if no engine had more than half: what one has beyond that leaves sooner."""
        return heapq.merge(*map(members, self._rings), key=attrgetter("stamp"))

    def _excess(self, touch: Touch) -> int:
        """How many chunks its engine has beyond its limit."""
        return touch.ring.size - (self._capacity // 2 if len(self.present) > 1 else self._capacity)
