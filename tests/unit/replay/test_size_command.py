"""`size`, from a small trace and a small configuration to gigabytes."""

import argparse
import json

import pytest

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.deciding import HybridChunkPlanner
from cpu_prefix_cache.eviction import POLICIES
from cpu_prefix_cache.tools.replay import size_command
from cpu_prefix_cache.tools.replay.meter import Meter
from cpu_prefix_cache.tools.replay.models import read_model
from cpu_prefix_cache.tools.replay.one_tier import replay_one_tier
from cpu_prefix_cache.tools.replay.options import policies_of
from cpu_prefix_cache.tools.replay.resumable import ResumableReplay
from cpu_prefix_cache.tools.replay.tiers import HostTier
from cpu_prefix_cache.tools.replay.traces import read_traces

LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
WINDOWED = {**LLAMA, "model_type": "gemma2", "head_dim": 128, "sliding_window": 512}
TOKEN = 2 * 2 * 4 * 128 * 2  # bytes


def trace_of(prompts):
    """Prompts of numbers, one for a block; equal numbers are equal prefixes."""
    return [
        json.dumps({"timestamp": at * 1_000, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids})
        for at, ids in enumerate(prompts)
    ]


# A prefix of three that everybody shares, and between its uses prompts that come only once.
SHARED = [ids for at in range(10, 40) for ids in ([0, 1, 2, at], [100 + at, 200 + at])]


def argparse_of_size():
    parser = argparse.ArgumentParser()
    size_command.add_arguments(parser.add_subparsers())
    return parser


@pytest.fixture
def size(tmp_path, capsys):
    """Runs the subcommand, for one policy unless others are given. Its exit code and what it printed."""

    def size(*options, prompts=SHARED, config=LLAMA):
        options = options if "--policy" in options else (*options, "--policy", "lru")
        trace, model = tmp_path / "trace.jsonl", tmp_path / "config.json"
        trace.write_text("\n".join(trace_of(prompts)))
        model.write_text(json.dumps(config))
        parser = argparse_of_size()
        weight = () if "--bytes-per-token" in options else ("--model", str(model))
        code = size_command.run(parser.parse_args(["size", str(trace), *weight, *options]))
        return code, capsys.readouterr().out

    return size


def test_the_bytes_of_a_token_and_the_memory_that_is_enough_are_printed(size):
    code, out = size()
    assert code == 0
    assert f"a token       {TOKEN:,} bytes (4.0 KiB) on all ranks together" in out
    assert "this model needs none to resume" in out
    assert "180 blocks of 512 tokens, 93 of them different" in out
    ideal = 29 * 3 / 180
    assert f"hit ratio {ideal:.4f} with infinite memory\n" in out
    enough = 5 * 512 * TOKEN  # the three that are shared, and two that come and go
    assert f"{enough / 1e9:,.1f} GB ({enough / 2**30:,.1f} GiB) of memory reach {ideal:.4f}" in out


def test_the_memory_of_the_device_counts_unless_prompts_are_held_whole(size):
    """Where the host holds prompts whole, as in a model that needs checkpoints, it does not."""
    for config, adds in ((LLAMA, True), (WINDOWED, False)):
        _, out = size(config=config)
        assert ("Device and host add" in out) == adds
        assert ("GiB) of memory reach" in out) == adds != ("GiB) of host memory reach" in out)


def test_the_least_memory_of_each_policy_stands_in_the_table_and_below_it(size):
    _, out = size("--bytes-per-token", str(10**9 // 512), "--policy", "lru,arc")
    rows = [line for line in out.splitlines() if "<- the least" in line]
    assert {row.split()[0]: row.split()[1] for row in rows} == {"lru": "5.0", "arc": "4.0"}
    assert "\nlru: 5.0 GB" in out and "\narc: 4.0 GB" in out


def test_all_policies_are_compared_by_default(tmp_path):
    args = argparse_of_size().parse_args(["size", "trace", "--bytes-per-token", "1"])
    assert policies_of(args.policy, list(POLICIES)) == list(POLICIES)


def test_round_amounts_of_memory_are_tried(size, tmp_path):
    """A block has 2 MiB, and five are enough."""
    size("--json", str(tmp_path / "out.json"))
    [result] = json.loads((tmp_path / "out.json").read_text())["results"]
    assert {2**power for power in range(23, 28)} < {point["capacity_bytes"] for point in result["points"]}


def test_sizes_that_servers_have_stand_in_the_table_below_the_goal_too(size):
    """A block has 64 GiB, and five are enough."""
    _, out = size("--bytes-per-token", str(2**36 // 512))
    rows = {float(row.split()[2].replace(",", "")) for row in out.splitlines() if row.startswith("lru ")}
    assert {64, 128, 256, 512, 1024, 2048, 4096} < rows
    assert "From 512.0 GiB on, twice as much adds less than 2% of hits." in out


def test_a_load_beyond_one_engine_is_reported(size):
    busy = "times as long as the trace, more than one engine at this rate can serve"
    _, out = size("--time-unit", "ms", "--prefill-rate", "1000")
    assert f"without hits that is {180 * 512 / 1_000 / 59:.1f} {busy}" in out
    assert busy not in size("--time-unit", "ms", "--prefill-rate", "2000")[1]


def test_savings_of_hits_are_printed_by_memory_and_written(size, tmp_path):
    out = tmp_path / "out.json"
    options = ["--prefill-rate", "1000", "--gpu-price", "3600", "--host-rate", "0.001", "--json", str(out)]
    _, printed = size(*options, config=LLAMA | {"intermediate_size": 1024})
    assert "hit time seconds saved of prefill money" in " ".join(printed.split())
    written = json.loads(out.read_text())
    assert (written["schema_version"], written["command"], written["target"]) == (1, "size", 0.9)
    [result] = written["results"]
    enough, loaded = result["enough"], 29 * 3 * 512
    assert enough in result["points"] and enough["capacity_bytes"] == 5 * 512 * TOKEN
    assert enough["prefill_seconds_saved"] == pytest.approx(enough["money_saved"])
    assert enough["prefill_seconds_saved"] == pytest.approx(loaded / 1000 - loaded * TOKEN / 1e6, rel=0.1)
    assert 0 < enough["time_hit_ratio"] < 1 and written["ideal"]["block_hit_ratio"] == enough["block_hit_ratio"]


def test_a_plot_is_drawn(size, tmp_path):
    pytest.importorskip("matplotlib")
    assert size("--plot", str(tmp_path / "out.svg"))[0] == 0
    assert "host capacity (GiB)" in (tmp_path / "out.svg").read_text()


def test_checkpoints_take_memory_and_hits(size):
    _, out = size("--bytes-per-token", str(TOKEN // 2))
    _, windowed = size(config=WINDOWED)
    assert f"a token       {TOKEN // 2:,} bytes" in out and f"a token       {TOKEN // 2:,} bytes" in windowed
    assert f"a checkpoint  {512 * TOKEN // 2:,} bytes" in windowed
    # Nobody resumes in the second request that shares the prefix: there is no checkpoint at its end yet.
    assert (
        f"hit ratio {29 * 3 / 180:.4f} with infinite memory, {28 * 3 / 180:.4f} when resumed at checkpoints" in windowed
    )


def test_every_rank_beyond_the_kv_heads_adds_one(size):
    assert "4.0 KiB" in size("--tp", "2")[1] and "8.0 KiB" in size("--tp", "8")[1]
    assert "2.0 KiB" in size("--kv-dtype", "fp8")[1]


@pytest.mark.parametrize(
    ("options", "config", "complaint"),
    [
        (("--target", "1.5"), LLAMA, "target is a share"),
        (("--target", "nan"), LLAMA, "target is a share"),
        (("--policy", "min"), LLAMA, "unknown policy 'min'; known are lru, arc, adaptive"),
        (("--policy", "lru,"), LLAMA, "--policy has nothing between two commas"),
        (("--json", "no/such/folder/out"), LLAMA, "there is no such folder"),
        (("--plot", "no/such/folder/out.png"), LLAMA, "there is no such folder"),
        (("--gpu-price", "3"), LLAMA, "--gpu-price is for prefill seconds saved"),
        (("--tflops", "600"), {**LLAMA, "model_type": "new"}, "of type 'new' takes to compute does not follow"),
        (("--kv-dtype", "fp3"), LLAMA, "unknown dtype 'fp3'"),
        (("--tp", "3"), LLAMA, "3 ranks cannot share its 4 KV heads"),
        ((), {**LLAMA, "model_type": "new", "kv_lora_rank": 3}, "'new' keeps"),
    ],
    ids=str,
)
def test_models_that_cannot_be_sized_are_refused_in_a_sentence(size, options, config, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        size(*options, config=config)


@pytest.mark.parametrize("option", ["--tp", "--limit", "--block-tokens", "--bytes-per-token"])
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "x"])
def test_numbers_are_counts(capsys, option, value):
    with pytest.raises(SystemExit):
        argparse_of_size().parse_args(["size", "trace", f"{option}={value}"])
    assert f"{option}: must be a whole number of at least 1, got {value!r}" in capsys.readouterr().err


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("capacity", [3, 5, 8, 60])
def test_without_checkpoints_it_replays_what_the_replay_command_replays(tmp_path, policy, capacity):
    (tmp_path / "trace").write_text("\n".join(trace_of(SHARED)))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    trace = read_traces([str(tmp_path / "trace")])
    replay = ResumableReplay(
        HybridChunkPlanner(read_model(tmp_path, block_tokens=512), max_model_len=2**40), capacity, policy
    )
    for request in trace.requests:
        replay.serve(request.keys, request.now)
    assert replay.hit_chunks == replay_one_tier(trace, HostTier(capacity, policy), Meter("", trace.blocks)).hit_blocks
