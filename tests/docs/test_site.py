"""The built site: links, and pages in a real browser that are opened from the disk."""

from __future__ import annotations

import importlib
import os
import shutil
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.conftest import REPO

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SCREENS = {"wide": (1280, 900), "phone": (390, 844)}


class Links(HTMLParser):
    """Collects the targets of links, images and scripts, and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.anchors |= {value for name in ("id", "name") if (value := values.get(name))}
        self.targets += [value for name in ("href", "src") if (value := values.get(name))]


def read(page: Path) -> Links:
    return Links(page.read_text())


@pytest.mark.slow
def test_every_link_inside_the_site_leads_somewhere(site):
    pages = {page: read(page) for page in site.rglob("*.html") if page.name != "404.html"}
    assert len(pages) > 40
    broken = []
    for page, links in pages.items():
        for target in links.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if not file.is_file() or (parts.fragment and file in pages and parts.fragment not in pages[file].anchors):
                broken.append(f"{page.relative_to(site)}: {target}")
    assert broken == []


@pytest.mark.slow
def test_no_page_loads_anything_from_another_site(site):
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert 'src="http' not in text, page
        assert 'rel="stylesheet" href="http' not in text, page


@pytest.mark.slow
@pytest.mark.parametrize("package", ["storage_formats", "edje_index", "pipelines"])
def test_every_public_name_is_on_its_page(site, package):
    module = importlib.import_module(package)
    anchors = read(site / "reference" / f"{package}.html").anchors
    for name in module.__all__:
        if not name.startswith("__"):
            assert anchors & {name.lower(), f"{module._MODULES[name]}.{name}"}, name


@pytest.mark.slow
def test_the_specification_is_included(site):
    text = (site / "repository/storage_formats/SPEC.html").read_text()
    assert "Row ids do not depend on failures" in text
    assert not list((REPO / "docs").rglob("SPEC.md"))


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--allow-file-access-from-files"]
        )
        yield browser
        browser.close()


@pytest.mark.slow
@pytest.mark.parametrize("screen", SCREENS)
def test_pages_fit_the_screen_and_make_no_requests_to_other_sites(site, browser, screen, tmp_path):
    width, height = SCREENS[screen]
    page = browser.new_page(viewport={"width": width, "height": height})
    problems: list[str] = []
    page.on("request", lambda request: problems.append(request.url) if request.url.startswith("http") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    pictures = Path(os.environ.get("EDJE_PICTURES", tmp_path))
    for file in [
        "index",
        "tutorial",
        "build",
        "performance",
        "comparison",
        "reference/cli/index",
        "reference/edje_index",
    ]:
        page.goto((site / f"{file}.html").as_uri())
        page.screenshot(path=pictures / f"{file.replace('/', '-')}-{screen}.png")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, file
        assert page.locator("h1").first.is_visible(), file
    assert problems == []
    page.close()


@pytest.mark.slow
def test_the_search_works_from_the_disk(site, browser):
    page = browser.new_page()
    page.goto((site / "index.html").as_uri())
    page.click(".md-search__input")
    page.keyboard.type("damaged blocks")
    page.wait_for_selector('.md-search-result__link[href*="fetch.html"][href*="#damaged-blocks"]')
    page.close()
