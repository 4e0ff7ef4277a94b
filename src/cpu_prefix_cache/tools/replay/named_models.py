"""Shapes of models that people name: what their published config.json has for the bytes and the compute of a token.

`active_parameters` is no name of a config.json. It stands where they do not follow from the others (flops.py).
"""

from collections.abc import Mapping
from typing import Any

LLAMA = {"model_type": "llama", "num_key_value_heads": 8, "head_dim": 128}
QWEN3 = {"model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
GEMMA3 = {"model_type": "gemma3_text", "sliding_window": 1_024}
GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2_880,
    "intermediate_size": 2_880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "num_experts_per_tok": 4,
}

NAMED: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-8b": LLAMA
    | {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4_096, "intermediate_size": 14_336},
    "llama-3.1-70b": LLAMA
    | {"num_hidden_layers": 80, "num_attention_heads": 64, "hidden_size": 8_192, "intermediate_size": 28_672},
    "qwen3-8b": QWEN3
    | {"num_hidden_layers": 36, "num_attention_heads": 32, "hidden_size": 4_096, "intermediate_size": 12_288},
    "qwen3-32b": QWEN3
    | {"num_hidden_layers": 64, "num_attention_heads": 64, "hidden_size": 5_120, "intermediate_size": 25_600},
    "qwen3-30b-a3b": QWEN3_MOE
    | {"num_hidden_layers": 48, "num_attention_heads": 32, "hidden_size": 2_048, "moe_intermediate_size": 768},
    "qwen3-235b-a22b": QWEN3_MOE
    | {"num_hidden_layers": 94, "num_attention_heads": 64, "hidden_size": 4_096, "moe_intermediate_size": 1_536},
    "gemma-3-12b": GEMMA3
    | {
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "hidden_size": 3_840,
        "intermediate_size": 15_360,
    },
    "gemma-3-27b": GEMMA3
    | {
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "hidden_size": 5_376,
        "intermediate_size": 21_504,
    },
    "gpt-oss-20b": GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128},
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "hidden_size": 7_168,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2_048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "q_lora_rank": 1_536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_next",
        "active_parameters": 3_000_000_000,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
    },
}
