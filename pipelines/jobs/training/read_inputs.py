"""Reads what a training was given: captions, and indexes that other runs built."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.jobs.training.captions import Captions, read_training_captions

if TYPE_CHECKING:
    from pipelines.jobs.training.request import TrainingInputs
    from storage_formats.format.manifest import CommittedIndex


@dataclass(frozen=True)
class ReadInputs:
    """The captions and the open indexes of a request; an index that was not given is None.

    Attributes:
        captions: of training and dev images.
        features, view_features, teacher_features, miner_features: indexes as in
            `pipelines.jobs.training.request.TrainingInputs`.
    """

    captions: Captions
    features: CommittedIndex | None
    view_features: CommittedIndex | None
    teacher_features: CommittedIndex | None
    miner_features: CommittedIndex | None


def read_inputs(inputs: TrainingInputs) -> ReadInputs:
    """Read all caption files and open all given indexes.

    Raises:
        UsageError: a file cannot be read, training and dev captions share images, or an index is missing.
        IncompleteIndexError, CorruptIndexError: an index cannot be used.
    """
    return ReadInputs(
        features=_open_index(inputs.features),
        view_features=_open_index(inputs.view_features),
        teacher_features=_open_index(inputs.teacher_features),
        miner_features=_open_index(inputs.miner_features),
        captions=read_training_captions(inputs),
    )


def _open_index(path: Path | None) -> CommittedIndex | None:
    from storage_formats.format.manifest import CommittedIndex

    return None if path is None else CommittedIndex.open(path)
