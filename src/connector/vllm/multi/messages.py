"""Messages that vLLM's MultiConnector sends with a step and gets with its output, and the times of a step besides."""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
)


@dataclass
class TimedMetadata(MultiKVConnectorMetadata):
    """`step` is the number of a step that is timed; None for others."""

    step: int | None = None


@dataclass
class TimedWorkerMetadata(MultiKVConnectorWorkerMetadata):
    """`seconds` is how long each connector kept that step waiting for its loads, on the slowest rank."""

    step: int | None = None
    seconds: Sequence[float] = ()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "TimedWorkerMetadata":
        merged = super().aggregate(other)
        seconds = [max(pair) for pair in zip(self.seconds, other.seconds, strict=True)]
        return TimedWorkerMetadata(merged.metadata, self.step, seconds)
