"""A build with images that kill the processes that decode them."""

from __future__ import annotations

import pytest
from PIL import Image

from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
from edje_index.indexing.image_encoder import ImageEncoder
from pipelines import build_index
from storage_formats import verify_index
from storage_formats.format.rows import read_rows
from tests.edje_index.indexing.test_helpers import faulty_decoder
from tests.integration.builds import make_photos

__all__ = ["faulty_decoder"]
pytestmark = pytest.mark.slow
FAULTS = {
    3: "os.kill(os.getpid(), 11)",
    40: "os._exit(0)",
    41: "os.kill(os.getpid(), 9)",
}


def test_only_the_images_that_kill_helpers_are_missing(
    tmp_path, monkeypatch, faulty_decoder
):
    photos = tmp_path / "photos"
    make_photos(photos, 100)
    for number, fault in FAULTS.items():
        image = Image.new("RGB", (30, 20), "red")
        image.save(photos / f"{number:04d}.jpg", comment=f"do: {fault};")
    create_untrained_bundle(tmp_path / "model", sizes=TINY)
    loaded = []
    load = ImageEncoder.open
    monkeypatch.setattr(
        ImageEncoder,
        "open",
        lambda *args, **options: loaded.append(args) or load(*args, **options),
    )
    result = build_index(
        photos, tmp_path / "index", tmp_path / "model", engine="inline", helpers=2
    )
    assert result.failed_by_reason == {"truncated": 14, "worker-died": 3}
    assert result.indexed == 83
    assert len(loaded) == 1
    assert verify_index(tmp_path / "index") == []
    rows = read_rows(tmp_path / "index").to_pylist()
    assert [row["row_id"] for row in rows if row["reason"] == "worker-died"] == [
        *FAULTS
    ]
