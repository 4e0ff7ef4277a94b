"""The smallest capacity that reaches a hit ratio, found by trying one capacity after another.

Start from a capacity that holds everything, go down round steps until the goal is missed, then bisect between the last
two:

    1,600 hit .64    1,024 .62    512 .57 missed    768 .61    640 .60    576 .59 ...

More capacity nearly always gives more hits, but not quite always, because evictions shorten the hits of different
requests. So the answer is a tried capacity that reaches the goal, next to a slightly smaller one that does not. A much
smaller one might still reach it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.tools.replay.prefill_work import Work

# The bisection ends when the answer is at most this share above a capacity that misses the goal.
CLOSE = 0.02


@dataclass(frozen=True, slots=True)
class Point:
    """The hit ratio of one capacity, and the work that hits saved there."""

    capacity: int
    hit_ratio: float
    found: Work = field(default_factory=Work)


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
    measured: Callable[[int], Point],
    *,
    target: float,
    least: int,
    largest: int,
    steps: Sequence[int] = (),
    shown: Sequence[int] = (),
    close: float = CLOSE,
) -> Sizing:
    """The smallest capacity in [least, largest] found to reach `target` times the hit ratio at `largest`.

    `steps` are capacities in between, which are tried first; `shown` are capacities that are tried in any case, at the
    end. Raises ConfigurationError unless 0 < target <= 1 and 1 <= least <= largest.
    """
    check_target(target)
    if not 1 <= least <= largest:
        raise ConfigurationError(f"capacities must be 1 <= least <= largest, got {least} and {largest}")
    tried: dict[int, Point] = {largest: measured(largest)}
    goal = target * tried[largest].hit_ratio
    enough, missed = largest, least - 1

    def reaches(capacity: int) -> bool:
        tried[capacity] = measured(capacity)
        return tried[capacity].hit_ratio >= goal

    for capacity in sorted({*steps, least} - {largest}, reverse=True):
        if not reaches(capacity):
            missed = capacity
            break
        enough = capacity
    while enough - missed > max(1, close * enough) and missed >= least:
        middle = (enough + missed) // 2
        if reaches(middle):
            enough = middle
        else:
            missed = middle
    for capacity in set(shown) - tried.keys():
        tried[capacity] = measured(capacity)
    return Sizing(goal, tried[enough], tuple(tried[capacity] for capacity in sorted(tried)))
