"""Hits of an LRU, as if there were one: where it would find nearly all, what was used longest ago leaves first.

An LRU holds what was used last, so it would hold the nodes (chunks and checkpoints) of the youngest uses for which it
has room together, and of the oldest of them a part:

    uses from old to young     U1 [A B]    U2 [C D E]    U3 [F]    U4 [A' B']        room for 5
    recent                                   --------------------------------
    a request for C D E        an LRU finds two thirds of it;  for A B, none of both

Of the chunks that requests used and that were known, the recent ones are an LRU's share of the hits that can be had;
while things do go by age, those that are here, whoever serves them. So age is left only when it finds too little, or
when requests have long forgotten that worth once found less.
"""

from collections import OrderedDict
from collections.abc import Iterable

from cpu_prefix_cache.eviction.ages import NEVER, Use

# Where an LRU found so much, order by worth found .1 to .2 points less of an agentic trace, and served 2 % less in the
# model of `serve_simulated`. With .95 in place of .9 a smaller host served 2 % less there.
ENOUGH = 0.9
DECAY = 0.998  # of what was found, with each request: half of it is of the last 350
FORGOTTEN = 1 / 8  # of what is not known: it counts as known, and not found


class Recency:
    """An LRU with room for so many nodes. Callers report when a use begins, and which nodes have it."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._recent = OrderedDict[Use, None]()  # uses, from the oldest on
        self._nodes = 0  # of recent uses
        self._found = self._served = 0.0
        self._known = room / 4  # at first: that much counts as not found

    @property
    def is_enough(self) -> bool:
        """Whether an LRU would have found more than was, and nearly all that could be."""
        return self._found > max(self._served, ENOUGH * self._known)

    def begin(self, use: Use) -> None:
        """A use begins, the youngest of all."""
        self._recent[use] = None

    def add(self, use: Use, nodes: int) -> None:
        """So many more nodes have this use; fewer, if negative. A use without members has ended."""
        use.nodes += nodes
        if use in self._recent:
            self._nodes += nodes
            self._shrink()
            if not use.members:
                self._recent.pop(use, None)

    def resize(self, room: int) -> None:
        """There is room for so many nodes now."""
        self._room = room
        self._shrink()

    def clear(self) -> None:
        """Nothing is here any more."""
        self._recent.clear()
        self._nodes = 0

    def seek(self, uses: Iterable[tuple[Use, int]], served: int, *, is_hinted: bool) -> None:
        """A request uses chunks that had these uses, so many each, or NEVER one; `served` of them are here.

        Of hints an LRU knows nothing.
        """
        oldest = next(iter(self._recent), NEVER)
        leaving = max(0, self._nodes - self._room)  # of the oldest
        found = known = 0.0
        for use, chunks in uses:
            known += FORGOTTEN * chunks if use is NEVER else chunks
            if use in self._recent:
                found += chunks * (1 - leaving / oldest.nodes) if use is oldest else chunks
        if self.is_enough:
            found = served
        self._known = self._known * DECAY + known
        self._found = self._found * DECAY + (0 if is_hinted else found)
        self._served = self._served * DECAY + served

    def _shrink(self) -> None:
        """Uses are recent while those that are younger leave some room."""
        while self._recent and self._nodes - (oldest := next(iter(self._recent))).nodes >= self._room:
            del self._recent[oldest]
            self._nodes -= oldest.nodes

    def check_valid(self, uses: Iterable[Use]) -> None:
        """Assert that recent uses are the youngest of these, all that have nodes, from the oldest on. For tests."""
        by_age = list(uses)
        assert [*self._recent] == by_age[len(by_age) - len(self._recent) :], "others are recent than the youngest"
        assert self._nodes == sum(use.nodes for use in self._recent), "recent nodes are miscounted"
        younger = self._nodes - next(iter(self._recent), NEVER).nodes
        assert not self._recent or younger < self._room, "more is recent than there is room for"
