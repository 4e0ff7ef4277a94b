"""A run that is cut off loses nothing: the rounds that finished are printed, and in --json.

It is cut off by Ctrl-C, by a reader of its output who has gone away, and by a full disk, in the second round of a
thousand million. Errors before the first round are printed as a sentence, too.
"""

import json
import os
import sys

import pytest

import offline_generation
import offline_generation_run
from offline_generation_checks import check

FOREVER = ["--documents", "1", "--max-new-tokens", "2", "--rounds", "1000000000"]
FULL = "/dev/full"  # a device that takes nothing
has_full = pytest.mark.skipif(not os.path.exists(FULL), reason=f"there is no {FULL} here")

pytestmark = pytest.mark.usefixtures("small_model")


@pytest.fixture
def interrupted(monkeypatch):
    """Interrupts the second of the two answers of the second round. Holds the answers so far."""
    answers = []

    def checked(*arguments):
        if len(answers) == 3:
            raise KeyboardInterrupt
        answers.append(check(*arguments))
        return answers[-1]

    monkeypatch.setattr(offline_generation_run, "check", checked)
    return answers


def rows(output):
    """The numbers of the rounds in the table."""
    return [int(line.split()[0]) for line in output.splitlines() if line[:5].strip().isdecimal()]


def test_an_interrupted_run_has_the_rounds_that_finished(interrupted, tmp_path, capsys):
    results = tmp_path / "results.json"
    assert offline_generation.main([*FOREVER, "--json", str(results)]) == 130
    said = capsys.readouterr()
    assert said.err.splitlines()[-1] == "error: interrupted: the rounds that finished are above"
    assert rows(said.out) == [1]
    assert "every answer agrees" not in said.out
    report = json.loads(results.read_text())
    assert [line["round"] for line in report["rounds"]] == [1]
    assert not report["finished"]
    assert report["ttft_seconds"]["no_cache"] > 0


def test_answers_are_shown_as_they_come(interrupted, capsys):
    assert offline_generation.main([*FOREVER, "--show"]) == 130
    shown = [line.strip() for line in capsys.readouterr().out.splitlines() if ", question " in line]
    assert [line.partition(": ")[2] for line in shown] == [repr(each.answer.text) for each in interrupted]
    assert shown[0].startswith("assert, question 1: ")


@has_full
def test_results_on_a_full_disk_leave_the_table_and_the_verdict(capsys):
    assert offline_generation.main([*FOREVER[:-1], "1", "--json", FULL]) == 2
    said = capsys.readouterr()
    assert said.err.splitlines()[-1] == f"error: cannot write --json {FULL}: No space left on device"
    assert rows(said.out) == [1]
    assert "every answer agrees" in said.out
    assert "time to the first token" in said.out


def test_results_that_cannot_be_written_leave_those_from_before(monkeypatch, tmp_path, capsys):
    results = tmp_path / "results.json"
    results.write_text("from before")

    def full(file, _):
        file.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    assert offline_generation.main([*FOREVER[:-1], "1", "--json", str(results)]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert results.read_text() == "from before"
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


@pytest.fixture
def stdout_of(monkeypatch):
    def replace(file):
        monkeypatch.setattr(sys, "stdout", file)
        return file

    return replace


def test_a_reader_who_has_gone_away_ends_the_run(stdout_of, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with stdout_of(os.fdopen(writer, "w")):
        assert offline_generation.main(FOREVER) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: cannot print: Broken pipe"


def test_a_round_that_can_no_longer_be_printed_is_in_the_results(monkeypatch, stdout_of, tmp_path):
    reader, writer = os.pipe()
    open_readers = [reader]

    def checked(*arguments):
        while open_readers:
            os.close(open_readers.pop())
        return check(*arguments)

    results = tmp_path / "results.json"
    monkeypatch.setattr(offline_generation_run, "check", checked)
    with stdout_of(os.fdopen(writer, "w")):
        assert offline_generation.main([*FOREVER, "--json", str(results)]) == 2
    assert [line["round"] for line in json.loads(results.read_text())["rounds"]] == [1]


@has_full
def test_a_full_disk_under_the_table_ends_the_run(stdout_of, capsys):
    with stdout_of(open(FULL, "w")):
        assert offline_generation.main(FOREVER) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: cannot print: No space left on device"


def test_a_closed_stdout_is_reported_before_anything_is_computed(stdout_of, capsys):
    stdout_of(None)
    assert offline_generation.main(FOREVER) == 2
    assert "stdout is closed" in capsys.readouterr().err


@pytest.fixture
def fresh_imports(monkeypatch):
    """The files of the example are imported again, and what they import is not."""
    for name in [name for name in sys.modules if name.startswith("offline_generation_")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("fresh_imports")
@pytest.mark.parametrize("package", ["torch", "transformers", "cpu_prefix_cache"])
def test_a_package_that_is_not_installed_is_named(monkeypatch, capsys, package):
    monkeypatch.setitem(sys.modules, package, None)
    assert offline_generation.main([]) == 2
    assert f"error: {package} is not installed: run `make demo`" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "status", "sentence"), [
    (KeyboardInterrupt, 130, "interrupted"), (MemoryError, 2, "not enough memory"),
])  # fmt: skip
def test_a_run_that_ends_before_its_first_answer_prints_the_reason(monkeypatch, capsys, error, status, sentence):
    def end(*_):
        raise error

    monkeypatch.setattr(offline_generation_run, "load_model", end)
    assert offline_generation.main([]) == status
    assert sentence in capsys.readouterr().err
