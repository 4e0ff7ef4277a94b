"""KV of DeepSeek V4-Flash and V4.1-Flash, as vLLM's own layers describe it (`vllm/models/deepseek_v4*`), with fp8 KV.

    V4-Flash       43 layers, all with a window of 128: 21 keep a latent of each 4 tokens and an indexer's key, and
                   20 one of each 128; compressors keep the tokens that they have not compressed
    V4.1-Flash     40 layers, all with a window of 128: layers 2, 8 and 14 keep latents and keys of each 2 tokens,
                   layer 20 of each token, and the others read those

A latent, and a token of a window, takes 584 bytes, and a key 132. Pages are padded to multiples of 576.
"""

import torch
from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheSpec, MLAAttentionSpec, SlidingWindowMLASpec

BLOCK = 256  # tokens
V41_SOURCES = {2: 2, 8: 2, 14: 2, 20: 1}  # tokens in a latent, by layer

_ROWS = dict(num_kv_heads=1, max_tp_shards=1, alignment=576)
_PACKED = _ROWS | dict(head_size=512, dtype=torch.uint8, cache_dtype_str="fp8_ds_mla", model_version="deepseek_v4")
_PACKED |= dict(state_content_bytes=584)


def v4_flash() -> dict[str, KVCacheSpec]:
    specs: dict[str, KVCacheSpec] = {f"{at}.window": _window(64) for at in range(43)}
    for at in range(2, 43):
        ratio = 128 if at % 2 else 4
        specs[f"{at}.latent"] = _latent(ratio)
        specs[f"{at}.open"] = _open(4, 2048, 8) if ratio == 4 else _open(8, 1024, 128)
        if ratio == 4:
            specs[f"{at}.key"] = _key(ratio)
            specs[f"{at}.key.open"] = _open(4, 512, 8)
    return specs


def v41_flash(replays: bool = True) -> dict[str, KVCacheSpec]:
    """`replays` is vLLM's default, `--swa-bounded-replay`."""
    more = {"bounded_replay": True} if replays else {}
    specs: dict[str, KVCacheSpec] = {f"{at}.window": _window(32, **more) for at in range(40)}
    for at, ratio in V41_SOURCES.items():
        specs[f"{at}.latent"] = _latent(ratio)
        specs[f"{at}.key"] = _key(ratio)
        if ratio > 1:
            ring = dict(num_kv_heads=1, head_size=1024, head_size_v=0, dtype=torch.float32)
            specs[f"{at}.ring"] = CircularBufferSpec(block_size=8, **ring)
    return specs


def _latent(tokens: int) -> KVCacheSpec:
    return MLAAttentionSpec(**_PACKED, block_size=BLOCK, tokens_per_state=tokens)


def _key(tokens: int) -> KVCacheSpec:
    return MLAAttentionSpec(**_ROWS, block_size=BLOCK, head_size=132, dtype=torch.uint8, tokens_per_state=tokens)


def _window(block: int, **more: bool) -> KVCacheSpec:
    return SlidingWindowMLASpec(**_PACKED, block_size=block, sliding_window=128, **more)


def _open(block: int, size: int, window: int) -> KVCacheSpec:
    return SlidingWindowMLASpec(**_ROWS, block_size=block, head_size=size, dtype=torch.float32, sliding_window=window)
