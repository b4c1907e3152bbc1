"""The page in a real browser: Debian's Chromium, driven by Playwright, and checked by axe-core."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipelines import build_index, quantize_index
from tests.edje_index.scoring.bundles import bundle_with_all_parts
from tests.pipelines.service.server import Service, serve

pytestmark = pytest.mark.slow
sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
NAME = "<img src=x onerror=alert(1)>.jpg"
AXE = "axe-core@4"


@pytest.fixture(scope="module")
def index(tmp_path_factory, tiny_bundle) -> Path:
    folder = tmp_path_factory.mktemp("page")
    (folder / "photos").mkdir()
    for row, name in enumerate([*(f"{row}.jpg" for row in range(20)), NAME]):
        pixels = np.random.default_rng(row).integers(0, 255, (6, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((320, 240)).save(folder / "photos" / name)
    bundle_with_all_parts(tiny_bundle).save(folder / "model")
    build_index(folder / "photos", folder / "photos.edje", folder / "model", engine="inline", threads=1)
    quantize_index(folder / "photos.edje", ["nvfp4", "sign1"])
    return folder / "photos.edje"


@pytest.fixture(scope="module")
def service(index, tmp_path_factory) -> Iterator[Service]:
    with serve(tmp_path_factory.mktemp("service"), index) as running:
        yield running


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("there is no chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def axe(tmp_path_factory) -> str:
    """The source of axe-core, from the registry of npm."""
    if shutil.which("npm") is None:
        pytest.skip("there is no npm")
    folder = tmp_path_factory.mktemp("axe")
    subprocess.run(["npm", "pack", "--silent", AXE], cwd=folder, check=True, capture_output=True)
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        return archive.extractfile("package/axe.min.js").read().decode()


@dataclass
class Watched:
    """A page whose errors and foreign requests are collected."""

    page: object
    home: str
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.page.on("request", self._request)
        self.page.on("dialog", lambda dialog: self.problems.append(f"dialog: {dialog.message}"))

    def _console(self, message) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"{message.type}: {message.text}")

    def _request(self, request) -> None:
        if not request.url.startswith((self.home, "blob:", "data:")):
            self.problems.append(f"request: {request.url}")

    def search(self, query: str) -> None:
        self.page.fill("#query", query)
        with self.page.expect_response("**/search"):
            self.page.press("#query", "Enter")
        self.wait()

    def wait(self) -> None:
        self.see("#status", " hits in ")
        self.page.wait_for_load_state("networkidle")

    def see(self, selector: str, text: str) -> None:
        """Wait for a text. Playwright's `wait_for_function` evaluates strings, which the page forbids."""
        sync_api.expect(self.page.locator(selector)).to_contain_text(text, timeout=60_000)

    def rows(self, order: str) -> list[int]:
        facts = self.page.locator(f"#{order} .facts").all_inner_texts()
        return [int(text.split(",")[0].removeprefix("row ")) for text in facts]


def image_widths(page) -> list[int]:
    """Widths of the photos, 0 if one is not loaded. The page loads those that come into view."""
    images = page.locator(".image img")
    for image in images.all():
        image.scroll_into_view_if_needed()
    page.wait_for_load_state("networkidle")
    return images.evaluate_all("images => images.map(image => image.naturalWidth)")


@pytest.fixture
def watched(browser, service) -> Iterator[Watched]:
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    watched = Watched(context.new_page(), service.url)
    watched.page.goto(service.url)
    watched.page.wait_for_load_state("networkidle")
    yield watched
    context.close()
    assert watched.problems == []


def answer(watched: Watched, body: dict) -> dict:
    return watched.page.request.post(f"{watched.home}/search", data=body).json()


def test_a_search_shows_both_orders_of_the_service(watched):
    watched.search("a red canoe")
    expected = answer(watched, {"query": "a red canoe", "k": 12, "pool": 100, "embedding_order": True})
    assert watched.rows("before") == [hit["row_id"] for hit in expected["by_embedding"]]
    assert watched.rows("after") == [hit["row_id"] for hit in expected["hits"]]
    movements = watched.page.locator("#after .movement").all_inner_texts()
    for text, hit in zip(movements, expected["hits"], strict=True):
        moved = hit["embedding_rank"] - hit["rank"]
        assert text.split(" ", 3)[2] == str(hit["embedding_rank"])
        assert (f"up {moved}" if moved > 0 else f"down {-moved}" if moved < 0 else "stays") in text
    assert all(image_widths(watched.page))
    watched.page.locator("#after summary").first.click()
    assert "logit" in watched.page.locator("#after details table").first.inner_text()
    assert "in the queue" in watched.page.inner_text("#status")


def test_the_precision_switch_says_what_changed(watched):
    watched.search("a red canoe")
    exact = watched.rows("after")
    with watched.page.expect_response("**/search"):
        watched.page.select_option("#precision", "sign1")
    watched.wait()
    rough = watched.rows("after")
    changed = sum(left != right for left, right in zip(exact, rough, strict=True))
    text = watched.page.inner_text("#changes")
    assert f"With sign1 instead of bf16, {changed} of 12 ranks hold another photo." in text
    assert watched.page.inner_text("#after-title") == "Re-ranked with sign1 tokens"


def test_an_image_finds_itself_chosen_or_dropped(watched, index):
    path = index.parent / "photos" / "7.jpg"
    row = answer(watched, {"image": base64.b64encode(path.read_bytes()).decode(), "k": 1})["hits"][0]["row_id"]
    with watched.page.expect_response("**/search"):
        watched.page.set_input_files("#image", path)
    watched.wait()
    assert watched.rows("after")[0] == row
    watched.search("a dog")
    with watched.page.expect_response("**/search"):
        watched.page.evaluate(
            """data => {
              const bytes = Uint8Array.from(atob(data), letter => letter.charCodeAt(0));
              const transfer = new DataTransfer();
              transfer.items.add(new File([bytes], "7.jpg", { type: "image/jpeg" }));
              const how = { dataTransfer: transfer, bubbles: true, cancelable: true };
              document.body.dispatchEvent(new DragEvent("drop", how));
            }""",
            base64.b64encode(path.read_bytes()).decode(),
        )
    watched.see("#after-title", "Similar photos")
    assert watched.rows("after")[0] == row
    assert watched.page.is_hidden("#before-section")


def test_more_like_this_and_the_shared_link(watched, browser):
    watched.search("a red canoe")
    first = watched.rows("after")[0]
    with watched.page.expect_response("**/search"):
        watched.page.locator("#after .similar").first.click()
    watched.wait()
    assert watched.rows("after") == [hit["row_id"] for hit in answer(watched, {"row_id": first, "k": 12})["hits"]]
    assert f"row={first}" in watched.page.url
    watched.page.go_back()
    watched.see("#after-title", "Re-ranked")
    assert "q=a+red+canoe" in watched.page.url
    shared = Watched(browser.new_page(), watched.home)
    shared.page.goto(watched.page.url)
    shared.wait()
    assert (shared.rows("after"), shared.problems) == (watched.rows("after"), [])
    assert shared.page.input_value("#query") == "a red canoe"
    shared.page.close()


def test_texts_are_ranked_for_an_image(watched, index):
    texts = ["a red canoe", "<img src=x onerror=alert(1)>", "two dogs", "snow"]
    watched.page.locator("#texts-box summary").click()
    watched.page.fill("#texts", "\n".join([texts[0], "", *texts[1:], " "]))
    with watched.page.expect_response("**/search/texts"):
        watched.page.set_input_files("#image", index.parent / "photos" / "7.jpg")
    watched.wait()
    items = watched.page.locator("#ranked-texts li").all_inner_texts()
    assert sorted(item.rpartition(" score ")[0] for item in items) == sorted(texts)
    watched.search("a dog")
    assert watched.page.is_hidden("#ranked-texts-section")


def test_a_link_can_inject_nothing(watched):
    watched.page.goto(f"{watched.home}/?q=%3Cscript%3Ealert(1)%3C/script%3E&pool=abc&precision=x&index=%3Cb%3E&row=1x")
    watched.wait()
    assert watched.page.input_value("#query") == "<script>alert(1)</script>"
    watched.search("any")
    names = watched.page.locator("#before .name, #after .name").all_inner_texts()
    watched.page.evaluate("document.getElementById('pool').value = 10")
    assert watched.page.locator("img[src=x]").count() == 0
    assert names


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 1200])
def test_the_page_is_accessible_and_fits(browser, service, axe, scheme, width):
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    watched = Watched(context.new_page(), service.url)
    watched.page.goto(f"{service.url}/?q=a+red+canoe")
    watched.wait()
    watched.page.locator("#after summary").first.click()
    watched.page.locator("#filter summary").click()
    watched.page.locator("#texts-box summary").click()
    assert watched.page.evaluate("document.documentElement.scrollWidth") <= width
    watched.page.evaluate(axe)
    violations = watched.page.evaluate("axe.run().then(result => result.violations)")
    assert not violations, json.dumps(violations, indent=1)[:4000]
    assert watched.problems == []
    context.close()


def test_the_page_asks_for_the_key(browser, index, tmp_path):
    with serve(tmp_path, index, EDJE_API_KEYS="a-key-of-enough-letters") as service:
        context = browser.new_context()
        page = context.new_page()
        page.goto(service.url)
        page.wait_for_selector("#key-form:not([hidden])")
        page.fill("#key", "a-key-of-enough-letters")
        page.press("#key", "Enter")
        page.wait_for_selector("#key-form", state="hidden")
        Watched(page, service.url).search("a dog")
        page.wait_for_load_state("networkidle")
        assert len(image_widths(page)) == 24
        assert all(image_widths(page))
        context.close()
