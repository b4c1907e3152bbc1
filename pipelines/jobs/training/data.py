"""Captions as tokens and embeddings, prepared once in the run folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from edje_index.progress import OnProgress
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.training.data.dataset import CaptionSet
    from pipelines.jobs.training.mining import OpenMiner
    from pipelines.jobs.training.start import StartModel


def prepared_data(
    folder: Path, start: StartModel, captions: CaptionSet, miner: OpenMiner, on_progress: OnProgress
) -> Path:
    """Make the `TrainingData` of `captions` in `folder` unless it exists; returns `folder`.

    Raises:
        UsageError: `folder` was made from other captions.
    """
    from edje_index.training.data.dataset import TrainingData, prepare_data

    if not folder.exists():
        prepare_data(captions, start.bundle.joint.tokenizer, start.bundle.text, miner.miner, on_progress).save(folder)
    if TrainingData.open(folder).images != len(captions.rows):
        raise UsageError(f"{folder} was made from other captions; set run.dir to another folder")
    return folder
