"""The copying half on one rank: carries out step plans and says, until it is heard, what became of them.

StepPlan  ->  run  ->  every transfer ends as done or failed, interrupts included (rule 11)
report    ->  all that has ended and no plan has called settled yet
"""

import logging

from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.errors import MisuseError
from cpu_prefix_cache.plan import VERSION, RankReport, StepPlan, TransferPlan

logger = logging.getLogger(__name__)


class CopyWorker:
    """Runs plans with one copier, synchronously. One per rank."""

    def __init__(self, rank: int, copier: Copier) -> None:
        self._rank = rank
        self._copier = copier
        self._done: set[int] = set()
        self._failed: set[int] = set()

    def run(self, plan: StepPlan) -> None:
        """Carry out one step's transfers. Raises MisuseError for a plan of another version, before it begins."""
        if plan.version != VERSION:
            raise MisuseError(f"this rank understands plans of version {VERSION}, got {plan.version}")
        settled = set(plan.settled)
        self._done = {id for id in self._done if id >= plan.settled_below} - settled
        self._failed = {id for id in self._failed if id >= plan.settled_below} - settled
        try:
            for transfer in plan.transfers:
                if transfer.failed or transfer.id in plan.cancelled:
                    self._failed.add(transfer.id)
                else:
                    self._copy(transfer)
        finally:  # an interrupt leaves nothing that nobody will ever report
            self._failed.update({transfer.id for transfer in plan.transfers} - self._done)

    def report(self) -> RankReport:
        return RankReport(self._rank, frozenset(self._done), frozenset(self._failed))

    def _copy(self, transfer: TransferPlan) -> None:
        try:
            self._copier.copy(transfer.direction, transfer.copies)
        except Exception:  # whatever it is, the transfer must resolve (rule 11)
            logger.exception("transfer %d failed", transfer.id)
            self._failed.add(transfer.id)
        else:
            self._done.add(transfer.id)
