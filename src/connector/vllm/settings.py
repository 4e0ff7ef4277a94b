"""The options in `kv_connector_extra_config`, checked when vLLM starts: those of `connector/common/options.py`, and
those of vLLM alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config import ParallelConfig, VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from connector.common.options import BYTES, CODEC, POOL, TIER, Check, checked, one_of, whole
from connector.common.options import CHECKS as COMMON_CHECKS
from connector.tier.cache import EngineTier, build_cache
from connector.tier.options import TierOption, tier_option
from connector.vllm import versions
from connector.vllm.groups import (
    device_blocks_per_chunk,
    hash_blocks_per_chunk,
    planned_group_ids,
    planner_for,
    replayed_tokens,
    sharers_of,
)
from connector.vllm.node_pool import ALWAYS, EnginePool, PoolOption, engine_pool, pool_option
from connector.vllm.resets import RESET, RESETS, WITH_DEVICE
from connector.vllm.tier_settings import tier_settings
from cpu_prefix_cache import ConfigurationError, Device, SharedTier
from cpu_prefix_cache.deciding import (
    RAW,
    CacheOptions,
    CPUPrefixCache,
    EngineSteps,
    EngineTraits,
    HybridChunkPlanner,
    KeptCache,
)

SYNC = "sync_load_bytes"
# 1,024 tokens of Llama 3.1 8B, 2.4 ms of a link of 55 GB/s. Where steps wait, the first token of 512, 1,024 and 2,048
# known tokens comes 13, 10 and 10 ms sooner beside 8 requests that decode, whose longest step takes 3, 7 and 10 ms more
# (H200, benchmarks/results/short_h200.json).
SYNC_LOAD_BYTES = 128 << 20

CHECKS: Mapping[str, Check] = {
    **COMMON_CHECKS,
    "checkpoint_interval": whole(1, "tokens"),
    RESET: one_of(*RESETS),
    TIER: tier_option,
    POOL: pool_option,
    SYNC: whole(0, "bytes"),
}


@dataclass(frozen=True)
class Settings:
    """Settings that both halves are built from.

    Each rank has a host region, or `sharers` adjacent ones share one: a tensor-parallel group, if its ranks hold the
    same bytes in some groups. With a pool the region is the keeper's, and all ranks share it; how large it is they
    learn when they join.
    """

    planner: HybridChunkPlanner
    group_ids: Sequence[int]  # vLLM's ids of the planner's groups
    host_bytes: int  # of one region
    regions: int
    ranks: int
    sharers: int
    hashes_per_chunk: int
    replayed_tokens: int  # how many tokens at the end of a hit vLLM computes again
    steps: EngineSteps
    overlaps: bool  # whether vLLM schedules a step before the one before has ended
    publishes_events: bool  # whether vLLM publishes KV events
    tier: EngineTier | None
    pool: EnginePool | None
    revision_file: str | None  # of the tier or the pool, if it has one
    reset: str  # one of RESETS
    sync_load_bytes: int  # that one step may load on each rank for requests which it computes
    options: Mapping[str, Any]  # the options given, without BYTES, POOL, CODEC, TIER, RESET and SYNC

    @classmethod
    def of(cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> "Settings":
        """Raises ConfigurationError with a message that names the remedy."""
        options = checked_options(vllm_config)
        codec = options.pop(CODEC, RAW)
        parallel, in_pool = vllm_config.parallel_config, options.pop(POOL, None)
        planner = planner_for(
            vllm_config, kv_cache_config, in_pages=TIER in options, codec=codec, in_pool=in_pool is not None
        )
        _check_interval(options.get("checkpoint_interval"), planner, kv_cache_config)
        _check_launcher(parallel)
        _check_routed_experts(vllm_config)
        sharers = sharers_of(planner, parallel, in_pool=in_pool is not None)
        regions = parallel.world_size // sharers
        hashes = hash_blocks_per_chunk(vllm_config, kv_cache_config)
        pool = None
        if in_pool is not None:
            pool = engine_pool(in_pool, options, vllm_config, planner, hashes)
            options |= ALWAYS
        else:
            _check_bytes(options[BYTES], planner.fewest_blocks * planner.host_block_bytes * regions)
        option = options.pop(TIER, None)
        sync_load_bytes = options.pop(SYNC, SYNC_LOAD_BYTES)
        return cls(
            planner,
            group_ids=planned_group_ids(kv_cache_config),
            host_bytes=options.pop(BYTES, 0) // regions,
            regions=regions,
            ranks=parallel.world_size,
            sharers=sharers,
            hashes_per_chunk=hashes,
            replayed_tokens=replayed_tokens(kv_cache_config),
            steps=_steps(vllm_config, planner, kv_cache_config),
            overlaps=vllm_config.max_concurrent_batches > 1,
            publishes_events=_publishes_events(vllm_config),
            revision_file=_revision_file(option or in_pool),
            pool=pool,
            tier=_tier(option, vllm_config, planner, hashes, regions),
            reset=options.pop(RESET, WITH_DEVICE),
            sync_load_bytes=sync_load_bytes,
            options=options,
        )

    @property
    def is_shared(self) -> bool:
        """Whether several ranks share a region."""
        return self.sharers > 1

    @property
    def shares_tier(self) -> bool:
        """Whether the tier is a store that other engines write to as well."""
        return self.tier is not None and isinstance(self.tier.tier, SharedTier)

    @property
    def hits_end_within_blocks(self) -> bool:
        """Whether vLLM may resume within a block of attention: beside states, where hashes are shorter than it."""
        return self.hashes_per_chunk > 1 and any(group.is_state for group in self.planner.groups)

    @property
    def revision(self) -> str | None:
        """The name of the weights at start, where a tier or a pool knows one."""
        named = self.pool or self.tier
        return None if named is None else str(named.namespace.spelled["revision"])

    @property
    def host_blocks(self) -> int:
        return self.host_bytes // self.planner.host_block_bytes

    def build(self, device: Device) -> CPUPrefixCache | KeptCache:
        """The cache, a TieredCache if there is a tier, a KeptCache with a pool. Raises ConfigurationError."""
        if self.pool is not None:
            return self.pool.build(device, self.ranks, self.options.get("min_load_tokens", 0))
        return build_cache(
            self.planner,
            device,
            self.tier,
            host_blocks=self.host_blocks,
            options=CacheOptions(**{"min_load_tokens": None, **self.options}),
            engine=EngineTraits(
                ranks=self.ranks,
                steps=self.steps,
                exchanges=not self.is_shared,
                log_boundaries=self.publishes_events,
            ),
        )


def _check_bytes(given: int, least: int) -> None:
    if given < least:
        raise ConfigurationError(
            f"{BYTES} must hold a chunk and its checkpoint on all ranks, at least {least} bytes; got {given}"
        )


def _revision_file(option: TierOption | PoolOption | None) -> str | None:
    return None if option is None else option.revision_file


def _tier(
    option: TierOption | None, vllm_config: VllmConfig, planner: HybridChunkPlanner, hashes: int, regions: int
) -> EngineTier | None:
    if option is None:
        return None
    return tier_settings(option, vllm_config, planner, planner.grid_tokens // hashes, regions)


def _steps(vllm_config: VllmConfig, planner: HybridChunkPlanner, kv_cache_config: KVCacheConfig) -> EngineSteps:
    speculative = vllm_config.speculative_config
    return EngineSteps(
        max_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        decode_tokens=1 + (speculative.num_speculative_tokens if speculative else 0),
        # A worker checks its copies right after it launches a step, and its report arrives when the step has ended.
        # So a copy that ends during its own step is found by the check of the next one. With asynchronous scheduling
        # the next step is launched while this one begins: the copy is found one check later, and by the time that
        # report arrives another step has been scheduled.
        report_steps=4 if vllm_config.scheduler_config.async_scheduling else 2,
        groups=len(kv_cache_config.kv_cache_groups),
        blocks_per_chunk=device_blocks_per_chunk(planner, kv_cache_config),
        asks_in_decode=False,
    )


def _check_launcher(parallel: ParallelConfig) -> None:
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        raise ConfigurationError(
            "under external_launcher each rank schedules on its own and receives no reports of other ranks; "
            "let vLLM start its ranks (--distributed-executor-backend mp or ray)"
        )


def _check_routed_experts(vllm_config: VllmConfig) -> None:
    """vLLM keeps them by block, of as many as the device has, and stops at a hit of which it has none (before 0.31 it
    returns those of other tokens).
    """
    if versions.returns_routed_experts(vllm_config):
        raise ConfigurationError(
            "vLLM has the routed experts of what the device holds alone, and stops at hits beyond: start it without "
            "--enable-return-routed-experts, or without the host cache"
        )


def _check_interval(interval: int | None, planner: HybridChunkPlanner, kv_cache_config: KVCacheConfig) -> None:
    """Checkpoints need blocks with hashes, and vLLM hashes those of windows only where it keeps them: every
    `prefix_cache_retention_interval` tokens; 0: only at the end of prompts; None: at every boundary. States it keeps
    where steps are to end (step_ends.py).
    """
    kept = kv_cache_config.prefix_cache_retention_interval
    if interval is None or kept is None or not planner.has_checkpoints or planner.has_states_alone:
        return
    if kept and interval % kept == 0:
        return
    raise ConfigurationError(
        f"vLLM keeps windows {f'every {kept} tokens' if kept else 'at the end of prompts only'}, so there "
        f"is nothing to store every {interval}; start it with --prefix-cache-retention-interval {interval}"
    )


def _publishes_events(vllm_config: VllmConfig) -> bool:
    events = vllm_config.kv_events_config
    return events is not None and events.enable_kv_cache_events


def checked_options(vllm_config: VllmConfig) -> dict[str, Any]:
    """The options given, TIER as a TierOption.

    Raises ConfigurationError if one is missing, unknown or out of range, and for a role in which vLLM would expect one
    half of the work.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_role != "kv_both":
        raise ConfigurationError(
            f"kv_role must be kv_both, got {transfer.kv_role}: the host cache serves the engine that fills it"
        )
    return checked(transfer.kv_connector_extra_config, CHECKS)
