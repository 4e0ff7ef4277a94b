"""The smallest capacity that reaches a hit ratio, found by trying one capacity after another.

Start from a capacity that holds everything, halve it until the goal is missed, then bisect between the last two:

    1,600 hit .64    800 .62    400 .57 missed    600 .61    500 .60    450 .59 ...

More capacity nearly always gives more hits, but not quite always, because evictions shorten the hits of different
requests. So the answer is a tried capacity that reaches the goal, next to a slightly smaller one that does not. A much
smaller one might still reach it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from cpu_prefix_cache.messages.errors import ConfigurationError

# The bisection ends when the answer is at most this share above a capacity that misses the goal.
CLOSE = 0.02


@dataclass(frozen=True, slots=True)
class Point:
    """The hit ratio of one capacity."""

    capacity: int
    hit_ratio: float


@dataclass(frozen=True, slots=True)
class Sizing:
    """`enough` is the smallest tried capacity that reaches `goal`; `points` are all tried ones, ascending."""

    goal: float
    enough: Point
    points: tuple[Point, ...]


def check_target(target: float) -> None:
    """Raises ConfigurationError unless 0 < target <= 1."""
    if not 0 < target <= 1:
        raise ConfigurationError(f"target is a share of the ideal hit ratio, above 0 and up to 1; got {target}")


def smallest_capacity(
    hit_ratio: Callable[[int], float], *, target: float, least: int, largest: int, close: float = CLOSE
) -> Sizing:
    """The smallest capacity in [least, largest] found to reach `target` times the hit ratio at `largest`.

    Raises ConfigurationError unless 0 < target <= 1 and 1 <= least <= largest.
    """
    check_target(target)
    if not 1 <= least <= largest:
        raise ConfigurationError(f"capacities must be 1 <= least <= largest, got {least} and {largest}")
    tried: dict[int, float] = {largest: hit_ratio(largest)}
    goal = target * tried[largest]
    enough, missed = largest, least - 1

    def reaches(capacity: int) -> bool:
        tried[capacity] = hit_ratio(capacity)
        return tried[capacity] >= goal

    while enough > least and missed < least:
        half = max(least, enough // 2)
        if reaches(half):
            enough = half
        else:
            missed = half
    while enough - missed > max(1, close * enough) and missed >= least:
        middle = (enough + missed) // 2
        if reaches(middle):
            enough = middle
        else:
            missed = middle
    points = tuple(Point(capacity, tried[capacity]) for capacity in sorted(tried))
    return Sizing(goal, Point(enough, tried[enough]), points)
