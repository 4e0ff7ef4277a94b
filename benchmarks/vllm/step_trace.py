"""Connectors that note each step of an engine on one GPU, as `serve.py --steps` starts them; `step_report.py` reads it.

A line of the file that STEPS names in the environment is a step: its tokens and requests, when its launch began (s),
how long that took the processor, from the plan of its copies to their results, and how long the GPU took for what lies
between (ms; null without a GPU).
"""

import json
import os
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import SimpleCPUOffloadConnector

from benchmarks.vllm.vllm_null import NullConnector
from connector.vllm import CPUPrefixCacheConnector


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
    """Steps whose launch has ended, until the GPU has run them."""

    def __init__(self) -> None:
        self._file = open(os.environ["STEPS"], "w", buffering=1)  # noqa: SIM115  as long as the process
        self._open = deque[tuple[dict[str, Any], torch.cuda.Event | None, torch.cuda.Event | None]]()

    def begin(self, step: Noted) -> None:
        self._now, self._began, self._mark = step, time.perf_counter(), mark()

    def end(self) -> None:
        now, launch = self._now, 1e3 * (time.perf_counter() - self._began)
        row = {"tokens": now.tokens, "requests": now.requests, "began": round(self._began, 6)}
        self._open.append((row | {"launch": round(launch, 3), "gpu": None}, self._mark, mark()))
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
            self._steps.end()
        return results


class NotedCPUPrefixCacheConnector(Noting, CPUPrefixCacheConnector):
    pass


class NotedNullConnector(Noting, NullConnector):
    pass


class NotedOffloadingConnector(Noting, OffloadingConnector):
    pass


class NotedSimpleCPUOffloadConnector(Noting, SimpleCPUOffloadConnector):
    pass
