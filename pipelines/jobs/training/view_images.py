"""Writes augmented views of photos as image files.

A view is a random crop as in Szegedy et al. (2015), with 35 % to 100 % of the area of the photo. Half of the views are
mirrored.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from edje_index.images.decode import ImageError, content_hash
from edje_index.images.decoded_input import DecodeSettings, decode_input, read_input
from edje_index.training.data.sampling import VIEWS, stream
from pipelines.progress.stopping import JobStopped, ShouldStop
from storage_formats.atomic import write_bytes_atomic

if TYPE_CHECKING:
    from edje_index.images.inputs import InputRef

_AREA = (0.35, 1.0)
_ASPECT = (3 / 4, 4 / 3)
_QUALITY = 95
_THREADS = 4
_AHEAD = 256
LIST = "views.jsonl"


@dataclass(frozen=True)
class Crops:
    """Which views to make of every photo.

    Attributes:
        views: number of views per photo.
        size: (height, width) of a view in pixels.
        seed: seed of the random crops.
        decoding: settings of decoding.
    """

    views: int
    size: tuple[int, int]
    seed: int
    decoding: DecodeSettings = field(default_factory=DecodeSettings)


def write_views(refs: Iterable[InputRef], folder: Path, crops: Crops, should_stop: ShouldStop) -> Path:
    """Write the views of all photos and a list of their files. Return the path of the list.

    Args:
        refs: the photos. A photo that cannot be decoded gets no views.
        folder: directory for the list and the views. `view_path` names the files of the views.
        crops: the views to make.
        should_stop: the cropping stops once `should_stop()` returns True.

    Raises:
        JobStopped: `should_stop()` returned True. The next call crops all photos again.
    """
    list_file = folder / LIST
    if list_file.exists():
        return list_file
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    photos = iter(refs)
    lines: list[str] = []
    with ThreadPoolExecutor(_THREADS, "edje-views") as pool:
        done = 0
        while batch := list(itertools.islice(photos, _AHEAD)):
            if should_stop():
                raise JobStopped(f"stopped after cropping {done:,} photos; the next run crops all photos again")
            for written in pool.map(lambda ref: _write(ref, folder, crops), batch):
                lines += [json.dumps({"path": str(path)}) + "\n" for path in written]
            done += len(batch)
    write_bytes_atomic(list_file, "".join(lines).encode())
    return list_file


def view_path(folder: Path, uri: str, view: int) -> Path:
    """Return the path in `folder` of view number `view` of the photo with the uri `uri`."""
    return folder / f"{hashlib.sha256(uri.encode()).hexdigest()[:32]}-{view}.jpg"


def _write(ref: InputRef, folder: Path, crops: Crops) -> list[Path]:
    try:
        data = read_input(ref)
        photo = decode_input(data, ref.uri, crops.decoding, lambda image: image).pixels
    except ImageError:  # the photo has no features either; the build of the feature index reports the failure
        return []
    paths = [view_path(folder, ref.uri, view) for view in range(crops.views)]
    content = int(content_hash(data)[:32], 16)  # the seed depends on the content, so a moved photo gets the same views
    for view, path in enumerate(paths):
        random_view(photo, crops.size, stream(crops.seed, VIEWS, content, view)).save(path, quality=_QUALITY)
    return paths


def random_view(photo: Image.Image, size: tuple[int, int], rng: np.random.Generator) -> Image.Image:
    """Return a random crop of `photo`, resized to `size` (height, width). Mirror the crop with probability 1/2."""
    area, aspect = rng.uniform(*_AREA), np.exp(rng.uniform(*np.log(_ASPECT)))
    pixels = photo.width * photo.height * area
    width, height = min(photo.width, (pixels * aspect) ** 0.5), min(photo.height, (pixels / aspect) ** 0.5)
    left, top = rng.uniform(0, photo.width - width), rng.uniform(0, photo.height - height)
    view = photo.resize(size[::-1], Image.Resampling.BICUBIC, box=(left, top, left + width, top + height))
    return view.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else view
