"""The result that a training run reports when it ends."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edje_index.training.fitting.finish import FinishedModel
    from pipelines.jobs.training.task import RunTask

BLANK_CAPTION = "blank-caption"
"""The key of `TrainResult.left_out` that counts blank captions instead of images."""


@dataclass(frozen=True)
class TrainResult:
    """The result of a training run.

    Attributes:
        bundle: path of the trained bundle.
        fingerprint: fingerprint of the bundle.
        run: fingerprint of the settings and data of the training run.
        images, captions: numbers of training images and training captions.
        left_out: number of images without features, by reason. Images that became unreadable during the training are
            counted too. The entry `BLANK_CAPTION` counts blank captions.
        steps: number of finished steps of the phase that trains the joint encoder.
        seconds: wall time of this run.
        last: the last log record; empty if there is none.
        score: weights of the final score by direction; see `edje_index.scoring.weights.DirectionWeights`.
        embedding_weight, late_weight, pooled_weight, prior_weight: weights of the embedding similarity, late
            interaction, pooled similarity and hubness correction in text-to-image search, as in `score`.
        caption_weights: weight of each part of the score in image-to-text search, as in `score`.
        bank_unused: True if a hubness bank was requested, but the fitted weight of the hubness correction is 0.
        fitting: settings of the final score.
        dev: fitted weights and recalls on the dev captions; see `edje_index.training.fitting.fit_weights`. The key
            "images" is for text-to-image search, "captions" for image-to-text search. None without dev captions.
        already_finished: True if an earlier run had finished the training run. Nothing was done in this case.
        truncated: number of training images that could be decoded only in part.

    Example:
        >>> from pipelines import TrainResult
        >>> TrainResult("model", "f" * 64, "e" * 64, images=6, captions=6, left_out={}, steps=2, seconds=1.5).steps
        2
    """

    bundle: str
    fingerprint: str
    run: str
    images: int
    captions: int
    left_out: dict[str, int]
    steps: int
    seconds: float
    last: dict[str, Any] = field(default_factory=dict)
    score: dict[str, Any] = field(default_factory=dict)
    embedding_weight: float = 0.0
    late_weight: float = 0.0
    pooled_weight: float = 0.0
    prior_weight: float = 0.0
    caption_weights: dict[str, float] = field(default_factory=dict)
    bank_unused: bool = False
    fitting: dict[str, Any] = field(default_factory=dict)
    dev: dict[str, Any] | None = None
    truncated: int = 0
    already_finished: bool = False


def training_result(task: RunTask, model: FinishedModel) -> TrainResult:
    """Return the result of a training run. The fields `fingerprint` and `seconds` are not set yet."""
    from edje_index.training.data.unreadable import unreadable_by_reason
    from edje_index.training.loop.log import read_log

    train, finish, score = task.train, task.finish, model.bundle.score
    records = read_log(train.runtime.run_dir)
    left_out = Counter(finish.left_out) + Counter(unreadable_by_reason(train.runtime.run_dir))
    dev = None
    if model.choices:  # by what is ranked: images in text-to-image search, captions in image-to-text search
        dev = {"images": asdict(model.choices["t2i"]), "captions": asdict(model.choices["i2t"])}
    return TrainResult(
        bundle=str(finish.out),
        fingerprint="",
        run=train.run,
        images=finish.images,
        captions=finish.captions,
        left_out=dict(left_out),
        steps=model.steps,
        seconds=0.0,
        last=records[-1] if records else {},
        score=score.to_json(),
        embedding_weight=score.t2i.embedding,
        late_weight=score.t2i.late,
        pooled_weight=score.t2i.pooled,
        prior_weight=score.t2i.hubness,
        caption_weights=score.i2t.by_part(),
        bank_unused=model.bank_unused,
        fitting=train.config.fitting.model_dump(),
        dev=dev,
        truncated=finish.truncated,
    )
