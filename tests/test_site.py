"""The documentation site: no warnings, every public name documented, no dead links."""

from __future__ import annotations

import functools
import http.server
import pickle
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import urldefrag

import pytest

from tests.test_public_names import PUBLIC

addnodes = pytest.importorskip("sphinx.addnodes")
pytest.importorskip("myst_nb")
pytest.importorskip("furo")

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site; return the folder of its pages and that of its doctrees."""
    folder = tmp_path_factory.mktemp("site")
    html, doctrees = folder / "html", folder / "doctrees"
    options = ["-q", "-W", "--keep-going", "-d", str(doctrees), str(ROOT / "docs"), str(html)]
    command = [sys.executable, "-m", "sphinx", *options]
    built = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert built.returncode == 0, built.stderr
    return html, doctrees


def test_site_documents_every_public_name(site):
    documented = set()
    for path in (site[1] / "api").glob("*.doctree"):
        for entry in pickle.loads(path.read_bytes()).findall(addnodes.desc):
            if entry[-1].astext().strip():
                documented |= {name for signature in entry[:-1] for name in signature["ids"]}
    in_packages = {name for package, name in PUBLIC if package != "kit"}
    pages = {f"{p}.{name}" for p, name in PUBLIC if p != "kit" or name not in in_packages}
    assert pages - documented == set()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Log no requests."""


@pytest.fixture
def address(site):
    """Serve the site; return the address of its front page."""
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(_Quiet, directory=str(site[0]))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture
def browser():
    """Start a headless Chromium: that of the system, else that of ``playwright install``."""
    playwright = pytest.importorskip("playwright.sync_api")
    installed = shutil.which("chromium") or shutil.which("google-chrome")
    with playwright.sync_playwright() as running:
        try:
            chromium = running.chromium.launch(executable_path=installed, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no Chromium: {str(error).splitlines()[0]}")
        yield chromium
        chromium.close()


IDS = "[...document.querySelectorAll('[id]')].map(one => one.id)"
LINKS = "[...document.querySelectorAll('a[href]')].map(one => one.href)"


def test_site_has_no_dead_links_in_a_browser(browser, address):
    page, problems = browser.new_page(), []
    page.on("pageerror", lambda error: problems.append(f"{page.url}: {error}"))
    page.on("requestfailed", lambda request: problems.append(request.url))
    page.on("request", lambda request: requested.add(request.url))
    requested, ids, links, waiting = set(), {}, set(), [f"{address}index.html"]
    while waiting:
        url = waiting.pop()
        is_page = url.endswith(".html")
        answer = page.goto(url) if is_page else page.request.get(url)
        if not answer.ok:
            problems.append(f"{url}: {answer.status}")
        ids[url] = set(page.evaluate(IDS)) if is_page else set()
        followed = page.evaluate(LINKS) if is_page and answer.ok else []
        inside = {link for link in followed if link.startswith(address)}
        links |= {(url, link) for link in inside}
        waiting += sorted({urldefrag(link).url for link in inside} - ids.keys() - {*waiting})
    for url, link in sorted(links):
        target, fragment = urldefrag(link)
        if fragment and fragment not in ids[target]:
            problems.append(f"{url}: {link}")
    assert problems == []
    assert {url for url in requested if not url.startswith((address, "data:"))} == set()
    assert len(ids) > 30
