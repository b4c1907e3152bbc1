"""The built site: public names, and pages in a real browser that are opened from
the disk.
"""

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
def test_the_screenshots_can_be_made_and_show_the_current_templates(
    tmp_path, tiny_bundle
):
    if shutil.which("chromium") is None:
        pytest.skip("there is no chromium")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    words = [REPO / "tests/docs/screenshots.sh", tiny_bundle, "", tmp_path]
    subprocess.run(words, env={**os.environ, "PATH": path}, check=True)
    assets = REPO / "docs/assets"
    names = {"page.webp", "before-after.webp", "explain.webp", "hits.webp"}
    for folder in (tmp_path, assets):
        assert {each.name for each in folder.glob("*.webp")} == names
    digests = [folder / "screenshots.sha256" for folder in (tmp_path, assets)]
    assert digests[0].read_text() == digests[1].read_text(), "make them again"
