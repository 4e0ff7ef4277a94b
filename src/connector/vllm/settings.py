"""From vLLM's configuration to ours, refused in one sentence when it asks for what is not built."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
    iter_layer_specs,
)

from cpu_prefix_cache import ConfigurationError, CPUPrefixCache, Device, Group, GroupKind, HybridChunkPlanner

NUMBERS = {"store_after": "prompts", "min_store_tokens": "tokens"}
OPTIONS = ("cpu_bytes_to_use", "offload", "policy", *NUMBERS)


@dataclass(frozen=True)
class Settings:
    """`planner` for the model's groups, and what the rest of vLLM's configuration says to a CPUPrefixCache.

    Of `kv_connector_extra_config`: `cpu_bytes_to_use` is the host memory of all ranks together; `offload`, `policy`,
    `store_after` and `min_store_tokens` are passed on.
    """

    planner: HybridChunkPlanner
    options: Mapping[str, Any]

    @classmethod
    def of(cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> "Settings":
        extra = dict(vllm_config.kv_transfer_config.kv_connector_extra_config)
        unknown = sorted(set(extra) - set(OPTIONS))
        if unknown:
            raise ConfigurationError(f"unknown option {unknown[0]!r}; known options are {', '.join(OPTIONS)}")
        host_bytes = extra.pop("cpu_bytes_to_use", None)
        if type(host_bytes) is not int:
            raise ConfigurationError(
                f"kv_connector_extra_config needs cpu_bytes_to_use, a whole number of bytes, got {host_bytes!r}"
            )
        for name in NUMBERS.keys() & extra.keys():
            if type(extra[name]) is not int:
                raise ConfigurationError(f"{name} is a whole number of {NUMBERS[name]}, got {extra[name]!r}")
        planner = _planner(vllm_config, kv_cache_config)
        speculative = vllm_config.speculative_config
        options = {
            "host_blocks": host_bytes // vllm_config.parallel_config.world_size // planner.host_block_bytes,
            "ready_blocks": 0,  # until every rank has reported its region
            "ranks": vllm_config.parallel_config.world_size,
            "max_step_tokens": _step_tokens(vllm_config, planner.grid_tokens),
            "decode_step_tokens": 1 + (speculative.num_speculative_tokens if speculative else 0),
            **extra,
        }
        return cls(planner, options)

    def build(self, device: Device) -> CPUPrefixCache:
        return CPUPrefixCache(self.planner, device, **self.options)


def _step_tokens(vllm_config: VllmConfig, grid: int) -> int:
    """What one step can allocate: blocks for its tokens, and one that each request has begun and not filled."""
    scheduler = vllm_config.scheduler_config
    return int(scheduler.max_num_batched_tokens + scheduler.max_num_seqs * grid)


def _planner(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> HybridChunkPlanner:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups) or "none"
        raise ConfigurationError(f"models with one KV cache group are built, with several not yet; got {kinds}")
    grid, _ = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return HybridChunkPlanner(
        [_group(groups[0], grid)], max_model_len=vllm_config.model_config.max_model_len, grid_tokens=grid
    )


def _group(group: KVCacheGroupSpec, block_tokens: int) -> Group:
    spec = group.kv_cache_spec
    for each in iter_layer_specs(spec):
        # Not isinstance: a subclass may keep its blocks by another rule.
        if type(each) not in (FullAttentionSpec, MLAAttentionSpec):
            raise ConfigurationError(f"KV state of kind {type(each).__name__} is not built yet; full attention is")
    layers = 1 if isinstance(spec, UniformTypeKVCacheSpecs) else len(group.layer_names)
    return Group(
        name="attention",
        kind=GroupKind.PREFIX,
        block_tokens=block_tokens,
        block_bytes=spec.page_size_bytes * layers,
    )
