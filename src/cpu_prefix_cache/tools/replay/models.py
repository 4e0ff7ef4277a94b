"""From a model's config.json to its groups of KV state, and to the bytes of a token and of a checkpoint.

>>> import json, pathlib, tempfile
>>> config = {"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
>>> file = pathlib.Path(tempfile.mkdtemp(), "config.json")
>>> _ = file.write_text(json.dumps(config | {"head_dim": 128}))
>>> groups = read_model(file)
>>> prefix_bytes_per_token(groups) // 2**10, checkpoint_bytes(groups)  # KiB
(128, 0)
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.model.codec import RAW, codec_of
from cpu_prefix_cache.model.groups import ChunkLocalGroup, Group, WindowGroup
from cpu_prefix_cache.model.planner import FAR_CHUNKS, HybridChunkPlanner
from cpu_prefix_cache.tools.replay.layers import LOCAL, PREFIX, STATE, WINDOW, Kind, layers_by_kind
from cpu_prefix_cache.tools.replay.model_config import ModelConfig, bytes_of
from cpu_prefix_cache.tools.replay.state_bytes import state_bytes

BLOCK_TOKENS = 16
NAMES = {
    PREFIX: "full",
    WINDOW: "window",
    LOCAL: "local",
    STATE: "state",
}
# The `max_model_len` of a planner that is only used to compute bytes.
ANY_LENGTH = 2**62


def read_model(
    path: Path, tp: int = 1, *, block_tokens: int = BLOCK_TOKENS, kv_dtype: str | None = None, codec: str = RAW
) -> list[Group]:
    """The groups of a model. `path` is its Hugging Face config.json, or the folder with it.

    Bytes are those of all `tp` ranks together, as host memory keeps them, so a planner for these groups has one rank.
    Ranks share the KV heads; with more ranks than heads each keeps one, and the total grows. A latent (MLA) is the same
    on every rank and kept once, so `tp` does not change it.

    A block of each group covers `block_tokens` tokens. KV has the model's dtype, or `kv_dtype`; states have their own.
    KV is kept by `codec`, states as they are. Draft layers (MTP, EAGLE) are not counted.

    Raises ConfigurationError for a file that is no configuration, and, naming the model_type, for a model whose layout
    does not follow from it with certainty or that cannot be split over so many ranks, or whose KV the codec is not for.
    """
    for name, value in (("tp", tp), ("block_tokens", block_tokens)):
        if value < 1:
            raise ConfigurationError(f"{name} must be at least 1, got {value}")
    config = ModelConfig.read(path)
    layers = layers_by_kind(config)
    groups: list[Group] = []
    for kind, name in NAMES.items():
        if not layers[kind]:
            continue
        size = state_bytes(config, tp) if kind.is_state else _token_bytes(config, tp, kv_dtype) * block_tokens
        numbers = _numbers(config, kind)
        if not kind.is_state:
            _check_codec(config, kv_dtype, codec)
            numbers["codec"] = codec
        groups.append(kind(name=name, block_tokens=block_tokens, block_bytes=layers[kind] * size, **numbers))
    return groups


def prefix_bytes_per_token(groups: Sequence[Group]) -> int:
    """Bytes of each token of a prefix as the host keeps it: the KV of the prefix groups."""
    prefix = [group for group in groups if group.is_prefix]
    return sum(group.device_blocks * group.kept_bytes // group.block_tokens for group in prefix)


def checkpoint_bytes(groups: Sequence[Group]) -> int:
    """The most bytes of a checkpoint: full windows, an attention chunk that is nearly full, and the states."""
    planner = HybridChunkPlanner(groups, max_model_len=ANY_LENGTH)
    return planner.checkpoint_bytes(FAR_CHUNKS)


def in_large_blocks(groups: Sequence[Group], chunk_tokens: int) -> list[Group]:
    """The same groups with the largest blocks that leave the bytes of chunks and checkpoints unchanged.

    A replay with fewer blocks is faster. Raises ConfigurationError if `chunk_tokens` is no whole number of blocks.
    """
    for group in groups:
        if chunk_tokens % group.block_tokens:
            raise ConfigurationError(f"{chunk_tokens} tokens are no whole number of blocks of {group.block_tokens}")
    return [_with_blocks(group, _large_block(group, chunk_tokens)) for group in groups]


def _token_bytes(config: ModelConfig, tp: int, kv_dtype: str | None) -> int:
    """Bytes of one token in one layer, over all ranks: K and V, or a latent."""
    item = _kv_item_bytes(config, kv_dtype)
    if config.has("kv_lora_rank"):
        latent = (config.number("kv_lora_rank") + config.number("qk_rope_head_dim")) * item
        index = config.number("index_head_dim") if config.has("index_head_dim") else 0
        return latent + index + 4 * math.ceil(index / 128)  # an indexer's key of 8-bit values, and a scale for each 128
    heads = config.number("num_key_value_heads", "num_attention_heads")
    if heads % tp and tp % heads:
        raise config.refused(f"{tp} ranks cannot share its {heads} KV heads")
    return 2 * max(heads, tp) * head_dim(config) * item


def head_dim(config: ModelConfig) -> int:
    """Values of one attention head."""
    if "head_dim" in config.values or "attention_head_dim" in config.values:
        return config.number("head_dim", "attention_head_dim")
    return config.number("hidden_size") // config.number("num_attention_heads")


def _kv_item_bytes(config: ModelConfig, kv_dtype: str | None) -> int:
    """Bytes of a KV value: of `kv_dtype` if given, else of the KV quantization, else of the model's dtype."""
    if kv_dtype is not None:
        return bytes_of(kv_dtype)
    quantization = config.values.get("quantization_config")
    scheme = quantization.get("kv_cache_scheme") if isinstance(quantization, dict) else None
    if isinstance(scheme, dict) and scheme.get("num_bits") == 8:
        return 1
    return config.item_bytes()


def _check_codec(config: ModelConfig, kv_dtype: str | None, codec: str) -> None:
    wanted = codec_of(codec).dtype
    dtype = kv_dtype or config.dtype()
    if wanted is not None and (dtype != wanted or _kv_item_bytes(config, kv_dtype) != bytes_of(wanted)):
        raise ConfigurationError(f'codec "{codec}" is for KV of {wanted}, and that of this model is not: leave it out')


def _numbers(config: ModelConfig, kind: Kind) -> dict[str, Any]:
    """The numbers of a kind's rule."""
    names = {WINDOW: "sliding_window", LOCAL: "attention_chunk_size"}
    return {"window_tokens": config.number(names[kind])} if kind in names else {}


def _large_block(group: Group, chunk_tokens: int) -> int:
    """The tokens of the group's largest block: a chunk, or less if windows would then keep more tokens."""
    if group.is_prefix or group.is_state:
        return chunk_tokens
    if isinstance(group, ChunkLocalGroup) and group.window_tokens % group.block_tokens == 0:
        return math.gcd(group.window_tokens, chunk_tokens)
    if not isinstance(group, WindowGroup):
        return group.block_tokens
    sees = group.window_tokens - 1 + group.extra_tokens
    reach = -(-sees // group.block_tokens) * group.block_tokens
    sizes = range(group.block_tokens, chunk_tokens + 1, group.block_tokens)
    return max(size for size in sizes if chunk_tokens % size == 0 and -(-sees // size) * size == reach)


def _with_blocks(group: Group, block_tokens: int) -> Group:
    """The group with blocks of `block_tokens` tokens. The page of a state has the same bytes in any case."""
    times = 1 if group.is_state else block_tokens // group.block_tokens
    return replace(group, block_tokens=block_tokens, block_bytes=group.block_bytes * times)
