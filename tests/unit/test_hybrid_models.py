"""The models of docs/hybrid.md: all construct, weigh what is known of them, and stand in the results as printed."""

import math
from pathlib import Path

import pytest

from benchmarks.deciding.hybrid_models import (
    MODELS,
    checkpoint_bytes,
    conversation_depths,
    conversation_table,
    main,
    token_bytes,
)
from cpu_prefix_cache.deciding import HybridChunkPlanner, PrefixGroup, StateGroup
from cpu_prefix_cache.model.report import advice, conversation_bytes, everything_bytes

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "hybrid.md").read_text()

KIB = 2**10
MIB = 2**20
GIB = 2**30
PLANNERS = {model.name: model.planner() for model in MODELS}

# Facts known apart from this code: KiB of prefix KV a token, MiB at one boundary, and how many times the prefix KV
# the rest weighs if it is kept at every position; what is there is cut to whole numbers, as these were.
FACTS = {
    "Llama-3.1-8B": (128, 0, 0),
    "gpt-oss-20b": (24, 3, 1),
    "gpt-oss-20b, TP2": (24, 3, 1),
    "Gemma3-4B": (20, 116, 5),
    "Gemma3-4B, as vLLM": (20, 116, 5),
    "Gemma3-27B": (80, 416, 5),
    "Llama-3.1-8B, CP2": (128, 0, 0),
}
ROUNDED = {"Qwen3-Next": (24, 38, 3), "Qwen3-Next, fp32 state": (24, 74, 3), "DeepSeek-V3, TP8": (69, 0, 0)}


def figures(name):
    planner = PLANNERS[name]
    token = token_bytes(planner)
    rest = sum(
        piece.num_bytes * piece.lanes / piece.group.block_tokens for piece in planner.pieces if not piece.in_chunk
    )
    return token / KIB, checkpoint_bytes(planner, planner.hittable_chunks(100_000)) / MIB, rest / token


@pytest.mark.parametrize("name", FACTS)
def test_attention_weighs_what_is_known_of_it(name):
    token, boundary, everywhere = figures(name)
    assert (token, boundary, math.floor(everywhere)) == FACTS[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_states_and_latents_weigh_what_is_known_of_them(name):
    assert tuple(round(figure) for figure in figures(name)) == ROUNDED[name]


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        ("Qwen3-Next", 544),
        ("Qwen3-Next, fp32 state", 1_056),
        ("Qwen3.5-35B-A3B", 1_056),
        ("Bamba-9B", 528),
        ("DeepSeek-V3, TP8", 64),
        ("DeepSeek-V4-Flash", 256),
        ("Llama-3.1-8B, CP2", 32),
        ("Llama-3.1-8B + 1B", 32),
    ],
)
def test_the_grid_is_the_engines_block(name, grid):
    assert PLANNERS[name].grid_tokens == grid


@pytest.mark.parametrize("name", ["Qwen3-Next", "Qwen3-Next, fp32 state", "Qwen3.5-35B-A3B", "Bamba-9B"])
def test_a_block_of_attention_is_as_long_as_a_state_is_large(name):
    """vLLM's rule, from which 544, 1,056 and 528 follow; the number of layers of each kind stands in the model."""
    layers = {"Qwen3-Next": (12, 36), "Qwen3.5-35B-A3B": (10, 30), "Bamba-9B": (3, 29)}[name.split(",")[0]]
    full, state = PLANNERS[name].groups
    token = full.block_bytes // full.block_tokens // layers[0]
    assert math.ceil(state.block_bytes / layers[1] / token / 16) * 16 == full.block_tokens


def test_deepseek_v3_is_stored_once_for_eight_ranks():
    planner = PLANNERS["DeepSeek-V3, TP8"]
    assert int(48 * GIB / token_bytes(planner)) == 733_430
    assert int(48 * GIB / token_bytes(planner) / 8) == 91_678, "with a copy for each rank"
    chunks = 48 * GIB // (planner.host_block_bytes * planner.host_blocks_per_chunk)
    assert 733_430 - 64 < chunks * 64 <= 733_430


def test_deepseek_v4_has_the_pages_vllm_reports():
    planner = PLANNERS["DeepSeek-V4-Flash"]
    assert [piece.num_bytes for piece in planner.pieces] == [1_002_240, 823_680 + 786_240, 656_640, 870_912]
    assert [sum(at.group == group for at in planner.checkpoint(9)) for group in range(4)] == [0, 2, 16, 2]


def test_no_group_wastes_a_quarter():
    for planner in PLANNERS.values():
        assert planner.waste < 0.04
        assert advice(planner) == []


def test_a_conversation_takes_more_with_each_checkpoint_and_never_more_than_everything():
    for planner in PLANNERS.values():
        turns = conversation_depths(planner)
        weights = [conversation_bytes(planner, 32_768, turns[at:]) for at in range(len(turns))]
        assert weights == sorted(weights, reverse=True)
        assert weights[0] <= everything_bytes(planner, 32_768)


def test_the_results_are_as_they_are_printed(capsys):
    main()
    assert (ROOT / "benchmarks" / "results" / "hybrid_models.txt").read_text() == capsys.readouterr().out


def test_each_row_of_the_page_is_one_of_the_results():
    """Without the columns of a token and of a checkpoint and the last one, and with `(fp8)` behind a name."""
    printed = [[row[0], *row[3:-1]] for row in rows(conversation_table())]
    shown = [[row[0].removesuffix(" (fp8)"), *row[1:]] for row in rows(PAGE) if row[0].split(" (")[0] in PLANNERS]
    assert len(shown) == 4 and all(row in printed for row in shown)


def kimi_linear(lanes):
    latent = PrefixGroup(name="latent", block_tokens=256, block_bytes=7 * 1152 * 256, lanes=lanes)
    state = StateGroup(name="state", block_tokens=256, block_bytes=20 * (32 * 128 * 128 * 4 + 3 * 4096 * 6) // 8)
    return HybridChunkPlanner([latent, state], max_model_len=2**20, ranks=8)


def test_a_latent_kept_once_takes_as_much_as_the_page_has():
    (on_each, often), (once, often_once) = (
        [conversation_bytes(kimi_linear(lanes), 2**15, at) // 10**6 for at in ([128], range(8, 129, 8))]
        for lanes in (None, 1)
    )
    page = " ".join(PAGE.split())
    assert f"take {once:,} MB instead of {on_each:,} with one checkpoint" in page
    assert f"{often_once:,} instead of {often:,} with one every 2,048 tokens" in page


def rows(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
