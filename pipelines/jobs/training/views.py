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
    from edje_index.training.config import TrainConfig
    from edje_index.training.loop.task import ViewTask
    from pipelines.jobs.training.index_builder import IndexBuilder
    from pipelines.jobs.training.start import StartModel


def view_task(
    given: Path | None, config: TrainConfig, start: StartModel, items: Sequence[CaptionedImage], builder: IndexBuilder
) -> ViewTask | None:
    """Features of `augmentation.views` views of each photo; None without views.

    Args:
        given: index of views that another run made; None crops the photos and computes the features.
        config: its views and seed decide the crops.
        start: bundle whose tower computes the features.
        items: photos that have features.
        builder: builds the index.

    Raises:
        UsageError: another tower made `given`, or it lacks views.
        JobStopped: cropping starts again; finished shards of features are kept.
    """
    from edje_index.training.loop.task import ViewTask

    count, rows_file = config.augmentation.views, builder.folder / "view-rows.npy"
    if not count:
        return None
    index = builder.folder / "views.edje" if given is None else given.absolute()
    if not rows_file.exists():
        if given is None:
            crops = _build_views(count, config.loop.seed, start, items, builder)
        else:
            check_encoder(index, start.accepted_features(), start.feature_adapter.kind)
            crops = _crop_folder(index)
        rows = _match_views(index, items, crops, count)
        if given is not None and (lacking := int((rows < 0).any(axis=1).sum())):
            raise UsageError(
                f"{index} lacks at least one of the {count} views of {lacking:,} of {len(items):,} photos; leave "
                "inputs.view_features out, and the views are computed"
            )
        _write_rows(rows_file, rows)
    shutil.rmtree(builder.folder / "views", ignore_errors=True)
    return ViewTask(index, rows_file)


def _crop_folder(index: Path) -> Path:
    """Where the files of the views were when `index` was built."""
    from storage_formats.format.rows import read_rows

    return Path(read_rows(index, [0], ["uri"])["uri"][0].as_py()).parent


def _build_views(
    count: int, seed: int, start: StartModel, items: Sequence[CaptionedImage], builder: IndexBuilder
) -> Path:
    """Build `views.edje` and return the folder of the cropped files, which the caller removes."""
    from edje_index.bundles.info import read_bundle_info
    from pipelines.sources import iter_all, open_sources

    names = set(_names(items))
    sources = image_sources(builder.folder / "viewed.jsonl", items)
    photos = (ref for ref in iter_all(open_sources(sources, path_column(sources))) if ref.uri in names)
    model = feature_model(builder.folder, start)
    height, width = read_bundle_info(model).vision["image_size"]
    builder.on_event(StatusMessage(f"cropping {count} views of {len(names):,} photos"))
    crops = builder.folder / "views"
    view_list = write_views(photos, crops, count, (height, width), seed, builder.should_stop)
    builder.build("views.edje", model, (os.fspath(view_list),), "computing features of the views, once")
    return crops


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
