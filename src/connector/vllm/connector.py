"""The connector class. vLLM constructs it once in the scheduler's process and once in each worker.

vllm serve MODEL --kv-transfer-config '{"kv_connector": "CPUPrefixCacheConnector", "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"cpu_bytes_to_use": 51539607552}}'
"""

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from connector.vllm import versions
from connector.vllm.log import log_through_vllm
from connector.vllm.memory_order import is_asked_for_the_engine, wanted_order
from connector.vllm.messages import StepMetadata, WorkerReports
from connector.vllm.metrics import CachePromMetrics, CacheStats
from connector.vllm.pool_view import PoolView, check_pool
from connector.vllm.scheduler import SchedulerHalf
from connector.vllm.settings import Settings, checked_options
from connector.vllm.touched import check_messages, check_overrides, is_made_by_vllm
from cpu_prefix_cache_vllm import register

if TYPE_CHECKING:  # it imports what copies, and the scheduler does not
    from connector.vllm.tensors import Registered

logger = logging.getLogger(__name__)


class CPUPrefixCacheConnector(KVConnectorBase_V1, SupportsHMA):
    """Passes each call to the scheduler half or the worker half. The base class documents when vLLM makes each call.

    Without vLLM's prefix caching there are no block hashes: the connector logs a warning and does nothing.
    """

    _cache_hit_source = versions.host_hit_source()

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_through_vllm()
        check_overrides(CPUPrefixCacheConnector)
        self.scheduler: SchedulerHalf | None = None
        self.worker: Any = None
        self._settings: Settings | None = None
        self._is_alone = is_made_by_vllm(self) and not versions.zeroes_new_blocks(kv_cache_config)
        if not vllm_config.cache_config.enable_prefix_caching:
            checked_options(vllm_config)
            logger.warning(
                "vLLM's prefix caching is off, so the host prefix cache is off; start vLLM with prefix caching"
            )
            return
        self._settings = settings = Settings.of(vllm_config, kv_cache_config)  # raises in every process
        if role is KVConnectorRole.SCHEDULER:
            versions.warn_if_untested()
            if settings.hits_end_within_blocks:
                logger.warning(
                    "vLLM may read wrong KV where a hit ends within a block, and what it computes behind that is kept: "
                    "do without prefix_match_unit, or decode context parallelism beside states (vllm#55112)"
                )
        else:
            from connector.vllm.worker import WorkerHalf  # imports torch and Triton, which the scheduler does not need

            self.worker = WorkerHalf(settings, vllm_config, kv_cache_config)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return wanted_order(vllm_config) if is_asked_for_the_engine() else None

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a lost store is only a miss later

    # In the scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        if self._settings is not None:
            check_messages()
            check_pool(gpu_block_pool)
            self.scheduler = SchedulerHalf(self._settings, PoolView(gpu_block_pool), is_alone=self._is_alone)

    def on_new_request(self, request: Request) -> None:
        if self.scheduler is not None:
            self.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self.scheduler is None:
            return 0, False
        return self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if self.scheduler is not None:
            self.scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        return StepMetadata() if self.scheduler is None else self.scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self.scheduler is not None:
            self.scheduler.update_connector_output(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self.scheduler is not None:
            self.scheduler.request_finished(request)
        return False, None  # vLLM may free the blocks now: sources of stores have a reference of their own

    def reset_cache(self) -> bool:
        return self.scheduler is None or self.scheduler.reset_cache()

    def has_pending_push_work(self) -> bool:
        # an idle engine must go on stepping until all reports have arrived
        return self.scheduler is not None and self.scheduler.has_transfers()

    def take_events(self) -> Iterable[KVCacheEvent]:
        return () if self.scheduler is None else self.scheduler.take_events()

    # In each worker

    def register_kv_caches(self, kv_caches: "Mapping[str, Registered]") -> None:
        if self.worker is not None:
            self.worker.register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self.worker is not None and isinstance(connector_metadata, StepMetadata):
            self.worker.begin(connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        received, failed = (set(), set()) if self.worker is None else self.worker.results()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def build_connector_worker_meta(self) -> WorkerReports | None:
        return None if self.worker is None else self.worker.reports()

    def shutdown(self) -> None:
        for half in (self.worker, self.scheduler):
            if half is not None:
                half.close()

    # In both halves, and in the frontend

    def get_kv_connector_stats(self) -> CacheStats | None:
        half = self.worker if self.scheduler is None else self.scheduler
        return None if half is None else half.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> CacheStats:
        return CacheStats.of(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> CachePromMetrics:
        return CachePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Copies run beside the forward pass: there is nothing to do for single layers

    def start_load_kv(self, forward_context: object, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: object, attn_metadata: object, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass


# Needed where the entry point is not installed: MultiConnector looks up the class of its parts' statistics by name.
register()
