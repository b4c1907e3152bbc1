"""The teacher of a distillation: which index it reads, and the row of each training image in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.jobs.training.index_builder import check_encoder
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.bundles.info import BundleInfo
    from edje_index.captions.reading import CaptionedImage
    from edje_index.training.loop.task import TeacherTask
    from pipelines.jobs.training.start import StartModel
    from storage_formats.format.manifest import CommittedIndex


def teacher_task(
    teacher: Path, index: CommittedIndex, start: StartModel, items: Sequence[CaptionedImage], run_folder: Path
) -> TeacherTask:
    """Prepare distillation from the bundle `teacher`.

    Args:
        teacher: a bundle.
        index: an index that the teacher built, or an index of features for its adapter.
        start: the student.
        items: images to train on.
        run_folder: receives a file with the row of each image.

    Raises:
        UsageError: the teacher has a different tokenizer, or its index does not suit it or lacks images.
    """
    import numpy as np

    from edje_index.bundles.info import read_bundle_info
    from edje_index.captions.matching import NAME_COLUMNS, match_all
    from edje_index.models.adapter import AdapterConfig
    from edje_index.training.loop.task import TeacherTask
    from edje_index.training.model.start_bundle import feature_fingerprints
    from storage_formats.format.rows import read_all_rows

    info = read_bundle_info(teacher)
    assert start.bundle.info is not None
    _check_tokenizers(teacher, start.bundle.info, info)
    has_tokens = index.manifest.model["fingerprint"] == info.encoder_fingerprint
    if not has_tokens:
        check_encoder(index, feature_fingerprints(info, AdapterConfig(**info.adapter)), "for the teacher")
    rows = match_all(index.root, read_all_rows(index, NAME_COLUMNS), items)
    rows_file = run_folder / "teacher-rows.npy"
    np.save(rows_file, rows)
    return TeacherTask(teacher.absolute(), index, has_tokens, rows_file)


def _check_tokenizers(teacher: Path, student_info: BundleInfo, teacher_info: BundleInfo) -> None:
    """Raise UsageError unless student and teacher read the same token ids."""
    if student_info.canonical_captions != teacher_info.canonical_captions:
        raise UsageError(
            f"architecture.canonical_captions is {student_info.canonical_captions}, but the teacher {teacher} was "
            f"trained with {teacher_info.canonical_captions}; set it to the teacher's value"
        )
    student, other = (info.files.get("joint/tokenizer.json") for info in (student_info, teacher_info))
    if student is None or other is None or student["sha256"] != other["sha256"]:
        raise UsageError(
            f"the teacher {teacher} has a different tokenizer from the student; set inputs.language or inputs.init to "
            "a model with the teacher's tokenizer"
        )
