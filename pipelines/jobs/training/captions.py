"""Reads the captions to train on and the dev captions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edje_index.captions.reading import CaptionedImage
    from pipelines.jobs.training.request import TrainingInputs


@dataclass(frozen=True)
class Captions:
    """Images with captions, as the files list them.

    Attributes:
        trained: images to train on.
        dev: dev images, on which the score weights are fitted; may be empty.
        blank: number of blank captions, which are left out.
    """

    trained: Sequence[CaptionedImage]
    dev: Sequence[CaptionedImage]
    blank: int = 0


def read_training_captions(inputs: TrainingInputs) -> Captions:
    """Read all caption files.

    Raises:
        UsageError: a file cannot be read, or training and dev captions share images.
    """
    from edje_index.captions.reading import check_apart, read_caption_file

    files = [read_caption_file(path, inputs.images, inputs.split) for path in inputs.captions]
    trained = [item for file in files for item in file.items]
    dev_files = [read_caption_file(inputs.dev, inputs.images, inputs.dev_split)] if inputs.dev else []
    dev = [item for file in dev_files for item in file.items]
    check_apart(trained, dev)
    return Captions(trained, dev, sum(file.blank for file in (*files, *dev_files)))
