"""Small models with random weights, one for each way of keeping the past. Their logits show a wrong past.

The usual initialisation of a transformers class (standard deviation 0.02, tied embeddings, states that decay within a
few tokens) hides it: the same tokens are generated whatever the cache holds, and zeroing a recurrent state changes the
logits by 1e-7. With these weights a damaged block, window or state is visible:

    embeddings            N(0, 1), not tied to the output
    matrices              N(0, 1 / fan_in); 1.5 times that for queries and keys, so that attention is sharp
    short convolutions    N(0, 1 / kernel)
    states                decay by 2 % a token: A = 0.2, and a step of 0.1
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from cpu_prefix_cache import ConfigurationError

VOCABULARY = 320  # the 256 bytes, and some more
MAX_MODEL_LEN = 8192
HEADS = 4
KV_HEADS = 2
STATE_WIDTH = 16
WINDOW = 32  # tokens that a tiny model's windows and attention chunks cover
# The matrices that make queries and keys, by the names that the families give them.
SHARP = ("q_proj", "k_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
DECAY = 0.2
STEP = 0.1


def tiny(family: str, *, seed: int = 0) -> PreTrainedModel:
    """The smallest float32 model of one of FAMILIES, for tests. Raises ConfigurationError for others."""
    return build_family(family, hidden=64, layers=4, window=WINDOW, seed=seed)


def build_family(family: str, *, hidden: int, layers: int, window: int, seed: int = 0) -> PreTrainedModel:
    """A float32 model of one of FAMILIES, `hidden` a multiple of 32. Raises ConfigurationError for others.

    `window` is the size in tokens of windows and attention chunks, in families that have them.
    """
    if family not in FAMILIES:
        raise ConfigurationError(f"unknown family {family!r}; known are {', '.join(FAMILIES)}")
    torch.manual_seed(seed)
    model = FAMILIES[family](hidden, layers, window).eval()
    initialise(model)
    return model


@torch.no_grad()
def initialise(model: PreTrainedModel) -> None:
    """Give `model` weights that make its past visible in its logits. Norms and biases are not changed."""
    hidden = model.config.get_text_config().hidden_size
    for name, weight in model.named_parameters():
        if "embed_tokens" in name:
            weight.normal_(std=1 / _embedding_scale(model))
        elif name.endswith("A_log"):
            weight.fill_(math.log(DECAY))
        elif name.endswith(("dt_bias", "dt_proj.bias")):
            weight.fill_(math.log(math.expm1(STEP)))  # softplus gives the step back
        elif weight.dim() == 3 and "conv" in name:
            weight.normal_(std=weight.shape[-1] ** -0.5)
        elif weight.dim() == 3:  # experts, some of them transposed
            fan_in = hidden if "gate_up" in name else weight[0].numel() // hidden
            weight.normal_(std=fan_in**-0.5)
        elif weight.dim() == 2:
            gain = 1.5 if name.split(".")[-2] in SHARP else 1.0
            weight.normal_(std=gain / weight.shape[1] ** 0.5)


def _embedding_scale(model: PreTrainedModel) -> float:
    """The factor the family applies to its embeddings, to divide by. Attention would hardly change such large ones."""
    return float(model.config.hidden_size**0.5) if isinstance(model, Gemma3ForCausalLM) else 1.0


def _common(hidden: int, layers: int) -> dict[str, Any]:
    return dict(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def _pattern(layers: int, kinds: Sequence[str]) -> list[str]:
    """`kinds` repeated, aligned so that the last layer is of the last kind."""
    return [kinds[(layer - layers) % len(kinds)] for layer in range(layers)]


def _llama(hidden: int, layers: int, window: int) -> PreTrainedModel:
    heads = dict(num_attention_heads=8, num_key_value_heads=4)
    return LlamaForCausalLM(LlamaConfig(**{**_common(hidden, layers), **heads}))


def _qwen3(hidden: int, layers: int, window: int) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**_common(hidden, layers), head_dim=hidden // HEADS))


def _gemma3(hidden: int, layers: int, window: int) -> PreTrainedModel:
    kinds = [*["sliding_attention"] * 3, "full_attention"]
    config = Gemma3TextConfig(
        **_common(hidden, layers),
        head_dim=hidden // HEADS,
        query_pre_attn_scalar=hidden // HEADS,
        sliding_window=window,
        layer_types=_pattern(layers, kinds),
    )
    return Gemma3ForCausalLM(config)


def _gpt_oss(hidden: int, layers: int, window: int) -> PreTrainedModel:
    config = GptOssConfig(
        **_common(hidden, layers),
        head_dim=hidden // HEADS,
        sliding_window=window,
        layer_types=_pattern(layers, ["sliding_attention", "full_attention"]),
        rope_parameters=dict(rope_type="default", rope_theta=150_000.0),
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    return GptOssForCausalLM(config)


def _delta_rule(hidden: int, layers: int) -> dict[str, Any]:
    """Three layers of gated delta rule, then one of attention, and so on."""
    return dict(
        **_common(hidden, layers),
        head_dim=hidden // HEADS,
        layer_types=_pattern(layers, [*["linear_attention"] * 3, "full_attention"]),
        linear_num_key_heads=KV_HEADS,
        linear_num_value_heads=HEADS,
        linear_key_head_dim=STATE_WIDTH,
        linear_value_head_dim=STATE_WIDTH,
    )


def _qwen3_next(hidden: int, layers: int, window: int) -> PreTrainedModel:
    config = Qwen3NextConfig(
        **_delta_rule(hidden, layers),
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=hidden // 2,
        shared_expert_intermediate_size=hidden // 2,
    )
    return Qwen3NextForCausalLM(config)


def _qwen3_5(hidden: int, layers: int, window: int) -> PreTrainedModel:
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**_delta_rule(hidden, layers)))


def _mamba2(hidden: int, layers: int) -> dict[str, Any]:
    heads = dict(mamba_n_heads=8, mamba_d_head=hidden // 4, mamba_expand=2, mamba_n_groups=1)
    # Without CUDA kernels a forward pass computes whole chunks. Of the default of 256 tokens most would be padding.
    return dict(**_common(hidden, layers), **heads, mamba_d_state=STATE_WIDTH, mamba_chunk_size=32)


def _bamba(hidden: int, layers: int, window: int) -> PreTrainedModel:
    attention = [layer for layer, kind in enumerate(_pattern(layers, ["mamba", "attention"])) if kind == "attention"]
    return BambaForCausalLM(BambaConfig(**_mamba2(hidden, layers), attn_layer_indices=attention))


def _falcon_h1(hidden: int, layers: int, window: int) -> PreTrainedModel:
    return FalconH1ForCausalLM(FalconH1Config(**_mamba2(hidden, layers), mamba_d_ssm=2 * hidden))


def _lfm2(hidden: int, layers: int, window: int) -> PreTrainedModel:
    return Lfm2ForCausalLM(
        Lfm2Config(**_common(hidden, layers), layer_types=_pattern(layers, ["conv", "full_attention"]))
    )


def _deepseek_v3(hidden: int, layers: int, window: int) -> PreTrainedModel:
    """The first half of the layers has one feed-forward network each, the others experts."""
    return DeepseekV3ForCausalLM(_latent(hidden, layers, dense=layers // 2))


def _deepseek_v3_dense(hidden: int, layers: int, window: int) -> PreTrainedModel:
    return DeepseekV3ForCausalLM(_latent(hidden, layers, dense=layers))


def _latent(hidden: int, layers: int, dense: int) -> DeepseekV3Config:
    """Queries and keys are as wide as values; otherwise a CPU cannot use its fast attention, and takes three times as
    long.
    """
    return DeepseekV3Config(
        **{**_common(hidden, layers), "num_key_value_heads": HEADS},
        q_lora_rank=hidden // 2,
        kv_lora_rank=hidden // 4,
        qk_rope_head_dim=hidden // 16,
        qk_nope_head_dim=hidden // 16,
        v_head_dim=hidden // 8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=hidden // 2,
        first_k_dense_replace=dense,
    )


def _llama4(hidden: int, layers: int, window: int) -> PreTrainedModel:
    config = Llama4TextConfig(
        **_common(hidden, layers),
        intermediate_size_mlp=2 * hidden,
        head_dim=hidden // HEADS,
        attention_chunk_size=window,
        layer_types=_pattern(layers, ["chunked_attention", "full_attention"]),
        moe_layers=[],
    )
    return Llama4ForCausalLM(config)


def _jamba(hidden: int, layers: int, window: int) -> PreTrainedModel:
    """Mamba 1. In transformers its state is ignored when several tokens follow."""
    config = JambaConfig(
        **_common(hidden, layers),
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=1,
        mamba_d_state=STATE_WIDTH,
        mamba_expand=2,
        mamba_dt_rank=hidden // 8,
    )
    return JambaForCausalLM(config)


FAMILIES: dict[str, Callable[[int, int, int], PreTrainedModel]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
    "gpt_oss": _gpt_oss,
    "qwen3_next": _qwen3_next,
    "qwen3_5": _qwen3_5,
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "lfm2": _lfm2,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v3_dense": _deepseek_v3_dense,
    "llama4": _llama4,
    "jamba": _jamba,
}
