"""Scarcity: whether chunks that a pool evicts would be requested again, if the pool beside it lent its room.

    evicted    a chunk leaves in the policy's order: its key is one of those remembered, the last `window` or some more
    missed     a request misses chunks. Those of them that are remembered would be here, had duplicates left first

A duplicate costs nothing to lose and a store to get back, before it leaves the other pool. Where a pool is large, what
its policy evicts is old and not requested again, and to evict duplicates first would store each prompt anew whenever
its request ends: vLLM served 9 % fewer prompt tokens a second so (one H100, 40 GiB behind a device of 17 GB).
"""

from collections.abc import Collection, Sequence
from itertools import islice, takewhile

# A block of 16 tokens of Llama 8B crosses the link in 40 us, and is computed in some 400 (H100). A store goes the way
# that is idle. Replay, agentic 1,000 + 1,000 and 1,000 + 2,000: .7845 and .8675 with 10, .7867 and .8687 with 20.
WORTH = 20  # stores


class Scarcity:
    """Counts of late what was evicted and what of it was missed; both halve when `window` chunks were evicted."""

    def __init__(self, window: int) -> None:
        self._window = max(1, window)
        self._gone: dict[bytes, None] = {}  # the last ones, the oldest first
        self._evicted = self._missed = 0.0

    def evicted(self, keys: Collection[bytes]) -> None:
        for key in self._gone.keys() & keys:
            del self._gone[key]
        self._gone.update(dict.fromkeys(keys))
        self._evicted += len(keys)
        if len(self._gone) > self._window + self._window // 8:  # at times: the gap before the first takes a scan
            for key in list(islice(self._gone, len(self._gone) - self._window)):
                del self._gone[key]
        if self._evicted > self._window:
            self._evicted, self._missed = self._evicted / 2, self._missed / 2

    def missed(self, keys: Sequence[bytes]) -> None:
        """A request misses the chunks with these keys, each below the one before it."""
        for key in list(takewhile(self._gone.__contains__, keys)):
            del self._gone[key]
            self._missed += 1

    @property
    def holds(self) -> bool:
        """Whether one evicted chunk is worth more than the store of a duplicate."""
        return WORTH * self._missed > self._evicted

    def clear(self) -> None:
        self._gone.clear()
        self._evicted = self._missed = 0.0
