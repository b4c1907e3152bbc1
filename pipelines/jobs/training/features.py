"""Finds or builds the indexes of features that a training run reads, and finds the row
of each captioned image.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from edje_index.bundles.bundle import ModelBundle
from edje_index.captions.matching import match_items, name_table
from edje_index.captions.reading import CaptionedImage
from edje_index.images.decode import ImageError
from edje_index.images.frames import LOAD, DecodeSettings, decode_input
from edje_index.inputs.containers import split_uri
from edje_index.inputs.input_lists import write_input_table
from edje_index.inputs.refs import InputRef, display_path, read_bytes
from edje_index.models.adapter import STRIDED, AdapterConfig, build_adapter
from edje_index.models.devices import threads_kept
from edje_index.training.config import TrainSettings
from edje_index.training.features import photo_view
from edje_index.training.start import feature_fingerprint
from pipelines.jobs.build import build_index
from pipelines.progress.events import JobStopped, OnEvent, ShouldStop, StatusMessage
from pipelines.sources import iter_all, open_sources
from storage_formats.arrays import Ints
from storage_formats.atomic import write_bytes_atomic
from storage_formats.errors import EdjeError, UsageError
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.rows import INDEXED, read_all_rows
from storage_formats.threads import ordered_map

INPUT_TABLE = "inputs.arrow"
_CROP_THREADS = 4
_CROPS_AHEAD = 256


@dataclass(frozen=True)
class TrainJob:
    """The settings of a training run, and the functions with which it reports progress
    and learns that it must stop.

    Attributes:
        on_event: called with each progress event.
        should_stop: called often; the run stops once `should_stop()` returns True.
    """

    settings: TrainSettings
    on_event: OnEvent
    should_stop: ShouldStop

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.settings.run.folder

    def say(self, text: str) -> None:
        """Report a line for the user."""
        self.on_event(StatusMessage(text))

    def build(
        self, name: str, model: Path, sources: tuple[str, ...], content: str
    ) -> CommittedIndex:
        """Build the index `name` in the run folder with the bundle `model`, or resume
        its build.

        Args:
            content: description of the result for the user, such as "embeddings for
                mining".
        """
        self.say(f"computing {content}, once")
        run = self.settings.run
        dtype = self.settings.loop.dtype
        out = self.folder / name
        with threads_kept():
            build_index(
                sources,
                out,
                model,
                engine="ray" if run.distributed else "inline",
                threads=run.threads,
                device=run.device,
                # With None, the build chooses the dtype by the device alone, as the
                # training loop does for "auto".
                dtype=None if dtype == "auto" else dtype,
                address=run.address,
                truncated="load",
                precisions=(self.settings.inputs.feature_precision,),
                # Failed images do not end the build. The training run reports them
                # itself.
                max_failed=1.0,
                on_event=self.on_event,
                should_stop=self.should_stop,
            )
        return CommittedIndex.open(out)

    def tower_bundle(
        self, name: str, start: ModelBundle, adapter: AdapterConfig
    ) -> Path:
        """Return the path of the bundle `name` in the run folder. If the bundle is
        missing, write it with the towers of `start` and a new adapter.
        """
        model = self.folder / name
        if not model.exists():
            bundle = replace(
                start,
                adapter=build_adapter(adapter),
                notes="computes features to train on; it cannot re-rank",
                info=None,
            )
            bundle.save(model)
        return model

    def sources(self, name: str, items: Sequence[CaptionedImage]) -> tuple[str, ...]:
        """Return the sources from which to build an index of `items`.

        These are first the archives and Parquet files that contain images, then a list
        of the paths of all other images. The list is written to the file `name` in the
        run folder. It is left out if it would be empty.
        """
        paths = list(dict.fromkeys(item.path for item in items))
        # Check first whether the path is a file, because the path of a file may look
        # like that of an archive member.
        parts = {
            path: None if os.path.isfile(path) else split_uri(path) for path in paths
        }
        archives = {part[0]: None for part in parts.values() if part is not None}
        lines = _path_lines(path for path, part in parts.items() if part is None)
        if not lines:
            return tuple(archives)
        list_file = self.folder / name
        if not list_file.exists() or list_file.read_bytes() != lines:
            write_bytes_atomic(list_file, lines)
        return (*archives, os.fspath(list_file))


def _path_lines(paths: Iterable[str]) -> bytes:
    return "".join(json.dumps({"path": path}) + "\n" for path in paths).encode()


def stored_features(
    job: TrainJob,
    start: ModelBundle,
    items: Sequence[CaptionedImage],
    given: CommittedIndex | None,
) -> CommittedIndex:
    """Return an index with the features of `items`: the index `given`, if there is one,
    or a new index.

    Raises:
        UsageError: the index `given` has other features.
    """
    trained = start.adapter.config
    features = trained.features(start.vision.num_patches)
    if given is not None:
        assert start.info is not None
        return check_encoder(
            given, feature_fingerprint(start.info, trained), features.kind
        )
    model = job.tower_bundle("features-model", start, features)
    sources = job.sources("features.edje.jsonl", items)
    return job.build("features.edje", model, sources, "features of the frozen tower")


def online_features(
    job: TrainJob, start: ModelBundle, items: Sequence[CaptionedImage]
) -> CommittedIndex:
    """Return an index with the embeddings of `items`, for a training run that computes
    the features of the images at every step. Also write the table of these images to
    `INPUT_TABLE`.

    Every index needs a token block per image. This index has blocks of one patch, which
    are not used. If the table exists, the images are not listed again, so that a
    stopped run can be resumed even if images are missing.

    Raises:
        EdjeError: the number of images has changed since the index was built.
    """
    table = job.folder / INPUT_TABLE
    name = "images.edje"
    if table.exists():
        return CommittedIndex.open(job.folder / name)
    sources = job.sources("images.edje.jsonl", items)
    features = start.adapter.config.features(start.vision.num_patches)
    one_patch = replace(features, kind=STRIDED, num_tokens=1)
    model = job.tower_bundle("images-model", start, one_patch)
    index = job.build(name, model, sources, "embeddings of the frozen tower")
    unchecked = table.with_name(f".{table.name}.part")
    rows = write_input_table(unchecked, iter_all(open_sources(sources)))
    if rows != index.manifest.spec.rows:
        unchecked.unlink()
        raise EdjeError(
            f"the images have changed since {index.root} was built: it has"
            f" {index.manifest.spec.rows} rows, but there are {rows} images now; remove"
            f" the run folder {job.folder} and train again"
        )
    unchecked.rename(table)
    return index


def stored_views(
    job: TrainJob, start: ModelBundle, items: Sequence[CaptionedImage]
) -> tuple[CommittedIndex, Ints]:
    """Return an index with the features of the augmented views of `items`, and the row
    of each view of each item.

    The rows have the shape [n, views] and dtype int64. The row is -1 for a view that
    could not be indexed.
    """
    files = job.folder / "views"
    name = "views.edje"
    count = job.settings.augmentation.views
    # Number the photos by their uri, in the order of `items`. Several items may have
    # the same photo.
    photos = dict[str, int]()
    numbers = [
        photos.setdefault(display_path(os.fsencode(item.path)), len(photos))
        for item in items
    ]
    if Layout(job.folder / name).manifest.exists():
        index = CommittedIndex.open(job.folder / name)
    else:
        view_list = files / "views.jsonl"
        if not view_list.exists():
            sources = job.sources("viewed.jsonl", items)
            crop_photos(job, start.vision.image_size, sources, photos, files)
            paths = (
                str(files / f"{photo}-{view}.jpg")
                for photo in range(len(photos))
                for view in range(count)
            )
            write_bytes_atomic(view_list, _path_lines(paths))
        features = start.adapter.config.features(start.vision.num_patches)
        model = job.tower_bundle("features-model", start, features)
        index = job.build(name, model, (os.fspath(view_list),), "features of the views")
    shutil.rmtree(files, ignore_errors=True)
    status = read_all_rows(index, ["status"])["status"].to_numpy(zero_copy_only=False)
    rows = np.where(status == INDEXED, np.arange(len(photos) * count), -1)
    return index, rows.reshape(-1, count)[numbers]


def crop_photos(
    job: TrainJob,
    size: tuple[int, int],
    sources: Sequence[str],
    photos: Mapping[str, int],
    files: Path,
) -> None:
    """Write all augmented views of `photos` to the folder `files`, which is emptied
    first. A view is stored in PHOTO-VIEW.jpg, where PHOTO and VIEW are the numbers of
    the photo and of the view. A photo that cannot be decoded gets no views.

    Args:
        size: height and width of a view, in pixels.
        sources: sources that contain the photos. Their other images are skipped.
        photos: number of each photo, by its uri.

    Raises:
        JobStopped: `job.should_stop()` returned True.
    """
    settings = job.settings
    count = settings.augmentation.views

    def crop(ref: InputRef) -> None:
        try:
            data = read_bytes(ref)
            _, (photo,), _ = decode_input(
                data, ref.uri, DecodeSettings(truncated=LOAD), lambda image: image
            )
        except ImageError:
            # The photo has no features either, and the training run reports it as left
            # out.
            return
        for view in range(count):
            cropped = photo_view(photo, data, view, size, settings.loop.seed)
            cropped.save(files / f"{photos[ref.uri]}-{view}.jpg", quality=95)

    job.say(f"cropping {count} views of {len(photos):,} photos")
    shutil.rmtree(files, ignore_errors=True)
    files.mkdir(parents=True)
    inputs = iter_all(open_sources(sources))
    refs = (ref for ref in inputs if ref.uri in photos)
    with contextlib.closing(
        ordered_map(crop, refs, _CROP_THREADS, _CROPS_AHEAD)
    ) as cropped_photos:
        for done, _ in enumerate(cropped_photos):
            if job.should_stop():
                raise JobStopped(
                    f"stopped after cropping {done:,} photos; the next run crops all"
                    " photos again"
                )


def check_encoder(index: CommittedIndex, accepted: str, content: str) -> CommittedIndex:
    """Return `index` if its encoder fingerprint is `accepted`. Otherwise raise
    UsageError, with `content` as the description of the required features.
    """
    encoder = index.manifest.model["fingerprint"]
    if encoder != accepted:
        raise UsageError(
            f"{index.root} does not contain the required features ({content}), because"
            f" its encoder fingerprint is {encoder} instead of {accepted}; give another"
            " index, or omit the index to let the training run compute it"
        )
    return index


def rows_of_all(index: CommittedIndex, items: Sequence[CaptionedImage]) -> Ints:
    """Return the row in `index` of each of the n images in `items`, int64 [n]. Raise
    UsageError if an image has no row with tokens.
    """
    rows = match_items(index.root, name_table(index), items).rows
    if missing := int((rows < 0).sum()):
        raise UsageError(
            f"{index.root} lacks {missing:,} training images; build that index from all"
            " training images, also from the readable part of truncated images"
        )
    return rows
