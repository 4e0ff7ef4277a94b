"""The bytes of one layer's recurrent state, over all ranks, in vLLM's layout.

A state consists of the recurrent values and of the last inputs of the layer's short convolution, for each channel one
fewer than the convolution is wide.

    delta net     a matrix for each value head; a convolution over q, k and v      Qwen3-Next, Qwen3.5, Kimi Linear
    Mamba 2       a matrix for each head; a convolution over x, B and C            Bamba, Falcon-H1, Nemotron-H
    Mamba         a vector for each channel; a convolution over the channels       Jamba, Falcon Mamba
    convolution   only the convolution                                             LFM2
"""

from cpu_prefix_cache.tools.replay.model_config import ModelConfig


def state_bytes(config: ModelConfig, tp: int) -> int:
    """Bytes of one layer's state on `tp` ranks together. Raises ConfigurationError if a value is missing."""
    channels, kernel, recurrent = _state(config, tp)
    dtype = config.item_bytes()
    recurrent_dtype = config.item_bytes("mamba_ssm_dtype", "mamba_ssm_cache_dtype")
    return channels * (kernel - 1) * dtype + recurrent * recurrent_dtype


def _state(config: ModelConfig, tp: int) -> tuple[int, int, int]:
    """Channels of the convolution, its width in tokens, and values of the recurrent state."""
    number = config.number
    if config.has("linear_num_value_heads"):
        key_heads, value_heads = number("linear_num_key_heads"), number("linear_num_value_heads")
        key_dim, value_dim = number("linear_key_head_dim"), number("linear_value_head_dim")
        _check_divides(config, tp, key_heads, value_heads)
        channels = 2 * key_heads * key_dim + value_heads * value_dim
        return channels, number("linear_conv_kernel_dim"), value_heads * value_dim * key_dim
    if config.family == "kimi_linear":
        heads, dim = number("linear_attn_config.num_heads"), number("linear_attn_config.head_dim")
        _check_divides(config, tp, heads)
        return 3 * heads * dim, number("linear_attn_config.short_conv_kernel_size"), heads * dim * dim
    if config.has("conv_L_cache"):
        channels = number("conv_dim", "hidden_size")
        _check_divides(config, tp, channels)
        return channels, number("conv_L_cache"), 0
    if config.family in ("mamba", "falcon_mamba", "jamba"):
        inner = number("intermediate_size") if config.family != "jamba" else _expanded(config)
        _check_divides(config, tp, inner)
        return inner, number("mamba_d_conv", "conv_kernel"), inner * number("mamba_d_state", "state_size")
    return _mamba2(config, tp)


def _mamba2(config: ModelConfig, tp: int) -> tuple[int, int, int]:
    heads = config.number("mamba_n_heads", "mamba_num_heads", "num_heads")
    if config.values.get("mamba_d_head", "auto") == "auto" and config.has("mamba_n_heads"):
        dim = _expanded(config) // heads
    else:
        dim = config.number("mamba_d_head", "mamba_head_dim", "head_dim")
    groups = config.number("mamba_n_groups", "n_groups")
    groups = groups if groups % tp == 0 else tp  # each rank has the groups of its heads
    size = config.number("mamba_d_state", "ssm_state_size", "state_size")
    _check_divides(config, tp, heads)
    return heads * dim + 2 * groups * size, config.number("mamba_d_conv", "conv_kernel"), heads * dim * size


def _expanded(config: ModelConfig) -> int:
    return config.number("mamba_expand", default=2) * config.number("hidden_size")


def _check_divides(config: ModelConfig, tp: int, *counts: int) -> None:
    for count in counts:
        if count % tp:
            raise config.refused(f"{tp} ranks cannot share the {count} heads or channels of its states")
