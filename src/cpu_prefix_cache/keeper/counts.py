"""Counts: the slots of the whole pool by state, and what has left it, as its keeper counts them.

COUNT_SECONDS have passed    `count` goes out with the next step, and nobody waits for the answer
answered                     levels are those of the answer, and what only grows has grown by as much
a keeper that is new         it counts anew: what it has counted is what has grown
"""

from collections.abc import Iterator, Sequence

from cpu_prefix_cache.keeper.messenger import Messenger
from cpu_prefix_cache.keeper.protocol import NUM_COUNTED, Kind, Message
from cpu_prefix_cache.messages.stats import PoolStatistics

COUNT_SECONDS = 1.0
NUM_LEVELS = 6  # of the numbers: those that go up and down; the others only grow


def counted(pool: PoolStatistics) -> Sequence[int]:
    """The numbers of an answer."""
    levels = pool.free, pool.writing, pool.cached, pool.retired, pool.pinned, pool.protected
    return *levels, pool.evictions, pool.unused_chunks, pool.unused_checkpoints


class Counts:
    """Counts that one engine has of its pool, since it joined."""

    def __init__(self, messenger: Messenger) -> None:
        self._messenger = messenger
        self._next: float | None = None  # when the keeper is to be queried
        self._last: Sequence[int] | None = None
        self._grown = [0] * (NUM_COUNTED - NUM_LEVELS)

    def passed(self, now: float, ids: Iterator[int]) -> None:
        """Time has come to `now`, in seconds. A message that goes out has the next of these ids."""
        if self._next is None:
            self._next = now + COUNT_SECONDS
        if now >= self._next and self._messenger.is_up:
            self._next = now + COUNT_SECONDS
            self._messenger.send(self._messenger.connection, Message(Kind.COUNT, next(ids)))

    def answered(self, message: Message) -> None:
        before, self._last = self._last, message.numbers
        pairs = zip((before or self._last)[NUM_LEVELS:], self._last[NUM_LEVELS:], strict=True)
        news = [now - last if now >= last else now for last, now in pairs]
        self._grown = [grown + new for grown, new in zip(self._grown, news, strict=True)]

    def statistics(self, capacity: int, ready: int) -> PoolStatistics:
        """With so many slots, of which this engine can use so many."""
        levels = (self._last or [0] * NUM_LEVELS)[:NUM_LEVELS]
        return PoolStatistics(capacity, ready, *levels, *self._grown)
