"""The tier of one rank: its slab, a worker that carries plans out, and what it tells the decider.

A report says again what no plan has taken in yet: transfers that have ended, slots refused in loads that are done, and
the current portion of what the slab held when it was opened.
"""

from collections.abc import Sequence

import torch

from cpu_prefix_cache.copier.worker import CopyWorker
from cpu_prefix_cache.messages.plan import Direction, StepPlan
from cpu_prefix_cache.messages.tier import Found, Refusal, TierPlan, TierReport
from cpu_prefix_cache.model.planner import Piece
from cpu_prefix_cache.slab.scan import RestartScan
from cpu_prefix_cache.slab.slab import Slab
from cpu_prefix_cache.slab.slab_copier import Refused, SlabCopier, SlabStatistics

PORTION_RECORDS = 64  # 1.2 ms of the decider where no two slots are neighbours (of a million), 0.2 ms where all are


class RankTier:
    """Owns `slab`. `region` is the host memory of this rank, uint8 [host blocks, slot bytes]; `pieces` are the
    planner's. One thread calls it.

    With `scans`, by default on rank 0 alone, it tells what the slab holds from before: all ranks hold the same, and a
    slot that one of them has lost is refused when it is read.
    """

    def __init__(
        self, slab: Slab, region: torch.Tensor, pieces: Sequence[Piece], rank: int, *, scans: bool | None = None
    ) -> None:
        self._slab, self._copier = slab, SlabCopier(slab, region, pieces)
        self._worker = CopyWorker(rank, self._copier)
        self._loads: dict[int, list[Refused]] = {}  # what each load that is not resolved reads
        self._portions = _Portions(slab, pieces) if (rank == 0 if scans is None else scans) else None

    def run(self, plan: TierPlan) -> None:
        """Begin one step's transfers. From here on nothing below the plan's first generation is served."""
        floor = plan.first_generation
        if plan.step.epoch:  # there was a reset, perhaps before the decider knew what this rank had when it was opened
            floor = max(floor, self._slab.next_generation)
        if floor > self._slab.floor:
            self._slab.advance(floor)
        if self._portions is not None:
            self._portions.take(plan.taken)
        for transfer in plan.step.transfers:
            if transfer.direction is Direction.LOAD:
                slots = [pair for copy in transfer.copies for pair in zip(copy.host_blocks, copy.labels, strict=False)]
                self._loads[transfer.id] = [(slot, label.generation) for slot, label in slots]
        self._worker.run(plan.step)
        self._forget(plan.step)

    def report(self) -> TierReport:
        transfers = self._worker.report()
        refused = [Refusal(id, slots) for id in sorted(transfers.done) if (slots := self._refused_in(id))]
        portion, found, is_scanned = (0, (), True) if self._portions is None else self._portions.current()
        return TierReport(
            transfers._replace(load_bytes_per_second=self._copier.read_bytes_per_second),
            tuple(refused),
            self._slab.next_generation,
            portion,
            found,
            is_scanned,
        )

    @property
    def is_busy(self) -> bool:
        """Whether a transfer had not ended at the last plan or report."""
        return self._worker.is_busy

    def statistics(self) -> SlabStatistics:
        return self._copier.statistics()

    def drain(self) -> None:
        """Wait until all transfers have ended."""
        self._worker.drain()

    def close(self) -> None:
        """Wait until all transfers have ended, end the threads, and unlock the slab. May be called again."""
        self._worker.close()
        self._copier.close()
        if self._portions is not None:
            self._portions.close()
        self._slab.close()

    def _refused_in(self, id: int) -> tuple[int, ...]:
        if not self._copier.refused:
            return ()
        return tuple(slot for slot, generation in self._loads.get(id, ()) if (slot, generation) in self._copier.refused)

    def _forget(self, step: StepPlan) -> None:
        over = {id for id in self._loads if id < step.resolved_below} | (self._loads.keys() & set(step.resolved))
        for id in over:
            read = self._loads.pop(id)
            for lost in self._copier.refused.intersection(read):
                if not any(lost in others for others in self._loads.values()):  # which report it, too
                    self._copier.refused.discard(lost)


class _Portions:
    """What the scan has found, a portion at a time. They are numbered from 1; 0: there is none yet."""

    def __init__(self, slab: Slab, pieces: Sequence[Piece]) -> None:
        self._scan: RestartScan | None = RestartScan(slab, pieces)
        self._number, self._taken = 0, 0
        self._found: tuple[Found, ...] = ()

    def take(self, number: int) -> None:
        """Portions up to `number` are taken in."""
        self._taken = number

    def current(self) -> tuple[int, tuple[Found, ...], bool]:
        """Its number, what it has, and whether it is the last."""
        if self._taken >= self._number:
            self._found = ()
            if self._scan is not None and self._scan.is_ordered and not self._scan.is_over:
                self._found = self._scan.portion(PORTION_RECORDS)
                self._number += 1
            if self._scan is not None and self._scan.is_over:
                self._scan = None
        return self._number, self._found, self._scan is None

    def close(self) -> None:
        if self._scan is not None:
            self._scan.wait()
