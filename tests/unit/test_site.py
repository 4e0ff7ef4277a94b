"""The site of the pages: it is built without a warning, all links in it lead somewhere, and no page is too wide.

site -> pages     HTML files as MkDocs writes them, with their links and anchors
     -> widths    of the content of each written page in a browser, on a desk and on a telephone

`make docs` runs it, where MkDocs is installed; widths are measured where there is Chromium.
"""

import json
import re
import shutil
import subprocess
import sys
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
WIDTHS = (1280, 390)
BROWSER_SECONDS = 240
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# Loads each page at each width, one after the other, and sends what is measured.
MEASURE = """<!doctype html><body></body><script type="module">
const measured = []
for (const page of PAGES) for (const width of WIDTHS) {
  const frame = document.createElement("iframe")
  frame.style = `width: ${width}px; height: 900px; border: 0`
  frame.src = page
  await new Promise((loaded) => { frame.onload = loaded; document.body.append(frame) })
  const shown = frame.contentDocument
  const heading = shown.querySelector("h1")
  measured.push([page, width, shown.documentElement.scrollWidth, heading ? heading.getClientRects().length : 0])
  frame.remove()
}
await fetch("measured", {method: "POST", body: JSON.stringify(measured)})
</script>"""


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


def measured(site, pages):
    """The width of the content of each page at each width, and whether its heading is shown."""
    script = MEASURE.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(WIDTHS))
    (site / "measure.html").write_text(script)
    with Server(site) as server, TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        Thread(target=server.serve_forever, daemon=True).start()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        address = f"http://127.0.0.1:{server.server_port}/measure.html"
        browser = subprocess.Popen(
            [BROWSER, *options, f"--user-data-dir={profile}/browser", address],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            return server.sent.get(timeout=BROWSER_SECONDS)
        finally:
            browser.terminate()
            browser.wait()
            server.shutdown()


def too_wide(found):
    return [each for each in found if each[2] > each[1] or not each[3]]


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


def test_every_link_and_anchor_leads_somewhere(site):
    pages = read(site)
    assert len(written(pages)) > 30
    assert sorted(set(leads_nowhere(site, pages))) == []


def test_links_that_lead_nowhere_are_noticed(tmp_path):
    (tmp_path / "a.html").write_text(
        '<h1 id="here">A</h1><a href="#here"></a><a href="b.html#no"></a><img src="c.png">'
    )
    (tmp_path / "b.html").write_text('<a href="a.html#here"></a><a href="a.html#gone"></a><a href="gone.html"></a>')
    found = sorted(leads_nowhere(tmp_path, read(tmp_path)))
    assert [link for _, link in found] == ["b.html#no", "c.png", "a.html#gone", "gone.html"]


def test_nothing_is_loaded_from_elsewhere(site):
    loaded = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"https?:|<link\b[^>]*\bhref=\"https?:")
    assert [path.name for path in site.rglob("*.html") if loaded.search(path.read_text())] == []


@pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed")
def test_no_page_is_wider_than_its_window(site):
    names = written(read(site))
    found = measured(site, names)
    assert len(found) == len(names) * len(WIDTHS)
    assert too_wide(found) == []


@pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed")
def test_a_page_that_is_too_wide_or_empty_is_noticed(tmp_path):
    (tmp_path / "wide.html").write_text('<h1>Wide</h1><div style="width: 800px">&nbsp;</div>')
    (tmp_path / "empty.html").write_text('<h1 style="display: none">Empty</h1>')
    (tmp_path / "right.html").write_text("<h1>Right</h1>")
    found = measured(tmp_path, ["wide.html", "empty.html", "right.html"])
    assert [(name, width) for name, width, *_ in too_wide(found)] == [
        ("wide.html", 390),
        ("empty.html", 1280),
        ("empty.html", 390),
    ]
