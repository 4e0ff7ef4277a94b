"""vLLM's MultiConnector, which loads from the connector that saves the most time instead of from the first.

vllm serve MODEL --kv-transfer-config '{"kv_connector": "CPUPrefixCacheMultiConnector", "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"connectors": [
        {"kv_connector": "CPUPrefixCacheConnector", "kv_role": "kv_both",
         "kv_connector_extra_config": {"cpu_bytes_to_use": 51539607552}},
        {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}]}}'

vLLM's class passes each call on to all of them: all are queried and all may store. Here is only what is decided and
measured:

    get_num_new_matched_tokens    Chooser.answered: who loads, or whether the request waits for an answer
    update_state_after_alloc      Chooser.admitted: the load begins
    build_connector_meta          Steps.begin
    update_connector_output       Steps.received, Steps.end: loads have ended, well or not
    start_load_kv, wait_for_...   in the workers: how long a step waits for each of them
"""

import copy
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole, supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector, MultiKVConnectorStats
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, UniformTypeKVCacheSpecs
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from connector.multi.choice import Speed
from connector.multi.chooser import ERROR, Chooser
from connector.vllm.log import log_through_vllm
from connector.vllm.multi.messages import TimedMetadata, TimedWorkerMetadata
from connector.vllm.multi.metrics import OWN, ChoiceCounts, ChoicePromMetrics, ChoiceStats
from connector.vllm.multi.options import ASSUMED_PREFILL, Options
from connector.vllm.multi.steps import Steps
from connector.vllm.touched import check_names, check_overrides
from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.deciding import MIN_TIMED_TOKENS, OVERHEAD_SECONDS, PrefillRate

logger = logging.getLogger(__name__)


class CPUPrefixCacheMultiConnector(MultiConnector):
    """Raises ConfigurationError for an option that cannot work, and for a connector that cannot keep this model."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        log_through_vllm()
        check_overrides(CPUPrefixCacheMultiConnector)
        options = Options.of(vllm_config)
        super().__init__(_checked(vllm_config, kv_cache_config), role, kv_cache_config)
        check_names(self, ("_connectors", "_requests_to_connector"))
        self._step: int | None = None
        self._seconds = [0.0] * len(self._connectors)
        if role is KVConnectorRole.SCHEDULER:
            self._follow(options, vllm_config, kv_cache_config)

    def _follow(self, options: Options, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        names = _names(vllm_config)
        ranks = vllm_config.parallel_config.decode_context_parallel_size
        bytes_per_token = _bytes_per_token(kv_cache_config, ranks)
        timed = PrefillRate()

        def prefill() -> float:
            return options.prefill_rate or timed.tokens_per_second or ASSUMED_PREFILL

        assumed = [Speed(rate, OVERHEAD_SECONDS) for rate in options.load_rates]
        self._has_one_group = len(kv_cache_config.kv_cache_groups) == 1
        self._names = names
        self._broken: set[int] = set()  # those that have raised an error
        self._is_async: dict[str, bool] = {}
        self.chooser = Chooser(options.deadlines, assumed, bytes_per_token, prefill)
        self._steps = Steps(self.chooser, timed)
        self._counts = ChoiceCounts(names, self.chooser.counts)
        known = zip(names, options.load_rates, options.deadlines, strict=True)
        logger.info(
            "loads from the connector that saves most time. Assumed until loads were measured: %s. Prompts: %s",
            "; ".join(f"{name} {rate / 1e9:g} GB/s, waited for at most {wait:g} s" for name, rate, wait in known),
            f"{options.prefill_rate:g} tokens/s, as configured"
            if options.prefill_rate
            else f"{ASSUMED_PREFILL:g} tokens/s, until two steps of {MIN_TIMED_TOKENS} tokens were measured",
        )

    # In the scheduler

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        id = request.request_id
        answers = [self._ask(at, request, num_computed_tokens) for at in range(len(self._connectors))]
        most = request.num_tokens - num_computed_tokens
        choice = self.chooser.answered(id, [tokens for tokens, _ in answers], most)
        self._requests_to_connector.pop(id, None)
        if choice.waits_for:
            return None, False
        if choice.winner is None:
            return 0, False
        self._requests_to_connector[id] = choice.winner
        tokens, self._is_async[id] = answers[choice.winner]
        return tokens, self._is_async[id]

    def _ask(self, at: int, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """A query changes nothing in a connector, so one that raises an error has just nothing."""
        try:
            tokens, is_async = self._connectors[at].get_num_new_matched_tokens(request, num_computed_tokens)
        except Exception:
            if at not in self._broken:
                self._broken.add(at)
                logger.exception("%s failed to say what it has; later errors of it are counted only", self._names[at])
            return ERROR, False
        return None if tokens is None else max(0, tokens), is_async

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        # blocks are reported as invalid only where their numbers say whose they are
        filled = blocks.get_block_ids()[0] if self._has_one_group else ()
        load = self.chooser.admitted(request.request_id, num_external_tokens, filled)
        is_async = self._is_async.pop(request.request_id, False)
        if load is not None:
            self._steps.begins(load, is_async)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> TimedMetadata:
        all_of = super().build_connector_meta(scheduler_output)
        step = self._steps.begin(scheduler_output.total_num_scheduled_tokens)
        return TimedMetadata(all_of.metadata, all_of.extra_async_saves, step)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        received = connector_output.finished_recving or ()
        self._steps.received(received, connector_output.failed_recving, connector_output.invalid_block_ids)
        timed = connector_output.kv_connector_worker_meta
        if isinstance(timed, TimedWorkerMetadata) and timed.step is not None:
            self._steps.end(timed.step, timed.seconds)

    def request_finished(self, request: Request, blocks: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._forget(request.request_id)
        return super().request_finished(request, blocks)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._forget(request.request_id)
        return super().request_finished_all_groups(request, block_ids)

    def _forget(self, id: str) -> None:
        self.chooser.gone(id)
        self._is_async.pop(id, None)

    # In each worker

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._step = connector_metadata.step if isinstance(connector_metadata, TimedMetadata) else None
        self._seconds = [0.0] * len(self._connectors)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for at, connector in enumerate(self._connectors):
            with self._timing(at):
                connector.start_load_kv(forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        for at, connector in enumerate(self._connectors):
            with self._timing(at):
                connector.wait_for_layer_load(layer_name)

    @contextmanager
    def _timing(self, at: int) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[at] += time.perf_counter() - began

    def build_connector_worker_meta(self) -> TimedWorkerMetadata | None:
        all_of = super().build_connector_worker_meta()
        if all_of is None and self._step is None:
            return None
        metadata = (None,) * len(self._connectors) if all_of is None else all_of.metadata
        return TimedWorkerMetadata(metadata, self._step, self._seconds)

    # In both, and in the frontend

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        told = super().get_kv_connector_stats()
        own = self._counts.take() if self.role is KVConnectorRole.SCHEDULER else None
        if own is not None:
            told = MultiKVConnectorStats() if told is None else told
            told[OWN] = own
        return told

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        received = dict(data or {})
        own = received.pop(OWN, None)
        told = super().build_kv_connector_stats(received)
        if own is not None:
            told[OWN] = ChoiceStats.of(own.data if isinstance(own, ChoiceStats) else own)
        return told

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ChoicePromMetrics:
        arguments = vllm_config, metric_types, labelnames, per_engine_labelvalues
        return ChoicePromMetrics(_names(vllm_config), super().build_prom_metrics(*arguments), *arguments)


def _names(vllm_config: VllmConfig) -> list[str]:
    """Names of the connectors in labels: several may be of one class."""
    classes = [each for each, _ in MultiConnector._get_connector_classes_and_configs(vllm_config)]
    return [f"{at}:{each.__name__}" for at, each in enumerate(classes)]


def _checked(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> VllmConfig:
    """The configuration for vLLM's class, which takes a connector for one group only if the hybrid manager is off.

    vLLM turns it off by itself for its own MultiConnector. In a model of one group it makes no difference.
    """
    classes = [each for each, _ in MultiConnector._get_connector_classes_and_configs(vllm_config)]
    if nested := [each.__name__ for each in classes if issubclass(each, MultiConnector)]:
        raise ConfigurationError(f"{nested[0]} cannot be one of several connectors: list its connectors instead")
    lacking = [each.__name__ for each in classes if not supports_hma(each)]
    scheduling = vllm_config.scheduler_config
    if not lacking or scheduling.disable_hybrid_kv_cache_manager:
        return vllm_config
    if len(kv_cache_config.kv_cache_groups) > 1:
        raise ConfigurationError(
            f"{lacking[0]} does not support models with several KV cache groups: leave it out, or start vLLM with "
            "--disable-hybrid-kv-cache-manager"
        )
    plain = copy.copy(vllm_config)
    plain.scheduler_config = copy.copy(scheduling)
    plain.scheduler_config.disable_hybrid_kv_cache_manager = True
    return plain


def _bytes_per_token(kv_cache_config: KVCacheConfig, ranks: int) -> float:
    """Bytes of one rank, as if windows and states were kept for every token. So many ranks divide the tokens."""
    return sum(
        group.kv_cache_spec.page_size_bytes
        * (1 if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs) else len(group.layer_names))
        / resolve_dcp_kv_block_size(group.kv_cache_spec, ranks)
        for group in kv_cache_config.kv_cache_groups
    )
