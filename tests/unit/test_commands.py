"""Commands on the pages: each module, script and target of the Makefile that they start is here.

tests/unit/replay/test_documented_commands.py reads the options of `cpu-prefix-cache`.
"""

import re
from pathlib import Path

import pytest

from tests.unit.test_links import PAGES, ROOT

OURS = ("src", ".", "examples")  # where modules are found that a page starts
OF_OTHERS = {"pytest", "venv", "pip", "sglang"}
PHONY = set(re.search(r"(?m)^\.PHONY: (.*)$", (ROOT / "Makefile").read_text())[1].split())


def started(text):
    """Modules, scripts and targets: in code, where a line may end anywhere."""
    code = " ".join(re.findall(r"```.*?```|`[^`]+`", text, re.DOTALL)).replace("\\\n", " ")
    yield from (("module", name) for name in re.findall(r"python\s+-m\s+([\w.]+)", code))
    yield from (("script", name) for name in re.findall(r"python\s+([\w/]+\.py)", code))
    yield from (("target", name) for name in re.findall(r"(?:^|[`\n ])make\s+([a-z][a-z-]*)", code))


def is_here(kind, name):
    if kind == "target":
        return name in PHONY
    if kind == "script":
        return (ROOT / name).is_file()
    path = Path(*name.split("."))
    return name.split(".")[0] in OF_OTHERS or any(
        (ROOT / folder / path).with_suffix(".py").is_file() or (ROOT / folder / path / "__main__.py").is_file()
        for folder in OURS
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_everything_that_a_page_starts_is_here(page):
    assert [each for each in started(page.read_text()) if not is_here(*each)] == []


def test_there_are_some_of_each_kind():
    kinds = [kind for page in PAGES for kind, _ in started(page.read_text())]
    assert min(kinds.count(kind) for kind in ("module", "script", "target")) >= 2


@pytest.mark.parametrize("text", ["`python -m\nbenchmarks.gone`", "```\npython examples/gone.py\n```", "`make gone`"])
def test_a_command_that_starts_nothing_is_noticed(text):
    assert [is_here(*each) for each in started(text)] == [False]
