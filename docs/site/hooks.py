"""Pages of the site that are not in docs/: other pages of the repository, linked sources, and the API reference.

    docs/vllm.md                    vllm.html
    CONTRIBUTING.md                 project/CONTRIBUTING.html         a page outside of docs/
    src/.../edge.py                 source/src/.../edge.py.html       a file or a folder that a page links to
    benchmarks/results/x.json       source/benchmarks/.../x.json      the same, as it is: data
    cpu_prefix_cache.deciding       api/cpu_prefix_cache.deciding.html

Pages keep the links that they have in the repository. They are translated when a page is read, so that MkDocs, which is
strict, checks all of them.
"""

import ast
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
DATA = {".csv", ".gz", ".json", ".jsonl", ".png", ".txt"}
LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".yaml": "yaml", ".rs": "rust"}
LINK = re.compile(r"(?<=\])\(([^()\s]+)\)")
FENCE = re.compile(r"^ *(```+|~~~+)")
NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n"

# Modules of the reference, each with its names; without names, those of its `__all__`.
MODULES: dict[str, tuple[str, ...]] = {
    "cpu_prefix_cache": (),
    "cpu_prefix_cache.by_keys": (),
    "cpu_prefix_cache.deciding": (),
    "cpu_prefix_cache.copying": (),
    "cpu_prefix_cache.tier": (),
    "cpu_prefix_cache.testing": (),
    "connector.transformers": (),
    "connector.transformers.continuous": ("ContinuousPrefixCache",),
    "connector.vllm": ("CPUPrefixCacheConnector",),
    "connector.vllm.multi": ("CPUPrefixCacheMultiConnector",),
    "connector.sglang": ("HostLinker",),
    "connector.atom.plugin": ("register",),
}
CALLED_BY_THE_ENGINE = {"CPUPrefixCacheConnector", "CPUPrefixCacheMultiConnector", "HostLinker"}

homes: dict[str, str] = {}  # pages that are made here -> where they are in the repository


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.markdown_extensions.append(Doctests())
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what pages link to, and what those that are added link to."""
    homes.clear()
    for module in MODULES:
        files.append(File.generated(config, f"api/{module}.md", content=reference(module)))
    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages() if not file.generated_by]
    for page in pages:
        for target in linked(page):
            if not target.startswith("docs/") and place(target) not in homes:
                homes[place(target)] = target
                files.append(file_of(target, config))
                pages += [target] * target.endswith(".md")
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with its links as they are in the site."""
    uri = page.file.src_uri
    if page.file.generated_by and not homes.get(uri, "").endswith(".md"):
        return markdown
    home = homes.get(uri, f"docs/{uri}")
    return with_links(markdown, lambda link: translated(link, home, uri))


def translated(link: str, home: str, uri: str) -> str:
    target, fragment = split(link, home)
    return link if target is None else posixpath.relpath(place(target), posixpath.dirname(uri)) + fragment


def split(link: str, home: str) -> tuple[str | None, str]:
    """The target of a link of a page, as a path of the repository, and its fragment; None: within the page, or away."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc or not parts.path:
        return None, ""
    fragment = f"#{parts.fragment}" if parts.fragment else ""
    return posixpath.normpath(posixpath.join(posixpath.dirname(home), unquote(parts.path))), fragment


def linked(page: str) -> list[str]:
    """The files and folders that a page links to."""
    links: list[str] = []

    def noted(link: str) -> str:
        links.append(link)
        return link

    with_links((ROOT / page).read_text(), noted)
    targets = (split(link, page)[0] for link in links)
    return [target for target in targets if target is not None and (ROOT / target).exists()]


def with_links(markdown: str, change: Callable[[str], str]) -> str:
    """The page, all of whose links outside of code blocks are changed."""
    lines, fence = [], None
    for line in markdown.split("\n"):
        if (match := FENCE.match(line)) and fence in (None, match[1]):
            fence = match[1] if fence is None else None
        elif fence is None:
            line = LINK.sub(lambda found: f"({change(found[1])})", line)
        lines.append(line)
    return "\n".join(lines)


def place(target: str) -> str:
    """Where the site has a file of the repository."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    seen = target.replace("/.", "/").removeprefix(".")  # MkDocs leaves out names that begin with a dot
    if seen.endswith(".md"):
        return f"project/{seen}"
    return f"source/{seen}" if Path(seen).suffix in DATA else f"source/{seen}.md"


def file_of(target: str, config: MkDocsConfig) -> File:
    path = ROOT / target
    if path.suffix in DATA:
        return File.generated(config, place(target), abs_src_path=str(path))
    return File.generated(config, place(target), content=path.read_text() if path.suffix == ".md" else shown(path))


def shown(path: Path) -> str:
    name = path.relative_to(ROOT)
    if path.is_dir():
        listed = sorted(each.name + "/" * each.is_dir() for each in path.iterdir() if each.name[0] not in "._")
        return f"{NOT_SEARCHED}# {name}/\n\n" + "\n".join(f"* `{each}`" for each in listed)
    return f"{NOT_SEARCHED}# {name}\n\n~~~~~ {LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}\n~~~~~\n"


def reference(module: str) -> str:
    """A page with what a module makes public."""
    tree = ast.parse(source_of(module).read_text())
    body = [f"# {module}", ast.get_docstring(tree) or ""]
    for name in MODULES[module] or sorted(public(tree)):
        members = "\n    options:\n      members: false" if name in CALLED_BY_THE_ENGINE else ""
        body.append(f"::: {module}.{name}{members}")
    return "\n\n".join(body)


def source_of(module: str) -> Path:
    path = ROOT / "src" / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def public(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(each) for each in node.targets] == ["__all__"]:
            yield from (name for name in ast.literal_eval(node.value) if not name.startswith("__"))


class Doctests(Extension):
    """Shows doctests that stand in no code block, as they do in docstrings and in some pages, as code."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(_Fences(md), "doctests", 100)


class _Fences(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        return list(fenced(lines))


def fenced(lines: list[str]) -> Iterator[str]:
    fence, inside = None, False
    for line in [*lines, ""]:
        if match := FENCE.match(line):
            fence = match[1] if fence is None else None if fence == match[1] else fence
        if not inside and fence is None and line.startswith(">>> "):
            inside = True
            yield "```pycon"
        elif inside and not line.strip():
            inside = False
            yield "```"
        yield line
