"""KV and states that models keep, read from the numbers of their published configurations."""

import json

import pytest

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.deciding import HybridChunkPlanner, PrefixGroup, StateGroup, WindowGroup
from cpu_prefix_cache.tools.replay.models import checkpoint_bytes, in_large_blocks, prefix_bytes_per_token, read_model

KIB, MIB = 2**10, 2**20

LLAMA_8B = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
QWEN2_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_window_layers": 28,
    "sliding_window": 131_072,
    "use_sliding_window": False,
}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "head_dim": 128,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "decoder_sparse_step": 1,
    "sliding_window": None,
}
MISTRAL_V01 = {**LLAMA_8B, "model_type": "mistral", "sliding_window": 4096, "max_position_embeddings": 32_768}
PHI35_MINI = {
    "model_type": "phi3",
    "hidden_size": 3072,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "sliding_window": 262_144,
    "max_position_embeddings": 131_072,
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "head_dim": 64,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}
GEMMA2_9B = {
    "model_type": "gemma2",
    "head_dim": 256,
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "max_position_embeddings": 8192,
}
GEMMA3_4B = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "vision_config": {"model_type": "siglip_vision_model", "num_hidden_layers": 27},
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
}
GEMMA3_27B = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "head_dim": 128,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "sliding_window": 1024,
    },
}
DELTA_NET = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "head_dim": 256,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "full_attention_interval": 4,
    **DELTA_NET,
}
QWEN35_35B = {
    "model_type": "qwen3_5_moe",
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "dtype": "bfloat16",
        "head_dim": 256,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 10,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "mamba_ssm_dtype": "float32",
        **DELTA_NET,
    },
}
BAMBA_9B = {
    "model_type": "bamba",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attn_layer_indices": [9, 18, 27],
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
}
FALCON_H1_7B = {
    "model_type": "falcon_h1",
    "hidden_size": 3072,
    "head_dim": 128,
    "num_hidden_layers": 44,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "mamba_d_ssm": 3072,
    "mamba_n_heads": 24,
    "mamba_d_head": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
}
NEMOTRON = {
    "model_type": "nemotron_h",
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attention_head_dim": 128,
    "hybrid_override_pattern": "M-M-M*",
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
}
JAMBA = {
    "model_type": "jamba",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
LFM2_12B = {
    "model_type": "lfm2",
    "hidden_size": 2048,
    "conv_dim": 2048,
    "conv_L_cache": 3,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
}
KIMI_LINEAR_48B = {
    "model_type": "kimi_linear",
    "hidden_size": 2304,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "mla_use_nope": True,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [at for at in range(1, 28) if at % 4 and at != 27],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "num_nextn_predict_layers": 1,
}
LLAMA4_SCOUT = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text",
        "head_dim": 128,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "attention_chunk_size": 8192,
        "no_rope_layers": [],
    },
}


@pytest.fixture
def reads(tmp_path):
    """Reads the groups of a configuration that is written to a file first."""

    def reads(config, **options):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return read_model(tmp_path, **options)

    return reads


# KiB of prefix KV a token and MiB at one boundary, known apart from this code: from vLLM's pages, or by hand.
ATTENTION = [
    (LLAMA_8B, 128, 0),
    (QWEN2_7B, 56, 0),
    (QWEN3_MOE, 96, 0),
    (PHI35_MINI, 384, 0),
    (MISTRAL_V01, 0, 512),
    (GPT_OSS_20B, 24, 3),
    (GEMMA2_9B, 168, 672),
    (GEMMA3_4B, 20, 116),
    (GEMMA3_27B, 80, 416),
    (LLAMA4_SCOUT, 48, 144 / 1024 * (8192 - 16)),
]


@pytest.mark.parametrize(("config", "token", "boundary"), ATTENTION, ids=lambda each: _name(each))
def test_attention_weighs_what_is_known_of_it(reads, config, token, boundary):
    groups = reads(config)
    assert (prefix_bytes_per_token(groups) / KIB, checkpoint_bytes(groups) / MIB) == (token, boundary)


# The same in KiB, and bytes of a page of one layer, times the layers that have one.
STATES = [
    (QWEN3_NEXT, 24, 36 * 1_097_728),
    (QWEN35_35B, 20, 30 * 2_146_304),
    (BAMBA_9B, 12, 29 * 2_147_840),
    (FALCON_H1_7B, 44, 44 * 2 * (3 * (3072 + 2 * 256) + 24 * 128 * 256)),
    (NEMOTRON, 4, 3 * (2 * 3 * (8192 + 2 * 8 * 128) + 4 * 128 * 64 * 128)),
    (JAMBA, 16, 28 * 2 * 8192 * (3 + 16)),
    (LFM2_12B, 12, 10 * 2 * 2 * 2048),
    (KIMI_LINEAR_48B, 7.875, 20 * (2 * 3 * 3 * 4096 + 4 * 32 * 128 * 128)),
]


@pytest.mark.parametrize(("config", "token", "page"), STATES, ids=lambda each: _name(each))
def test_states_weigh_what_is_known_of_them(reads, config, token, page):
    groups = reads(config)
    assert (prefix_bytes_per_token(groups) / KIB, checkpoint_bytes(groups)) == (token, page)


def test_a_model_of_states_alone_keeps_no_prefix(reads):
    mamba = {"model_type": "mamba", "num_hidden_layers": 4, "intermediate_size": 64, "state_size": 16, "conv_kernel": 4}
    [group] = reads(mamba)
    assert isinstance(group, StateGroup) and group.block_bytes == 4 * 2 * 64 * (3 + 16)


def test_ranks_share_heads_until_each_has_one(reads):
    tokens = [prefix_bytes_per_token(reads(LLAMA_8B, tp=tp)) // KIB for tp in (1, 2, 8, 16)]
    assert tokens == [128, 128, 128, 256]
    with pytest.raises(ConfigurationError, match="3 ranks cannot share its 8 KV heads"):
        reads(LLAMA_8B, tp=3)


def test_a_latent_is_kept_once_however_many_ranks_there_are(reads):
    one, eight = reads(DEEPSEEK_V3), reads(DEEPSEEK_V3, tp=8)
    assert one == eight
    assert prefix_bytes_per_token(one) == 61 * 576 * 2 and round(61 * 576 * 2 / KIB) == 69


def test_states_are_shared_too_but_for_the_groups_of_their_heads(reads):
    page = [checkpoint_bytes(reads(BAMBA_9B, tp=tp)) for tp in (1, 4)]
    assert page[1] - page[0] == 29 * 3 * 2 * (3 * 2 * 128), "B and C of the one group are on all four ranks"
    with pytest.raises(ConfigurationError, match="32 ranks cannot share"):
        reads(QWEN3_NEXT, tp=32)


def test_coded_kv_takes_49_bytes_for_64_and_states_as_many_as_before(reads):
    raw, coded = reads(QWEN3_NEXT), reads(QWEN3_NEXT, codec="exponent")
    assert prefix_bytes_per_token(coded) * 64 == prefix_bytes_per_token(raw) * 49
    assert checkpoint_bytes(coded) == checkpoint_bytes(raw)
    with pytest.raises(ConfigurationError, match="is for KV of bfloat16, and that of this model is not: leave it out"):
        reads(LLAMA_8B, kv_dtype="fp8", codec="exponent")


def test_the_kv_dtype_is_the_models_or_the_given_one(reads):
    def token(config, **options):
        return prefix_bytes_per_token(reads(config, **options)) // KIB

    assert token({**LLAMA_8B, "torch_dtype": "float32"}) == 256
    assert token(LLAMA_8B, kv_dtype="fp8") == 64
    assert token({**LLAMA_8B, "quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}) == 64
    assert checkpoint_bytes(reads(QWEN3_NEXT, kv_dtype="fp8")) == 36 * 1_097_728, "states keep their own"
    with pytest.raises(ConfigurationError, match="unknown dtype 'fp3'"):
        reads(LLAMA_8B, kv_dtype="fp3")


def test_an_unknown_type_that_is_like_llama_is_read_like_llama(reads):
    assert reads({**LLAMA_8B, "model_type": "new", "num_local_experts": 8}) == reads(LLAMA_8B)
    layer_types = ["sliding_attention", "full_attention"] * 16
    window, full = {"sliding_window": 128, "layer_types": layer_types}, [PrefixGroup, WindowGroup]
    assert [type(group) for group in reads({**LLAMA_8B, "model_type": "new", **window})] == full


@pytest.mark.parametrize(
    "surprise",
    [
        {"sliding_window": 128},
        {"mamba_d_state": 128},
        {"kv_lora_rank": 512},
        {"num_kv_shared_layers": 10, "layer_types": ["full_attention"] * 32},
        {"layer_types": ["heavy_attention"] * 32},
        {"is_encoder_decoder": True},
        {"num_key_value_heads": [8, 4, 4]},
        {"num_key_value_heads": None},
        {"head_dim": 0},
    ],
    ids=str,
)
def test_an_unknown_type_that_may_be_anything_else_is_refused_by_name(reads, surprise):
    with pytest.raises(ConfigurationError, match=r"'new' keeps.*--bytes-per-token"):
        reads({**LLAMA_8B, "model_type": "new", **surprise})


def test_files_that_are_no_configuration_are_refused(tmp_path, reads):
    with pytest.raises(ConfigurationError, match=r"there is no file .*nowhere\.json"):
        read_model(tmp_path / "nowhere.json")
    with pytest.raises(ConfigurationError, match="names no model_type"):
        reads({"num_hidden_layers": 3})
    with pytest.raises(ConfigurationError, match="is not the configuration of a model"):
        reads([1, 2])
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match="is not JSON"):
        read_model(tmp_path / "config.json")
    with pytest.raises(ConfigurationError, match="tp must be at least 1"):
        reads(LLAMA_8B, tp=0)


@pytest.mark.parametrize(
    "config", [GPT_OSS_20B, GEMMA3_27B, LLAMA4_SCOUT, QWEN35_35B, MISTRAL_V01, LLAMA_8B], ids=lambda each: _name(each)
)
@pytest.mark.parametrize("chunk", [512, 64, 48])
def test_larger_blocks_weigh_the_same_at_every_boundary(reads, config, chunk):
    small = HybridChunkPlanner(reads(config), max_model_len=2**40, grid_tokens=chunk)
    large = HybridChunkPlanner(in_large_blocks(small.groups, chunk), max_model_len=2**40, grid_tokens=chunk)
    assert large.chunk_bytes == small.chunk_bytes
    for depth in (1, 2, 7, 16, 17, 1_000_003):
        assert large.checkpoint_bytes(depth) == small.checkpoint_bytes(depth)


def _name(each):
    return each.get("model_type") if isinstance(each, dict) else str(each)
