"""The pages: every relative link leads to a file and a heading that exist, and every file that is named is a link.

page -> links      `[text](file.md#heading)` and images, as the Markdown parser finds them
     -> mentions   code spans, and words of the text, outside of links: faults if they are a path of this tree
     -> anchors    headings, in the form in which GitHub makes anchors of them
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "cpu_prefix_cache"
PAGES = [
    *sorted(ROOT.glob("*.md")),
    ROOT / ".github" / "SECURITY.md",
    *sorted((ROOT / "docs").glob("*.md")),
    PACKAGE / "README.md",
]
CODE = [ROOT / name for name in ("src", "benchmarks", "examples", "property_tests", "tests")]
NAMES = Counter(path.name for folder in CODE for path in folder.rglob("*.py"))
EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@dataclass
class Found:
    """Links, images, mentions and anchors of a page."""

    links: list[str] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    mentions: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)


def read(page):
    found = Found()
    previous = None
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text()):
        if token.type == "inline":
            if previous.type == "heading_open":
                found.anchors.add(anchor(token.children))
            read_inline(token.children, found)
        previous = token
    return found


def read_inline(tokens, found):
    depth = 0
    for token in tokens:
        if token.type == "link_open":
            found.links.append(token.attrs["href"])
        elif token.type == "image":
            found.images.append(token.attrs["src"])
        elif token.type == "code_inline" and depth == 0:
            found.mentions.append(token.content)
        elif token.type == "text" and depth == 0:
            found.mentions += [word.strip("()[],.:;") for word in token.content.split()]
        depth += token.nesting if token.type in ("link_open", "link_close") else 0


def anchor(tokens):
    text = "".join(token.content for token in tokens if token.type in ("text", "code_inline"))
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def leads_nowhere(page):
    """The relative links and images whose file, or heading, does not exist."""
    found = read(page)
    for link in found.links + found.images:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = page.parent / unquote(parts.path) if parts.path else page
        if not target.exists() or (parts.fragment and parts.fragment not in read(target).anchors):
            yield link


def named_and_no_link(page):
    """The files and folders that the page names without a link."""
    return [name for name in read(page).mentions if re.fullmatch(r"[\w.][\w./-]*", name) and is_here(name, page)]


def is_here(name, page):
    """A path, as seen from the page, the repository or the package; or the name of exactly one file of the code."""
    if "/" in name or name.endswith(".md"):
        return any((folder / name).exists() for folder in (page.parent, ROOT, PACKAGE))
    return NAMES[name] == 1


@EVERY_PAGE
def test_every_link_leads_somewhere(page):
    assert list(leads_nowhere(page)) == []


@EVERY_PAGE
def test_every_file_that_is_named_is_a_link(page):
    assert named_and_no_link(page) == []


def test_the_readme_has_no_image_that_a_package_index_cannot_show():
    assert [image for image in read(ROOT / "README.md").images if not urlsplit(image).scheme] == []


def test_every_page_of_the_docs_is_in_the_index():
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / urlsplit(link).path).resolve() for link in read(index).links}
    assert sorted(page.name for page in index.parent.glob("*.md") if page not in linked | {index}) == []


@pytest.fixture
def page(tmp_path):
    def written(text):
        page = tmp_path / "page.md"
        page.write_text("# A `title`: with colon\n\n| a table |\n|---|\n| " + text + " |\n")
        return page

    return written


@pytest.mark.parametrize("text", ["[a](gone.md)", "[a](#gone)", "[a](page.md#gone)", "![a](gone.png)", "[`a`](gone/)"])
def test_a_broken_link_is_noticed(page, text):
    assert len(list(leads_nowhere(page(text)))) == 1


@pytest.mark.parametrize("text", ["[a](page.md)", "[a](#a-title-with-colon)", "[a](page.md#a-title-with-colon)"])
def test_a_link_that_works_is_none(page, text):
    assert list(leads_nowhere(page(text))) == []


@pytest.mark.parametrize(
    "text", ["see `docs/vllm.md`", "see docs/vllm.md.", "(page.md)", "`copier/ring.py`", "`triton_staging.py`"]
)
def test_a_file_that_is_named_and_no_link_is_noticed(page, text):
    assert len(named_and_no_link(page(text))) == 1


@pytest.mark.parametrize(
    "text", ["[`docs/vllm.md`](page.md)", "`python docs/vllm.md`", "`/dev/null`", "`__init__.py`", "and/or, e.g. 1/2"]
)
def test_linked_files_and_words_that_are_no_paths_are_no_faults(page, text):
    assert list(named_and_no_link(page(text))) == []
