"""The built site: public names, and pages in a real browser that are opened from
the disk.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import edje_index
import storage_formats
from storage_formats import codec
from storage_formats.format.layout import SHARD_SIZE
from tests.conftest import REPO

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
VIEWED = (
    "index tutorial build performance comparison concepts reference/cli/index"
    " reference/edje_index"
)
SCREENS = {"wide": (1280, 900), "phone": (390, 844)}


@pytest.mark.slow
def test_every_public_name_is_on_its_page(site):
    """The fixture builds the site, where a broken link or a wrong docstring is an
    error.
    """
    for package in (storage_formats, edje_index):
        page = (site / "reference" / f"{package.__name__}.html").read_text()
        anchors = set(re.findall(r'id="([^"]+)"', page))
        homes = storage_formats._MODULES | edje_index._MODULES
        for name in package.__all__:
            if not name.startswith("__"):
                assert anchors & {name.lower(), f"{homes[name]}.{name}"}, name


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--allow-file-access-from-files"],
        )
        yield browser
        browser.close()


@pytest.mark.slow
@pytest.mark.parametrize("screen", SCREENS)
def test_pages_fit_the_screen_and_make_no_requests_to_other_sites(
    site, browser, screen, tmp_path
):
    width, height = SCREENS[screen]
    page = browser.new_page(viewport={"width": width, "height": height})
    problems: list[str] = []
    page.on(
        "request",
        lambda request: (
            problems.append(request.url) if request.url.startswith("http") else None
        ),
    )
    page.on("pageerror", lambda error: problems.append(str(error)))
    pictures = Path(os.environ.get("EDJE_PICTURES", tmp_path))
    for file in VIEWED.split():
        page.goto((site / f"{file}.html").as_uri())
        page.screenshot(path=pictures / f"{file.replace('/', '-')}-{screen}.png")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, file
        assert page.locator("h1").first.is_visible(), file
    assert problems == []
    page.close()


def test_the_layout_in_the_picture_is_that_of_the_format():
    text = (REPO / "docs/layout.svg").read_text()
    record_bytes = codec("fp8").record_bytes
    assert f"{SHARD_SIZE:,} records of {record_bytes:,} bytes" in text
    row = SHARD_SIZE + 3
    assert (
        f"row {row:,} = shard 1, position 3: 3 x {record_bytes:,} = byte"
        f" {3 * record_bytes:,}" in text
    )


@pytest.mark.slow
def test_the_search_works_from_the_disk(site, browser):
    page = browser.new_page()
    page.goto((site / "index.html").as_uri())
    page.click(".md-search__input")
    page.keyboard.type("damaged blocks")
    page.wait_for_selector(
        '.md-search-result__link[href*="fetch.html"][href*="#damaged-blocks"]'
    )
    page.close()


@pytest.mark.slow
def test_the_screenshots_can_be_made_and_show_the_current_templates(
    tmp_path, tiny_bundle
):
    if shutil.which("chromium") is None:
        pytest.skip("there is no chromium")
    variables = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    subprocess.run(
        [REPO / "tests/docs/screenshots.sh", tiny_bundle, "", tmp_path],
        env=variables,
        check=True,
    )
    made, committed = (
        {path.name for path in folder.glob("*.webp")}
        for folder in (tmp_path, REPO / "docs/assets")
    )
    assert (
        made
        == committed
        == {"page.webp", "before-after.webp", "explain.webp", "hits.webp"}
    )
    assert all(
        (REPO / "docs/assets" / name).stat().st_size < 300_000 for name in committed
    )
    digest = "screenshots.sha256"
    assert (tmp_path / digest).read_text() == (
        REPO / "docs/assets" / digest
    ).read_text(), "make them again"
