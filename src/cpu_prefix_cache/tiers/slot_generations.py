"""SlotGenerations: the generation of each slot of a tier, as its decider counts them (rule 15).

closed    until each rank has reported the first generation that it has never used
open      generations are given from there on, and what was found from before is taken in, portion by portion
reset     a new range: nothing below it is served again; of a tier that was closed then, nothing from before
"""

from array import array
from collections.abc import Sequence

from cpu_prefix_cache.messages.generations import begin_of, range_of
from cpu_prefix_cache.messages.plan import StepPlan
from cpu_prefix_cache.messages.tier import Ask, Found, TierPlan, TierReport


class SlotGenerations:
    """`of` has that of each of `slots` slots. `first` is the first that is served, `next` the next that is given."""

    def __init__(self, slots: int, ranks: int) -> None:
        self.of = array("Q", bytes(8 * slots))
        self.first = self.next = 0
        self.unused: dict[int, int] = {}  # rank -> the first generation that it has never used
        self._ranks = ranks
        self._taken = 0  # portions
        self._revision: str | None = None  # as the last reset has named it

    @property
    def is_open(self) -> bool:
        return len(self.unused) == self._ranks

    def opens(self, rank: int, unused: int) -> bool:
        """Whether it is opened by this report of a rank."""
        if self.is_open:
            return False
        self.unused.setdefault(rank, unused)
        if self.is_open:
            self.next = max(*self.unused.values(), self.next)
            self.first = self.next if self.first else 0  # which a reset has raised
        return self.is_open

    def take_in(self, report: TierReport) -> Sequence[Found]:
        """The slots in a report that are served; none if it does not have the next portion."""
        if report.portion != self._taken + 1:
            return ()
        self._taken += 1
        return [found for found in report.found if found.label.generation >= self.first]

    def has_all(self, report: TierReport) -> bool:
        """Whether the last portion is in this report, and taken in."""
        return report.is_scanned and report.portion == self._taken

    def plan(self, step: StepPlan, asks: tuple[Ask, ...] = (), told_below: int = 0) -> TierPlan:
        return TierPlan(step, self.first, self._taken, asks, told_below, self._revision)

    def reset(self, revision: str | None) -> None:
        self._revision = revision
        self.first = self.next = begin_of(range_of(self.next) + 1)
