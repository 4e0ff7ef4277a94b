"""What travels between the two halves inside vLLM's own messages: out with each step, back with each step's output."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from cpu_prefix_cache import RankReport, StepPlan


@dataclass
class StepMetadata(KVConnectorMetadata):
    """One step's plan, and for each load in it the request vLLM wants to hear about when the load is over.

    `plan` is None where there is no cache, `computes` whether the step has anything to compute, `is_awaited` whether
    requests wait for a copy to end, or for the blocks that it has. `timed` is the number of a step whose time tells how
    fast prompts are computed, None for all others. `destinations` are the device blocks of loads, where
    vLLM is told of those that failed by their blocks. A rank names that request once in `finished_recving`, however the
    load ended, and in `failed_recving` too if it failed or was cancelled: vLLM keeps the blocks of an aborted request
    until it has heard.
    """

    plan: StepPlan | None = None
    requests: Mapping[int, str] = field(default_factory=dict)
    computes: bool = False
    destinations: Mapping[int, Sequence[int]] = field(default_factory=dict)
    is_awaited: bool = False
    timed: int | None = None


@dataclass
class WorkerReports(KVConnectorWorkerMetadata):
    """What ranks have copied. vLLM adds up those of one step, in any order, and tests them for truth: no `__len__`.

    `timed` is that of the step. Several steps may be under way, and vLLM keeps an output without anything in it to
    itself: so the other half cannot tell by counting which step an output is of.
    """

    reports: tuple[RankReport, ...]
    timed: int | None = None

    def aggregate(self, other: "WorkerReports") -> "WorkerReports":
        return WorkerReports(self.reports + other.reports, self.timed)
