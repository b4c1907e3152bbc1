"""Features of augmented views, and which view belongs to which photo."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edje_index.images.inputs import display_path
from pipelines.jobs.training.features import feature_model
from pipelines.jobs.training.index_builder import check_encoder, image_sources, path_column
from pipelines.jobs.training.view_images import view_path, write_views
from pipelines.progress.events import StatusMessage
from storage_formats.atomic import write_bytes_atomic
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.captions.reading import CaptionedImage
    from edje_index.training.loop.task import ViewTask
    from pipelines.jobs.training.index_builder import IndexBuilder
    from pipelines.jobs.training.start import StartModel


def computed_views(
    count: int, seed: int, start: StartModel, items: Sequence[CaptionedImage], builder: IndexBuilder
) -> ViewTask:
    """Crop `count` views of each photo and compute their features. `items` are the photos with features.

    Raises:
        JobStopped: cropping starts again; finished shards of features are kept.
    """
    from edje_index.training.loop.task import ViewTask

    index, folder, rows = (builder.folder / name for name in ("views.edje", "views", "view-rows.npy"))
    if not rows.exists():
        _build_views(count, seed, start, items, builder)
        _write_rows(rows, _match_views(index, items, folder, count))
    shutil.rmtree(folder, ignore_errors=True)
    return ViewTask(index, rows)


def given_views(
    given: Path, count: int, start: StartModel, items: Sequence[CaptionedImage], run_folder: Path
) -> ViewTask:
    """Take `count` views of each photo from an index of views that another run made.

    Raises:
        UsageError: another tower made it, or it lacks views.
    """
    from edje_index.training.loop.task import ViewTask
    from storage_formats.format.rows import read_rows

    index, rows = given.absolute(), run_folder / "view-rows.npy"
    if not rows.exists():
        check_encoder(index, start.accepted_features(), start.feature_adapter.kind)
        folder = Path(read_rows(index, [0], ["uri"])["uri"][0].as_py()).parent
        matched = _match_views(index, items, folder, count)
        if lacking := int((matched < 0).any(axis=1).sum()):
            raise UsageError(
                f"{index} lacks {lacking:,} of {len(items):,} photos, or some of {count} views of them; leave "
                "inputs.view_features out to have the views computed"
            )
        _write_rows(rows, matched)
    return ViewTask(index, rows)


def _build_views(
    count: int, seed: int, start: StartModel, items: Sequence[CaptionedImage], builder: IndexBuilder
) -> None:
    """Build `views.edje` from cropped files, which the caller removes."""
    from edje_index.bundles.info import read_bundle_info
    from pipelines.sources import iter_all, open_sources

    names = set(_names(items))
    sources = image_sources(builder.folder / "viewed.jsonl", items)
    photos = (ref for ref in iter_all(open_sources(sources, path_column(sources))) if ref.uri in names)
    model = feature_model(builder.folder, start)
    height, width = read_bundle_info(model).vision["image_size"]
    builder.on_event(StatusMessage(f"cropping {count} views of {len(names):,} photos"))
    view_list = write_views(photos, builder.folder / "views", count, (height, width), seed, builder.should_stop)
    builder.build("views.edje", model, (os.fspath(view_list),), "computing features of the views, once")


def _match_views(index: Path, items: Sequence[CaptionedImage], folder: Path, count: int) -> NDArray[np.int64]:
    """Row of every view of every photo in `index`, int64 [n, count]; -1 if it has none.

    Args:
        folder: where the files of the views were when the index was built; their names follow from it.
    """
    from edje_index.captions.matching import match_items

    views = [
        [replace(item, path=view_path(folder, name, view)) for item, name in zip(items, _names(items), strict=True)]
        for view in range(count)
    ]
    return np.stack([match_items(index, view_items, allow_none=True).rows for view_items in views], axis=1)


def _names(items: Sequence[CaptionedImage]) -> list[str]:
    return [display_path(os.fsencode(item.path)) for item in items]


def _write_rows(path: Path, rows: NDArray[np.int64]) -> None:
    content = io.BytesIO()
    np.save(content, rows)
    write_bytes_atomic(path, content.getvalue())
