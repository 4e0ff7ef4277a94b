"""The tier of a rank that has a host region of its own.

A rank may lack some of the model's groups (a pipeline stage). Their host blocks hold nothing there, are zeroed, and are
written all the same: so what any rank has says which chunks are whole.
"""

import torch

from cpu_prefix_cache import Direction
from cpu_prefix_cache.messages.tier import TierPlan, TierReport
from cpu_prefix_cache.slab.rank_tier import RankTier
from cpu_prefix_cache.slab.slot_copier import SlotStatistics


class Owner:
    """`region` is the rank's host memory, and `absent` the groups that it lacks."""

    def __init__(self, tier: RankTier, region: torch.Tensor, absent: frozenset[int]) -> None:
        self._tier, self._region, self._absent = tier, region, absent

    def run(self, plan: TierPlan) -> None:
        """Begin one step's transfers."""
        if self._absent:
            self._zero(plan)
        self._tier.run(plan)

    def report(self) -> TierReport:
        return self._tier.report()

    @property
    def is_busy(self) -> bool:
        """Whether a transfer had not ended at the last plan or report."""
        return self._tier.is_busy

    def statistics(self) -> SlotStatistics:
        return self._tier.statistics()

    def drain(self) -> None:
        """Wait until all transfers have ended."""
        self._tier.drain()

    def close(self) -> None:
        self._tier.close()

    def _zero(self, plan: TierPlan) -> None:
        """Zero what is stored of groups that this rank lacks: bytes of others may be left in their host blocks."""
        stores = (each for each in plan.step.transfers if each.direction is Direction.STORE)
        for copy in (copy for store in stores for copy in store.copies if copy.group in self._absent):
            self._region[list(copy.device_blocks)] = 0
