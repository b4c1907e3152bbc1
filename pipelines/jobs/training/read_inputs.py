"""Reads the captions and opens the indexes that a request names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelines.jobs.training.captions import Captions, read_training_captions
from pipelines.jobs.training.request import ONLINE

if TYPE_CHECKING:
    from pipelines.jobs.training.request import TrainingInputs
    from storage_formats.format.manifest import CommittedIndex


@dataclass(frozen=True)
class ReadInputs:
    """The captions and the open indexes that a request names.

    Attributes:
        captions: captions of the training and dev images.
        features, view_features, teacher_features, miner_features: open indexes. The settings with the same names in
            `pipelines.jobs.training.request.TrainingInputs` give their directories. None if the request names no index.
    """

    captions: Captions
    features: CommittedIndex | None
    view_features: CommittedIndex | None
    teacher_features: CommittedIndex | None
    miner_features: CommittedIndex | None


def read_inputs(inputs: TrainingInputs) -> ReadInputs:
    """Read all caption files and open all given indexes.

    Raises:
        UsageError: a file cannot be read, an image has both training and dev captions, or an index is missing.
        IncompleteIndexError, CorruptIndexError: an index cannot be used.
    """
    from storage_formats.format.manifest import CommittedIndex

    stored = None if inputs.features == ONLINE else inputs.features
    paths = (stored, inputs.view_features, inputs.teacher_features, inputs.miner_features)
    features, views, teacher, miner = [None if path is None else CommittedIndex.open(path) for path in paths]
    return ReadInputs(read_training_captions(inputs), features, views, teacher, miner)
