"""`cpu-prefix-cache replay`, from its arguments to its printed and written results."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cpu_prefix_cache.eviction import POLICIES
from cpu_prefix_cache.tools.cli import main
from tests.unit.replay.traces import mooncake_lines, random_prompts, write

PROMPTS = ["abc", "abd", "xyz", "abc"]
# In 2 layers K and V of 2 heads, each 128 numbers of 2 bytes: 2048 bytes a token.
MODEL = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
TOKEN = ["--bytes-per-token", "2048"]
RATES = ["--prefill-rate", "1000", "--host-rate", "1"]


@pytest.fixture
def trace(tmp_path):
    return write(tmp_path / "trace.jsonl", mooncake_lines(PROMPTS))


def rows(capsys):
    """The table that was printed: (policy, capacity) -> the other cells."""
    lines = capsys.readouterr().out.split("\n\n")[1].splitlines()
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    return {(name, capacity): dict(zip(cells[0][2:], rest, strict=True)) for name, capacity, *rest in cells[1:]}


def test_one_tier(trace, capsys):
    assert main(["replay", trace, "--capacity", "4,100", "--policy", "lru"]) == 0
    table = rows(capsys)
    assert list(table) == [
        ("no cache", "-"),
        ("lru", "4"),
        ("min", "4"),
        ("lru", "100"),
        ("min", "100"),
        ("infinite", "-"),
    ]
    assert table["no cache", "-"]["hit blocks"] == "0.0000"
    assert table["lru", "4"]["hit blocks"] == f"{2 / 12 + 1 / 12:.4f}"  # ab, and then a
    assert table["min", "4"]["hit blocks"] == table["infinite", "-"]["hit blocks"] == f"{5 / 12:.4f}"
    found = table["lru", "100"]
    assert (found["stored"], found["loaded"]) == ("7", "5")


def test_min_is_explained_below_the_table(trace, capsys):
    main(["replay", trace])
    sentence = (
        "the most that any cache of this capacity finds, counted in blocks. In tokens or time a policy can exceed it"
    )
    assert sentence in capsys.readouterr().out


def test_without_a_choice_every_policy_and_a_sweep_of_capacities_are_replayed(tmp_path, capsys):
    trace = write(tmp_path / "trace", mooncake_lines(random_prompts(0, 100, letters="abc")))
    main(["replay", trace])
    table = rows(capsys)
    assert {name for name, _ in table} == {*POLICIES, "min", "no cache", "infinite"}
    assert len({capacity for _, capacity in table} - {"-"}) == 5


@pytest.mark.parametrize("offload", ["lazy", "eager"])
def test_two_tiers(trace, capsys, offload):
    arguments = ["--capacity", "50", "--device-capacity", "4", "--policy", "lru,arc", "--offload", offload]
    assert main(["replay", trace, *arguments]) == 0
    table = rows(capsys)
    assert {name for name, _ in table} == {"lru", "arc", "min", "at eviction", "no cache", "infinite"}
    assert table["lru", "50"]["hit blocks"] == table["infinite", "-"]["hit blocks"]


def test_json_has_one_result_for_each_policy_and_capacity(trace, tmp_path):
    out = tmp_path / "out.json"
    main(["replay", trace, "--policy", "arc,min", "--capacity", "4,8", "--json", str(out)])
    written = json.loads(out.read_text())
    assert (written["schema_version"], written["command"], written["traces"]) == (1, "replay", [trace])
    assert (written["requests"], written["blocks"], written["block_tokens"]) == (4, 12, 512)
    assert (written["block_bytes"], written["flops"], written["prefill"]) == (None, None, None)
    assert written["ideal"] == {"block_hit_ratio": 5 / 12, "token_hit_ratio": 5 / 12, "time_hit_ratio": None}
    assert [(each["policy"], each["capacity_blocks"]) for each in written["results"]] == [
        ("arc", 4),
        ("min", 4),
        ("arc", 8),
        ("min", 8),
    ]
    result = written["results"][2]
    assert result.pop("seconds") > 0
    assert result == {
        "policy": "arc",
        "capacity_blocks": 8,
        "device_capacity_blocks": None,
        "offload": None,
        "block_hit_ratio": 5 / 12,
        "token_hit_ratio": 5 / 12,
        "time_hit_ratio": None,
        "stored_blocks": 7,
        "loaded_blocks": 5,
        "evictions": 0,
        "lost_before_store_blocks": 0,
        "trace_blocks": 12,
        "prefill_seconds_saved": None,
        "prefill_share_saved": None,
        "money_saved": None,
    }


def test_json_of_two_tiers_names_both(trace, tmp_path):
    out = tmp_path / "out.json"
    tiers = ["--capacity", "50", "--device-capacity", "4", "--offload", "eager"]
    main(["replay", trace, "--policy", "lru", *tiers, "--json", str(out)])
    written = json.loads(out.read_text())
    [result] = written["results"]
    assert (result["capacity_blocks"], result["device_capacity_blocks"], result["offload"]) == (50, 4, "eager")
    assert result["block_hit_ratio"] == 5 / 12 and result["lost_before_store_blocks"] == 0
    for reference in ("min", "at_eviction"):  # though no such policy was given
        assert [(each["capacity_blocks"], each["block_hit_ratio"]) for each in written[reference]] == [(50, 5 / 12)]


def test_a_tier_below_has_columns_and_json_of_its_own(trace, capsys, tmp_path):
    out = tmp_path / "out.json"
    below = ["--below", "50", "--below-offload", "eager"]
    assert main(["replay", trace, "--policy", "lru,min", "--capacity", "3", *below, "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "above a tier of 50 blocks with LRU; eager stores\n" in printed
    assert "from below: blocks of prompts that only the tier" in printed and "of prefill" not in printed
    result, known = json.loads(out.read_text())["results"]
    assert (result["below_capacity_blocks"], result["below_offload"]) == (50, "eager")
    assert sum(result["block_hit_ratio_by_tier"].values()) == pytest.approx(result["block_hit_ratio"]) == 5 / 12
    assert result["block_hit_ratio_by_tier"]["below"] == 3 / 12
    assert "below_capacity_blocks" not in known and known["block_hit_ratio"] == 5 / 12


def test_three_tiers_have_at_eviction_and_rates(trace, capsys, tmp_path):
    tiers = ["--capacity", "2,3", "--device-capacity", "3", "--below", "6GB"]
    rates = [*RATES, "--below-rate", "0.5"]
    assert main(["replay", trace, "--policy", "lru,arc", *tiers, *TOKEN, *rates]) == 0
    printed = capsys.readouterr().out
    assert "break-even: loading is faster than computing above 0.00 GB/s" in printed
    assert "those blocks are missed" in printed
    lines = [line for line in printed.splitlines() if line.startswith(("lru", "arc"))]
    assert len(lines) == 4 and all(line.endswith("%") for line in lines)
    assert max(map(len, printed.split("\n\n")[1].splitlines())) <= 120


def test_prefill_saved_is_shown_without_a_tier_below_too(trace, capsys):
    assert main(["replay", trace, "--policy", "lru", "--capacity", "100", *TOKEN, *RATES]) == 0
    assert rows(capsys)["lru", "100"]["of prefill"] == f"{5 / 12 * (1 - 2048 / 1e6):.1%}"


def test_the_rate_of_a_tier_is_read_from_what_bench_writes(trace, capsys, tmp_path):
    measured = tmp_path / "rates.json"
    measured.write_text(json.dumps({"read_gb_per_s": 0.125}))
    options = ["--policy", "lru", "--capacity", "3", "--below", "50", *TOKEN, *RATES, "--below-rate"]
    assert main(["replay", trace, *options, str(measured)]) == 0
    assert "from below at 0.12 GB/s" in capsys.readouterr().out
    measured.write_text("{}")
    assert main(["replay", trace, *options, str(measured)]) == 2
    assert "is not what `bench --tier PATH --json FILE` writes" in capsys.readouterr().err


def test_hit_time_is_shown_with_a_model_and_what_it_saves_with_a_rate_and_a_price(trace, capsys, tmp_path):
    """One prompt of two that share their beginning: of its time less is found than of its tokens."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"intermediate_size": 2048}))
    model = ["--policy", "lru", "--capacity", "100", "--model", str(tmp_path)]
    assert main(["replay", trace, *model]) == 0
    found = rows(capsys)["lru", "100"]
    assert float(found["hit time"]) < float(found["hit tokens"]) == 0.4167 and "money" not in found
    estimated = ["--tflops", "0.001", "--gpu-price", "7200"]
    out = tmp_path / "out.json"
    assert main(["replay", trace, *model, *estimated, "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert (
        "(estimated: 0.0 GFLOP a token at 0 TFLOPS)" in printed and "loads from the host take no time here" in printed
    )
    written = json.loads(out.read_text())
    [result], prefill = written["results"], written["prefill"]
    assert result["prefill_share_saved"] == pytest.approx(result["time_hit_ratio"])
    assert result["prefill_seconds_saved"] == pytest.approx(
        prefill["seconds_of_all_prompts"] * result["time_hit_ratio"]
    )
    assert result["money_saved"] == pytest.approx(2 * result["prefill_seconds_saved"])
    flops = written["flops"]["of_a_token"] * 12 * 512 + written["flops"]["of_a_pair"] * 4 * (1536 * 1537 / 2)
    assert prefill["seconds_of_all_prompts"] == pytest.approx(flops / 1e9)


def test_a_rate_is_that_of_prompts_of_a_length(trace, capsys, tmp_path):
    """Short ones would be computed faster, as their tokens have less to attend to."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MODEL | {"intermediate_size": 2048}))
    out = tmp_path / "out.json"
    for rate in ("1000", "1000@1536"):
        arguments = ["--policy", "lru", "--model", str(config), "--prefill-rate", rate, "--json", str(out)]
        assert main(["replay", trace, *arguments]) == 0
        prefill = json.loads(out.read_text())["prefill"]
        name = "tokens_per_second_on_average" if "@" in rate else "tokens_per_second_at_start"
        assert prefill[name] == pytest.approx(1000, rel=1e-3)  # all prompts of the trace have 1,536 tokens


def test_an_unknown_model_has_no_hit_time_and_the_reason_is_printed(trace, capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"model_type": "new"}))
    model = ["--policy", "lru", "--capacity", "100", "--model", str(tmp_path)]
    assert main(["replay", trace, *model]) == 0
    printed = capsys.readouterr().out
    assert "hit time is not known of this model: give its --active-parameters" in printed
    assert main(["replay", trace, *model, "--active-parameters", "1B"]) == 0
    assert "hit time" in rows(capsys)["lru", "100"]
    assert main(["replay", trace, *model, "--tflops", "600"]) == 2
    assert "of a model of type 'new' takes to compute does not follow" in capsys.readouterr().err


def test_rates_are_read_from_what_bench_writes(trace, capsys, tmp_path):
    measured = tmp_path / "bench.json"
    measured.write_text(json.dumps({"load_gb_per_s": 54.5, "matmul_tflops": 600.0}))
    rates = ["--tflops", str(measured), "--active-parameters", "8B", *TOKEN, "--host-rate", str(measured)]
    assert main(["replay", trace, "--policy", "lru", *rates]) == 0
    printed = capsys.readouterr().out
    assert "16.0 GFLOP a token at 600 TFLOPS" in printed and "loads come from the host at 54.50 GB/s" in printed


def test_bytes_are_capacities(trace, capsys):
    main(["replay", trace, "--policy", "lru", "--capacity", "100MiB", "--bytes-per-token", "2048"])
    assert rows(capsys)["lru", "100"]["host bytes"] == "100.0 MiB"


@pytest.mark.parametrize(
    ("options", "blocks"),
    [([], "200"), (["--tp", "4"], "100"), (["--kv-dtype", "fp8"], "400"), (["--codec", "exponent"], "261")],
)
def test_the_bytes_of_a_token_follow_from_the_model(trace, tmp_path, capsys, options, blocks):
    """Four ranks have one each of two KV heads."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    replay = ["replay", trace, "--policy", "lru", "--capacity", "200MiB", "--model", str(tmp_path), *options]
    assert main(replay) == 0
    assert ("lru", blocks) in rows(capsys)


def test_a_model_that_keeps_nothing_for_a_token_has_no_bytes_per_token(trace, tmp_path, capsys):
    states = {"model_type": "falcon_mamba", "num_hidden_layers": 2, "hidden_size": 64, "state_size": 4}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(states | {"intermediate_size": 128, "conv_kernel": 4}))
    assert main(["replay", trace, "--model", str(config)]) == 2
    assert "keeps nothing for each token" in capsys.readouterr().err


def test_token_logs_and_limits(tmp_path, capsys):
    log = write(tmp_path / "log", [{"timestamp": at, "token_ids": list(range(40))} for at in range(3)])
    main(["replay", log, "--policy", "lru", "--capacity", "9", "--limit", "2", "--block-tokens", "8"])
    assert rows(capsys)["lru", "9"]["hit blocks"] == "0.5000"


def test_without_capacities_round_ones_are_replayed(tmp_path, capsys):
    prompts = [f"{number:04}" for number in range(3_000)]  # 3,000 and some blocks
    trace = write(tmp_path / "trace", mooncake_lines(prompts))
    main(["replay", trace, "--policy", "lru", *TOKEN])  # a block has a MiB
    assert {capacity for name, capacity in rows(capsys) if name == "lru"} == {"128", "256", "512", "1,024", "2,048"}


def test_a_bad_line_stops_it_or_is_counted(tmp_path, capsys):
    trace = write(tmp_path / "log.jsonl", [*mooncake_lines(PROMPTS), "nothing"])
    assert main(["replay", trace]) == 2
    printed = capsys.readouterr()
    assert "log.jsonl, line 5: it is not JSON" in printed.err and not printed.out
    assert main(["replay", trace, "--skip-bad-lines"]) == 0
    assert "bad lines that were skipped: 1, the first: " in capsys.readouterr().out


def test_requests_whose_number_of_blocks_does_not_fit_are_counted(trace, capsys):
    main(["replay", trace, "--block-tokens", "16"])
    assert "requests with more or fewer blocks than their input_length takes: 4" in capsys.readouterr().out


def test_a_guessed_unit_of_time_is_printed_with_the_option_to_change_it(trace, capsys):
    sentence = "timestamps are taken for seconds, 50.0 minutes in all; with --time-unit ms they would be 3.0 s"
    main(["replay", trace])
    assert sentence in capsys.readouterr().out
    main(["replay", trace, "--time-unit", "ms"])
    assert "timestamps are taken" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--policy", "mru"], "unknown policy 'mru'; known are lru, arc"),
        (["--policy", "lru,adaptive@x"], "got 'adaptive@x'"),
        (["--policy", ""], "--policy has nothing between two commas, or none at all: ''"),
        (["--capacity", "100,,200"], "--capacity has nothing between two commas, or none at all: '100,,200'"),
        (["--capacity", "many"], "a capacity is a number of blocks"),
        (["--capacity", "1GiB"], "--bytes-per-token or --model"),
        (["--capacity", "1KiB", "--bytes-per-token", "100"], "less than a block"),
        (["--offload", "eager"], "--offload is for two tiers"),
        (["--horizon", "4"], "--horizon is for two tiers"),
        (["--device-capacity", "0"], "at least one block"),
        (["--device-capacity", "8", "--offload", "eager", "--horizon", "4"], "eager ones do not look ahead"),
        (["--json", "no/such/folder/out.json"], "there is no such folder"),
        (["--plot", "no/such/folder/out.png"], "there is no such folder"),
        (["--json", "."], "is a folder"),
        (["--capacity", "9" * 400], "at most 15 digits"),
        (["--capacity", "9" * 400 + "GiB", "--bytes-per-token", "1"], "at most 15 digits"),
        (["--tp", "2"], "--tp is for --model"),
        (["--below-offload", "lazy"], "--below-offload is for a tier below the host: give --below"),
        (["--below", "7", "--capacity", "4"], "needs at least 8"),
        (["--below", "1GiB"], "--bytes-per-token or --model"),
        (["--below-rate", "7"], "--below-rate is for a tier below"),
        (["--host-rate", "7"], "--host-rate is for prefill seconds saved: give --prefill-rate or --tflops, too"),
        (["--gpu-price", "7"], "--gpu-price is for prefill seconds saved"),
        (["--capacity", "4", "--below", "50", *TOKEN, *RATES], "give --below-rate, too"),
        (["--prefill-rate", "nan"], "--prefill-rate is TOKENS/S or TOKENS/S@LENGTH; must be a number above 0"),
        (["--prefill-rate", "1e300"], "must be a number from 1e-15 to 1e+15, got '1e300'"),
        (["--prefill-rate", "7@x"], "must be a whole number of at least 1, got 'x'"),
        (["--prefill-rate", "7", *TOKEN, "--host-rate", "0"], "--host-rate must be a number above 0, got '0'"),
        (["--tflops", "7"], "--tflops needs what a token takes to compute: give --model or --active-parameters"),
        (["--tflops", "quick", "--active-parameters", "8B"], "--tflops must be a number above 0, got 'quick', or the"),
        (["--active-parameters", "many"], "--active-parameters is a number such as 22B"),
        (
            ["--model", "no/such/model"],
            "no model of that name is known: give the model's config.json, or one of llama-3.1",
        ),
        (["--prefill-rate", "7", "--host-rate", "1"], "rates are in bytes"),
        (
            ["--capacity", "4", "--below", "50", *TOKEN, *RATES, "--below-rate", "fast"],
            "must be a number above 0, got 'fast', or the file of",
        ),
        (["--bytes-per-token", "2", "--kv-dtype", "fp8"], "--kv-dtype is for --model"),
        (["--bytes-per-token", "2", "--codec", "exponent"], "--codec is for --model"),
    ],
)
def test_impossible_options_are_refused_in_a_sentence_before_anything_is_replayed(trace, capsys, arguments, sentence):
    assert main(["replay", trace, *arguments]) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err and printed.err.count("\n") == 1 and not printed.out


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--limit", "0"],
        ["--limit", "9" * 5000],
        ["--horizon", "x"],
        ["--horizon", "\u0663"],
        ["--offload", "never"],
        ["--bytes-per-token", "1", "--model", "m"],
        ["--store-after", "0"],
        ["--min-store-tokens", "-1"],
        ["--time-unit", "us"],
        ["--limit", "1", "--limit", "2"],
        ["--time-unit", "s", "--time-unit=ms"],
        ["--gpu-price", "0"],
        ["--prefill-rate", "1", "--tflops", "1"],
        ["--below-offload", "never"],
    ],
    ids=str,
)
def test_malformed_options_are_refused(trace, capsys, arguments):
    with pytest.raises(SystemExit) as exit:
        main(["replay", *([trace, *arguments] if arguments else [])])
    assert exit.value.code == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("cpu-prefix-cache replay: ") and printed.err.count("\n") == 1 and not printed.out


def test_a_plot_without_matplotlib_is_refused_before_anything_is_replayed(trace, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["replay", trace, "--plot", str(tmp_path / "out.png")]) == 2
    printed = capsys.readouterr()
    assert "--plot needs matplotlib: pip install matplotlib" in printed.err and not printed.out


def test_a_plot_is_drawn(trace, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    assert main(["replay", trace, "--plot", str(tmp_path / "out.png")]) == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    for name in ("out.what", "out"):
        assert main(["replay", trace, "--plot", str(tmp_path / name)]) == 2
        printed = capsys.readouterr()
        assert "a plot's name ends in one of" in printed.err and not printed.out


def test_a_capacity_beyond_the_trace_takes_no_memory_and_is_infinite(trace, capsys):
    most = str(10**14)
    for tiers in (["--capacity", most], ["--capacity", most, "--device-capacity", "4"]):
        assert main(["replay", trace, "--policy", "lru,arc,adaptive", *tiers]) == 0
        table = rows(capsys)
        assert {table[policy, f"{10**14:,}"]["hit blocks"] for policy in ("lru", "arc", "adaptive")} == {"0.4167"}
    assert main(["replay", trace, "--policy", "lru", "--capacity", "2", "--device-capacity", most]) == 0
    assert rows(capsys)["lru", "2"]["stored"] == "0"


def test_admission_options_hold_back_what_few_or_short_prompts_had(trace, capsys):
    for tiers in (["--capacity", "100"], ["--capacity", "100", "--device-capacity", "3"]):
        stored = {}
        for options in ([], ["--store-after", "2"], ["--min-store-tokens", str(4 * 512)]):
            assert main(["replay", trace, "--policy", "lru", *tiers, *options]) == 0
            stored["".join(options[:1])] = int(rows(capsys)["lru", "100"]["stored"])
        assert stored[""] > stored["--store-after"] > stored["--min-store-tokens"] == 0


def test_admission_thresholds_are_printed(trace, capsys):
    main(["replay", trace, "--capacity", "9", "--store-after", "2"])
    assert "stored is what 2 or more prompts of at least 0 tokens had" in capsys.readouterr().out


def test_policies_and_capacities_may_be_given_one_by_one(trace, capsys):
    assert main(["replay", trace, "--policy", "lru", "--policy", "arc", "--capacity", "3,4", "--capacity", "5"]) == 0
    table = rows(capsys)
    assert {("lru", each) for each in "345"} | {("arc", each) for each in "345"} <= table.keys()


def test_the_last_line_names_the_best_policy_of_each_capacity(trace, capsys):
    assert main(["replay", trace, "--policy", "lru,arc,min", "--capacity", "3,100"]) == 0
    out = capsys.readouterr().out
    assert re.fullmatch(
        r"most hits: (lru|arc) at 3 blocks \(\d+\.\d points above (lru|arc)\), "
        r"lru at 100 blocks \(0\.0 points above arc\)",
        out.splitlines()[-1],
    )
    options = ["--policy", "lru", "--capacity", "3"]
    assert main(["replay", trace, *options]) == 0
    assert "most hits" not in capsys.readouterr().out


def test_ids_of_content_are_an_option(tmp_path, capsys):
    lines = [
        {"timestamp": at, "input_length": 1024, "hash_ids": ids} for at, ids in enumerate([[1, 2], [2, 1], [1, 2]])
    ]
    path = write(tmp_path / "log", lines)
    assert main(["replay", path, "--skip-bad-lines"]) == 2
    assert "--ids content" in capsys.readouterr().err
    assert main(["replay", path, "--ids", "content", "--policy", "lru", "--capacity", "9"]) == 0
    assert rows(capsys)["lru", "9"]["hit blocks"] == "0.3333"


# Seen from a shell


def test_the_command_alone_prints_its_help(capsys):
    with pytest.raises(SystemExit) as exit:
        main([])
    assert exit.value.code == 0 and "examples:" in capsys.readouterr().out


def started(arguments, **pipes):
    command = [sys.executable, "-m", "cpu_prefix_cache.tools.cli", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **pipes)


def hears_interrupts():
    """A shell that runs the tests in the background lets its children ignore them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_an_interruption_is_printed(tmp_path):
    """It waits for a trace that never comes."""
    os.mkfifo(tmp_path / "trace")
    process = started(["replay", str(tmp_path / "trace")], stdout=subprocess.PIPE, preexec_fn=hears_interrupts)
    with open(tmp_path / "trace", "w"):  # it has come that far
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[1] == "cpu-prefix-cache: interrupted\n"
    assert process.returncode == 130


def test_a_broken_pipe_is_reported(trace):
    reader, writer = os.pipe()
    os.close(reader)
    process = started(["replay", trace], stdout=writer)
    os.close(writer)
    assert process.communicate()[1] == "cpu-prefix-cache: cannot print: Broken pipe\n"
    assert process.returncode == 2


def test_without_a_stdout_it_does_nothing(trace, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["replay", trace]) == 2
    assert "stdout is closed" in capsys.readouterr().err


def test_names_that_a_terminal_cannot_show_are_escaped(trace, tmp_path):
    odd = tmp_path / "\u00f6.jsonl"
    odd.write_text(Path(trace).read_text())
    process = started(["replay", str(odd)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert "\\xf6.jsonl" in process.communicate()[0]
    assert process.returncode == 0


@pytest.mark.parametrize("option", ["--tp", "--limit", "--block-tokens", "--bytes-per-token"])
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "x"])
def test_numbers_are_counts(capsys, option, value):
    with pytest.raises(SystemExit):
        main(["replay", "trace", f"{option}={value}"])
    assert f"{option}: must be a whole number of at least 1, got {value!r}" in capsys.readouterr().err
