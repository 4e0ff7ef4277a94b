"""How vLLM makes groups of layers and divides memory among them. From 0.33 on the groups are made first, elsewhere."""

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

try:
    from vllm.v1.core.kv_cache_planning import (
        get_global_kv_cache_groups,
        get_kv_cache_configs,
        get_kv_cache_groups,
    )
except ImportError:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs, get_kv_cache_groups

    get_global_kv_cache_groups = None

__all__ = ["get_kv_cache_groups", "kv_cache_configs"]


def kv_cache_configs(config: VllmConfig, stages: list[dict[str, KVCacheSpec]], memory: int) -> list[KVCacheConfig]:
    """KV caches of each stage, which has so many bytes."""
    groups = [get_global_kv_cache_groups(config, stages)] if get_global_kv_cache_groups else []
    return get_kv_cache_configs(config, stages, [memory] * len(stages), *groups)
