"""The rows of `make test-field`: the tests that they select, and their results."""

import fcntl
import sys
import time
from pathlib import Path

import pytest

from tests.field import environments, run
from tests.field.environments import ENVIRONMENTS, Environment
from tests.field.outcomes import Outcome, Report, State, outcome
from tests.field.rows import KINDS, Row, rows_of

SKIPPED = "there is no such server"
TESTS = """
import fcntl, os, subprocess
import pytest
def test_passes(): pass
def test_fails(): assert False
def test_is_skipped(): pytest.skip("there is no such server")
@pytest.fixture
def broken(): raise OSError
def test_has_an_error(broken): pass
def test_starts_what_has_no_end():
    with open("held", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        subprocess.run(["sleep", "300"], pass_fds=[file.fileno()])
def test_stops_the_run(): pytest.exit("it is gone")
def test_ends_the_process(): os._exit(1)
"""


@pytest.fixture
def tests_here(tmp_path, monkeypatch):
    """Rows run here, in this Python."""
    (tmp_path / "tests_here.py").write_text(TESTS)
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setitem(ENVIRONMENTS, "here", Environment("FIELD_PYTHON", Path(sys.executable)))
    monkeypatch.delenv("FIELD_PYTHON", raising=False)
    return "tests_here.py::test_"


@pytest.mark.parametrize(
    ("tests", "state", "detail"),
    [
        (dict(bytes="passes", hits="fails"), State.LOST_HITS, "test_fails"),
        (dict(hits="has_an_error"), State.WRONG, "hits: test_has_an_error does not run"),
        (dict(hits="stops_the_run"), State.WRONG, "hits: pytest ends with 2: _pytest.outcomes.Exit: it is gone"),
        (dict(hits="ends_the_process"), State.WRONG, "hits: pytest ends with 1: tests_here.py"),
        (dict(bytes="is_skipped"), State.NOT_RUN, SKIPPED),
    ],
)
def test_the_outcomes_of_its_tests_decide_the_state_of_a_row(tests_here, tests, state, detail):
    row = Row("a row", "here", **{kind: tests_here + name for kind, name in tests.items()})
    assert run.run(row) == Outcome(state, detail)


PASSED, FAILED = Report(passed=1), Report(failed=("test_fails",))


@pytest.mark.parametrize(
    ("reports", "state", "detail"),
    [
        (dict(bytes=PASSED), State.RIGHT, "1 tests"),
        (
            dict(bytes=PASSED, hits=Report(skipped=(SKIPPED,))),
            State.RIGHT,
            f"1 tests, and some are left out: {SKIPPED}",
        ),
        (dict(bytes=FAILED), State.WRONG, "test_fails"),
        (dict(hits=FAILED, bytes=FAILED), State.WRONG, "test_fails"),
        (dict(hits=FAILED, bytes=Report(failed=("test_one", "test_two"))), State.WRONG, "test_one and 1 more"),
        (dict(refusals=PASSED), State.REFUSED, "1 tests"),
        (dict(refusals=FAILED), State.WRONG, "test_fails"),
    ],
)
def test_reports_decide_it_by_their_kinds(reports, state, detail):
    assert outcome(reports) == Outcome(state, detail)


@pytest.mark.slow  # it waits as long as such a row may take
def test_a_row_without_an_end_is_wrong_and_the_processes_that_it_has_started_do_not_outlive_it(tests_here, tmp_path):
    (tmp_path / "held").touch()
    row = Row("a row", "here", hits=f"{tests_here}starts_what_has_no_end", seconds=6)
    assert run.run(row) == Outcome(State.WRONG, "hits: no end within 6 s")
    with open(tmp_path / "held") as file:
        for _ in range(50):
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.1)
    pytest.fail("a process of it is still there")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (dict(bytes="tests/vllm/test_not_yet.py"), "there is no tests/vllm/test_not_yet.py"),
        (dict(bytes="tests_here.py -k nothing"), "no test is selected by: tests_here.py -k nothing"),
        (dict(bytes="tests_here.py", needs=("NO_SUCH_SOURCE",)), "NO_SUCH_SOURCE names nothing that is here"),
    ],
)
def test_a_row_that_cannot_run_gives_the_reason(tests_here, said, why):
    assert run.run(Row("a row", "here", **said)) == Outcome(State.NOT_RUN, why)


@pytest.mark.parametrize("options", ["", " -k passes"])
def test_a_file_that_skips_itself_gives_the_reason(tests_here, tmp_path, options):
    (tmp_path / "skipped_here.py").write_text(f"import pytest\npytest.skip({SKIPPED!r}, allow_module_level=True)")
    row = Row("a row", "here", bytes=f"skipped_here.py{options}")
    assert run.run(row) == Outcome(State.NOT_RUN, SKIPPED)


def test_an_environment_that_is_not_there_is_named(tests_here, monkeypatch):
    monkeypatch.setenv("FIELD_PYTHON", "/nowhere/python")
    result = run.run(Row("a row", "here", bytes=f"{tests_here}passes"))
    assert result.state is State.NOT_RUN and result.detail.startswith("/nowhere/python is not there")


def test_a_folder_that_cannot_be_made_is_no_fault_of_the_row(tests_here, monkeypatch, tmp_path):
    def make(python, folder):
        environments.subprocess.run(
            [python, "-c", "raise SystemExit('no such release')"], check=True, capture_output=True, text=True
        )

    monkeypatch.setattr(environments, "FOLDERS", tmp_path / ".field")
    monkeypatch.setitem(ENVIRONMENTS, "here", Environment("FIELD_PYTHON", Path(sys.executable), make))
    assert run.run(Row("a row", "here", bytes=f"{tests_here}passes")).detail == (
        "here cannot be installed: no such release"
    )
    assert list((tmp_path / ".field").iterdir()) == []


def test_only_what_is_the_newest_is_loaded_anew(monkeypatch, tmp_path):
    monkeypatch.delenv("FIELD_PYTHON", raising=False)
    made = []

    def make(python, folder):
        made.append(folder.name)
        folder.mkdir()
        (folder / f"{len(made)}.py").touch()

    monkeypatch.setattr(environments, "FOLDERS", tmp_path / ".field")
    for is_newest in (False, True):
        environment = Environment("FIELD_PYTHON", Path(sys.executable), make, is_newest)
        monkeypatch.setitem(ENVIRONMENTS, "here", environment)
        for _ in range(2):
            environments.prepared("here")
    assert len(made) == 3
    assert [each.name for each in (tmp_path / ".field" / "here").iterdir()] == ["3.py"]


def test_the_exit_status_is_1_if_a_row_is_bad(monkeypatch, capsys):
    rows = [Row(name, "here", bytes=name) for name in ("right", "lost hits", "not run")]
    monkeypatch.setattr(run, "rows_of", lambda: rows)
    monkeypatch.setattr(run, "run", lambda row: Outcome(State(row.name)))
    assert run.main([]) == 1 and run.main(["right", "not"]) == 0
    assert "3 rows: 1 right, 0 refused, 1 lost hits, 0 wrong, 1 not run" in capsys.readouterr().out


def test_words_that_no_row_has_are_an_error(monkeypatch):
    monkeypatch.setattr(run, "rows_of", lambda: [Row("fp8 KV", "here", bytes="tests")])
    with pytest.raises(SystemExit, match="no row has 'fp9' in its name: there are fp8 KV"):
        run.main(["fp8", "fp9"])


def test_every_row_has_an_environment_and_names_tests_that_exist():
    rows = rows_of()
    assert {row.environment for row in rows} <= set(ENVIRONMENTS)
    for row in rows:
        for kind, said in row.selections.items():
            assert kind in KINDS
            files, _, words = said.partition(" -k ")
            paths = [run.ROOT / each for each in files.split()]
            assert paths and all(each.exists() for each in paths), row.name
            text = "".join(each.name + each.read_text() for each in paths if words)
            missing = [word for word in words.strip("' ").split(" or ") if word.removeprefix("not ") not in text]
            assert not missing, f"{row.name}: no test has {missing} in its name"


def test_a_row_without_tests_and_a_name_that_stands_twice_are_refused(tmp_path):
    file = tmp_path / "rows.toml"
    file.write_text('[[row]]\nname = "empty"\nenvironment = "base"\n')
    with pytest.raises(ValueError, match="'empty' has no tests"):
        rows_of(file)
    file.write_text('[[row]]\nname = "one"\nenvironment = "base"\nbytes = "tests"\n' * 2)
    with pytest.raises(ValueError, match="two rows 'one'"):
        rows_of(file)
