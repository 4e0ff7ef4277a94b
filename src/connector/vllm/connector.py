"""The class vLLM constructs: once in the scheduler's process, once in each worker's. The worker half is not built yet.

When it is, this will be how to turn it on:

vllm serve MODEL --kv-transfer-config '{"kv_connector": "CPUPrefixCacheConnector",
    "kv_connector_module_path": "connector.vllm", "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"cpu_bytes_to_use": 51539607552}}'
"""

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from connector.vllm.messages import StepMetadata
from connector.vllm.scheduler import SchedulerHalf
from connector.vllm.settings import Settings

WORKER_NOT_BUILT = "the worker half of CPUPrefixCacheConnector is not built yet"


class CPUPrefixCacheConnector(KVConnectorBase_V1, SupportsHMA):
    """Hands each call of vLLM's to the half it concerns. vLLM's docstrings of these methods say when they come."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        if role is not KVConnectorRole.SCHEDULER:
            raise NotImplementedError(WORKER_NOT_BUILT)
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = Settings.of(vllm_config, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a store that is lost is a miss, and nothing worse

    # In the scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self.scheduler = SchedulerHalf(self._settings, gpu_block_pool)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self.scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        return self.scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.scheduler.update_connector_output(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.scheduler.request_finished(request)
        return False, None  # vLLM frees its blocks at once: what is being copied has a reference of ours

    def reset_cache(self) -> bool:
        self.scheduler.reset_cache()
        return True

    def has_pending_push_work(self) -> bool:
        return self.scheduler.has_transfers()  # or an idle engine would not step, and hear no reports

    # In each worker

    def start_load_kv(self, forward_context: object, **kwargs: Any) -> None:
        raise NotImplementedError(WORKER_NOT_BUILT)

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise NotImplementedError(WORKER_NOT_BUILT)

    def save_kv_layer(self, layer_name: str, kv_layer: object, attn_metadata: object, **kwargs: Any) -> None:
        raise NotImplementedError(WORKER_NOT_BUILT)

    def wait_for_save(self) -> None:
        raise NotImplementedError(WORKER_NOT_BUILT)
