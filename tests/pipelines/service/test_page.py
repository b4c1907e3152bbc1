"""The page in a real browser: Chromium, driven by Playwright, and checked by
axe-core.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode

import httpx
import pytest

from tests.command_line import command
from tests.pipelines.conftest import write_photo
from tests.pipelines.service.conftest import ROWS
from tests.pipelines.service.server import serve, serving

pytestmark = pytest.mark.slow
sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or pytest.skip(
    "there is no chromium", allow_module_level=True
)


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def axe(tmp_path_factory):
    """The source of axe-core, from the registry of npm."""
    if shutil.which("npm") is None:
        pytest.skip("there is no npm")
    folder = tmp_path_factory.mktemp("axe")
    subprocess.run(
        ["npm", "pack", "--silent", "axe-core@4"],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        return archive.extractfile("package/axe.min.js").read().decode()


@dataclass
class Watched:
    """A page whose errors and foreign requests are collected."""

    page: object
    home: str
    problems: list[str] = field(default_factory=list)

    def __post_init__(self):
        own = (self.home, "blob:", "data:")
        said = ("error", "warning")
        problems = self.problems
        self.page.on(
            "console",
            lambda message: (
                problems.append(message.text) if message.type in said else None
            ),
        )
        self.page.on("pageerror", lambda error: problems.append(str(error)))
        self.page.on(
            "request",
            lambda request: (
                None if request.url.startswith(own) else problems.append(request.url)
            ),
        )
        self.page.on("dialog", lambda dialog: problems.append(dialog.message))

    def search(self, query):
        self.page.fill("#query", query)
        with self.page.expect_response("**/search"):
            self.page.press("#query", "Enter")
        self.wait()

    def wait(self):
        """Wait until the search is finished and its photos are loaded."""
        sync_api.expect(self.page.locator("#status")).to_contain_text(
            "photo", timeout=60_000
        )
        self.page.wait_for_selector("body:not(.busy)")
        self.page.wait_for_load_state("networkidle")

    def rows(self):
        """Rows of the photos, in the order of the page."""
        links = self.page.locator("#photos a").evaluate_all(
            "links => links.map(link => link.search)"
        )
        return [int(link.removeprefix("?row=")) for link in links]

    def answer(self, **body):
        """Rows of the hits that the service gives."""
        answer = self.page.request.post(f"{self.home}/search", data={"k": ROWS, **body})
        return [hit["row_id"] for hit in answer.json()["hits"]]


@pytest.fixture
def watched(browser, service):
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    watched = Watched(context.new_page(), service.url)
    watched.page.goto(service.url)
    watched.wait()
    yield watched
    context.close()
    assert watched.problems == []


def test_the_grid_goes_on_after_the_pool_in_the_order_of_the_embeddings(watched):
    page = watched.page
    # the first page shows the photos of the index
    assert len(set(watched.rows())) == ROWS - 1
    page.goto(f"{watched.home}/?q=a+red+canoe&pool=10")
    watched.wait()
    further = watched.answer(query="a red canoe", score="embedding", skip=10)
    assert (
        watched.rows() == watched.answer(query="a red canoe", k=10, pool=10) + further
    )
    assert (
        page.locator("#photos > li").all_inner_texts()[10]
        == "Further photos, by embedding only"
    )
    images = page.locator("#photos img")
    for image in images.all():
        image.scroll_into_view_if_needed()
    watched.wait()
    assert all(images.evaluate_all("images => images.map(image => image.naturalWidth)"))
    page.route("**/search", lambda route: route.abort(), times=1)
    page.goto(f"{watched.home}/?q=a+dog")
    sync_api.expect(page.locator("#status.error")).to_contain_text(
        "The service cannot be reached."
    )
    assert (watched.rows(), watched.problems.pop()) == (
        [],
        "Failed to load resource: net::ERR_FAILED",
    )
    page.click("#filter-button")
    page.fill("#where", "width > 9999")
    page.press("#where", "Enter")
    sync_api.expect(page.locator("#status")).to_contain_text(
        "No photo passes the filter."
    )
    assert watched.rows() == []


def test_a_photo_is_shown_large_and_has_an_address(watched, browser):
    page = watched.page
    watched.search("a red canoe")
    rows = watched.rows()
    page.locator("#photos a").nth(1).click()
    assert page.url.endswith(f"?q=a+red+canoe&photo={rows[1]}")
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
    assert page.url.endswith(f"photo={rows[2]}")
    watched.wait()
    file = page.locator("#values dd").first.inner_text()
    with page.expect_download() as download:
        page.click("#download")
    assert Path(download.value.path()).read_bytes() == Path(file).read_bytes()
    shared = Watched(browser.new_page(), watched.home)
    shared.page.goto(page.url)
    sync_api.expect(shared.page.locator("#values dd").first).to_have_text(file)
    shared.wait()
    assert (shared.rows(), shared.problems) == (rows, [])
    shared.page.close()
    page.keyboard.press("Escape")
    page.wait_for_url(f"{watched.home}/?q=a+red+canoe")
    page.go_forward()
    with page.expect_response("**/search"):
        page.click("#similar")
    watched.wait()
    assert watched.rows() == watched.answer(row_id=rows[2])
    page.go_back()
    sync_api.expect(page.locator("#viewer")).to_be_visible()
    assert page.input_value("#query") == "a red canoe"


GIVE = """([data, event, member]) => {
  const transfer = new DataTransfer();
  const bytes = Uint8Array.from(atob(data), letter => letter.charCodeAt(0));
  transfer.items.add(new File([bytes], "7.jpg", { type: "image/jpeg" }));
  const how = { [member]: transfer, bubbles: true, cancelable: true };
  const Kind = event === "drop" ? DragEvent : ClipboardEvent;
  document.body.dispatchEvent(new Kind(event, how));
}"""


def test_an_image_is_chosen_dropped_or_pasted_and_joined_with_text(watched, index):
    page = watched.page
    path = index.parent / "photos" / "07.jpg"
    data = base64.b64encode(path.read_bytes()).decode()
    (row,) = watched.answer(image=data, k=1)
    for event, member in (
        ("", ""),
        ("drop", "dataTransfer"),
        ("paste", "clipboardData"),
    ):
        with page.expect_response("**/search"):
            (
                page.evaluate(GIVE, [data, event, member])
                if event
                else page.set_input_files("#image", path)
            )
        sync_api.expect(page.locator("#status")).to_contain_text("most similar first")
        assert watched.rows()[0] == row
        page.click("#remove")
        watched.wait()
    page.fill("#query", "a dog")
    with page.expect_response("**/search") as response:
        page.set_input_files("#image", path)
    asked = response.value.request.post_data_json
    watched.wait()
    assert watched.rows() == watched.answer(query="a dog", image=asked["image"])
    assert page.locator("#chip img").is_visible()


def test_the_comparison_shows_both_orders_and_what_a_precision_changes(watched):
    page = watched.page
    watched.search("a red canoe")
    assert page.is_hidden("#compare")
    page.click("#compare-button")
    asked = {"query": "a red canoe", "k": ROWS, "pool": 100, "embedding_order": True}
    expected = page.request.post(f"{watched.home}/search", data=asked).json()

    def rows(order):
        facts = page.locator(f"#{order} .facts").all_inner_texts()
        return [int(text.split(",")[0].removeprefix("row ")) for text in facts]

    assert rows("before") == [hit["row_id"] for hit in expected["by_embedding"]]
    assert rows("after") == [hit["row_id"] for hit in expected["hits"]]
    moved = expected["hits"][0]["embedding_rank"] - 1
    assert (f"up {moved}" if moved else "stays") in page.locator(
        "#after .movement"
    ).first.inner_text()
    assert "logit" in page.locator("#after details table").first.text_content()
    assert f"relevance {expected['hits'][0]['relevance']:.2f}" in page.inner_text(
        "#after summary"
    )
    exact = rows("after")
    with page.expect_response("**/search"):
        page.select_option("#precision", "nvfp4")
    watched.wait()
    changed = sum(
        left != right for left, right in zip(exact, rows("after"), strict=True)
    )
    assert (
        f"With nvfp4 instead of bf16, {changed} of {ROWS - 1} ranks"
        in page.inner_text("#changes")
    )


def test_a_link_can_inject_nothing(watched):
    script = "<script>alert(1)</script>"
    page = watched.page
    parameters = {
        "q": script,
        "pool": "abc",
        "precision": "x",
        "row": "1x",
        "photo": "<b>",
    }
    page.goto(f"{watched.home}/?{urlencode(parameters)}")
    watched.wait()
    assert (page.input_value("#query"), len(watched.rows())) == (script, ROWS - 1)
    page.goto(f"{watched.home}/?row=3&compare=1")
    watched.wait()
    page.click("#texts-box summary")
    page.fill("#texts", f"snow\n\n{script}\n ")
    page.click("#rank-texts")
    sync_api.expect(page.locator("#ranked-texts li")).to_have_count(2)
    assert script in page.inner_text("#ranked-texts")
    page.goto(f"{watched.home}/?row=0&photo=3")
    sync_api.expect(page.locator("#captions")).to_have_text("<b>two</b> dogs")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_every_state_is_accessible_and_fits(browser, service, axe, scheme, width):
    context = browser.new_context(
        viewport={"width": width, "height": 800}, color_scheme=scheme
    )
    page = context.new_page()
    watched = Watched(page, service.url)
    for address in (
        "?q=a+canoe&pool=10",
        "?row=3&q=dog&where=width>9",
        "?q=dog&compare=1",
        "?q=dog&photo=3",
        "docs",
    ):
        page.goto(f"{service.url}/{address}")
        page.wait_for_load_state("networkidle")
        if address != "docs":
            watched.wait()
        if "compare" in address:
            page.locator("#after summary").first.click()
            page.click("#texts-box summary")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, address
        if address.endswith("pool=10"):
            box = page.locator("#photos img").nth(1).bounding_box()
            # the first screen shows photos
            assert box["y"] + box["height"] < 400
        page.evaluate(axe)
        violations = page.evaluate("axe.run().then(result => result.violations)")
        assert not violations, json.dumps(violations, indent=1)[:4000]
    assert page.locator("#routes section").count() > 10
    assert watched.problems == []
    context.close()


def test_the_key_is_asked_first_and_the_query_kept(browser, index, tmp_path):
    with serve(tmp_path, index, EDJE_API_KEYS="a-key-of-enough-letters") as service:
        page = browser.new_page()
        page.goto(f"{service.url}/?q=a+dog&photo=3")
        for key, problem in (
            ("wrong", ""),
            ("a\u2013dash", "This key is not accepted."),
            ("a-key-of-enough-letters", "This key is not accepted."),
        ):
            sync_api.expect(page.locator("#key")).to_be_focused()
            assert (page.is_hidden("#query"), page.inner_text("#status")) == (
                True,
                problem,
            )
            with page.expect_response("**/info"):
                page.fill("#key", key)
                page.press("#key", "Enter")
        Watched(page, service.url).wait()
        assert (page.input_value("#query"), page.is_visible("#key")) == ("a dog", False)
        assert page.locator("#large").evaluate("image => image.naturalWidth") == 64
        with page.expect_download() as download:
            page.click("#download")
        assert Path(download.value.path()).read_bytes()[:3] == b"\xff\xd8\xff"
        page.goto(f"{service.url}/docs")
        page.wait_for_selector("#routes section code")
        assert "`" not in page.inner_text("#routes")
        page.close()


def test_one_command_shows_a_folder_and_what_was_added_to_it(tmp_path, tiny_bundle):
    (tmp_path / "browser").write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/opened\n')
    (tmp_path / "browser").chmod(0o755)
    os.mkfifo(tmp_path / "opened")
    (tmp_path / "cache").mkdir()
    # `model get` downloads 174 MB
    (tmp_path / "cache" / "model").symlink_to(tiny_bundle)
    variables = {
        "BROWSER": f"{tmp_path}/browser %s",
        "EDJE_CACHE": str(tmp_path / "cache"),
    }
    for photos in (1, 3):
        for row in range(photos):
            write_photo(tmp_path / "photos" / f"{row}.png", row)
        with serving(
            tmp_path, command("show", tmp_path / "photos"), variables
        ) as service:
            assert (tmp_path / "opened").read_text().strip() == service.url
            answer = httpx.post(
                f"{service.url}/search", json={"query": "a dog", "k": 10}, timeout=60
            )
            assert len(answer.json()["hits"]) == photos
