"""How many tokens of common models a GiB of host memory holds, as a table: that of docs/vllm.md.

    python -m benchmarks.deciding.tokens_per_gib

Each model has the KV of its published config.json, with 16-bit KV and states. `cpu-prefix-cache size --model`
reads such a file as it is.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from cpu_prefix_cache.deciding import Group, HybridChunkPlanner
from cpu_prefix_cache.model.report import conversation_bytes
from cpu_prefix_cache.tools.replay.models import checkpoint_bytes, prefix_bytes_per_token, read_model

KIB = 2**10
MIB = 2**20
GIB = 2**30
PROMPTS = (8_192, 32_768)  # tokens

LLAMA = dict(model_type="llama", num_key_value_heads=8, head_dim=128)
QWEN3 = dict(model_type="qwen3", num_key_value_heads=8, head_dim=128)
GEMMA3 = dict(model_type="gemma3_text", sliding_window=1_024)
GPT_OSS = dict(model_type="gpt_oss", num_attention_heads=64, num_key_value_heads=8, head_dim=64, sliding_window=128)


class Model(NamedTuple):
    config: Mapping[str, Any]
    block_tokens: int = 16  # as vLLM has them: with states, until a block of attention is as large as a state


MODELS = {
    "Llama 3.1 8B": Model(dict(LLAMA, num_hidden_layers=32, num_attention_heads=32)),
    "Llama 3.1 70B, 3.3 70B": Model(dict(LLAMA, num_hidden_layers=80, num_attention_heads=64)),
    "Qwen3 8B": Model(dict(QWEN3, num_hidden_layers=36, num_attention_heads=32)),
    "Qwen3 32B": Model(dict(QWEN3, num_hidden_layers=64, num_attention_heads=64)),
    "Qwen3 30B-A3B": Model(
        dict(QWEN3, model_type="qwen3_moe", num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4)
    ),
    "Gemma 3 12B": Model(
        dict(GEMMA3, num_hidden_layers=48, num_attention_heads=16, num_key_value_heads=8, head_dim=256)
    ),
    "Gemma 3 27B": Model(
        dict(GEMMA3, num_hidden_layers=62, num_attention_heads=32, num_key_value_heads=16, head_dim=128)
    ),
    "gpt-oss 20b": Model(dict(GPT_OSS, num_hidden_layers=24)),
    "gpt-oss 120b": Model(dict(GPT_OSS, num_hidden_layers=36)),
    "DeepSeek-V3 (MLA)": Model(
        dict(
            model_type="deepseek_v3",
            num_hidden_layers=61,
            num_attention_heads=128,
            num_key_value_heads=128,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
        ),
        block_tokens=64,
    ),
    "Qwen3-Next 80B-A3B": Model(
        dict(
            model_type="qwen3_next",
            num_hidden_layers=48,
            num_attention_heads=16,
            num_key_value_heads=2,
            head_dim=256,
            full_attention_interval=4,
            linear_conv_kernel_dim=4,
            linear_key_head_dim=128,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_value_head_dim=128,
        ),
        block_tokens=544,
    ),
}


def groups_of(model: Model, **options: Any) -> list[Group]:
    with TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        file.write_text(json.dumps(model.config))
        return read_model(file, block_tokens=model.block_tokens, **options)


def tokens_in_a_gib(planner: HybridChunkPlanner, prompt: int) -> int:
    """Tokens of prompts of `prompt` tokens, each with a checkpoint at its end. The host keeps whole chunks of them."""
    kept = planner.full_chunks(prompt) * planner.grid_tokens
    return GIB * kept // conversation_bytes(planner, kept)


def row(name: str, model: Model) -> str:
    groups = groups_of(model)
    planner = HybridChunkPlanner(groups, max_model_len=max(PROMPTS))
    checkpoint = checkpoint_bytes(groups)
    cells = (
        name,
        f"{prefix_bytes_per_token(groups) / KIB:,.1f}",
        f"{checkpoint / MIB:,.1f}" if checkpoint else "none",
        *(f"{tokens_in_a_gib(planner, prompt):,}" for prompt in PROMPTS),
    )
    return f"| {' | '.join(cells)} |"


def table() -> str:
    lengths = " | ".join(f"tokens in a GiB, in prompts of {prompt:,}" for prompt in PROMPTS)
    head = f"| model | KiB a token | MiB a checkpoint | {lengths} |"
    return "\n".join([head, "|---|--:|--:|--:|--:|", *(row(name, model) for name, model in MODELS.items())])


if __name__ == "__main__":
    print(table())
