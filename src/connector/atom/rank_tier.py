"""The tier of one rank, and its reports.

Ranks begin together or not at all: if one raises, ATOM does not start. A report is repeated until a plan has answered
it, and every REPEAT_SECONDS, since ATOM drops reports when a rank takes long.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from connector.atom.tensors import BoundTensors
from connector.tier.cache import EngineTier
from connector.tier.namespace import RankNamespace
from cpu_prefix_cache.deciding import HybridChunkPlanner
from cpu_prefix_cache.tier import RankPart, TierPlan, TierReport

REPEAT_SECONDS = 1.0


class RepeatingTier:
    """A tier that repeats its reports. `region` is the host memory of this rank, and `planner` is its layout.

    Raises ConfigurationError for what only the operator can change.
    """

    def __init__(
        self,
        below: EngineTier,
        planner: HybridChunkPlanner,
        bound: BoundTensors,
        region: torch.Tensor,
        rank: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        slots = below.slots(planner.host_block_bytes, region.shape[0])
        own = {"row order": "; ".join(bound.spelled), "device": architecture_of(bound.device)}
        namespace, part = RankNamespace.of(below.namespace, own), RankPart(slots, rank, rank, below.owners)
        self._tier = below.tier.opening(namespace, region, planner.pieces, part)
        self._clock = clock
        self._told: TierReport | None = None
        self._told_at = 0.0

    def run(self, plan: TierPlan) -> None:
        """Begin one step's transfers."""
        self._tier.run(plan)

    def news(self) -> TierReport | None:
        """News that the scheduler side may not have yet."""
        report, now = self._tier.report(), self._clock()
        if report == self._told and not report.is_repeated and now < self._told_at + REPEAT_SECONDS:
            return None
        self._told, self._told_at = report, now
        return report

    def close(self) -> None:
        self._tier.close()


def rank_here(config: Any) -> int:
    """The number of this process among the tensor parallel ranks."""
    if config.tp_world_size == 1:
        return 0
    from aiter.dist.parallel_state import get_tp_group

    return int(get_tp_group().rank_in_group)


def architecture_of(device: torch.device) -> str:
    """The architecture, by which ATOM's kernels write KV, and not the model, on which rounding alone depends."""
    if device.type != "cuda":
        return device.type
    return "capability {}.{}".format(*torch.cuda.get_device_capability(device))
