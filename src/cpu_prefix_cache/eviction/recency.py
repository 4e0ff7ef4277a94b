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

from collections.abc import Callable, Iterable

from cpu_prefix_cache.eviction.ages import NEVER, Use

# Where an LRU found so much, order by worth found .1 to .2 points less of an agentic trace, and served 2 % less in the
# model of `serve_simulated`. With .95 in place of .9 a smaller host served 2 % less there.
ENOUGH = 0.9
DECAY = 0.998  # of what was found, with each request: half of it is of the last 350
FORGOTTEN = 1 / 8  # of what is not known: it counts as known, and not found


class Recency:
    """An LRU with room for so many nodes. Callers report when a use begins, and which nodes have it; `younger` is the
    next younger use, also of one that has just ended.
    """

    def __init__(self, room: int, younger: Callable[[Use], Use | None]) -> None:
        self._room = room
        self._younger = younger
        self._oldest: Use | None = None  # of the recent ones; all that are younger are recent, too
        self._nodes = 0  # of recent uses
        self._found = self._served = 0.0
        self._known = room / 4  # at first: that much counts as not found

    @property
    def is_enough(self) -> bool:
        """Whether an LRU would have found more than was, and nearly all that could be."""
        return self._found > max(self._served, ENOUGH * self._known)

    def begin(self, use: Use) -> None:
        """A use begins, the youngest of all."""
        self._oldest = self._oldest or use

    def add(self, use: Use, nodes: int) -> None:
        """So many more nodes have this use; fewer, if negative. A use without members has ended."""
        use.nodes += nodes
        if self._is_recent(use):
            self._nodes += nodes
            self._shrink()
        if not use.members and use is self._oldest:
            self._oldest = self._younger(use)

    def resize(self, room: int) -> None:
        """There is room for so many nodes now."""
        self._room = room
        self._shrink()

    def clear(self) -> None:
        """Nothing is here any more."""
        self._oldest, self._nodes = None, 0

    def seek(self, uses: Iterable[tuple[Use, int]], served: int, *, is_hinted: bool) -> None:
        """A request uses chunks that had these uses, so many each, or NEVER one; `served` of them are here.

        Of hints an LRU knows nothing.
        """
        leaving = max(0, self._nodes - self._room)  # of the oldest
        found = known = 0.0
        for use, chunks in uses:
            known += FORGOTTEN * chunks if use is NEVER else chunks
            if self._is_recent(use):
                found += chunks * (1 - leaving / use.nodes) if use is self._oldest else chunks
        if self.is_enough:
            found = served
        self._known = self._known * DECAY + known
        self._found = self._found * DECAY + (0 if is_hinted else found)
        self._served = self._served * DECAY + served

    def _is_recent(self, use: Use) -> bool:
        return self._oldest is not None and use.number >= self._oldest.number

    def _shrink(self) -> None:
        """Uses are recent while those that are younger leave some room."""
        while self._oldest is not None and self._nodes - self._oldest.nodes >= self._room:
            self._nodes -= self._oldest.nodes
            self._oldest = self._younger(self._oldest)

    def check_valid(self, uses: Iterable[Use]) -> None:
        """Assert that the nodes of the recent ones of these, which are all, are counted. For tests."""
        recent = [use for use in uses if self._is_recent(use)]
        assert recent[:1] == ([] if self._oldest is None else [self._oldest]), "the oldest recent use has ended"
        assert self._nodes == sum(use.nodes for use in recent), "recent nodes are miscounted"
        assert not recent or self._nodes - recent[0].nodes < self._room, "more is recent than there is room for"
