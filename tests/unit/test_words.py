"""First words and verbs, in docstrings, names of tests, help of options and headings.

first word    none of What, Of, Who, Whose, That, Those, And: they stand for a noun that the reader has to find; the
              name of a test does not go on with the one before, by So, Nor, But, Even
speech        no form of `say`, `tell`, `hear`, `ask`: an option is given, a report sent, a store queried
tuples        none that is unpacked where it is written, to have the formatter keep a line
"""

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "src"
PACKAGE = LIBRARY / "cpu_prefix_cache"
SUITES = [ROOT / name for name in ("benchmarks", "examples", "property_tests", "tests")]
PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob(".github/*.md"),
    *ROOT.glob("docs/*.md"),
    ROOT / "property_tests" / "README.md",
    PACKAGE / "README.md",
]

FIRST = re.compile(r"\W*(what|of|who|whose|that|those|and)\b", re.IGNORECASE)
GOES_ON = re.compile(r"(so|nor|but|even)\b")
SPEECH = re.compile(r"(?<![\w/])(said|told|heard|asked|says|tells)\b", re.IGNORECASE)
CODE_SPAN = re.compile(r"`[^`]*`")
Function = ast.FunctionDef | ast.AsyncFunctionDef

Check = Callable[[str], list[str]]


class Words(NamedTuple):
    texts: tuple[str, ...]  # docstrings without code spans, help of options, and names of tests
    tests: tuple[str, ...]  # these names
    tuples: tuple[str, ...]


@cache
def words_of(source: str) -> Words:
    nodes = list(ast.walk(ast.parse(source)))
    tests = tuple(names_of_tests(nodes))
    return Words((*docstrings(nodes), *helps(nodes), *tests), tests, tuple(unpacked(nodes)))


def docstrings(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            yield CODE_SPAN.sub("it", ast.get_docstring(node) or "")


def helps(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.keyword) and node.arg == "help":
            yield from (
                each.value
                for each in ast.walk(node.value)
                if isinstance(each, ast.Constant) and isinstance(each.value, str)
            )


def names_of_tests(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, Function) and node.name.startswith("test_"):
            yield node.name.removeprefix("test_").replace("_", " ")


def unpacked(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List):
            yield ast.unparse(node)


def first_words(source: str) -> list[str]:
    texts, tests, _ = words_of(source)
    return [text for text in texts if FIRST.match(text)] + [text for text in tests if GOES_ON.match(text)]


def speech(source: str) -> list[str]:
    return [text for text in words_of(source).texts if SPEECH.search(text)]


def tuples(source: str) -> list[str]:
    return list(words_of(source).tuples)


def faults(files: Iterator[Path], check: Check) -> dict[str, list[str]]:
    return {str(file.relative_to(ROOT)): found for file in files if (found := check(file.read_text()))}


def headings(page: Path) -> list[str]:
    tokens = MarkdownIt("commonmark").parse(page.read_text())
    return [text.content for before, text in pairwise(tokens) if before.type == "heading_open"]


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
@pytest.mark.parametrize("check", [first_words, speech, tuples])
def test_suites_have_none(suite, check):
    assert faults(suite.rglob("*.py"), check) == {}


@pytest.mark.parametrize("check", [first_words, tuples])
def test_the_library_has_none(check):
    assert faults(LIBRARY.rglob("*.py"), check) == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_headings_have_none(page):
    assert [text for text in headings(page) if FIRST.match(text) or SPEECH.search(text)] == []


@pytest.mark.parametrize(
    ("check", "source"),
    [
        (first_words, '"""What a load does."""'),
        (first_words, 'class Load:\n    """Of a request, its load."""'),
        (first_words, "def test_who_loads(): ..."),
        (first_words, "def test_nor_does_a_store(): ..."),
        (first_words, "parser.add_argument('--host', help='of a rank')"),
        (speech, 'def load():\n    """Loads, and says so."""'),
        (speech, "async def test_a_rank_is_told(): ..."),
        (tuples, "names = [*('a', 'b'), c]"),
        (tuples, "f(*[a, b])"),
    ],
)
def test_a_fault_is_noticed(check, source):
    assert len(check(source)) == 1


@pytest.mark.parametrize(
    "source",
    ['"""Whatever a load does."""', '"""Reads `told`, and TALK_FOLDER/told."""', "names = [*a, *(b for b in c), *f()]"],
)
def test_other_words_are_no_faults(source):
    assert first_words(source) + speech(source) + tuples(source) == []
