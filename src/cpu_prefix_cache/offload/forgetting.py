"""Keys remembered for each chunk on a device, which does not report when a chunk leaves it.

For each new key two of the oldest are looked up, a portion in each step. A key that is still on the device becomes the
youngest, and the others are forgotten. So at most about twice as many are remembered as the device has.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from operator import not_

LEAST_SWEPT = 64  # entries in one step: 0.1 ms with vLLM's block pool
SWEPT_SHARE = 8  # of what is due: never behind by more than the new keys of a few steps


class Forgetting:
    """Keys in the order in which they are looked up."""

    def __init__(self) -> None:
        self._oldest: deque[bytes] = deque()
        self._due = 0  # keys to be looked up

    def add(self, keys: Iterable[bytes]) -> None:
        """Remember these keys, all of them new."""
        before = len(self._oldest)
        self._oldest.extend(keys)
        self._due += 2 * (len(self._oldest) - before)

    def gone(self, are_here: Callable[[Sequence[bytes]], Sequence[bool]]) -> list[bytes]:
        """Look up a portion of the oldest. Those that have left the device, which are forgotten."""
        if not self._due:
            return []
        count = min(self._due, max(LEAST_SWEPT, self._due // SWEPT_SHARE))
        self._due -= count
        keys = [self._oldest.popleft() for _ in range(min(count, len(self._oldest)))]
        here = are_here(keys)
        self._oldest.extend(compress(keys, here))
        return list(compress(keys, map(not_, here)))

    def clear(self) -> deque[bytes]:
        """Forget all. Returns them."""
        oldest, self._oldest, self._due = self._oldest, deque(), 0
        return oldest
