"""The built site: links, and pages in a real browser that are opened from the disk."""

from __future__ import annotations

import importlib
import itertools
import os
import shutil
from pathlib import Path

import pytest

from pipelines.jobs.plan import SHARD_SIZE
from storage_formats import codec
from tests.conftest import REPO
from tests.docs.links import broken_links, pages_of, read_links

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PICTURES = ["data-flow.svg", "layout.svg", "commit.svg", "score.svg"]
SCREENS = {"wide": (1280, 900), "phone": (390, 844)}


@pytest.mark.slow
def test_every_link_inside_the_site_leads_somewhere(site):
    assert len(pages_of(site)) > 40
    assert list(broken_links(site)) == []


def test_the_check_of_links_finds_what_is_broken(tmp_path):
    (tmp_path / "page.html").write_text('<h1 id="top"></h1><a href="#top"></a><a href="https://example.org/x"></a>')
    (tmp_path / "index.html").write_text(
        '<a href="page.html#top"></a><a href="page.html#end"></a><img src="a%20b.svg"><a href="gone.html"></a>'
    )
    (tmp_path / "a b.svg").touch()
    assert list(broken_links(tmp_path)) == ["index.html: page.html#end", "index.html: gone.html"]


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
    anchors = read_links(site / "reference" / f"{package}.html").anchors
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
        "concepts",
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
@pytest.mark.parametrize("picture", PICTURES)
def test_the_texts_of_a_picture_lie_inside_it_and_do_not_overlap(browser, picture):
    page = browser.new_page()
    page.goto((REPO / "docs" / picture).as_uri())
    width, height = page.evaluate("(({width, height}) => [width, height])(document.documentElement.viewBox.baseVal)")
    get_boxes = "[...document.querySelectorAll('text')].map(text => text.getBBox())"
    boxes = page.evaluate(f"{get_boxes}.map(box => [box.x, box.y, box.x + box.width, box.y + box.height])")
    assert len(boxes) > 15
    for left, top, right, bottom in boxes:
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
    for (left, top, right, bottom), (x0, y0, x1, y1) in itertools.combinations(boxes, 2):
        assert right <= x0 or x1 <= left or bottom <= y0 + 2 or y1 <= top + 2
    page.close()


def test_the_layout_in_the_picture_is_that_of_the_format():
    text = (REPO / "docs/layout.svg").read_text()
    record_bytes = codec("fp8").record_bytes
    assert f"{SHARD_SIZE:,} records of {record_bytes:,} bytes" in text
    row = SHARD_SIZE + 3
    assert f"row {row:,} = shard 1, position 3: 3 x {record_bytes:,} = byte {3 * record_bytes:,}" in text


@pytest.mark.slow
def test_the_search_works_from_the_disk(site, browser):
    page = browser.new_page()
    page.goto((site / "index.html").as_uri())
    page.click(".md-search__input")
    page.keyboard.type("damaged blocks")
    page.wait_for_selector('.md-search-result__link[href*="fetch.html"][href*="#damaged-blocks"]')
    page.close()
