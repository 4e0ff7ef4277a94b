"""Messages between the two halves. vLLM sends one with each step, and returns the other with the step's output."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from cpu_prefix_cache.deciding import Direction, RankReport, StepPlan
from cpu_prefix_cache.tier import TierPlan, TierReport


@dataclass
class StepMetadata(KVConnectorMetadata):
    """The plan of one step. vLLM passes it from the scheduler to each worker.

    plan            None if there is no cache
    requests        load id -> request id. When the load has ended, each rank names the request once in
                    `finished_recving`, and also in `failed_recving` if the load failed or was cancelled. vLLM keeps the
                    blocks of an aborted request until then. A load that is not in `plan` has failed already. For a
                    load of `plan` that is not here the compute of this step waits
    computes        whether the step computes any tokens
    is_awaited      whether requests wait for a copy to end, or for the device blocks that it holds
    timed           the number of this step, if its duration is measured (to learn how fast prompts are computed)
    tier            what the ranks do with the tier below host memory, after `plan`; None if there is none
    """

    plan: StepPlan | None = None
    requests: Mapping[int, str] = field(default_factory=dict)
    computes: bool = False
    is_awaited: bool = False
    timed: int | None = None
    tier: TierPlan | None = None

    @property
    def computed_on(self) -> Set[int]:
        """The loads that the compute of this step waits for."""
        transfers = () if self.plan is None else self.plan.transfers
        return {each.id for each in transfers if each.direction is Direction.LOAD} - self.requests.keys()


@dataclass
class WorkerReports(KVConnectorWorkerMetadata):
    """Reports on what ranks have copied, and on their tiers. vLLM aggregates those of one step, in any order.

    `prepared` are the ranks whose host regions have all the blocks that they will ever have.

    Without `__len__`, because vLLM tests it for truth. `timed` is that of the step's metadata: several steps may be in
    flight, and vLLM drops empty outputs, so the scheduler half cannot count outputs to know the step.
    """

    reports: tuple[RankReport, ...]
    timed: int | None = None
    tier: tuple[TierReport, ...] = ()
    prepared: tuple[int, ...] = ()

    def aggregate(self, other: "WorkerReports") -> "WorkerReports":
        prepared = self.prepared + other.prepared
        return WorkerReports(self.reports + other.reports, self.timed, self.tier + other.tier, prepared)
