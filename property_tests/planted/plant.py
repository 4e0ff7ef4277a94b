"""`make planted`: puts each fault of a list into a copy of the tree and runs the tests that must notice it.

    python -m property_tests.planted.plant property_tests/planted/*.toml

A list has one table a fault: its name; the function (`scope`, see `scopes.py`); an expression or statements that are
there once (`old`), however they are laid out; what takes their place (`new`); and the tests that notice (`by`: files or
single tests as pytest names them, each of which must fail). Faults that are nowhere or in several places are printed,
and tests that pass; the exit status is 1 if there are any. `--day 3` tries every seventh fault, from the third on, so
that a week of nights tries all.
"""

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from property_tests.mutants.trial import search_alike
from property_tests.planted.scopes import NotOnceError, file_of, put

SHARE = 0.5  # of the examples of property tests: 250 runs of the cache machine
DAYS = 7
SECONDS = 120.0  # a fault may wait for ever: a test that has not ended by then has noticed it


@dataclasses.dataclass(frozen=True)
class Planted:
    """One fault of a list."""

    says: str
    scope: str
    old: str
    new: str
    by: tuple[str, ...]


def main() -> None:
    options = _options()
    faults = [fault for path in options.lists for fault in read(path)]
    if options.day:
        faults = of_day(faults, options.day)
    chosen = [fault for fault in faults if options.only in fault.says]
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        shutil.copytree(options.root, tree, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build"))
        for fault in tqdm(chosen, disable=None):
            for complaint in complaints(fault, tree):
                tqdm.write(f"{fault.says}: {complaint}")
                wrong += 1
    print(f"{len(chosen)} faults, {wrong} complaints")
    sys.exit(wrong > 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m property_tests.planted.plant", description=__doc__)
    parser.add_argument("lists", type=Path, nargs="+")
    parser.add_argument("--only", default="", help="faults whose words contain this")
    parser.add_argument("--day", type=int, choices=range(1, DAYS + 1), help="day of the week: a seventh of the faults")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the tree")
    return parser.parse_args()


def of_day(faults: list[Any], day: int) -> list[Any]:
    """Every seventh: a week of nights tries each fault once."""
    return faults[day - 1 :: DAYS]


def read(path: Path) -> list[Planted]:
    """The faults of a list; TypeError for a field that is missing or unknown."""
    rows = tomllib.loads(path.read_text())["fault"]
    return [Planted(**{**row, "by": tuple(row["by"])}) for row in rows]


def complaints(fault: Planted, tree: Path) -> Iterator[str]:
    """Why a fault cannot be planted, or which test does not notice it."""
    try:
        path = file_of(tree / "src", fault.scope)
        source = path.read_text()
        path.write_text(put(source, fault.scope, fault.old, fault.new))
    except NotOnceError as error:
        yield str(error)
        return
    try:
        yield from (f"{test}: {what}" for test in fault.by if (what := _passed(tree, test)))
    finally:
        path.write_text(source)


def _passed(tree: Path, test: str) -> str:
    """The last words of a run that does not notice; "" if it fails, ends by a signal or not at all."""
    path = os.pathsep.join([str(tree / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-p",
        "property_tests.planted.plant",
        "-p",
        "no:cacheprovider",
        test,
    ]
    try:
        run = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return ""
    noticed = run.returncode < 0 or run.returncode == pytest.ExitCode.TESTS_FAILED  # an import that fails is none
    return "" if noticed else (run.stdout.strip().splitlines() or ["nothing printed"])[-1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """This module is pytest's plugin in the runs that it starts."""
    search_alike(items, SHARE)


if __name__ == "__main__":
    main()
