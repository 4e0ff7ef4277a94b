"""Hints of when a request's prefix is used again: which of them can be used, and how many came.

    given                            used                  counted
    None                             nothing               not at all
    0 to 65,536 seconds, infinity    as it is              accepted
    another finite number            the nearest of those  clipped
    anything else                    nothing               malformed

A hint may be wrong, and none stops a request. So a wrong one is counted instead of refused.
"""

from collections import Counter
from math import inf

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


def counted_next_use(given: object, counts: Counter[str]) -> float | None:
    """As `usable_next_use`, of a hint that a request came with, which is counted by its name in HintStatistics."""
    used = usable_next_use(given)
    if given is not None:
        counts["malformed" if used is None else "accepted" if used == given else "clipped"] += 1
    return used
