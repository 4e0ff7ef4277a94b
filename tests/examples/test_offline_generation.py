"""The example as its users run it: the table, the JSON, the control, and a clear sentence for what cannot be done."""

import importlib.util
import json
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from connector.transformers import build_model

FILE = Path(__file__).parents[2] / "examples" / "offline_generation.py"
SMALL = ["--documents", "2", "--device-blocks", "88", "--max-new-tokens", "3"]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("offline_generation", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def small_model(monkeypatch, example):
    """The built-in models, smaller, and documents of which the device holds one."""
    monkeypatch.setattr(example, "DOCUMENT_TOKENS", (400, 800))
    layers = {"full": 2}
    monkeypatch.setattr(example, "build_model", lambda arch: build_model(arch, hidden=64, layers=layers.get(arch, 4)))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A local checkpoint without a tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint")
    build_model("full", hidden=32, layers=1).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def half_precision_checkpoint(tmp_path_factory):
    """In half precision, with a tokenizer: one token for each of some words."""
    folder = tmp_path_factory.mktemp("half")
    build_model("full", hidden=64, layers=2).to(torch.bfloat16).save_pretrained(folder)
    words = sorted({word for text in topics.values() for word in text.split()})[:318]
    tokenizer = Tokenizer(WordLevel({word: id for id, word in enumerate(["<unk>", *words])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    return folder


def run(example, tmp_path, *options):
    """The exit status and what --json says."""
    report = tmp_path / "report.json"
    status = example.main([*options, "--json", str(report)])
    return status, json.loads(report.read_text())


@pytest.mark.usefixtures("small_model")
@pytest.mark.parametrize("offload", ["lazy", "eager"])
@pytest.mark.parametrize(("arch", "blocks"), [("full", "72"), ("swa", "88"), ("hybrid", "88"), ("mla", "72")])
def test_round_two_comes_from_the_host_and_agrees(example, tmp_path, capsys, arch, blocks, offload):
    options = [*SMALL, "--device-blocks", blocks, "--arch", arch, "--offload", offload]
    status, report = run(example, tmp_path, *options)
    assert status == 0
    first, second = report["rounds"]
    assert first["host_hit_tokens"] == 0
    assert second["host_hit_tokens"] * 4 >= second["prompt_tokens"]
    for line in report["rounds"]:
        assert line["tokens_match"]
        assert line["max_logit_error"] <= example.TOLERANCE
        hit = line["device_hit_tokens"] + line["host_hit_tokens"]
        assert hit + line["computed_tokens"] == line["prompt_tokens"]
        assert line["ttft_ms_median"] > 0 < line["ttft_ms_median_no_cache"]
    assert "control" not in report
    output = capsys.readouterr().out
    assert "pydoc_data.topics" in output
    assert "every answer agrees" in output


@pytest.mark.usefixtures("small_model")
@pytest.mark.parametrize("policy", ["arc", "adaptive"])
def test_every_policy_serves(example, tmp_path, policy):
    status, report = run(example, tmp_path, *SMALL, "--device-blocks", "72", "--policy", policy)
    assert (status, report["policy"]) == (0, policy)
    assert report["rounds"][1]["host_hit_tokens"] > 0


@pytest.mark.usefixtures("small_model")
def test_the_report_has_every_group(example, tmp_path):
    _, report = run(example, tmp_path, *SMALL, "--rounds", "1", "--documents", "1")
    (group,) = report["groups"]
    assert group == {
        "name": "attention", "kind": "prefix", "layers": 2, "block_tokens": 16,
        "bytes_per_block": report["host_block_bytes"],
    }  # fmt: skip
    _, report = run(example, tmp_path, *SMALL, "--rounds", "1", "--documents", "1", "--arch", "swa")
    assert [(group["kind"], group["layers"]) for group in report["groups"]] == [("prefix", 1), ("window", 3)]
    _, report = run(example, tmp_path, *SMALL, "--rounds", "1", "--documents", "1", "--arch", "hybrid")
    assert [(group["kind"], group["layers"]) for group in report["groups"]] == [("prefix", 1), ("state", 3)]


@pytest.mark.usefixtures("small_model")
@pytest.mark.parametrize(
    ("arch", "piece"),
    [
        ("full", "chunk"),
        ("swa", "chunk"),
        ("swa", "window"),
        ("hybrid", "chunk"),
        ("hybrid", "state"),
        ("mla", "chunk"),
    ],
)
def test_control_a_corrupted_piece_is_caught(example, tmp_path, arch, piece):
    status, report = run(example, tmp_path, *SMALL, "--arch", arch, "--corrupt", piece)
    assert status == 1
    assert report["control"] == "caught"
    assert max(line["max_logit_error"] for line in report["rounds"]) > example.TOLERANCE


@pytest.mark.usefixtures("small_model")
def test_control_without_a_load_says_so(example, tmp_path):
    status, report = run(example, tmp_path, *SMALL, "--offload", "off", "--rounds", "1", "--corrupt", "chunk")
    assert (status, report["control"]) == (3, "nothing to corrupt")


def test_a_checkpoint_without_a_tokenizer_takes_bytes(example, tmp_path, checkpoint):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one prompt of more than sixteen bytes"}\n\n{"prompt": "another one"}\n')
    status, report = run(example, tmp_path, "--model", str(checkpoint), "--prompts", str(prompts))
    assert status == 0
    assert report["arch"] == str(checkpoint)
    assert report["rounds"][0]["requests"] == 2
    assert report["rounds"][1]["device_hit_tokens"] == 32


def test_half_precision_with_a_tokenizer_runs_and_does_not_fail_on_differences(
    example, tmp_path, half_precision_checkpoint
):
    options = ["--documents", "2", "--device-blocks", "256", "--max-new-tokens", "3"]
    status, report = run(example, tmp_path, "--model", str(half_precision_checkpoint), *options)
    assert status == 0
    first, second = report["rounds"]
    assert 2 * 2 * example.DOCUMENT_TOKENS[0] <= first["prompt_tokens"]
    assert second["host_hit_tokens"] > 0
    assert {"differences", "near_ties"} <= second.keys()


@pytest.mark.parametrize(
    ("error", "exact", "control", "status"),
    [
        (0.0, True, None, 0),
        (1e-3, True, None, 1),  # float32 must agree
        (1e-3, False, None, 0),  # half precision may not, and says so
        (1e-3, True, "caught", 1),
        (0.0, True, "missed", 3),
    ],
)
def test_the_verdict(example, capsys, error, exact, control, status):
    checks = [example.Check(None, 0.0, 0.0, error, True, False, control is not None)]
    assert example.verdict(checks, control and example.judge_control(checks), exact=exact) == status
    said = capsys.readouterr().out
    assert (control or ("every answer agrees" if not error else "1 answers differ")) in said


def test_a_control_that_differs_before_the_damage_proves_nothing(example):
    before = example.Check(None, 0.0, 0.0, 1e-3, True, False, damaged=False)
    after = example.Check(None, 0.0, 0.0, 1e-3, True, False, damaged=True)
    assert example.judge_control([before, after]) == "differs without damage"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--device", "cuda"], "no CUDA device"),
        (["--arch", "mla", "--corrupt", "window"], "no such piece"),
        (["--corrupt", "state"], "no such piece"),
        (["--model", "/no/such/model"], "cannot load the model"),
        (["--device-blocks", "0"], "at least 1"),
        (["--host-bytes", "0"], "at least 1"),
        (["--host-bytes", "900TiB"], "ask for at most"),
        (["--prompts", "/no/such/file.jsonl"], "cannot read the prompts"),
        (["--documents", "10000"], "ask for no more"),
        (["--device-blocks", "3"], "device blocks, but the pool has 3"),
        (["--device-blocks", "999999999"], "ask for at most"),
        (["--json", "/no/such/folder/x.json"], "not a file that can be written"),
        (["--max-new-tokens", "8190"], "more than the model's 8192"),
        (["--tier", "disk:/x:1GiB"], "unknown kind of tier"),
        (["--tier", "file:/no/such/folder:1TB"], "does not exist"),
        (["--tier", "file:/tmp:1MiB"], "give the tier at least"),
        (["--tier", "file:/tmp:1GiB", "--offload", "off"], "below host memory"),
    ],
)
@pytest.mark.usefixtures("small_model")
def test_what_cannot_be_done_is_said_in_one_sentence(example, capsys, options, sentence):
    assert example.main(options) == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: ")
    assert sentence in message


@pytest.mark.parametrize("line", ["not json", '{"text": "a"}', '{"prompt": 1}', "[]", r'{"prompt": "\ud800"}'])
def test_a_bad_line_of_prompts_is_named(example, tmp_path, capsys, line):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "good"}\n' + line + "\n")
    assert example.main(["--prompts", str(prompts)]) == 2
    assert line in capsys.readouterr().err


def test_a_prompt_longer_than_the_model_is_refused(example, tmp_path, capsys, checkpoint):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "x" * 9000}) + "\n")
    assert example.main(["--model", str(checkpoint), "--prompts", str(prompts), "--device-blocks", "1000"]) == 2
    assert "more than the model's 8192" in capsys.readouterr().err


TIERS = ["full", "swa", "hybrid", "mla"]


def with_tier(arch, folder, *options):
    blocks = "72" if arch in ("full", "mla") else "88"
    tier = ["--tier", f"file:{folder}:64MiB", "--host-bytes", "16MiB", "--offload", "eager"]
    return [*SMALL, "--device-blocks", blocks, "--arch", arch, *tier, *options]


@pytest.mark.usefixtures("small_model")
@pytest.mark.parametrize("arch", TIERS)
def test_a_second_run_finds_in_the_files_what_the_first_had(example, tmp_path, capsys, arch):
    options = with_tier(arch, tmp_path)
    reports = []
    for _ in range(2):
        status, report = run(example, tmp_path, *options)
        assert status == 0
        reports.append(report)
        assert "on host  of it from tier" in capsys.readouterr().out
    first, again = reports
    assert first["tier"]["found"] == 0 < again["tier"]["found"]
    assert first["rounds"][0]["tier_hit_tokens"] == 0
    of_host = again["rounds"][0]["host_hit_tokens"]
    assert 0 < again["rounds"][0]["tier_hit_tokens"] <= of_host
    assert 2 * of_host > again["rounds"][0]["prompt_tokens"] - again["rounds"][0]["device_hit_tokens"]
    assert all(line["max_logit_error"] <= example.TOLERANCE for report in reports for line in report["rounds"])
    assert again["tier"]["refused"] == 0


@pytest.mark.usefixtures("small_model")
@pytest.mark.parametrize("arch", TIERS)
def test_with_a_tier_a_corrupted_piece_is_caught_too(example, tmp_path, arch):
    options = with_tier(arch, tmp_path)
    run(example, tmp_path, *options)
    status, report = run(example, tmp_path, *options, "--corrupt", "chunk")
    assert (status, report["control"]) == (1, "caught")


@pytest.mark.usefixtures("small_model")
def test_without_a_tier_the_table_has_no_column_for_it(example, tmp_path, capsys):
    _, report = run(example, tmp_path, *SMALL, "--rounds", "1", "--documents", "1")
    assert "tier" not in report and report["rounds"][0]["tier_hit_tokens"] is None
    assert "tier" not in capsys.readouterr().out


@pytest.mark.parametrize(("text", "number"), [("2GiB", 1 << 31), ("500MB", 500_000_000), ("64k", 64_000), ("7", 7)])
def test_sizes_are_read_with_their_units(example, text, number):
    assert example.parse_bytes(text) == number
