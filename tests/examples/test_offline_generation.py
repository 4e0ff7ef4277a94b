"""The example as its users run it: the table, the picture, the answers, the JSON, and the control.

What cannot be done is in test_offline_generation_refusals.py.
"""

import json
import shutil
from pydoc_data.topics import topics

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast, logging

import offline_generation
from builtin_models import build_model
from connector.transformers import Generation, PrefixCachedGenerator
from offline_generation_checks import TOLERANCE, Check
from offline_generation_inputs import DOCUMENT_TOKENS
from offline_generation_report import judge_control, picture, verdict

SMALL = ["--documents", "2", "--device-blocks", "88", "--max-new-tokens", "3"]


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


def run(tmp_path, *options):
    """The exit status and the report of --json."""
    report = tmp_path / "report.json"
    status = offline_generation.main([*options, "--json", str(report)])
    return status, json.loads(report.read_text())


@pytest.mark.usefixtures("small_model")
@pytest.mark.parametrize("offload", ["lazy", "eager"])
@pytest.mark.parametrize(("arch", "blocks"), [("full", "72"), ("swa", "88"), ("hybrid", "88"), ("mla", "72")])
def test_round_two_comes_from_the_host_and_agrees(tmp_path, capsys, arch, blocks, offload):
    options = [*SMALL, "--device-blocks", blocks, "--arch", arch, "--offload", offload]
    status, report = run(tmp_path, *options)
    assert status == 0
    first, second = report["rounds"]
    assert first["host_hit_tokens"] == 0
    assert second["host_hit_tokens"] * 4 >= second["prompt_tokens"]
    for line in report["rounds"]:
        assert line["tokens_match"]
        assert line["max_logit_error"] <= TOLERANCE
        hit = line["device_hit_tokens"] + line["host_hit_tokens"]
        assert hit + line["computed_tokens"] == line["prompt_tokens"]
        assert line["ttft_ms_median"] > 0 < line["ttft_ms_median_no_cache"]
    assert "control" not in report
    output = capsys.readouterr().out
    assert "pydoc_data.topics" in output
    assert "every answer agrees" in output


@pytest.mark.usefixtures("small_model")
@pytest.mark.parametrize("policy", ["arc", "adaptive", "adaptive@1000"])
def test_every_policy_serves(tmp_path, policy):
    status, report = run(tmp_path, *SMALL, "--device-blocks", "72", "--policy", policy)
    assert (status, report["policy"]) == (0, policy)
    assert report["rounds"][1]["host_hit_tokens"] > 0


@pytest.mark.usefixtures("small_model")
def test_the_report_has_every_group(tmp_path):
    _, report = run(tmp_path, *SMALL, "--rounds", "1", "--documents", "1")
    (group,) = report["groups"]
    assert group == {
        "name": "attention", "kind": "prefix", "layers": 2, "block_tokens": 16,
        "bytes_per_block": report["host_block_bytes"],
    }  # fmt: skip
    _, report = run(tmp_path, *SMALL, "--rounds", "1", "--documents", "1", "--arch", "swa")
    assert [(group["kind"], group["layers"]) for group in report["groups"]] == [("prefix", 1), ("window", 3)]
    _, report = run(tmp_path, *SMALL, "--rounds", "1", "--documents", "1", "--arch", "hybrid")
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
def test_control_a_corrupted_piece_is_caught(tmp_path, arch, piece):
    status, report = run(tmp_path, *SMALL, "--arch", arch, "--corrupt", piece)
    assert status == 1
    assert report["control"] == "caught"
    assert max(line["max_logit_error"] for line in report["rounds"]) > TOLERANCE


@pytest.mark.usefixtures("small_model")
def test_control_without_a_load_is_reported(tmp_path):
    status, report = run(tmp_path, *SMALL, "--offload", "off", "--rounds", "1", "--corrupt", "chunk")
    assert (status, report["control"]) == (3, "nothing to corrupt")


def test_a_checkpoint_without_a_tokenizer_takes_bytes(tmp_path, checkpoint):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one prompt of more than sixteen bytes"}\n\n{"prompt": "another one"}\n')
    status, report = run(tmp_path, "--model", str(checkpoint), "--byte-tokens", "--prompts", str(prompts))
    assert status == 0
    assert report["arch"] == str(checkpoint)
    assert report["rounds"][0]["requests"] == 2
    assert report["rounds"][1]["device_hit_tokens"] == 32


def test_half_precision_with_a_tokenizer_runs_and_does_not_fail_on_differences(tmp_path, half_precision_checkpoint):
    options = ["--documents", "2", "--device-blocks", "256", "--max-new-tokens", "3"]
    status, report = run(tmp_path, "--model", str(half_precision_checkpoint), *options)
    assert status == 0
    first, second = report["rounds"]
    assert 2 * 2 * DOCUMENT_TOKENS[0] <= first["prompt_tokens"]
    assert second["host_hit_tokens"] > 0
    assert {"differences", "near_ties"} <= second.keys()


def test_a_model_without_a_length_runs_with_one_that_is_given(tmp_path):
    MambaForCausalLM(MambaConfig(vocab_size=300, hidden_size=16, num_hidden_layers=1)).save_pretrained(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one prompt of more than sixteen bytes"}\n')
    options = ["--model", str(tmp_path), "--byte-tokens", "--prompts", str(prompts)]
    status, report = run(tmp_path, *options, "--max-model-len", "64")
    assert status == 0
    assert report["rounds"][1]["device_hit_tokens"] == 32


def test_a_checkpoint_that_samples_gives_its_most_likely_answer(tmp_path, checkpoint, capsys):
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 5.0}')
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one prompt of more than sixteen bytes"}\n')
    options = ["--byte-tokens", "--prompts", str(prompts), "--show"]
    shown = []
    for model in (checkpoint, folder):
        assert offline_generation.main(["--model", str(model), *options]) == 0
        shown.append([line for line in capsys.readouterr().out.splitlines() if ", line 1: " in line])
    assert shown[0] == shown[1]
    assert len(shown[0]) == 2


@pytest.mark.parametrize(
    ("error", "exact", "control", "status"),
    [
        (0.0, True, None, 0),
        (1e-3, True, None, 1),  # float32 must agree
        (1e-3, False, None, 0),  # half precision may not, and prints it
        (1e-3, True, "caught", 1),
        (0.0, True, "missed", 3),
    ],
)
def test_the_verdict(error, exact, control, status):
    checks = [Check(None, 0.0, 0.0, error, True, False, control is not None)]
    code, said = verdict(checks, control and judge_control(checks), exact=exact)
    assert code == status
    assert (control or ("every answer agrees" if not error else "1 answers differ")) in said


def test_a_control_that_differs_before_the_damage_proves_nothing():
    before = Check(None, 0.0, 0.0, 1e-3, True, False, damaged=False)
    after = Check(None, 0.0, 0.0, 1e-3, True, False, damaged=True)
    assert judge_control([before, after]) == "differs without damage"


TIERS = ["full", "swa", "hybrid", "mla"]


def with_tier(arch, folder, *options):
    blocks = "72" if arch in ("full", "mla") else "88"
    tier = ["--tier", f"file:{folder}:64MiB", "--host-bytes", "16MiB", "--offload", "eager"]
    return [*SMALL, "--device-blocks", blocks, "--arch", arch, *tier, *options]


@pytest.mark.usefixtures("small_model")
@pytest.mark.parametrize("arch", TIERS)
def test_a_second_run_finds_in_the_files_what_the_first_had(tmp_path, capsys, arch):
    options = with_tier(arch, tmp_path)
    reports = []
    for _ in range(2):
        status, report = run(tmp_path, *options)
        assert status == 0
        reports.append(report)
        assert "on host  of it from tier" in capsys.readouterr().out
    first, again = reports
    assert first["tier"]["found"] == 0 < again["tier"]["found"]
    assert first["rounds"][0]["tier_hit_tokens"] == 0
    of_host = again["rounds"][0]["host_hit_tokens"]
    assert 0 < again["rounds"][0]["tier_hit_tokens"] <= of_host
    assert 2 * of_host > again["rounds"][0]["prompt_tokens"] - again["rounds"][0]["device_hit_tokens"]
    assert all(line["max_logit_error"] <= TOLERANCE for report in reports for line in report["rounds"])
    assert again["tier"]["refused"] == 0


@pytest.mark.usefixtures("small_model")
@pytest.mark.parametrize("arch", TIERS)
def test_with_a_tier_a_corrupted_piece_is_caught_too(tmp_path, arch):
    options = with_tier(arch, tmp_path)
    run(tmp_path, *options)
    status, report = run(tmp_path, *options, "--corrupt", "chunk")
    assert (status, report["control"]) == (1, "caught")


@pytest.mark.usefixtures("small_model")
def test_without_a_tier_the_table_has_no_column_for_it(tmp_path, capsys):
    _, report = run(tmp_path, *SMALL, "--rounds", "1", "--documents", "1")
    assert "tier" not in report and report["rounds"][0]["tier_hit_tokens"] is None
    assert "tier" not in capsys.readouterr().out


@pytest.mark.usefixtures("small_model")
@pytest.mark.parametrize(
    "text",
    [
        '{"prompt": "one\u2028line"}\n{"prompt": "another\u0085one"}\n',  # letters that some take for ends of lines
        '\ufeff{"prompt": "one"}\r\n\r\n{"prompt": "another"}\r\n',  # as some editors write
        '{"prompt": "one"}\n{"prompt": "another"}',
    ],
    ids=["separators", "byte order mark", "no end of line"],
)
def test_lines_of_prompts_are_read_as_json_lines(tmp_path, text):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes(text.encode())
    _, report = run(tmp_path, "--prompts", str(prompts), "--rounds", "1", "--max-new-tokens", "1")
    assert report["rounds"][0]["requests"] == 2


@pytest.mark.usefixtures("small_model")
def test_the_texts_of_answers_are_shown_beside_where_their_prompts_are(tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n\n{"prompt": "another"}\n')
    options = ["--prompts", str(prompts), "--max-new-tokens", "4", "--rounds", "1"]
    offline_generation.main(options)
    assert "line 1" not in capsys.readouterr().out
    offline_generation.main([*options, "--show"])
    shown = [line for line in capsys.readouterr().out.splitlines() if str(prompts) in line and ", line" in line]
    generator = PrefixCachedGenerator(build_model("full", hidden=64, layers=2), device_blocks=9, offload="off")
    texts = [generation.text for generation in generator.generate(["one", "another"], 4)]
    assert shown == [f"  {prompts}, line {at}: {text!r}" for at, text in zip((1, 3), texts, strict=True)]


@pytest.mark.usefixtures("small_model")
def test_rounds_take_their_questions_in_turn(tmp_path, capsys):
    _, report = run(tmp_path, "--documents", "1", "--rounds", "4", "--max-new-tokens", "1", "--show")
    asked = [line.split(":")[0].split()[-1] for line in capsys.readouterr().out.splitlines() if ", question " in line]
    assert asked == ["1", "2", "3", "4", "5", "6", "1", "2"]
    assert len(report["rounds"]) == 4 and report["finished"]


@pytest.mark.usefixtures("small_model")
def test_units_of_sizes_have_any_case(tmp_path):
    status, _ = run(tmp_path, *SMALL, "--rounds", "1", "--documents", "1", "--host-bytes", "1.5 gib")
    assert status == 0


def check_of(hit, seconds, without):
    answer = Generation((), "", 100, hit == "device" and 90, hit == "host" and 90, 10, seconds, (), torch.empty(0))
    return Check(answer, without, 2 * without, 0.0, True, False, False)


def test_the_picture_compares_medians():
    checks = [check_of("none", 0.9, 0.6), check_of("device", 0.01, 0.6), check_of("host", 0.02, 0.6)]
    assert picture([*checks, check_of("host", 0.04, 0.6)]).splitlines() == [
        "time to the first token, medians of all rounds",
        "  no cache     600.0 ms  ############################################################",
        "  device hit    10.0 ms  #",
        "  host hit      30.0 ms  ###",
    ]
    assert picture(checks[:1]).splitlines()[2:] == ["  device hit          -", "  host hit            -"]


@pytest.mark.usefixtures("small_model")
def test_the_output_ends_with_the_picture_and_stderr_is_empty(tmp_path, capfd):
    logging.set_verbosity_warning()
    status = offline_generation.main([*SMALL, "--arch", "hybrid", "--json", str(tmp_path / "report.json")])
    said = capfd.readouterr()
    assert (status, said.err) == (0, "")  # no progress bar where there is no terminal
    assert logging.get_verbosity() == logging.ERROR  # no warnings of transformers, which writes where capfd cannot read
    *_, title, without, device, host = said.out.strip().splitlines()
    assert title.startswith("time to the first token")
    assert [line.split()[0] for line in (without, device, host)] == ["no", "device", "host"]
    assert all(line.endswith("#") for line in (without, device, host))
