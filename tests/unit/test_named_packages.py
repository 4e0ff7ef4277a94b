"""Packages that messages and pages name for `pip install`: dependencies of this project, or this clone.

The name of this project is on no index: whoever registers it there would be installed.
"""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
NAMES = {re.split(r"[<>=;\[ ]", each)[0] for all_of in EXTRAS.values() for each in all_of} - {PROJECT["name"]}
FILES = [
    *ROOT.glob("*.md"),
    *ROOT.glob(".github/*.md"),
    *(path for folder in ("src", "docs", "examples") for path in (ROOT / folder).rglob("*") if path.is_file()),
]
TEXTS = {path: path.read_text() for path in FILES if path.suffix in (".md", ".py")}


def installed(text):
    """The arguments of each `pip install`, up to the end of the command."""
    for command in re.findall(r"pip install ([^\n`#,:)]+)", text):
        words = re.sub(r"\".*", "", command)
        yield from (word for word in shlex.split(words) if not word.startswith(("-", "/")))


def is_known(name):
    """A package that is needed, or the clone itself with extras that exist."""
    if match := re.fullmatch(r"\.(?:\[([\w,]+)\])?", name):
        return set((match[1] or "").split(",")) - {""} <= EXTRAS.keys()
    return name in NAMES


def test_only_packages_that_exist_are_named():
    unknown = {path: [name for name in installed(text) if not is_known(name)] for path, text in TEXTS.items()}
    assert {path: names for path, names in unknown.items() if names} == {}
    assert [path for path, text in TEXTS.items() if f"{PROJECT['name']}[" in text] == []


def test_some_are_found():
    found = {name for text in TEXTS.values() for name in installed(text)}
    assert {".", ".[transformers]", "matplotlib", "torch"} <= found


@pytest.mark.parametrize("command", ["'cpu-prefix-cache[plot]'", "cpu-prefix-cache", "matplotlip", "'.[plots]'"])
def test_another_one_would_be_noticed(command):
    assert [is_known(name) for name in installed(f'needs it: pip install {command}"')] == [False]
