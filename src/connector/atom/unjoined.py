"""Reports of each rank on itself pass ATOM's aggregator as it is.

ATOM passes a completion on when all ranks have reported the same operation. A rank's report of its tier has the number
of the rank in it, rates and slots, and is joined by the scheduler half. What its blocks take should be the same on all
ranks, and if it is not, the report would be lost. So these operations are taken out of each rank's reports, and put
back beside what was joined.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from atom.kv_transfer.disaggregation.types import ConnectorCompletion, KVConnectorOutput

from connector.atom.geometry import block_bytes_of
from connector.atom.messages import Unfit, Unpinned
from cpu_prefix_cache.tier import TierReport

Aggregate = Callable[[Any, Sequence[KVConnectorOutput]], KVConnectorOutput]


def passing_on(aggregate: Aggregate) -> Aggregate:
    """ATOM's `KVOutputAggregator.aggregate`, around each rank's report of itself."""

    @wraps(aggregate)
    def aggregate_and_pass_on(aggregator: Any, outputs: Sequence[KVConnectorOutput]) -> KVConnectorOutput:
        taken = [_take(output) for output in outputs]
        joined = aggregate(aggregator, outputs)
        joined.connector_completions.update(*taken)
        return joined

    return aggregate_and_pass_on


def _take(output: KVConnectorOutput) -> set[ConnectorCompletion]:
    reports = {each for each in output.connector_completions if _is_of_one_rank(each.operation_id)}
    output.connector_completions -= reports
    return reports


def _is_of_one_rank(operation: object) -> bool:
    return isinstance(operation, (TierReport, Unfit, Unpinned)) or block_bytes_of(operation) is not None
