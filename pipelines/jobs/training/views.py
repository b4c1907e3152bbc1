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
from pipelines.jobs.training.index_builder import check_encoder
from pipelines.jobs.training.view_images import view_path
from pipelines.jobs.training.view_index import VIEW_FILES, VIEW_INDEX, build_view_index
from storage_formats.atomic import write_bytes_atomic
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.captions.reading import CaptionedImage
    from edje_index.training.config import TrainConfig
    from edje_index.training.loop.task import ViewTask
    from pipelines.jobs.training.index_builder import IndexBuilder
    from pipelines.jobs.training.start import StartModel
    from storage_formats.format.manifest import CommittedIndex


def view_task(
    given: CommittedIndex | None,
    config: TrainConfig,
    start: StartModel,
    items: Sequence[CaptionedImage],
    builder: IndexBuilder,
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
    from edje_index.captions.matching import NAME_COLUMNS, match_items
    from edje_index.training.loop.task import ViewTask
    from storage_formats.format.manifest import CommittedIndex
    from storage_formats.format.rows import read_all_rows

    count, rows_file = config.augmentation.views, builder.folder / "view-rows.npy"
    if not count:
        return None
    if not rows_file.exists():
        if given is None:
            index = build_view_index(config, start, items, builder)
        else:
            index = given
            check_encoder(index, start.accepted_features(), start.feature_adapter.kind)
        table = read_all_rows(index, NAME_COLUMNS)
        # The files of the views were here when the index was built. Their names follow from it.
        files = builder.folder / VIEW_FILES if given is None else Path(table["uri"][0].as_py()).parent
        names = [display_path(os.fsencode(item.path)) for item in items]
        views = [
            [replace(item, path=view_path(files, name, view)) for item, name in zip(items, names, strict=True)]
            for view in range(count)
        ]
        matches = [match_items(index.root, table, view_items, allow_none=True).rows for view_items in views]
        rows = np.stack(matches, axis=1)
        if given is not None and (lacking := int((rows < 0).any(axis=1).sum())):
            raise UsageError(
                f"{given.root} lacks at least one of the {count} views of {lacking:,} of {len(items):,} photos; leave "
                "inputs.view_features out, and the views are computed"
            )
        _write_rows(rows_file, rows)
    shutil.rmtree(builder.folder / VIEW_FILES, ignore_errors=True)
    return ViewTask(given or CommittedIndex.open(builder.folder / VIEW_INDEX), rows_file)


def _write_rows(path: Path, rows: NDArray[np.int64]) -> None:
    content = io.BytesIO()
    np.save(content, rows)
    write_bytes_atomic(path, content.getvalue())
