"""The site of the pages: it is built without a warning, all links in it lead somewhere, and a browser shows each page.

site -> pages     HTML files as MkDocs writes them, with their links and anchors
     -> sheets    screenshots of the beginnings of all written pages, side by side, on a desk and on a telephone; what
                  is measured on them: the width of a page's content, its heading, missing images, colours

`make docs` runs it, where MkDocs is installed; pages are looked at where there is Chromium, and sheets left in build/.
"""

import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from threading import Thread
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("mkdocs", reason="MkDocs is not installed: `make docs` has it")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "docs" / "site" / "mkdocs.yml"
WINDOWS = (1280, 390)
BROWSER_SECONDS = 240
BLANK_COLOURS = 8  # at most; a line of text has more, by its smooth edges
COLUMNS, HEIGHT = 8, 900
SHEETS = ROOT / "build"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
IN_A_BROWSER = pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed")

# Sends what a function returns when all is loaded, before the browser takes a screenshot and ends.
SEND = """<!doctype html>
<script>
addEventListener("load", () => {
  const request = new XMLHttpRequest()
  request.open("POST", "sent", false)
  request.send(JSON.stringify(result()))
})
</script>"""

# Shows the beginnings of all pages at one width, side by side.
SHEET = """
<style>
body { display: grid; grid-template-columns: repeat(COLUMNS, WIDTHpx); margin: 0 }
iframe { width: WIDTHpx; height: HEIGHTpx; border: 0 }
</style>
FRAMES
<script>
const result = () => [...document.querySelectorAll("iframe")].map((frame) => {
  const page = frame.contentDocument
  const heading = page.querySelector("h1")
  return {
    width: page.documentElement.scrollWidth,
    headings: heading ? heading.getClientRects().length : 0,
    missing: [...page.images].filter((image) => !image.naturalWidth).map((image) => image.src),
  }
})
</script>"""

# Counts the colours of each page of a sheet.
COLOURS = """
<img src="PICTURE">
<script>
const context = new OffscreenCanvas(WIDTH, HEIGHT).getContext("2d", {willReadFrequently: true})
const result = () => [...Array(PAGES).keys()].map((at) => {
  context.drawImage(document.images[0], -WIDTH * (at % COLUMNS), -HEIGHT * Math.floor(at / COLUMNS))
  return new Set(new Uint32Array(context.getImageData(0, 0, WIDTH, HEIGHT).data.buffer)).size
})
</script>"""


@dataclass(frozen=True)
class Seen:
    """A page in a window of a width: the width of its content, boxes of its heading, missing images, colours."""

    name: str
    window: int
    width: int
    headings: int
    missing: list[str]
    colours: int

    @property
    def faults(self):
        found = {
            "too wide": self.width > self.window,
            "no heading": not self.headings,
            "a missing image": self.missing,
            "blank": self.colours <= BLANK_COLOURS,
        }
        return [fault for fault, is_so in found.items() if is_so]


class Page(HTMLParser):
    """Links and anchors of a page."""

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors = [], {"", "__top"}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        self.links += [found[name] for name in ("href", "src") if found.get(name)]


def build(folder, config=CONFIG):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    return subprocess.run([*command, "--config-file", config], cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return read(site)


def read(site):
    return {path.relative_to(site).as_posix(): Page(path.read_text()) for path in site.rglob("*.html")}


def leads_nowhere(site, pages):
    for name, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or name == "404.html":
                continue
            target = (site / name).parent / unquote(parts.path) if parts.path else site / name
            inside = target.resolve().relative_to(site.resolve()).as_posix()
            known = pages[inside].anchors if inside in pages else {""}
            if not target.is_file() or unquote(parts.fragment) not in known:
                yield name, link


def written(pages):
    """Pages that people read: no sources."""
    return sorted(name for name in pages if not name.startswith("source/") and name != "404.html")


class Server(ThreadingHTTPServer):
    """Serves a site to a browser, which sends back what it has measured."""

    def __init__(self, site):
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=site))
        self.sent = Queue()


class Handler(SimpleHTTPRequestHandler):
    def do_POST(self):
        self.server.sent.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *arguments):
        pass


def see(site, pages, window):
    """Shows all pages in windows of one width, and leaves their screenshot in the site."""
    picture = site / f"pages_{window}.png"
    values = {"COLUMNS": COLUMNS, "WIDTH": window, "HEIGHT": HEIGHT, "PAGES": len(pages), "PICTURE": picture.name}
    frames = "".join(f'<iframe src="{page}"></iframe>' for page in pages)
    size = f"--window-size={window * COLUMNS},{HEIGHT * math.ceil(len(pages) / COLUMNS)}"
    measured = sent(site, filled(SHEET, **values, FRAMES=frames), size, f"--screenshot={picture}")
    colours = sent(site, filled(COLOURS, **values), "--dump-dom")
    looked = zip(pages, measured, colours, strict=True)
    return [Seen(page, window, **each, colours=count) for page, each, count in looked]


def sent(site, html, *options):
    """The result of a page beside those of a site, sent before the browser that shows it ends."""
    (site / "shown.html").write_text(SEND + html)
    with Server(site) as server, TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        Thread(target=server.serve_forever, daemon=True).start()
        always = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}/browser"]
        address = f"http://127.0.0.1:{server.server_port}/shown.html"
        command = [BROWSER, *always, *options, address]
        try:
            subprocess.run(command, check=True, timeout=BROWSER_SECONDS, capture_output=True)
        finally:
            server.shutdown()
        return server.sent.get_nowait()


def filled(text, **values):
    for name, value in values.items():
        text = text.replace(name, str(value))
    return text


FAULTY = {
    "right.html": ("<h1>Right</h1>", [[], []]),
    "wide.html": ('<h1>Wide</h1><div style="width: 800px">&nbsp;</div>', [[], ["too wide"]]),
    "bare.html": ("<p>Without a heading</p>", [["no heading"]] * 2),
    "lacks.html": ('<h1>Lacks an image</h1><img src="gone.png">', [["a missing image"]] * 2),
    "blank.html": ('<h1 style="color: white">Blank</h1>', [["blank"]] * 2),
}


@pytest.mark.parametrize(
    ("link", "fails"), [("b.md#here", False), ("gone.md", True), ("b.md#gone", True), ("/b.md", True)]
)
def test_a_build_fails_by_a_link_that_leads_nowhere(tmp_path, link, fails):
    pages = tmp_path / "pages"
    pages.mkdir()
    (pages / "index.md").write_text(f"# A\n\n[b]({link})\n")
    (pages / "b.md").write_text("# Here\n")
    config = tmp_path / "mkdocs.yml"
    config.write_text(f"INHERIT: {CONFIG}\ndocs_dir: pages\nhooks: []\nnav:\nplugins: []\n")
    assert bool(build(tmp_path / "site", config).returncode) == fails


def test_every_link_and_anchor_leads_somewhere(site, pages):
    assert len(written(pages)) > 30
    assert sorted(set(leads_nowhere(site, pages))) == []


def test_links_that_lead_nowhere_are_noticed(tmp_path):
    (tmp_path / "a.html").write_text(
        '<h1 id="here">A</h1><a href="#here"></a><a href="b.html#no"></a><img src="c.png">'
    )
    (tmp_path / "b.html").write_text('<a href="a.html#here"></a><a href="a.html#gone"></a><a href="gone.html"></a>')
    found = sorted(leads_nowhere(tmp_path, read(tmp_path)))
    assert [link for _, link in found] == ["b.html#no", "c.png", "a.html#gone", "gone.html"]


def run_together(html):
    """Paragraphs in which words are far apart: a program or a table whose lines a browser joins."""
    return [text for text in re.findall(r"<p>(.*?)</p>", html, re.DOTALL) if re.search(r"\S {3,}\S", text)]


def test_no_docstring_has_a_table_that_becomes_a_paragraph(site):
    reference = list((site / "api").rglob("*.html"))
    assert len(reference) > 10
    assert {page.name: found for page in reference if (found := run_together(page.read_text()))} == {}
    assert run_together("<p>one      of them\ntwo      of them</p>") and not run_together("<pre>one      of them</pre>")


def test_nothing_is_loaded_from_elsewhere(site):
    loaded = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"https?:|<link\b[^>]*\bhref=\"https?:")
    assert [path.name for path in site.rglob("*.html") if loaded.search(path.read_text())] == []


@IN_A_BROWSER
@pytest.mark.parametrize("window", WINDOWS)
def test_every_page_fits_its_window_and_shows_something(site, pages, window):
    seen = see(site, written(pages), window)
    SHEETS.mkdir(exist_ok=True)
    shutil.copy(site / f"pages_{window}.png", SHEETS)
    assert [each for each in seen if each.faults] == []


@IN_A_BROWSER
def test_a_fault_of_a_page_is_noticed(tmp_path):
    for name, (html, _) in FAULTY.items():
        (tmp_path / name).write_text(html)
    seen = [see(tmp_path, list(FAULTY), window) for window in WINDOWS]
    found = {desk.name: [desk.faults, telephone.faults] for desk, telephone in zip(*seen, strict=True)}
    assert found == {name: faults for name, (_, faults) in FAULTY.items()}
