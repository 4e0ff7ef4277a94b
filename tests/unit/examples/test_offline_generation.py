"""The example as its users run it: the table, the picture, the answers, the control, and what cannot be done."""

from pydoc_data.topics import topics

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

import offline_generation
from builtin_models import build_model
from offline_generation import COLUMNS, TOLERANCE, Answer, picture

SMALL = ["--documents", "3", "--max-new-tokens", "3"]
ARCHITECTURES = ("full", "swa", "hybrid", "mla")


def run(capsys, *options):
    """The exit status, each line of the table by the names of its columns, and all that was printed."""
    status = offline_generation.main([*SMALL, *options])
    output = capsys.readouterr().out
    rows = [line.replace(" ms", "").split() for line in output.splitlines() if line.lstrip()[:1].isdigit()]
    table = [dict(zip(COLUMNS, map(float, row), strict=True)) for row in rows if len(row) == len(COLUMNS)]
    return status, table, output


@pytest.mark.usefixtures("small_model")
@pytest.mark.parametrize(
    ("arch", "offload"), [("full", "lazy"), ("full", "eager"), ("swa", "eager"), ("hybrid", "lazy"), ("mla", "lazy")]
)
def test_round_two_comes_from_the_host_and_agrees(capsys, arch, offload):
    status, table, output = run(capsys, "--arch", arch, "--offload", offload)
    assert status == 0 and "none of 12 answers differ" in output
    first, second = table
    assert first["on host"] == 0
    assert 4 * second["on host"] >= second["prompt tokens"]
    for row in table:
        assert row["computed"] + row["on device"] + row["on host"] == row["prompt tokens"]
        assert row["logit error"] <= TOLERANCE and row["first token"] > 0 < row["without"]


@pytest.mark.usefixtures("small_model")
@pytest.mark.parametrize(
    ("arch", "piece"),
    [*((arch, "chunk") for arch in ARCHITECTURES), ("swa", "checkpoint"), ("hybrid", "checkpoint")],
)
def test_control_a_damaged_piece_is_noticed(capsys, arch, piece):
    status, table, output = run(capsys, "--arch", arch, "--corrupt", piece)
    assert status == 1 and "none of 12" not in output
    assert table[0]["logit error"] <= TOLERANCE < table[1]["logit error"]


@pytest.mark.usefixtures("small_model")
def test_a_control_that_loads_nothing_notices_nothing(capsys):
    assert run(capsys, "--rounds", "1", "--corrupt", "chunk")[0] == 0


@pytest.mark.usefixtures("small_model")
def test_a_second_run_finds_in_the_files_what_the_first_had(tmp_path, capsys):
    tier = ["--tier", f"file:{tmp_path}:64MiB", "--host-bytes", "16MiB", "--offload", "eager", "--rounds", "1"]
    assert [run(capsys, *tier)[1][0]["on host"] > 0 for _ in range(2)] == [False, True]


def test_a_checkpoint_in_half_precision_shows_its_answers_and_may_differ(tmp_path, capsys):
    build_model("full", hidden=64, layers=2).to(torch.bfloat16).save_pretrained(tmp_path)
    words = sorted({word for text in topics.values() for word in text.split()})[:318]
    tokenizer = Tokenizer(WordLevel({word: id for id, word in enumerate(["<unk>", *words])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(tmp_path)
    status, table, output = run(capsys, "--model", str(tmp_path))
    assert status == 0 and table[1]["on device"] > 0
    assert output.count(" s, without ") == 12


def test_the_picture_compares_medians():
    def answer(device, host, seconds):
        return Answer(100, device, host, seconds, 0.6, 0.0, True, torch.empty(0))

    answers = [answer(0, 0, 0.9), answer(90, 0, 0.01), answer(0, 90, 0.02), answer(0, 90, 0.04)]
    assert picture(answers).splitlines() == [
        "time to the first token, medians of all rounds",
        f"no cache      600.0 ms  {61 * '#'}",
        "host hit       30.0 ms  ####",
        "device hit     10.0 ms  ##",
    ]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--host-bytes", "2iB"], "a size is a number of bytes"),
        (["--host-bytes", "0"], "host_bytes must hold at least one chunk"),
        (["--device-bytes", "900TiB"], "ask for at most"),
        (["--tier", "file:/nvme"], "file:"),
        (["--codec", "exponent"], "is for bfloat16"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--documents", "0"], "nothing to ask: give --documents"),
        (["--rounds", "-1"], "nothing to ask"),
        (["--max-new-tokens", "0"], "nothing to ask"),
    ],
)
def test_a_run_that_cannot_be_ends_with_a_sentence(capsys, options, sentence):
    assert offline_generation.main(options) == 2
    assert sentence in capsys.readouterr().err
