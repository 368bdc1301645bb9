"""The site, built as `make docs` serves it: links lead somewhere, nothing is fetched from elsewhere, and a
browser shows every page whole at the width of a laptop and of a phone."""

import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parent.parent
SITE = ROOT / "build" / "docs"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (1280, 390)
ADDRESS = re.compile(r'<(?:a|img|link|script|iframe)\b[^>]*?\s(?:href|src)="([^"]*)"')
ANCHOR = re.compile(r'\s(?:id|name)="([^"]+)"')

# A page that opens every page of the site in a frame of each width, and sends back what is cut.
HARNESS = """<!doctype html><title>harness</title><body><script>
const pages = PAGES, widths = WIDTHS, found = [];
const wait = milliseconds => new Promise(done => setTimeout(done, milliseconds));
function cut(page) {
  const width = page.documentElement.clientWidth, root = page.documentElement, bad = [];
  if (root.scrollWidth > width + 1) bad.push(`the page is ${root.scrollWidth} wide`);
  const boxes = "article :is(pre, table, img, svg, p, li, h1, h2, h3, h4, .katex)";
  for (const box of page.querySelectorAll(boxes)) {
    // Inside the window, or inside a box that scrolls and is.
    let outer = box;
    const seen = () => {
      const {left, right, width: own} = outer.getBoundingClientRect();
      return !own || (left > -1 && right < width + 1);
    };
    const scrolls = () => /auto|scroll/.test(page.defaultView.getComputedStyle(outer).overflowX);
    let whole = seen();
    while (!whole && outer.tagName !== "ARTICLE") {
      outer = outer.parentElement;
      whole = scrolls() && seen();
    }
    if (!whole) bad.push(`${box.tagName} is cut: ${box.textContent.trim().slice(0, 60)}`);
  }
  return bad;
}
(async () => {
  try {
  for (const name of pages) {
    const frame = document.createElement("iframe"), errors = [];
    frame.style = `width: ${widths[0]}px; height: 800px; border: 0`;
    document.body.append(frame);
    await new Promise(done => { frame.onload = done; frame.src = name; });
    await frame.contentDocument.fonts.ready;
    for (const width of widths) {
      frame.style.width = `${width}px`;
      await wait(60);
      errors.push(...cut(frame.contentDocument).map(text => `at ${width}: ${text}`));
    }
    const page = frame.contentDocument;
    const typeset = page.querySelectorAll(".arithmatex > .katex, .arithmatex > .katex-display").length;
    if (typeset !== page.querySelectorAll(".arithmatex").length) errors.push("mathematics is not typeset");
    for (const image of page.images)
      if (image.loading !== "lazy" && !image.naturalWidth) errors.push(`${image.src} is not drawn`);
    const elsewhere = frame.contentWindow.performance.getEntriesByType("resource")
      .map(entry => entry.name).filter(url => !url.startsWith(location.origin) && !url.startsWith("data:"));
    errors.push(...elsewhere.map(url => `fetches ${url}`));
    found.push([name, errors]);
    frame.remove();
  }
  } catch (error) { found.push(["harness", [String(error)]]); }
  await fetch("/found", {method: "POST", body: JSON.stringify(found)});
})();
</script>"""


@pytest.fixture(scope="module")
def site() -> Path:
    """A strict build: MkDocs refuses links to pages and headings that are not there."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(SITE)],
        cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return SITE


def pages(site: Path) -> list[Path]:
    """Those that were written; of the pages of the source, one stands for all."""
    every = sorted(site.rglob("index.html"))
    return [page for page in every if page.parts[len(site.parts)] != "source" or "problem" in page.parts]


def test_links_lead_somewhere(site):
    texts = {path.resolve(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    anchors = {path: {unescape(name) for name in ANCHOR.findall(text)} for path, text in texts.items()}
    broken = []
    for page in pages(site):
        for address in map(unescape, ADDRESS.findall(texts[page.resolve()])):
            parts = urlsplit(address)
            if parts.scheme in ("http", "https", "mailto", "data"):
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page.resolve()
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                broken.append(f"{page.relative_to(site)}: {address}")
            elif parts.fragment and unquote(parts.fragment) not in anchors.get(target, ()):
                broken.append(f"{page.relative_to(site)}: {address} has no such anchor")
    assert not broken


def test_pages_ask_for_nothing_from_elsewhere(site):
    """A link may lead away; what a browser fetches by itself may not."""
    fetched = re.compile(r'<(?:img|script|iframe|link)\b[^>]*?\s(?:src|href)="(?:https?:)?//[^"]*"[^>]*>')
    asked = [
        (page.relative_to(site), tag)
        for page in pages(site)
        for tag in fetched.findall(page.read_text(encoding="utf-8"))
        if 'rel="canonical"' not in tag
    ]
    assert not asked


def test_the_api_has_types_and_leads_to_the_source(site):
    """Every parameter in a table has its type; every link to the source, the line of a definition."""
    text = (site / "api" / "index.html").read_text(encoding="utf-8")
    rows = re.findall(r'<tr class="doc-section-item">(.*?)</tr>', text, re.S)
    cells = [re.findall(r"<td>(.*?)</td>", row, re.S) for row in rows]
    cells = [[re.sub("<.*?>", "", cell).strip() for cell in row] for row in cells]
    parameters = [row for row in cells if len(row) == 4]  # name, type, description, default
    assert len(parameters) > 300
    assert not [name for name, kind, *_ in parameters if not kind]
    links = re.findall(r'href="\.\./source/([\w/]+)/#L-(\d+)"', text)
    assert len(links) > 200
    for module, line in links:
        code = (ROOT / "src" / "measureflow" / f"{module}.py").read_text(encoding="utf-8").splitlines()
        assert re.match(r"\s*(class|def|@)", code[int(line) - 1]), f"{module}, line {line}"


def test_tables_of_contents_show_no_tex(site):
    """A heading is shown there as plain text: write it without mathematics."""
    shown = re.compile(r'class="md-ellipsis">([^<]*)')
    titles = [title for page in pages(site) for title in shown.findall(page.read_text(encoding="utf-8"))]
    assert len(titles) > 100
    assert not [title for title in titles if "\\(" in title or "$" in title]


class Server(http.server.ThreadingHTTPServer):
    """Serves the site and the harness on loopback, and keeps what the harness sends back."""

    def __init__(self, site: Path, names: list[str]):
        super().__init__(("127.0.0.1", 0), functools.partial(Handler, directory=str(site)))
        self.harness = HARNESS.replace("PAGES", json.dumps(names)).replace("WIDTHS", json.dumps(WIDTHS))
        self.found: list = []
        self.done = threading.Event()


class Handler(http.server.SimpleHTTPRequestHandler):
    def do_GET(self):
        if self.path != "/harness.html":
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(self.server.harness.encode())
        return None

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.found = json.loads(body)
        self.send_response(200)
        self.end_headers()
        self.server.done.set()

    def log_message(self, *_):
        pass


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here; `make chromium` installs it")
def test_a_browser_shows_every_page_whole(site, tmp_path):
    """No box is cut at 1280 or 390 pixels: what is wider scrolls inside its own box. Mathematics is typeset,
    pictures are drawn, nothing is fetched from elsewhere, and nothing is written to the console."""
    names = ["/" + page.parent.relative_to(site).as_posix() + "/" for page in pages(site)]
    server = Server(site, [name.replace("/./", "/") for name in names])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    log = tmp_path / "log"
    with log.open("wb") as file:
        browser = subprocess.Popen(
            [
                CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
                f"--user-data-dir={tmp_path / 'browser'}", "--remote-debugging-port=0",
                "--window-size=1400,900", f"http://127.0.0.1:{server.server_address[1]}/harness.html",
            ],
            stdout=subprocess.DEVNULL, stderr=file,
        )  # fmt: skip
        try:
            assert server.done.wait(480), (
                "the browser did not answer:\n" + log.read_text(errors="replace")[-2000:]
            )
        finally:
            browser.terminate()
            browser.wait()
            server.shutdown()
            server.server_close()
    wrong = {page: errors for page, errors in server.found if errors}
    assert not wrong, json.dumps(wrong, indent=1, ensure_ascii=False)
    assert len(server.found) == len(names)
    said = [
        line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if "CONSOLE" in line
    ]
    assert not said, "\n".join(said)
