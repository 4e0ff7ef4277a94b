"""`cpu-prefix-cache replay`, from its arguments to what it prints and writes."""

import importlib.util
import json
import sys
from types import ModuleType

import pytest

from cpu_prefix_cache.eviction import POLICIES
from cpu_prefix_cache.replay.cli import main
from tests.replay.traces import mooncake_lines, random_prompts, write

PROMPTS = ["abc", "abd", "xyz", "abc"]


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
        *(("no cache", "-"), ("lru", "4"), ("min", "4"), ("lru", "100"), ("min", "100"), ("infinite", "-"))
    ]
    assert table["no cache", "-"]["hit blocks"] == "0.0000"
    assert table["lru", "4"]["hit blocks"] == f"{2 / 12 + 1 / 12:.4f}"  # ab, and then a
    assert table["min", "4"]["hit blocks"] == table["infinite", "-"]["hit blocks"] == f"{5 / 12:.4f}"
    found = table["lru", "100"]
    assert (found["stored"], found["loaded"], found["evictions"]) == ("7", "5", "0")


def test_it_says_what_min_is(trace, capsys):
    main(["replay", trace])
    assert "a reference for prefix hits and not a proven ceiling" in capsys.readouterr().out


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
    assert table["lru", "50"]["lost"].isdecimal()


def test_json_has_one_result_for_each_policy_and_capacity(trace, tmp_path):
    out = tmp_path / "out.json"
    main(["replay", trace, "--policy", "arc,min", "--capacity", "4,8", "--json", str(out)])
    written = json.loads(out.read_text())
    assert list(written) == ["traces", "ideal", "results"]
    assert written["traces"] == [trace]
    assert written["ideal"] == {"block_hit_ratio": 5 / 12, "token_hit_ratio": 5 / 12}
    assert [(each["policy"], each["capacity_blocks"]) for each in written["results"]] == [
        *(("arc", 4), ("min", 4), ("arc", 8), ("min", 8))
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
        "stored_blocks": 7,
        "loaded_blocks": 5,
        "evictions": 0,
        "trace_blocks": 12,
    }


def test_json_of_two_tiers_names_both(trace, tmp_path):
    out = tmp_path / "out.json"
    tiers = ["--capacity", "50", "--device-capacity", "4", "--offload", "eager"]
    main(["replay", trace, "--policy", "lru", *tiers, "--json", str(out)])
    [result] = json.loads(out.read_text())["results"]
    assert (result["capacity_blocks"], result["device_capacity_blocks"], result["offload"]) == (50, 4, "eager")
    assert result["block_hit_ratio"] == 5 / 12


def test_bytes_are_capacities_and_are_counted(trace, capsys):
    main(["replay", trace, "--policy", "lru", "--capacity", "100MiB", "--bytes-per-token", "2048"])
    assert rows(capsys)["lru", "100"]["stored bytes"] == "7.0 MiB"


def test_a_model_says_what_a_token_weighs(trace, capsys, monkeypatch):
    models = ModuleType("models")
    models.read_model = lambda path: [str(path)]
    models.prefix_bytes_per_token = lambda groups: {"model/config.json": 2048, "state/config.json": 0}[groups[0]]
    monkeypatch.setitem(sys.modules, "cpu_prefix_cache.replay.models", models)
    main(["replay", trace, "--policy", "lru", "--capacity", "100MiB", "--model", "model/config.json"])
    assert rows(capsys)["lru", "100"]["loaded bytes"] == "5.0 MiB"
    assert main(["replay", trace, "--model", "state/config.json"]) == 2


def test_token_logs_and_limits(tmp_path, capsys):
    log = write(tmp_path / "log", [{"timestamp": at, "token_ids": list(range(40))} for at in range(3)])
    main(["replay", log, "--policy", "lru", "--capacity", "9", "--limit", "2", "--block-tokens", "8"])
    assert rows(capsys)["lru", "9"]["hit blocks"] == "0.5000"


def test_a_bad_line_stops_it_or_is_counted(tmp_path, capsys):
    trace = write(tmp_path / "log.jsonl", [*mooncake_lines(PROMPTS), "nothing"])
    assert main(["replay", trace]) == 2
    printed = capsys.readouterr()
    assert "log.jsonl, line 5: it is not JSON" in printed.err and not printed.out
    assert main(["replay", trace, "--skip-bad-lines"]) == 0
    assert "1 bad lines were skipped, the first: " in capsys.readouterr().out


def test_a_size_of_blocks_that_does_not_fit_is_asked_about(trace, capsys):
    main(["replay", trace, "--block-tokens", "16"])
    assert "4 requests have more or fewer blocks than their input_length takes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--policy", "mru"], "unknown policy 'mru'; known are lru, arc"),
        (["--policy", ""], "unknown policy ''"),
        (["--capacity", "many"], "a capacity is a number of blocks"),
        (["--capacity", "1GiB"], "--bytes-per-token or --model"),
        (["--capacity", "1KiB", "--bytes-per-token", "100"], "less than a block"),
        (["--offload", "eager"], "--offload is for two tiers"),
        (["--horizon", "4"], "--horizon is for two tiers"),
        (["--device-capacity", "0"], "at least one block"),
        (["--device-capacity", "8", "--offload", "eager", "--horizon", "4"], "eager ones do not look ahead"),
        (["--json", "no/such/folder/out.json"], "cannot be written"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(trace, capsys, arguments, sentence):
    assert main(["replay", trace, *arguments]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [[], ["--limit", "0"], ["--horizon", "x"], ["--offload", "never"], ["--bytes-per-token", "1", "--model", "m"]],
)
def test_what_is_no_option_is_refused(trace, capsys, arguments):
    with pytest.raises(SystemExit) as exit:
        main(["replay", *([trace, *arguments] if arguments else [])])
    assert exit.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_before_anything_is_replayed(trace, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["replay", trace, "--plot", str(tmp_path / "out.png")]) == 2
    printed = capsys.readouterr()
    assert "pip install 'cpu-prefix-cache[plot]'" in printed.err and not printed.out


def test_a_plot_is_drawn(trace, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    assert main(["replay", trace, "--plot", str(tmp_path / "out.png")]) == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert main(["replay", trace, "--plot", str(tmp_path / "out.what")]) == 2
    assert "cannot be written" in capsys.readouterr().err
