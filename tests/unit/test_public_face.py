"""The public face: six modules, and only what their `__all__` names. Everything else in the library is private.

connectors, examples, pages    import these modules only
each `__all__`                 is sorted, and what it names exists; no name has two homes
the top module                 is small enough to be read at once
"""

import ast
import importlib
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest
import torch  # noqa: F401  half of the names need it

ROOT = Path(__file__).parents[2]
LIBRARY = "cpu_prefix_cache"
FACE = [LIBRARY, *(f"{LIBRARY}.{name}" for name in ("by_keys", "copying", "deciding", "testing", "tier"))]
MOST_NAMES = 30
USERS = [
    path
    for folder in ("src/connector", "src/cpu_prefix_cache_vllm", "examples")
    for path in (ROOT / folder).rglob("*.py")
]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob(".github/*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")]
STATEMENT = re.compile(r"^(?:>>> |\.\.\. )?((?:from|import) .+)$")


def imported(tree: ast.AST) -> Iterator[tuple[str, str | None]]:
    """Modules of the library that are imported, each with a name that is imported of it, or None."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        yield from ((module, name) for module, name in found if module.split(".")[0] == LIBRARY)


def statements(page: str) -> Iterator[ast.AST]:
    """Imports in the code of a page: in its blocks, and in doctests, which stand in blocks or by themselves."""
    lines = iter(page.splitlines())
    for line in lines:
        if match := STATEMENT.match(line):
            statement = match[1]
            while statement.count("(") > statement.count(")") and (more := next(lines, None)) is not None:
                statement += "\n" + more.removeprefix("... ")
            try:
                yield ast.parse(statement)
            except SyntaxError:  # a sentence
                continue


def is_public(module: str, name: str | None) -> bool:
    """Whether others may import this name, or the module itself."""
    if module not in FACE:
        return False
    return name in (None, "*") or f"{module}.{name}" in FACE or name in importlib.import_module(module).__all__


def private(trees: Iterator[ast.AST]) -> list[tuple[str, str | None]]:
    return [each for tree in trees for each in imported(tree) if not is_public(*each)]


def test_connectors_and_examples_import_public_names_only():
    found = {file: private(iter([ast.parse(file.read_text())])) for file in USERS}
    assert {file: names for file, names in found.items() if names} == {}


def test_pages_import_public_names_only():
    found = {page: private(statements(page.read_text())) for page in PAGES}
    assert {page: names for page, names in found.items() if names} == {}


def test_imports_on_pages_are_found():
    assert len([each for page in PAGES for tree in statements(page.read_text()) for each in imported(tree)]) >= 10


@pytest.mark.parametrize(
    "text",
    [
        "from cpu_prefix_cache.pool import coordinator",
        ">>> from cpu_prefix_cache.deciding import Offload",
        "import cpu_prefix_cache.pool.block_pool as pool",
        "from cpu_prefix_cache import (\n    HostCache,\n    BlockPool,\n)",
        ">>> from cpu_prefix_cache import (\n...     BlockPool,\n... )",
    ],
)
def test_a_private_import_is_noticed(text):
    assert len(private(statements(text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "from cpu_prefix_cache import HostCache, deciding",
        "import cpu_prefix_cache.tier",
        ">>> from cpu_prefix_cache.deciding import *",
        "from the first token on",
    ],
)
def test_other_text_is_none(text):
    assert private(statements(text)) == []


@pytest.mark.parametrize("name", FACE)
def test_names_are_sorted_and_exist(name):
    module = importlib.import_module(name)
    assert module.__all__ == sorted(set(module.__all__))
    assert [each for each in module.__all__ if not hasattr(module, each)] == []


def test_the_top_module_is_small():
    assert len(importlib.import_module(LIBRARY).__all__) <= MOST_NAMES


def test_no_name_has_two_homes():
    names = {module: set(importlib.import_module(module).__all__) for module in FACE}
    assert {pair: both for pair in combinations(FACE, 2) if (both := names[pair[0]] & names[pair[1]])} == {}


def test_the_top_module_lists_the_others():
    listed = re.findall(rf"^ +({LIBRARY}[\w.]*) ", importlib.import_module(LIBRARY).__doc__ or "", re.MULTILINE)
    assert sorted(listed) == sorted(FACE)
