"""Finds the rows of the captioned images, and of their views, in the indexes."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edje_index.images.inputs import display_path
from pipelines.jobs.training.indexes import VIEW_FILES, VIEW_ROWS
from pipelines.jobs.training.result import BLANK_CAPTION
from pipelines.jobs.training.view_images import view_path
from pipelines.progress.events import OnEvent, StatusMessage
from storage_formats.atomic import write_bytes_atomic
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.captions.matching import MatchedRows
    from edje_index.captions.reading import CaptionedImage
    from edje_index.training.config import TrainConfig
    from edje_index.training.data.dataset import CaptionSet
    from edje_index.training.loop.feature_task import ViewTask
    from edje_index.training.loop.task import TeacherTask
    from pipelines.jobs.training.captions import Captions
    from pipelines.jobs.training.indexes import FurtherIndexes, ViewIndex
    from pipelines.jobs.training.request import TrainingInputs
    from storage_formats.format.manifest import CommittedIndex


@dataclass(frozen=True)
class MatchedCaptions:
    """Captioned images that have features.

    Attributes:
        features: the feature index.
        items: the images to train on.
        captions: captions of `items`, and the rows of `items` in `features`.
        dev: dev captions, and the rows of the dev images in `features`; None without dev captions.
        left_out: number of images without features, by reason. The entry `BLANK_CAPTION` counts blank captions.
        truncated: number of training images that could be decoded only in part.
    """

    features: CommittedIndex
    items: Sequence[CaptionedImage]
    captions: CaptionSet
    dev: CaptionSet | None
    left_out: dict[str, int]
    truncated: int = 0


def match_captions(
    index: CommittedIndex, captions: Captions, on_event: OnEvent, *, truncated: str = "load"
) -> MatchedCaptions:
    """Return the captions of all images that have features in `index`.

    If `truncated` is "fail", images that the index holds in part are left out.

    Raises:
        UsageError: an image is missing from the index, no training image has features, or no dev image has features.
    """
    from edje_index.captions.matching import NOT_IN_INDEX

    matched = _match(index, [*captions.trained, *captions.dev])
    if truncated == "fail":
        matched = matched.without_truncated()
    if absent := matched.missing().get(NOT_IN_INDEX):
        raise UsageError(
            f"{absent:,} of {len(matched.rows):,} captioned images are not in {index.root}; build that "
            "index from all training and dev images, or leave inputs.features out"
        )
    trained_rows, dev_rows = matched.split(len(captions.trained))
    if left_out := trained_rows.missing():
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in left_out.items())
        on_event(StatusMessage(f"images left out because they have no features: {reasons}"))
    if captions.blank:
        on_event(StatusMessage(f"blank captions left out: {captions.blank:,}"))
        left_out = {**left_out, BLANK_CAPTION: captions.blank}
    if in_part := int(trained_rows.truncated.sum()):
        on_event(StatusMessage(f"truncated images that are used in part: {in_part:,}"))
    trained_items, trained = _caption_set(trained_rows, captions.trained, "inputs.captions")
    dev = _caption_set(dev_rows, captions.dev, "inputs.dev")[1] if captions.dev else None
    return MatchedCaptions(index, trained_items, trained, dev, left_out, in_part)


def _caption_set(
    matched: MatchedRows, items: Sequence[CaptionedImage], setting: str
) -> tuple[list[CaptionedImage], CaptionSet]:
    """Return the images that have features, and a `CaptionSet` of their rows and captions."""
    from edje_index.training.data.dataset import CaptionSet

    kept, rows = matched.indexed(items)
    if not kept:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in matched.missing().items())
        raise UsageError(
            f"none of the {len(items):,} images of {setting} has features ({reasons}); correct the image files"
        )
    return kept, CaptionSet(rows, [item.captions for item in kept])


@dataclass(frozen=True)
class MiningModel:
    """The embedding model that mines hard negatives.

    Attributes:
        bundle: bundle of the mining model; None if the frozen towers mine the hard negatives.
        index: index of the mining model's embeddings.
        rows: row in `index` of each image to train on, int64 [n].
    """

    bundle: Path | None
    index: CommittedIndex
    rows: NDArray[np.int64]


@dataclass(frozen=True)
class FurtherRows:
    """The rows of the images to train on, in each index besides the feature index.

    Attributes:
        mining: the mining model, its index, and the rows in that index.
        teacher: the teacher, its index, and the rows in that index; None without a teacher.
        views: the index of the augmented views, and the rows in that index; None without views.
    """

    mining: MiningModel
    teacher: TeacherTask | None
    views: ViewTask | None


def further_rows(
    inputs: TrainingInputs, config: TrainConfig, indexes: FurtherIndexes, matched: MatchedCaptions, run_folder: Path
) -> FurtherRows:
    """Return the rows of the images to train on, in each of `indexes`.

    Raises:
        UsageError: an index lacks an image or a view.
    """
    from edje_index.training.loop.feature_task import ViewTask
    from edje_index.training.loop.task import TeacherTask

    teacher = views = None
    if inputs.teacher is not None:
        teacher = TeacherTask(inputs.teacher.absolute())
        if indexes.teacher is not None:
            rows_file = run_folder / "teacher-rows.npy"
            np.save(rows_file, _rows(indexes.teacher, matched))
            teacher = replace(teacher, index=indexes.teacher, rows=rows_file)
    if indexes.views is not None:
        rows_file = _stored_view_rows(indexes.views, matched.items, config.augmentation.views, run_folder)
        shutil.rmtree(run_folder / VIEW_FILES, ignore_errors=True)
        views = ViewTask(indexes.views.index, rows_file)
    mining = MiningModel(inputs.miner, indexes.mining, _rows(indexes.mining, matched))
    return FurtherRows(mining, teacher, views)


def _stored_view_rows(views: ViewIndex, photos: Sequence[CaptionedImage], count: int, run_folder: Path) -> Path:
    """Return the path of the file with the rows of the views. Write the file if it does not exist.

    Raises:
        UsageError: an earlier run wrote the file for another number of photos.
    """
    rows_file = run_folder / VIEW_ROWS
    if not rows_file.exists():
        content = io.BytesIO()
        np.save(content, _view_rows(views, photos, count))
        write_bytes_atomic(rows_file, content.getvalue())
    elif (stored := len(np.load(rows_file, mmap_mode="r"))) != len(photos):
        raise UsageError(
            f"{rows_file} holds the views of {stored:,} photos, but there are {len(photos):,}: the features have "
            "changed, or another version of edje-index chose the images; set run.dir to another folder"
        )
    return rows_file


def _rows(index: CommittedIndex, matched: MatchedCaptions) -> NDArray[np.int64]:
    """Return the row in `index` of each image to train on, int64 [n]."""
    if index is matched.features:
        return matched.captions.rows
    rows = _match(index, matched.items).rows
    if missing := int((rows < 0).sum()):
        raise UsageError(
            f"{index.root} lacks {missing:,} training images; build that index from all training images, with the same "
            "treatment of truncated images (inputs.truncated)"
        )
    return rows


def _view_rows(views: ViewIndex, photos: Sequence[CaptionedImage], count: int) -> NDArray[np.int64]:
    """Return the row of each view, int64 [n, count]. The value is -1 for a view that could not be indexed."""
    view_items = [
        replace(photo, path=os.fspath(view_path(views.files, display_path(os.fsencode(photo.path)), view)))
        for photo in photos
        for view in range(count)
    ]
    rows = _match(views.index, view_items, allow_none=True).rows.reshape(-1, count)
    lacking = int((rows < 0).any(axis=1).sum())
    if lacking and views.is_given:
        raise UsageError(
            f"{views.index.root} does not have all {count} views of {lacking:,} of {len(photos):,} photos; leave "
            "inputs.view_features out to compute all views"
        )
    return rows


def _match(index: CommittedIndex, items: Sequence[CaptionedImage], *, allow_none: bool = False) -> MatchedRows:
    from edje_index.captions.matching import NAME_COLUMNS, match_items
    from storage_formats.format.rows import read_all_rows

    table = read_all_rows(index, NAME_COLUMNS)
    return match_items(index.root, table, items, allow_none=allow_none)
