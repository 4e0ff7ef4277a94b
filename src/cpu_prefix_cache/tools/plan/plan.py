"""A plan: the curves of one load, and which of them and which size to look at."""

from dataclasses import dataclass

from cpu_prefix_cache.tools.plan.curves import GIB, SIZES, Curve, Origins, preferred_of
from cpu_prefix_cache.tools.plan.worth import Worth
from cpu_prefix_cache.tools.replay.knee import flat_from

NO_HOST = "no host"


@dataclass(frozen=True, slots=True)
class Plan:
    """`policies`, and `variants` of the preferred one: coded, above a tier."""

    worth: Worth
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
        """Index of the size from which on twice as much adds little; None if no size is so large."""
        return flat_from(self.preferred.shares)

    @property
    def looked_at(self) -> int:
        """Index of the knee, or of the largest size without one."""
        return len(SIZES) - 1 if self.knee is None else self.knee

    @property
    def deepest(self) -> Curve:
        """The last curve that has all sizes: that of the preferred policy, coded or above a tier if those are there."""
        return [curve for curve in (self.preferred, *self.variants) if len(curve.outcomes) == len(SIZES)][-1]

    def origins(self) -> dict[str, Origins]:
        """Where tokens came from without a host, and with each size of the deepest curve."""
        trace, outcomes = self.worth.trace, zip(SIZES, self.deepest.outcomes, strict=True)
        alone = {NO_HOST: Origins.of(self.worth.alone, trace)}
        return alone | {size_name(size): Origins.of(outcome.tally, trace) for size, outcome in outcomes}


def size_name(size: int) -> str:
    """A size in whole GiB or TiB.

    >>> size_name(512 << 30), size_name(2 << 40)
    ('512 GiB', '2 TiB')
    """
    gib = size // GIB
    return f"{gib} GiB" if gib < 1024 else f"{gib // 1024} TiB"
