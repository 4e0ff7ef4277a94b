"""The fragments of the changelog: some text in lines that fit, without a mark of its own, whose links lead somewhere.

towncrier, which makes the changelog of them, refuses a name that is no fragment's.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_links import leads_nowhere, named_and_no_link

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "changes"
LONGEST = 118  # behind the mark of an item


def faults(text, root=ROOT):
    """Sentences about a fragment."""
    lines = text.splitlines()
    if not text.strip():
        yield "it is empty"
    if text.lstrip()[:2] in ("- ", "* ") or text.lstrip()[:1] == "#":
        yield "it begins with the mark of an item, or of a heading, which towncrier adds"
    if any(len(line) > LONGEST for line in lines):
        yield f"a line has more than {LONGEST} characters"
    page = _At(root / "CHANGELOG.md", text)
    yield from (f"{link} leads nowhere" for link in leads_nowhere(page))
    yield from (f"{name} is no link" for name in named_and_no_link(page))


class _At:
    """A page with another text."""

    def __init__(self, path, text):
        self.parent, self._text = path.parent, text

    def read_text(self):
        return self._text


def built(folder):
    command = [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "next", "--dir", folder]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def project(tmp_path):
    """A folder with our settings, and no fragment."""
    pytest.importorskip("towncrier", reason="towncrier is not installed: the extra `dev` has it")
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    (tmp_path / "docs" / "changes").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("fragment", sorted(FOLDER.glob("*.md")), ids=lambda path: path.name)
def test_a_fragment_has_no_fault(fragment):
    assert list(faults(fragment.read_text())) == []


@pytest.mark.parametrize(
    "text", ["", "* An item.", "## Added", "word " * 30, "See [a](docs/gone.md).", "See `docs/vllm.md`."]
)
def test_a_fault_is_noticed(text):
    assert len(list(faults(text))) == 1


def test_fragments_become_a_part_of_the_changelog(project):
    for fragment in FOLDER.glob("*.md"):
        (project / "docs" / "changes" / fragment.name).write_text(fragment.read_text())
    (project / "docs" / "changes" / "+stores.added.md").write_text("A store in [a folder](docs/write_a_store.md).\n")
    ran = built(project)
    assert ran.returncode == 0, ran.stderr
    assert "## next, " in ran.stdout
    assert "### Added\n\n- A store in [a folder](docs/write_a_store.md).\n" in ran.stdout


@pytest.mark.parametrize("name", ["+stores.new.md", "stores.md"])
def test_another_name_is_refused(project, name):
    (project / "docs" / "changes" / name).write_text("A store.\n")
    ran = built(project)
    assert ran.returncode == 1
    assert f"Invalid news fragment name: {name}" in ran.stderr


def test_the_changelog_has_the_place_where_towncrier_inserts():
    assert (ROOT / "CHANGELOG.md").read_text().count("\n<!-- the next release comes here: make changelog -->\n") == 1
