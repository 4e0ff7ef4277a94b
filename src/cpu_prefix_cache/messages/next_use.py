"""Hints of when a request's prefix is used again: which of them can be used, and how many came.

    given                            used                  counted
    None                             nothing               not at all
    0 to 65,536 seconds, infinity    as it is              accepted
    another finite number            the nearest of those  clipped
    anything else                    nothing               malformed

A hint may be wrong, and none stops a request. So a wrong one is counted instead of refused.
"""

from math import inf

from cpu_prefix_cache.messages.stats import HintStatistics

LONGEST = 65_536.0  # seconds: the policies distinguish no longer ones


def usable_next_use(given: object) -> float | None:
    """The seconds that a policy can use of a hint; infinity: never; None: nothing.

    >>> usable_next_use(30), usable_next_use(-2.5), usable_next_use(1e9), usable_next_use(inf)
    (30.0, 0.0, 65536.0, inf)
    >>> usable_next_use(None), usable_next_use("soon"), usable_next_use(True), usable_next_use(float("nan"))
    (None, None, None, None)
    """
    if isinstance(given, bool) or not isinstance(given, int | float) or given != given:
        return None
    return inf if given == inf else float(max(0.0, min(given, LONGEST)))


class NextUses:
    """Counts the hints that requests came with."""

    def __init__(self) -> None:
        self._accepted = self._clipped = self._malformed = 0

    def read(self, given: object) -> float | None:
        """Count a hint. Returns what can be used of it."""
        used = usable_next_use(given)
        if used is None:
            self._malformed += given is not None
        elif used == given:
            self._accepted += 1
        else:
            self._clipped += 1
        return used

    def statistics(self) -> HintStatistics:
        return HintStatistics(self._accepted, self._clipped, self._malformed)
