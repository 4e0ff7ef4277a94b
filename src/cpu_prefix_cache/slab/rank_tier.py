"""The tier of one rank: its bytes, a worker that carries plans out, and its reports to the decider.

A report repeats everything that no plan has taken in yet: transfers that have ended, slots refused in loads that are
done, and what the tier's *source* knows: what a slab held when it was opened, portion by portion, or the answers of a
shared store.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from cpu_prefix_cache.copier.worker import CopyWorker
from cpu_prefix_cache.messages.tier import TierPlan, TierReport
from cpu_prefix_cache.model.planner import Piece
from cpu_prefix_cache.slab.below import Below
from cpu_prefix_cache.slab.tier_copier import SlotStatistics, TierCopier

if TYPE_CHECKING:
    import torch


class Source(Protocol):
    """Reports to the scheduler: recovered slots, or a store's answers."""

    def begin(self, plan: TierPlan) -> None:
        """A step begins."""

    def told(self, report: TierReport) -> TierReport:
        """The report, with the source's own part."""

    @property
    def is_busy(self) -> bool:
        """Whether there will soon be more to report."""

    def close(self) -> None: ...


class RankTier:
    """Owns what is `below`, and `source`. `region` is the host memory of this rank, uint8 [host blocks, slot bytes].
    `pieces` are the planner's. Loads are given up when reads stall for `stall_seconds`. One thread calls it.
    """

    def __init__(
        self,
        below: Below,
        region: "torch.Tensor | memoryview",
        pieces: Sequence[Piece],
        rank: int,
        source: Source | None = None,
        stall_seconds: float | None = None,
    ) -> None:
        self._below, self._source = below, source
        self._copier = TierCopier(below, region, pieces, stall_seconds)
        self._worker = CopyWorker(rank, self._copier)

    def run(self, plan: TierPlan) -> None:
        """Begin one step's transfers. From here on nothing below the plan's first generation is served."""
        floor = plan.first_generation
        if plan.step.epoch:  # there was a reset, perhaps before the decider knew what this rank had when it was opened
            floor = max(floor, self._below.next_generation)
        if floor > self._below.floor:
            self._below.advance(floor, plan.revision)
            self._copier.keep_floor()
        if self._source is not None:
            self._source.begin(plan)
        self._worker.run(plan.step)

    def report(self) -> TierReport:
        transfers = self._worker.report()._replace(load_bytes_per_second=self._copier.read_bytes_per_second)
        report = TierReport(transfers, self._below.next_generation, is_scanned=True)
        return report if self._source is None else self._source.told(report)

    @property
    def is_busy(self) -> bool:
        """Whether a transfer had not ended at the last plan or report, or a query of the source is in flight."""
        return self._worker.is_busy or (self._source is not None and self._source.is_busy)

    def statistics(self) -> SlotStatistics:
        return self._copier.statistics()

    def drain(self) -> None:
        """Wait until all transfers have ended."""
        self._worker.drain()

    def close(self) -> None:
        """Wait until all transfers have ended, end the threads, and let the bytes go. May be called again."""
        self._below.stop()
        self._worker.close()
        self._copier.close()
        if self._source is not None:
            self._source.close()
        self._below.close()
