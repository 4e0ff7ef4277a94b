"""Keys remembered for each chunk on a device, which does not report when a chunk leaves it.

Their owner forgets what it sees leave the device. For each new key beyond these, two of the oldest are looked up, a
portion in each step. A key that is still on the device becomes the youngest, and the others are forgotten. So at most
about twice as many are remembered as the device has.
"""

from collections.abc import Callable, Sequence
from itertools import compress, islice
from operator import not_
from typing import Any

LEAST_SWEPT = 64  # entries in one step: 0.1 ms with vLLM's block pool
SWEPT_SHARE = 8  # of what is due: never behind by more than the new keys of a few steps
SPARED_SHARE = 2  # of what is remembered so much may be due: what an owner sees leave, it sees later than what comes


class Forgetting:
    """Which of the keys that an owner remembers, the oldest first, have left a device."""

    def __init__(self) -> None:
        self._due = 0  # keys to be looked up; negative: what was looked up has left since

    def added(self, count: int) -> None:
        """So many new keys are remembered."""
        self._due += 2 * count

    def left(self, count: int) -> None:
        """So many keys have been forgotten that were not looked up here."""
        self._due -= 2 * count

    def gone(self, remembered: dict[bytes, Any], are_here: Callable[[Sequence[bytes]], Sequence[bool]]) -> list[bytes]:
        """Look up a portion of the oldest. Those that have left the device, to be forgotten."""
        if self._due <= len(remembered) // SPARED_SHARE:
            return []
        count = min(self._due, max(LEAST_SWEPT, self._due // SWEPT_SHARE))
        self._due -= count
        keys = list(islice(remembered, count))
        here = are_here(keys)
        for key in compress(keys, here):
            remembered[key] = remembered.pop(key)  # the youngest
        return list(compress(keys, map(not_, here)))
