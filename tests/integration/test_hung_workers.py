"""Builds with an image at which the worker process hangs or dies: Ray, real
processes, a real shard.
"""

from __future__ import annotations

import functools
import os
import signal
from dataclasses import dataclass
from typing import Any

import pytest
from PIL import Image

from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
from edje_index.indexing.image_encoder import ImageEncoder
from pipelines import build_index
from pipelines.engines.ray_engine import run_on_ray
from pipelines.jobs import encode
from storage_formats import verify_index
from storage_formats.format.rows import read_rows
from tests.integration.builds import make_photos

pytestmark = pytest.mark.slow

WIDTH = 71
OPEN = ImageEncoder.open
OPEN_WORKER = encode.open_worker
# a busy machine takes long to import torch and open the model
STALL_SECONDS = 45.0


@dataclass
class HangsAtOneSize:
    """An encoder whose process hangs or dies at the image that is `WIDTH` pixels
    wide.
    """

    encoder: Any
    how: str

    def preprocess(self, image, out=None):
        if image.width == WIDTH:
            # the kernel continues stopped processes if their process group is orphaned
            while True:
                os.kill(os.getpid(), getattr(signal, self.how))
        return self.encoder.preprocess(image, out)

    def __getattr__(self, name):
        return getattr(self.encoder, name)


def open_worker(how, *settings, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ImageEncoder,
            "open",
            lambda *args, **options: HangsAtOneSize(OPEN(*args, **options), how),
        )
        return OPEN_WORKER(*settings, **options)


@pytest.mark.parametrize("how", ["SIGSTOP", "SIGKILL"])
def test_only_the_image_at_which_workers_hang_or_die_is_missing(
    tmp_path, monkeypatch, how
):
    make_photos(tmp_path / "photos", 6)
    Image.new("RGB", (WIDTH, 20), "red").save(tmp_path / "photos" / "0003.jpg")
    create_untrained_bundle(tmp_path / "model", sizes=TINY)
    monkeypatch.setattr(encode, "open_worker", functools.partial(open_worker, how))
    run = functools.partial(run_on_ray, workers=1, stall_seconds=STALL_SECONDS)
    monkeypatch.setattr(encode, "open_engine", lambda *_, **__: run)
    result = build_index(
        tmp_path / "photos",
        tmp_path / "index",
        tmp_path / "model",
        batch_size=2,
        threads=1,
    )
    assert (result.indexed, result.failed_by_reason) == (5, {"worker-died": 1})
    assert verify_index(tmp_path / "index") == []
    row = read_rows(tmp_path / "index").to_pylist()[3]
    assert (row["status"], row["reason"]) == ("failed", "worker-died")
    assert (
        row["detail"]
        == "2 worker processes died or hung while they read or decoded the image"
    )
