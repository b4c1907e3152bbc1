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
    """The captioned images of all caption files, in the order of the files.

    Attributes:
        trained: captioned images to train on.
        dev: captioned images to which the weights of the final score are fitted; may be empty.
        blank: number of blank captions in the files. Blank captions are skipped.
    """

    trained: Sequence[CaptionedImage]
    dev: Sequence[CaptionedImage]
    blank: int = 0


def read_training_captions(inputs: TrainingInputs) -> Captions:
    """Read the files of training captions and the file of dev captions.

    Raises:
        UsageError: a file cannot be read, the directory of the images is missing, or an image has both training and dev
            captions.
    """
    from edje_index.captions.reading import check_apart, check_image_directory, read_caption_file

    check_image_directory(inputs.images)
    files = [read_caption_file(path, inputs.images, inputs.split) for path in inputs.captions]
    trained = [item for file in files for item in file.items]
    dev_files = [read_caption_file(inputs.dev, inputs.images, inputs.dev_split)] if inputs.dev else []
    dev = [item for file in dev_files for item in file.items]
    check_apart(trained, dev)
    return Captions(trained, dev, sum(file.blank for file in (*files, *dev_files)))
