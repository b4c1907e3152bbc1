"""A small index of random images, built with a tiny random model."""

import numpy as np
from PIL import Image

from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
from pipelines import build_index

ROWS = 13
SHARD_SIZE = 8
HOLE = 5
DUPLICATE_ROW = 12


def photo(root, row):
    """The image of a row of the index at `root`."""
    return root.parent / "photos" / f"{row:02}.png"


def build_photos(folder):
    """The index and its bundle in `folder`. Row `HOLE` is no image and row
    `DUPLICATE_ROW` duplicates row 0.
    """
    root = folder / "index"
    model = folder / "model"
    (folder / "photos").mkdir(parents=True)
    for row in range(ROWS):
        pixels = np.random.default_rng(row % DUPLICATE_ROW).integers(
            0, 255, (32, 32, 3), dtype=np.uint8
        )
        Image.fromarray(pixels).save(photo(root, row))
    photo(root, HOLE).write_bytes(b"not an image")
    create_untrained_bundle(model, sizes=TINY)
    build_index(
        folder / "photos",
        root,
        model,
        engine="inline",
        device="cpu",
        shard_size=SHARD_SIZE,
        dedupe=True,
        max_failed=1,
    )
    return root, model
