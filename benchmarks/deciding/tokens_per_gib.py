"""How many tokens of common models a GiB of host memory holds, as a table: that of docs/vllm.md.

    python -m benchmarks.deciding.tokens_per_gib

Each model has the KV of its published config.json, with 16-bit KV and states. `cpu-prefix-cache plan --model` takes
these names, and such a file as it is.
"""

from pathlib import Path
from typing import Any

from cpu_prefix_cache.deciding import Group, HybridChunkPlanner
from cpu_prefix_cache.model.report import conversation_bytes
from cpu_prefix_cache.tools.replay.models import checkpoint_bytes, prefix_bytes_per_token, read_model

KIB = 2**10
MIB = 2**20
GIB = 2**30
PROMPTS = (8_192, 32_768)  # tokens

QWEN3_NEXT = "qwen3-next-80b-a3b"
# Blocks as vLLM has them: with states, until a block of attention is as large as a state.
BLOCK_TOKENS = {"deepseek-v3": 64, QWEN3_NEXT: 544}
TITLES = {
    "Llama 3.1 8B": "llama-3.1-8b",
    "Llama 3.1 70B, 3.3 70B": "llama-3.1-70b",
    "Qwen3 8B": "qwen3-8b",
    "Qwen3 32B": "qwen3-32b",
    "Qwen3 30B-A3B": "qwen3-30b-a3b",
    "Gemma 3 12B": "gemma-3-12b",
    "Gemma 3 27B": "gemma-3-27b",
    "gpt-oss 20b": "gpt-oss-20b",
    "gpt-oss 120b": "gpt-oss-120b",
    "DeepSeek-V3 (MLA)": "deepseek-v3",
    "Qwen3-Next 80B-A3B": QWEN3_NEXT,
}


def groups_of(name: str, **options: Any) -> list[Group]:
    return read_model(Path(name), block_tokens=BLOCK_TOKENS.get(name, 16), **options)


def tokens_in_a_gib(planner: HybridChunkPlanner, prompt: int) -> int:
    """Tokens of prompts of `prompt` tokens, each with a checkpoint at its end. The host keeps whole chunks of them."""
    kept = planner.full_chunks(prompt) * planner.grid_tokens
    return GIB * kept // conversation_bytes(planner, kept)


def row(title: str, name: str) -> str:
    groups = groups_of(name)
    planner = HybridChunkPlanner(groups, max_model_len=max(PROMPTS))
    checkpoint = checkpoint_bytes(groups)
    cells = (
        title,
        f"{prefix_bytes_per_token(groups) / KIB:,.1f}",
        f"{checkpoint / MIB:,.1f}" if checkpoint else "none",
        *(f"{tokens_in_a_gib(planner, prompt):,}" for prompt in PROMPTS),
    )
    return f"| {' | '.join(cells)} |"


def table() -> str:
    lengths = " | ".join(f"tokens in a GiB, in prompts of {prompt:,}" for prompt in PROMPTS)
    head = f"| model | KiB a token | MiB a checkpoint | {lengths} |"
    return "\n".join([head, "|---|--:|--:|--:|--:|", *(row(title, name) for title, name in TITLES.items())])


if __name__ == "__main__":
    print(table())
