"""Connectors that note each step of an engine on one GPU, as `serve.py --steps` starts them; `step_report.py` reads it.

A line of the file that STEPS names in the environment is a step: its tokens and requests, when its launch began (s),
how long that took the processor, from the plan of its copies to their results, how long the GPU took for what lies
between (ms; null without a GPU), and of each of our loads that has ended by then the ms and the steps since its plan.
"""

import json
import os
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import SimpleCPUOffloadConnector

from benchmarks.vllm.vllm_null import NullConnector
from connector.vllm import CPUPrefixCacheConnector
from connector.vllm.messages import StepMetadata


@dataclass
class Noted(KVConnectorMetadata):
    """A connector's metadata of a step, and what the step computes."""

    metadata: KVConnectorMetadata
    tokens: int
    requests: int


def mark() -> torch.cuda.Event | None:
    """A point in the current stream."""
    if not torch.cuda.is_available():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Steps:
    """Steps whose launch has ended, until the GPU has run them; and loads that requests wait for."""

    def __init__(self) -> None:
        self._loads: dict[str, tuple[float, int]] = {}  # request -> when it was planned, and in which step
        self._number = 0
        self._file = open(os.environ["STEPS"], "w", buffering=1)  # noqa: SIM115  as long as the process
        self._open = deque[tuple[dict[str, Any], torch.cuda.Event | None, torch.cuda.Event | None]]()

    def begin(self, step: Noted) -> None:
        self._now, self._began, self._mark = step, time.perf_counter(), mark()
        self._number += 1
        if isinstance(step.metadata, StepMetadata):
            self._loads |= dict.fromkeys(step.metadata.requests.values(), (self._began, self._number))

    def end(self, received: Iterable[str]) -> None:
        now, launch = self._now, 1e3 * (time.perf_counter() - self._began)
        ended = [self._loads.pop(request) for request in self._loads.keys() & set(received)]
        row: dict[str, Any] = {"tokens": now.tokens, "requests": now.requests, "began": round(self._began, 6)}
        row |= {"launch": round(launch, 3), "gpu": None}
        row["loads"] = [(round(1e3 * (self._began - began), 3), self._number - number) for began, number in ended]
        self._open.append((row, self._mark, mark()))
        while self._open and ((last := self._open[0][2]) is None or last.query()):
            row, first, last = self._open.popleft()
            if first is not None and last is not None:
                row["gpu"] = round(first.elapsed_time(last), 3)
            self._file.write(json.dumps(row) + "\n")


class Noting(KVConnectorBase_V1):
    _steps: Steps | None = None

    def build_connector_meta(self, scheduler_output: Any) -> Noted:
        tokens, requests = scheduler_output.total_num_scheduled_tokens, len(scheduler_output.num_scheduled_tokens)
        return Noted(super().build_connector_meta(scheduler_output), tokens, requests)

    def handle_preemptions(self, connector_metadata: Any) -> None:
        super().handle_preemptions(connector_metadata.metadata)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._steps = self._steps or Steps()
        self._steps.begin(connector_metadata)
        super().bind_connector_metadata(connector_metadata.metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        if self._steps is not None:
            self._steps.end(results.finished_recving)
        return results


class NotedCPUPrefixCacheConnector(Noting, CPUPrefixCacheConnector):
    pass


class NotedNullConnector(Noting, NullConnector):
    pass


class NotedOffloadingConnector(Noting, OffloadingConnector):
    pass


class NotedSimpleCPUOffloadConnector(Noting, SimpleCPUOffloadConnector):
    pass
