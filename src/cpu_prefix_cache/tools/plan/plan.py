"""A plan: the curves of one load, and which of them and which size to look at."""

from collections.abc import Sequence
from dataclasses import dataclass

from cpu_prefix_cache.tools.plan.curves import Curve, origins_of, preferred_of
from cpu_prefix_cache.tools.plan.worth import Worth
from cpu_prefix_cache.tools.replay.knee import flat_from
from cpu_prefix_cache.tools.replay.units import show_bytes

NO_HOST = "no host"
ENOUGH = 0.9
LEVEL = 0.001  # a share of prefill within which two sizes save the same


@dataclass(frozen=True, slots=True)
class Plan:
    """`policies`, and `variants` of the preferred one: coded, above a tier.

    `most` is the share of prefill that the preferred one saves with all memory that it could use.
    """

    worth: Worth
    sizes: Sequence[int]
    most: float
    policies: tuple[Curve, ...]
    variants: tuple[Curve, ...]

    @property
    def preferred(self) -> Curve:
        return preferred_of(self.policies)

    @property
    def curves(self) -> tuple[Curve, ...]:
        return self.policies + self.variants

    @property
    def knee(self) -> int | None:
        """Index of the size from which on twice as much adds little; None if no size is so large, or none saves."""
        return flat_from(self.preferred.shares) if self.saves else None

    @property
    def saves(self) -> bool:
        return max(self.preferred.shares) >= LEVEL

    @property
    def looked_at(self) -> int:
        """Index of the knee, or of the largest size without one."""
        return len(self.sizes) - 1 if self.knee is None else self.knee

    @property
    def enough(self) -> int | None:
        """Index of the first size that saves `ENOUGH` of what all memory would; None if none does."""
        reached = (at for at, share in enumerate(self.preferred.shares) if 0 < ENOUGH * self.most <= share)
        return next(reached, None)

    @property
    def most_money(self) -> int | None:
        """Index of the size that leaves the most money, the first of equal ones; None if none leaves any."""
        outcomes = zip(self.sizes, self.preferred.outcomes, strict=True)
        left = [self.worth.money(outcome, size) or 0.0 for size, outcome in outcomes]
        return left.index(max(left)) if max(left) > 0 else None

    @property
    def deepest(self) -> Curve:
        """The last curve that has all sizes: that of the preferred policy, coded or above a tier if those are there."""
        return [curve for curve in (self.preferred, *self.variants) if len(curve.outcomes) == len(self.sizes)][-1]

    def origins(self) -> dict[str, dict[str, int]]:
        """Where tokens came from without a host, and with each size of the deepest curve."""
        trace, outcomes = self.worth.trace, zip(self.sizes, self.deepest.outcomes, strict=True)
        alone = {NO_HOST: origins_of(self.worth.alone, trace)}
        return alone | {size_name(size): origins_of(outcome.tally, trace) for size, outcome in outcomes}


def size_name(size: int) -> str:
    """A size in the largest binary unit.

    >>> size_name(512 << 30), size_name(2 << 40), size_name(1536 << 30)
    ('512 GiB', '2 TiB', '1.5 TiB')
    """
    return show_bytes(size).replace(".0 ", " ")
