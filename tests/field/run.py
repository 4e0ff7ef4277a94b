"""`make test-field`: one line for each row, and one for all.

python -m tests.field.run [WORD ...]     only the rows that have one of these words in their names
"""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path

from tests.field.environments import ROOT, NotRun, prepared
from tests.field.outcomes import Outcome, Report, State, outcome
from tests.field.rows import Row, rows_of

ALL_RAN, NO_TESTS = (0, 1), 5  # pytest's exit status: tests pass or fail; it has selected none
BAD = (State.LOST_HITS, State.WRONG)


def main(words: list[str]) -> int:
    """The exit status: 1 if a row has lost hits or is wrong."""
    counts: Counter[State] = Counter()
    for row in _chosen(words):
        result = run(row)
        counts[result.state] += 1
        print(f"{row.name:40} {result.state.value:10} {result.detail}", flush=True)
    print(f"{counts.total()} rows: " + ", ".join(f"{counts[state]} {state.value}" for state in State))
    return int(any(counts[state] for state in BAD))


def _chosen(words: list[str]) -> list[Row]:
    """All rows without words. Exits for a word that no row has in its name."""
    rows = rows_of()
    for word in words:
        if not any(word in row.name for row in rows):
            sys.exit(f"no row has {word!r} in its name: there are {', '.join(row.name for row in rows)}")
    return [row for row in rows if not words or any(word in row.name for word in words)]


def run(row: Row) -> Outcome:
    """Run its selections, one after the other."""
    try:
        _check(row)
        python, variables = prepared(row.environment)
        return outcome({kind: selected(said, row, python, variables) for kind, said in row.selections.items()})
    except NotRun as why:
        return Outcome(State.NOT_RUN, str(why))


def _check(row: Row) -> None:
    """Raises NotRun if something that the row needs is not here."""
    for name in row.needs:
        if not os.environ.get(name) or not Path(os.environ[name]).exists():
            raise NotRun(f"{name} names nothing that is here")
    for said in row.selections.values():
        for file in (each.partition("::")[0] for each in shlex.split(said) if each.startswith("tests")):
            if not (ROOT / file).exists():
                raise NotRun(f"there is no {file}")


def selected(said: str, row: Row, python: Path, variables: dict[str, str]) -> Report:
    """Run a selection with pytest. Raises NotRun if it selects nothing."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.xml"
        command = [python, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={file}", *shlex.split(said)]
        try:
            status, output = _ended(command, variables | row.variables, row.seconds)
        except subprocess.TimeoutExpired:
            return Report(error=f"no end within {row.seconds} s")
        report = Report.read(file) if file.exists() else None  # a test may have ended the process
        if status == NO_TESTS and not (report and report.skipped):  # a file may skip itself
            raise NotRun(f"no test is selected by: {said}")
        if report is not None and (status in (*ALL_RAN, NO_TESTS) or report.error):
            return report
        lines = output.strip().splitlines() or ["nothing was said"]
        *_, why = [line for line in lines if line.startswith("!!")] or lines  # pytest's own reason
        return Report(error=f"pytest ends with {status}: {why.strip('! ')}")


def _ended(command: list[str | Path], variables: dict[str, str], seconds: float) -> tuple[int, str]:
    """The exit status and the output. What the command has started does not outlive it. Raises TimeoutExpired."""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            output, _ = running.communicate(timeout=seconds)
            return running.returncode, output
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
