"""Writes augmented views of photos as image files."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from edje_index.images.decode import ImageError
from edje_index.images.decoded_input import DecodeSettings, decode_input
from edje_index.images.inputs import InputRef, read_bytes
from edje_index.training.data.crops import Crops
from pipelines.progress.events import JobStopped, ShouldStop
from storage_formats.atomic import write_bytes_atomic

_QUALITY = 95
_THREADS = 4
_AHEAD = 256
LIST = "views.jsonl"


def write_views(
    refs: Iterable[InputRef], folder: Path, crops: Crops, decoding: DecodeSettings, should_stop: ShouldStop
) -> Path:
    """Write the views of all photos and a list of their files. Return the path of the list.

    Args:
        refs: the photos. A photo that cannot be decoded gets no views.
        folder: directory for the list and the views. `view_path` names the files of the views.
        crops: the views to make.
        decoding: settings of decoding.
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
            for written in pool.map(lambda ref: _write(ref, folder, crops, decoding), batch):
                lines += [json.dumps({"path": str(path)}) + "\n" for path in written]
            done += len(batch)
    write_bytes_atomic(list_file, "".join(lines).encode())
    return list_file


def view_path(folder: Path, uri: str, view: int) -> Path:
    """Return the path in `folder` of view number `view` of the photo with the uri `uri`."""
    return folder / f"{hashlib.sha256(uri.encode()).hexdigest()[:32]}-{view}.jpg"


def _write(ref: InputRef, folder: Path, crops: Crops, decoding: DecodeSettings) -> list[Path]:
    try:
        data = read_bytes(ref)
        photo = decode_input(data, ref.uri, decoding, lambda image: image).pixels
    except ImageError:  # the photo has no features either; the build of the feature index reports the failure
        return []
    paths = [view_path(folder, ref.uri, view) for view in range(crops.views)]
    for number, path in enumerate(paths):
        crops.view(photo, data, number).save(path, quality=_QUALITY)
    return paths
