"""The site of the pages: it is built without a warning, its links lead to something, and it fits a phone."""

import functools
import re
import threading
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pytest
from programs import run_python

pytest.importorskip("sphinx", reason="the group docs of pyproject.toml is not installed")


class Page(HTMLParser):
    """The links, the ids and the text of a page."""

    def __init__(self, path):
        super().__init__()
        self.links, self.loaded, self.ids, self.text = [], [], set(), []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids |= {values[name] for name in ("id", "name") if values.get(name)}
        link = values.get("href") or values.get("src")
        if link is not None and values.get("rel") not in ("canonical", "index", "search"):
            (self.links if tag == "a" else self.loaded).append(link)

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    words = ("--fail-on-warning", "--quiet", "-c", "docs", ".", folder)
    built = run_python("-m", "sphinx", *words)
    assert built.returncode == 0, built.stderr[-3000:]
    return folder


def test_every_link_leads_to_something_and_nothing_is_loaded_from_another_host(site):
    pages = {path: Page(path) for path in site.rglob("*.html")}
    assert {"index.html", "docs/reference.html", "extras/swarm/README.html", "docs/api.html"} <= {
        str(path.relative_to(site)) for path in pages
    }
    for path, page in pages.items():
        assert not [link for link in page.loaded if urlsplit(link).netloc], path
        for link in {*page.links, *page.loaded}:
            url = urlsplit(link)
            if url.scheme:
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            assert target.exists(), f"{path} links {link}"
            if url.fragment and target in pages:
                assert unquote(url.fragment) in {*pages[target].ids, "top"}, f"{path} links {link}"


def test_no_program_shows_and_docstrings_do(site):
    texts = {path.stem: "".join(Page(path).text) for path in site.rglob("*.html")}
    assert not [name for name, text in texts.items() if re.search(r"\[\[\[|cog\.out", text)]
    for words in ("policy_versions", "clip(r_t, 1 − clip_low, 1 + clip_high)·A", "engine_options"):
        assert words in texts["api"]
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    assert '"docs/telemetry"' in index and "staleness" in index


@pytest.fixture(scope="module")
def address(site):
    """Of a server of the site: in a file:// page the search may not read other pages."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=site)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("width", [1280, 400])
def test_the_pages_fit_the_window_and_the_search_finds(address, browser, width):
    view = browser.new_page(viewport={"width": width, "height": 900})
    faults = []
    view.on("pageerror", lambda error: faults.append(str(error)))
    for name in ("index", "docs/reference", "docs/telemetry", "docs/api", "docs/devices"):
        view.goto(f"{address}/{name}.html")
        assert view.evaluate("document.documentElement.scrollWidth") <= width, name
    view.goto(f"{address}/search.html?q=staleness")
    view.wait_for_selector("#search-results li p.context")
    assert not faults
    view.close()
