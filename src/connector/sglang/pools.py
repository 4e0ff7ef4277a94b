"""SGLang's device pools as groups of our layout, each by SGLang's name for it. A block is a page, of a state a slot.

    KV       full attention: K and V, or the latents of MLA
    SWA      sliding windows: K and V
    MAMBA    states and their convolutions

KV of another shape is refused.
"""

from collections.abc import Iterator
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from cpu_prefix_cache import ConfigurationError, KVGroup, Prefix, State, Window
from cpu_prefix_cache.copying import Part, Role, blocks_first


def groups_of(params: Any) -> dict[PoolName, KVGroup]:
    """All that pages consist of, from SGLang's CacheInitParams. Raises ConfigurationError for what is kept by none."""
    _check(params)
    page, kv = params.page_size, params.token_to_kv_pool_allocator.get_kvcache()
    parts = {name: [*_attention(pool, layers, page)] for name, (pool, layers) in _pools(kv).items()}
    groups: dict[PoolName, KVGroup] = {PoolName.KV: Prefix(parts[PoolName.KV], block_tokens=page)}
    if PoolName.SWA in parts:
        tokens = -(-params.swa_retain_window // page) * page  # SGLang restores these before the token it computes
        groups[PoolName.SWA] = Window(parts[PoolName.SWA], block_tokens=page, window_tokens=tokens + 1)
    if ComponentType.MAMBA in params.tree_components:
        groups[PoolName.MAMBA] = State([*_states(params.req_to_token_pool)], block_tokens=page)
    return groups


def _check(params: Any) -> None:
    states, has_states = params.req_to_token_pool, ComponentType.MAMBA in params.tree_components
    drafts = (params.mtp_draft_device_pools, params.sidecar_draft_device_pools, params.mtp_draft_mamba_pools)
    refused = {
        "pipeline parallelism": params.pp_size > 1,
        "context parallelism": params.attn_cp_size > 1
        or params.token_to_kv_pool_allocator.page_size != params.page_size,
        "a drafter's KV": any(drafts),
        "states that its tree leaves out": isinstance(states, HybridReqToTokenPool) and not has_states,
        "states in int8 or with others beside them": has_states
        and (states.mamba_ckpt_pool is not None or states.short_conv_pool.enabled or states.ngram_pool.enabled),
    }
    for what in (what for what, is_refused in refused.items() if is_refused):
        raise ConfigurationError(f"HostLinker does not keep pages with {what}: serve without it, or without HostLinker")


def _pools(kv: Any) -> dict[PoolName, tuple[Any, dict[int, int]]]:
    """The pools of attention, each with the places of its layers in the lists that it has."""
    if type(kv) is SWAKVPool:
        full = {layer: at for layer, (at, is_window) in kv.layers_mapping.items() if not is_window}
        windows = {layer: at for layer, (at, is_window) in kv.layers_mapping.items() if is_window}
        return {PoolName.KV: (kv.full_kv_pool, full), PoolName.SWA: (kv.swa_kv_pool, windows)}
    if type(kv) is HybridLinearKVPool:
        return {PoolName.KV: (kv.full_kv_pool, kv.full_attention_layer_id_mapping)}
    return {PoolName.KV: (kv, {layer: layer for layer in range(kv.layer_num)})}


def _attention(pool: Any, layers: dict[int, int], page: int) -> Iterator[Part]:
    if type(pool) is MHATokenToKVPool and pool.kv_cache_layout == "nhd" and pool.k_scale_buffer is None:
        buffers = {Role.KEY: pool.k_buffer, Role.VALUE: pool.v_buffer}
    elif type(pool) is MLATokenToKVPool and pool.kv_scale_buffer is None:
        buffers = {Role.LATENT: pool.kv_buffer}
    else:
        raise ConfigurationError(
            f"HostLinker does not keep KV in a {type(pool).__name__} of this layout: serve without HostLinker, or with "
            "KV of full attention, MLA, sliding windows or states, token by token and without scales"
        )
    for layer, at in layers.items():
        for role, of_layers in buffers.items():
            yield blocks_first(layer, role, of_layers[at].unflatten(0, (-1, page)))


def _states(requests: Any) -> Iterator[Part]:
    cache = requests.mamba_pool.mamba_cache
    for layer, at in requests.mamba_map.items():
        yield blocks_first(layer, Role.STATE, cache.temporal[at])
        for number, convolution in enumerate(cache.conv):
            yield blocks_first(layer, Role.CONV_STATE, convolution[at], number=number)
