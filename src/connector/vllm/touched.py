"""Assumptions that the connector makes of vLLM beyond the interface of connectors, checked once, when it starts.

    connector              vLLM calls what we override
    messages, metrics      fields that are read

vLLM promises none of it. A release that has changed it is refused: later the engine would stop in the middle of a
request. What is assumed of the block pool is in `pool_view.py`, what only some releases have in `versions.py`.
"""

import sys
from collections.abc import Iterable
from dataclasses import fields
from traceback import walk_stack
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from cpu_prefix_cache import ConfigurationError

STEP = ("num_scheduled_tokens", "preempted_req_ids", "total_num_scheduled_tokens")
STEP_OUTPUT = ("finished_recving", "invalid_block_ids", "kv_connector_worker_meta")
PROMETHEUS = ("_counter_cls", "_gauge_cls", "_histogram_cls", "_labelnames")


def is_made_by_vllm(connector: KVConnectorBase_V1) -> bool:
    """Whether vLLM's factory constructs this connector for vLLM itself, and not for a connector that has others beside
    it. Called by its constructor.
    """
    frames = (frame for frame, _ in walk_stack(sys._getframe(1)))
    callers = [frame for frame in frames if frame.f_locals.get("self") is not connector]
    if not callers or callers[0].f_code is not KVConnectorFactory.create_connector.__code__:
        return False
    return not any(isinstance(each.f_locals.get("self"), KVConnectorBase_V1) for each in callers)


def check_overrides(connector: type) -> None:
    """Raises ConfigurationError if the connector's class has a public name that vLLM does not know: nobody calls it."""
    ours = {name for name in vars(connector) if not name.startswith("_")}
    if unknown := sorted(ours.difference(dir(KVConnectorBase_V1), dir(SupportsHMA))):
        raise misfit(f"a connector has no {unknown[0]}")


def check_messages() -> None:
    """Raises ConfigurationError if a message between vLLM's halves lacks a field of those above."""
    for message, names in ((SchedulerOutput, STEP), (KVConnectorOutput, STEP_OUTPUT)):
        if missing := sorted(set(names).difference(field.name for field in fields(message))):
            raise misfit(f"{message.__name__} has no {missing[0]}")


def check_names(thing: Any, names: Iterable[str]) -> None:
    """Raises ConfigurationError if this lacks one of these attributes."""
    if missing := sorted(set(names).difference(dir(thing))):
        raise misfit(f"{type(thing).__name__} has no {missing[0]}")


def misfit(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"CPUPrefixCacheConnector does not fit vLLM {vllm.__version__}: {what}; use a release that it is tested with"
    )
