"""Translates vLLM's KV cache groups into the planner's: the kind of each group, and the bytes of one block.

The kind follows from the exact type of a layer's spec. A subclass may keep its blocks differently, so an unknown type
raises ConfigurationError with its name. Bytes are counted without padding, as `tensors.py` finds them.

Groups that vLLM itself does not cache are left out (its `prefix_cacheable_group_ids` names the others):

    scratch             a block of its own for each request, which vLLM fills anew
    replayed windows    after a hit vLLM computes their tokens again, and leaves alone what other groups have of these

Scheduler and ranks must compute the same host blocks, but the scheduler knows less about the layers:

    a group whose layers differ in size        the scheduler has the spec of its first layer only
    a group with no layers on this rank        another pipeline stage has them

So ranks plan with the scheduler's view too (`generate_scheduler_kv_cache_config`); `own_block_bytes` is what the
layers of this rank take.

A spec's block is that of one rank. Under decode context parallelism the ranks divide the tokens of full attention and
MLA among them, and the scheduler's block covers those of all; under prefill context parallelism alone all have all.

The ranks of a tensor-parallel group share a region if they have the same bytes in a group: all of them a latent of
which they divide no tokens, some of them a KV head (`heads.py`). In a keeper's pool all ranks of an engine do, also its
stages. Host blocks are rows of as many lanes as there are ranks with bytes of their own.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from vllm.config import ParallelConfig, VllmConfig
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    resolve_dcp_kv_block_size,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, UniformTypeKVCacheSpecs

from connector.vllm import versions
from connector.vllm.heads import different_heads
from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.deciding import (
    RAW,
    ChunkLocalGroup,
    Group,
    HybridChunkPlanner,
    PrefixGroup,
    StateGroup,
    WindowGroup,
    codec_of,
)

Kept = tuple[type[Group] | None, dict[str, Any]]  # a kind of group, None if nothing is kept, and fields of it


def planner_for(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    *,
    in_pages: bool = False,
    codec: str = RAW,
    in_pool: bool = False,
) -> HybridChunkPlanner:
    """The planner of this model, for one region as the scheduler sees it. With `in_pages` host blocks are whole pages.
    Groups of the dtype that `codec` is for are kept in its form, and others as they are. With `in_pool` all ranks share
    the region.

    Raises ConfigurationError for an unknown kind of KV state, and for one that cannot be kept as configured.
    """
    kv_cache_config = generate_scheduler_kv_cache_config([kv_cache_config])
    grid, _ = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    drops = _lookahead_tokens(vllm_config, grid)
    pages = layer_pages(kv_cache_config)
    groups = [
        _group(at, kind, group, pages, drops, codec)
        for at, group in enumerate(kv_cache_config.kv_cache_groups)
        if (kind := _one_kind(group)) is not None
    ]
    if codec != RAW and all(group.codec == RAW for group in groups):
        form = codec_of(codec)
        raise ConfigurationError(
            f'codec "{codec}" is for KV of {form.dtype} in blocks of {form.unit} bytes, of which this model has none: '
            "leave it out"
        )
    _check_lengths(groups, grid)
    parallel = vllm_config.parallel_config
    ranks = parallel.decode_context_parallel_size
    specs = [kv_cache_config.kv_cache_groups[at].kv_cache_spec for at in planned_group_ids(kv_cache_config)]
    divided = [_divided(group, spec, ranks) for group, spec in zip(groups, specs, strict=True)]
    heads = different_heads(vllm_config)
    shared = [_with_heads(group, spec, heads) for group, spec in zip(divided, specs, strict=True)]
    sharers = parallel.tensor_parallel_size
    if in_pool:
        shared = [_in_each(group, parallel.world_size // sharers) for group in shared]
        sharers = parallel.world_size
    return HybridChunkPlanner(
        shared,
        max_model_len=vllm_config.model_config.max_model_len,
        grid_tokens=grid,
        ranks=_row_lanes(shared, sharers) if in_pool or _has_replicas(shared) else 1,
        in_pages=in_pages,
    )


def _row_lanes(groups: Sequence[Group], ranks: int) -> int:
    """The lanes of a host block in a region that so many ranks share."""
    return math.lcm(*(group.lanes or ranks for group in groups))


def _check_lengths(groups: Sequence[Group], grid: int) -> None:
    """Raises ConfigurationError for block lengths that vLLM itself does not handle.

    vLLM finds chunked-local attention only if all groups have blocks of the same length. And it aligns steps to the
    shortest blocks of one rank (`Scheduler._mamba_block_aligned_split`): a longer state block then gets the hash of its
    end, but holds the state of an earlier token.
    """
    shortest = min(groups, key=lambda group: group.block_tokens)
    for group in groups:
        if isinstance(group, ChunkLocalGroup) and group.block_tokens != grid:
            raise ConfigurationError(
                f"group {group.name!r} has blocks of {group.block_tokens} tokens where prefix hits come every {grid}: "
                "vLLM finds chunked-local attention only in blocks of that length; start it with "
                "--disable-hybrid-kv-cache-manager"
            )
        if group.is_state and group.block_tokens > shortest.block_tokens:
            raise ConfigurationError(
                f"group {group.name!r} has a state every {group.block_tokens} tokens, and group {shortest.name!r} has "
                f"blocks of {shortest.block_tokens}: vLLM then hashes states as if they were of later tokens; give the "
                f"second group (often a drafter's) blocks of at least {group.block_tokens} tokens"
            )


def planned_group_ids(kv_cache_config: KVCacheConfig) -> list[int]:
    """vLLM's ids of the planner's groups: those that keep any state.

    Raises ConfigurationError for layers of different kinds in one group.
    """
    groups = enumerate(kv_cache_config.kv_cache_groups)
    return [at for at, group in groups if _one_kind(group) is not None]


def own_block_bytes(kv_cache_config: KVCacheConfig) -> list[int]:
    """The bytes of one block of each planned group, in the layers that this rank has."""
    groups = [kv_cache_config.kv_cache_groups[at] for at in planned_group_ids(kv_cache_config)]
    return [sum(_block_bytes(spec) for spec in _layers(group)) for group in groups]


def sharers_of(planner: HybridChunkPlanner, parallel: ParallelConfig, *, in_pool: bool = False) -> int:
    """How many adjacent ranks share a region."""
    if in_pool:
        return int(parallel.world_size)
    return int(parallel.tensor_parallel_size) if _has_replicas(planner.groups) else 1


def _has_replicas(groups: Sequence[Group]) -> bool:
    """Whether ranks of a tensor-parallel group hold the same bytes, in some groups at least."""
    return any(group.lanes is not None for group in groups)


def _in_each(group: Group, count: int) -> Group:
    """The group where so many tensor-parallel groups, each with bytes of its own, share a region."""
    return group if group.lanes is None else replace(group, lanes=group.lanes * count)


def hash_blocks_per_chunk(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """How many of a request's block hashes make a chunk. The last one is the chunk's key."""
    grid, hashed = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return grid // hashed


def device_blocks_per_chunk(planner: HybridChunkPlanner, kv_cache_config: KVCacheConfig) -> int:
    """The most blocks that vLLM allocates for the tokens of a chunk: of scratch one."""
    left_out = [group for group in kv_cache_config.kv_cache_groups if _one_kind(group) is None]
    lengths = [group.block_tokens for group in planner.groups]
    lengths += [each.kv_cache_spec.block_size if _replayed(each) else planner.grid_tokens for each in left_out]
    return sum(planner.grid_tokens // length for length in lengths)


def replayed_tokens(kv_cache_config: KVCacheConfig) -> int:
    """How many tokens vLLM computes again at the end of a hit, to rebuild windows that it does not cache.

    It leaves alone what other groups have of these tokens, and computes hits of no more tokens from the beginning.
    """
    return max(map(_replayed, kv_cache_config.kv_cache_groups), default=0)


def layer_pages(kv_cache_config: KVCacheConfig) -> dict[str, int]:
    """The bytes of each layer's page in a block, padding included."""
    tensors = kv_cache_config.kv_cache_tensors
    return {name: min(each.layer_stride, each.block_stride) for each in tensors for name in each.layers}


def _lookahead_tokens(vllm_config: VllmConfig, grid: int) -> int:
    """The tokens that vLLM drops from the end of a hit for EAGLE drafts: with a connector, a block (config/vllm.py)."""
    speculative = vllm_config.speculative_config
    return grid if speculative is not None and speculative.use_eagle_block_drop() else 0


def _group(
    at: int, kind: type[Group], group: KVCacheGroupSpec, pages: Mapping[str, int], lookahead_tokens: int, codec: str
) -> Group:
    _, fields = _kept(group.kv_cache_spec)
    if kind.is_prefix:
        fields["lookahead_tokens"] = lookahead_tokens
    block_bytes, form = _scheduled_bytes(group, pages), codec_of(codec)
    is_coded = _dtypes(group) == {form.dtype} and block_bytes % form.unit == 0
    return kind(
        name=f"{kind.kind}-{at}",
        block_tokens=group.kv_cache_spec.block_size,
        block_bytes=block_bytes,
        codec=codec if is_coded else RAW,
        **fields,
    )


def _divided(group: Group, spec: KVCacheSpec, ranks: int) -> Group:
    """The group where so many ranks divide the tokens of a prompt among them (decode context parallelism).

    A block covers the tokens of all of them, and is as large on each as it was. Raises ConfigurationError for groups of
    which vLLM divides none.
    """
    tokens = resolve_dcp_kv_block_size(spec, ranks)
    if tokens == spec.block_size:
        return group
    if not group.is_prefix:
        raise ConfigurationError(
            f"group {group.name!r} is neither full attention nor MLA, and vLLM divides the tokens of no others; start "
            "it with --decode-context-parallel-size 1"
        )
    return replace(group, block_tokens=tokens, lanes=None)


def _with_heads(group: Group, spec: Any, heads: int | None) -> Group:
    """The group where the ranks have so many different KV heads, if not None: then each has one."""
    has_heads = group.lanes is None and not group.is_state and spec.num_kv_heads == 1
    return replace(group, lanes=heads) if heads is not None and has_heads else group


def _dtypes(group: KVCacheGroupSpec) -> set[str]:
    """The types of all elements of a group, as torch names them."""
    found = [dtype for spec in _specs(group) for dtype in (spec.dtypes if _is_state(spec) else [spec.dtype])]
    return {str(dtype).removeprefix("torch.") for dtype in found}


def _scheduled_bytes(group: KVCacheGroupSpec, pages: Mapping[str, int]) -> int:
    """The bytes of a group's block as the scheduler knows them: where layers differ in size, from their pages."""
    of_layers = [pages.get(name) for name in group.layer_names]
    if len(set(of_layers)) > 1:
        return sum(page or _block_bytes(group.kv_cache_spec) for page in of_layers)
    return _block_bytes(group.kv_cache_spec) * max(1, len(of_layers))


def _layers(group: KVCacheGroupSpec) -> Sequence[KVCacheSpec]:
    """The spec of each layer of the group that this rank has."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return [spec.kv_cache_specs[name] for name in group.layer_names]
    return [spec] * len(group.layer_names)


def _one_kind(group: KVCacheGroupSpec) -> type[Group] | None:
    """The kind of all layers of a group, on this stage and others; None if nothing is kept of them.

    Raises ConfigurationError if they differ.
    """
    kind, *others = {_kept(each)[0] for each in _specs(group)}
    if others:
        kinds = sorted("none" if each is None else each.kind for each in (kind, *others))
        raise ConfigurationError(f"layers of one KV cache group are of different kinds: {kinds}")
    return kind


def _replayed(group: KVCacheGroupSpec) -> int:
    return max(map(versions.replayed_tokens, _specs(group)))


def _specs(group: KVCacheGroupSpec) -> Collection[KVCacheSpec]:
    spec = group.kv_cache_spec
    return spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


def _is_state(spec: KVCacheSpec) -> bool:
    return type(spec).__name__ == "MambaSpec"


def _kept(spec: KVCacheSpec) -> Kept:
    name = type(spec).__name__
    if name not in _KNOWN:
        raise ConfigurationError(f"KV state of kind {name} is not known; known are {', '.join(sorted(_KNOWN))}")
    return _KNOWN[name](spec)


def _state(spec: Any) -> Kept:
    if spec.mamba_cache_mode != "align":
        raise ConfigurationError(
            f'recurrent state with mamba_cache_mode "{spec.mamba_cache_mode}" is not supported; '
            "start vLLM with --mamba-cache-mode align"
        )
    return StateGroup, {}


def _window(spec: Any, **more: Any) -> Kept:
    if versions.replayed_tokens(spec):
        return None, {}
    return WindowGroup, {"window_tokens": spec.sliding_window, "extra_tokens": spec.extra_retained_tokens, **more}


_KNOWN: dict[str, Callable[[Any], Kept]] = {
    "FullAttentionSpec": lambda spec: (PrefixGroup, {}),
    "MLAAttentionSpec": lambda spec: (PrefixGroup, {"lanes": 1}),
    "SlidingWindowSpec": _window,
    "SlidingWindowMLASpec": partial(_window, lanes=1),
    "ChunkedLocalAttentionSpec": lambda spec: (ChunkLocalGroup, {"window_tokens": spec.attention_chunk_size}),
    "MambaSpec": _state,
    "CircularBufferSpec": lambda spec: (None, {}),  # vLLM rebuilds it
}


def _block_bytes(spec: Any) -> int:
    """The bytes of one layer's block without padding: `real_page_size_bytes`, which MambaSpec lacks."""
    if _is_state(spec):
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))
    return int(spec.real_page_size_bytes)
