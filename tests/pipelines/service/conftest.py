"""An index of photos in two precisions, and a service that answers from it."""

import httpx
import numpy as np
import pytest
from PIL import Image

from pipelines import build_index, quantize_index
from tests.pipelines.service.server import serve

ROWS = 12
HOLE = 5


@pytest.fixture(scope="session")
def index(tmp_path_factory, tiny_bundle):
    folder = tmp_path_factory.mktemp("served")
    (folder / "photos").mkdir()
    for row in range(ROWS):
        path = folder / "photos" / f"{row:02d}.jpg"
        pixels = np.random.default_rng(row).integers(
            0, 255, (48, 64, 3), dtype=np.uint8
        )
        Image.fromarray(pixels).save(path, quality=95)
    (folder / "photos" / f"{HOLE:02d}.jpg").write_bytes(b"not an image")
    (folder / "photos" / "03.txt").write_text("a red canoe\n<b>two</b> dogs\n")
    (folder / "photos" / "03.json").write_text('{"author": "Ada"}')
    root = folder / "photos.edje"
    build_index(
        folder / "photos", root, tiny_bundle, engine="inline", threads=1, shard_size=8
    )
    quantize_index(root, ["nvfp4"])
    return root


@pytest.fixture(scope="session")
def service(index, tmp_path_factory):
    with serve(tmp_path_factory.mktemp("service"), index) as running:
        yield running


@pytest.fixture
def http(service):
    with httpx.Client(base_url=service.url, timeout=60) as client:
        yield client
