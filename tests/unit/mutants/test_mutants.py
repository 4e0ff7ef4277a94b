"""The tool that judges the tests: faults of a statement, faults that count as killed, and names of faults."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from property_tests.mutants.faults import Fault, faults_of
from property_tests.mutants.sample import draw, population, read, write
from property_tests.mutants.subjects import SUBJECTS

HOME = Path(__file__).parents[3]
TINY = """
def clipped(value, most):
    if value > most:
        return most
    return value

def counted(n):
    steps = 0
    while n > 0:
        n -= 1
        steps += 1
    return steps

def halved(n):
    return n // 2

def never(n):
    return n + 1

def elsewhere(n):
    return n * 5

LEAST = 4

def raised(n):
    return max(n, LEAST)
"""
EXAMPLES = """
import subprocess, sys

from cpu_prefix_cache.tiny import clipped, counted, never, raised

def test_that_fails_anyway():
    assert counted(3) == never(3)

def test_clipped():
    assert clipped(7, 3) == 3

def test_counted():
    assert counted(3) == 3

def test_raised():
    assert raised(3) == 4

def test_elsewhere():
    subprocess.run([sys.executable, "-c", "from cpu_prefix_cache.tiny import *; assert elsewhere(3) == 15"], check=True)
"""
PROPERTIES = """
from hypothesis import given, strategies

from cpu_prefix_cache.tiny import halved

@given(strategies.integers(0, 1000))
def test_halved(n):
    assert n in (2 * halved(n), 2 * halved(n) + 1)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "--import-mode=importlib"\npythonpath = ["src"]\n',
        "src/cpu_prefix_cache/__init__.py": "",
        "src/cpu_prefix_cache/tiny.py": TINY,
        "tests/unit/conftest.py": "import cpu_prefix_cache.tiny",
        "tests/unit/test_tiny.py": EXAMPLES,
        "property_tests/test_tiny_laws.py": PROPERTIES,
    }
    for name, text in files.items():
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(text)
    return tmp_path / "tree"


def changes(source: str) -> set[str]:
    return {f"{fault.kind}: {fault.change}" for fault in faults_of("file.py", source)}


def test_faults_of_a_condition_and_its_exit() -> None:
    assert changes("def f(a, b):\n    if a < b or not a:\n        return\n    a += 1\n") == {
        "exit removed: `if a < b or not a:`",
        "comparison: `a < b` becomes `a <= b` in `if a < b or not a:`",
        "comparison: `a < b` becomes `a >= b` in `if a < b or not a:`",
        "condition: `a < b or not a` becomes `a < b and (not a)` in `if a < b or not a:`",
        "condition: `a < b or not a` becomes `not a` in `if a < b or not a:`",
        "condition: `a < b or not a` becomes `a < b` in `if a < b or not a:`",
        "condition: `not a` becomes `a` in `if a < b or not a:`",
        "dropped: `a += 1`",
        "arithmetic: `a += 1` becomes `a -= 1`",
        "off by one: `1` becomes `2` in `a += 1`",
        "off by one: `1` becomes `0` in `a += 1`",
    }


def test_faults_of_a_call() -> None:
    assert changes("def f(a, b):\n    self.take(a, b[a:])\n    del b[a]\n") == {
        "dropped: `self.take(a, b[a:])`",
        "arguments swapped: `self.take(a, b[a:])` becomes `self.take(b[a:], a)` in `self.take(a, b[a:])`",
        "off by one: `b[a:]` becomes `b[a + 1:]` in `self.take(a, b[a:])`",
        "dropped: `del b[a]`",
    }


def test_messages_annotations_and_checks_are_let_be() -> None:
    assert not changes('def f(a: int | None) -> int | None:\n    """1 < 2"""\n    raise ValueError(f"{a + 1}")\n')
    assert not changes("def check_valid(self):\n    self.a += 1\n")
    assert changes("LEAST = 7\nT = int | None\n") == {
        "off by one: `7` becomes `8` in `LEAST = 7`",
        "off by one: `7` becomes `6` in `LEAST = 7`",
    }


def test_every_fault_can_be_compiled_and_changes_its_statement_alone() -> None:
    source = (
        "def f(a):\n    if a:\n        b = 1\n    elif a > 2:\n        b = sorted(a)\n    return b[a:] if b else 'é'\n"
    )
    for fault in faults_of("file.py", source):
        changed = fault.put_into(source.encode()).decode()
        compile(changed, "file.py", "exec")
        lines = zip(source.splitlines(), changed.splitlines(), strict=False)
        assert next(at for at, (old, new) in enumerate(lines, start=1) if old != new) in fault.lines


def test_a_draw_is_that_of_its_seed(tree: Path) -> None:
    faults = population(tree, SUBJECTS["deciding"])
    assert draw(faults, 1, 5) == draw(list(reversed(faults)), 1, 5) == draw(faults, 1, 7)[:5]
    assert draw(faults, 1, 5) != draw(faults, 2, 5)
    assert len({fault.lines.start for fault in draw(faults, 1, 1000)}) == len(draw(faults, 1, 1000))


def test_a_list_is_found_again_where_the_code_has_moved(tree: Path) -> None:
    tiny = tree / "src/cpu_prefix_cache/tiny.py"
    before = population(tree, SUBJECTS["deciding"])
    write(tree / "list.json", before)
    (tree / "src/cpu_prefix_cache/room").mkdir()
    (tree / "src/cpu_prefix_cache/room/larger.py").write_text("\n\n\n" + TINY.replace("return n + 1", "return n + 3"))
    tiny.unlink()
    found, gone = read(tree / "list.json", population(tree, SUBJECTS["deciding"]))
    assert {fault.content[1:] for fault in found} == {
        fault.content[1:] for fault in before if fault.function != "never"
    }
    assert all(fault.file.endswith("room/larger.py") for fault in found)
    assert len(gone) == len(before) - len(found) and all("never" in line for line in gone)


@pytest.mark.slow  # a run of the tool, which runs at night, too
def test_faults_are_killed_or_survive_or_never_end(tree: Path, tmp_path: Path) -> None:
    """`elsewhere` runs in a program that its test starts, which imports the whole file, as a conftest.py does."""

    def only(part: str) -> Fault:
        (fault,) = [fault for fault in population(tree, SUBJECTS["deciding"]) if part in str(fault)]
        return fault

    expected = {
        "exit removed: `if value > most:`": ("killed", "tests/unit/test_tiny.py::test_clipped"),
        "comparison: `value > most` becomes `value >= most`": ("survived", ""),  # the same at value == most
        "dropped: `n -= 1`": ("killed", "out of time: tests/unit/test_tiny.py::test_counted"),
        "off by one: `2` becomes `3` in `return n // 2`": ("killed", "property_tests/test_tiny_laws.py::test_halved"),
        "arithmetic: `n + 1`": ("not run", ""),
        "off by one: `5` becomes `6` in `return n * 5`": ("killed", "tests/unit/test_tiny.py::test_elsewhere"),
        "off by one: `4` becomes `5` in `LEAST = 4`": ("killed", "tests/unit/test_tiny.py::test_raised"),
    }
    write(tmp_path / "list.json", map(only, expected))
    results = tmp_path / "results.jsonl"
    files = ["--list", tmp_path / "list.json", "--results", results, "--scratch", tmp_path / "scratch"]
    command = [sys.executable, "-m", "property_tests.mutants", "--root", tree, *files]
    printed = subprocess.run(command, cwd=HOME, check=True, capture_output=True, text=True).stdout
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(row["result"], row["by"]) for row in rows] == list(expected.values())
    assert "left out, as it fails without a fault: tests/unit/test_tiny.py::test_that_fails_anyway\n" in printed
    assert "survived: src/cpu_prefix_cache/tiny.py:3 in clipped: comparison: `value > most`" in printed
    assert (tree / "src/cpu_prefix_cache/tiny.py").read_text() == TINY
    again = subprocess.run(command, cwd=HOME, check=True, capture_output=True, text=True).stdout
    assert again == printed and len(results.read_text().splitlines()) == len(rows)  # goes on where it was
