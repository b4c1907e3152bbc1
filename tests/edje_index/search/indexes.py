"""A small index of random images, built with a tiny random model."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from PIL import Image

from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
from edje_index.images.input_lists import write_input_lists
from edje_index.images.inputs import InputRef
from edje_index.indexing.faiss_index import build_ann
from edje_index.indexing.image_encoder import ImageEncoder
from edje_index.indexing.shard_encoding import encode_shard
from edje_index.indexing.shard_task import ShardTask
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.writing.begin import begin_index
from storage_formats.writing.publish import Provenance, finish_index

SPEC = IndexSpec(rows=13, shard_size=8, block_shape=(4, 16), embed_dim=24)
HOLE = 5
DUPLICATE_ROW = 12


def build_photos(folder: Path) -> tuple[Path, Path]:
    """The index and its bundle in `folder`. Row `HOLE` is no image and row `DUPLICATE_ROW` duplicates row 0."""
    info = create_untrained_bundle(folder / "model", sizes=TINY)
    root = folder / "index"
    begin_index(root, SPEC)
    encoder = ImageEncoder.open(folder / "model", device="cpu", threads=1)
    Layout(root).input_lists.mkdir()
    write_input_lists(Layout(root), [_photo(folder, row) for row in range(SPEC.rows)], SPEC.shard_size)
    tasks = (ShardTask(str(root), shard, SPEC, "plan", 4, 10**7, 1) for shard in range(SPEC.shards))
    receipts = [encode_shard(task, encoder) for task in tasks]
    model = {"fingerprint": info.encoder_fingerprint, "bundle": str(folder / "model")}
    finish_index(root, SPEC, receipts, Provenance(model, {}, "plan"), build_ann(root, SPEC))
    return root, folder / "model"


def _photo(folder: Path, row: int) -> InputRef:
    path = folder / f"{row}.png"
    if row == HOLE:
        path.write_bytes(b"not an image")
    else:
        seed = 0 if row == DUPLICATE_ROW else row
        pixels = np.random.default_rng(seed).integers(0, 255, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return InputRef(str(path), os.fsencode(path), duplicate_of=0 if row == DUPLICATE_ROW else None)
