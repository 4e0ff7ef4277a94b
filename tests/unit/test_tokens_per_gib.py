"""The tokens that a GiB holds, as printed in docs/vllm.md, follow from the models' configurations."""

from pathlib import Path

import pytest

from benchmarks.deciding.tokens_per_gib import GIB, KIB, MIB, TITLES, groups_of, table, tokens_in_a_gib
from cpu_prefix_cache.deciding import HybridChunkPlanner
from cpu_prefix_cache.tools.replay.models import checkpoint_bytes, prefix_bytes_per_token

PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"

# By hand: layers with full attention, bytes of a token in each; layers with a window or a state, bytes of each there.
KNOWN = {
    "Llama 3.1 8B": (32, 2 * 8 * 128 * 2, 0, 0),
    "Llama 3.1 70B, 3.3 70B": (80, 2 * 8 * 128 * 2, 0, 0),
    "Qwen3 8B": (36, 2 * 8 * 128 * 2, 0, 0),
    "Qwen3 32B": (64, 2 * 8 * 128 * 2, 0, 0),
    "Qwen3 30B-A3B": (48, 2 * 4 * 128 * 2, 0, 0),
    "Gemma 3 12B": (8, 2 * 8 * 256 * 2, 40, 1_024 * 2 * 8 * 256 * 2),
    "Gemma 3 27B": (10, 2 * 16 * 128 * 2, 52, 1_024 * 2 * 16 * 128 * 2),
    "gpt-oss 20b": (12, 2 * 8 * 64 * 2, 12, 128 * 2 * 8 * 64 * 2),
    "gpt-oss 120b": (18, 2 * 8 * 64 * 2, 18, 128 * 2 * 8 * 64 * 2),
    "DeepSeek-V3 (MLA)": (61, (512 + 64) * 2, 0, 0),
    "Qwen3-Next 80B-A3B": (12, 2 * 2 * 256 * 2, 36, (3 * 8_192 + 32 * 128 * 128) * 2),
}


def test_the_page_has_the_table():
    assert table() in PAGE.read_text()


def test_another_model_would_be_noticed(monkeypatch):
    monkeypatch.setitem(TITLES, "Qwen3 8B", "qwen3-32b")
    assert table() not in PAGE.read_text()


@pytest.mark.parametrize("name", TITLES)
def test_bytes_are_those_that_are_known_apart_from_the_planner(name):
    layers, token, others, each = KNOWN[name]
    groups = groups_of(TITLES[name])
    assert (prefix_bytes_per_token(groups), checkpoint_bytes(groups)) == (layers * token, others * each)


@pytest.mark.parametrize("name", TITLES)
def test_a_gib_holds_that_many_prompts_with_a_checkpoint_each_but_for_little_waste(name):
    layers, token, others, each = KNOWN[name]
    planner = HybridChunkPlanner(groups_of(TITLES[name]), max_model_len=32_768)
    for prompt in (8_192, 32_768):
        ideal = GIB / (layers * token + others * each / prompt)
        assert ideal * 0.97 < tokens_in_a_gib(planner, prompt) <= ideal


def test_bytes_per_token_by_ranks_and_dtypes_are_those_on_the_page():
    def token(name, **options):
        return prefix_bytes_per_token(groups_of(TITLES[name], **options)) / KIB

    assert token("Qwen3 30B-A3B", tp=4) == 96 and token("Qwen3 30B-A3B", tp=8) == 192
    assert token("DeepSeek-V3 (MLA)", tp=8) == token("DeepSeek-V3 (MLA)")
    assert token("Llama 3.1 8B", kv_dtype="fp8") == 64
    assert round(checkpoint_bytes(groups_of(TITLES["Qwen3-Next 80B-A3B"], kv_dtype="fp8")) / MIB, 1) == 37.7
