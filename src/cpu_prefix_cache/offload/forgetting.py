"""Forgetting in time: whoever remembers something for each chunk that a device holds is not told when one has left it.

For each new entry two of the oldest are looked at, a portion in each step; what is still there is the youngest again.
So what is remembered is at most about twice what is there, once the sweep has caught up.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from operator import not_

LEAST_SWEPT = 64  # entries in one step: 0.1 ms with vLLM's block pool
SWEPT_SHARE = 8  # of what is due: it is never behind by more than a few steps' new entries


class Forgetting:
    """Keys in the order in which they are looked at."""

    def __init__(self) -> None:
        self._oldest: deque[bytes] = deque()
        self._due = 0  # entries to be looked at

    def add(self, keys: Iterable[bytes]) -> None:
        """Keys that are remembered from now on, none of which was."""
        before = len(self._oldest)
        self._oldest.extend(keys)
        self._due += 2 * (len(self._oldest) - before)

    def gone(self, are_here: Callable[[Sequence[bytes]], Sequence[bool]]) -> list[bytes]:
        """Look at some of the oldest, if there is reason to. Those that are to be forgotten."""
        if not self._due:
            return []
        count = min(self._due, max(LEAST_SWEPT, self._due // SWEPT_SHARE))
        self._due -= count
        keys = [self._oldest.popleft() for _ in range(min(count, len(self._oldest)))]
        here = are_here(keys)
        self._oldest.extend(compress(keys, here))
        return list(compress(keys, map(not_, here)))

    def clear(self) -> None:
        self._oldest.clear()
        self._due = 0
