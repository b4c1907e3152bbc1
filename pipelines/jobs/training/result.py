"""What a training run reports when it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TrainResult:
    """The result of a training run.

    Attributes:
        bundle: path of the bundle.
        fingerprint: fingerprint of the bundle.
        run: fingerprint of the settings and data of the training.
        images, captions: numbers of images and captions trained on.
        left_out: number of images without features, by reason.
        steps: finished steps of the joint phase.
        seconds: wall time of this run.
        last: the last log record.
        score: weights of the final score by direction, see `edje_index.scoring.weights.DirectionWeights`.
        embedding_weight, late_weight, pooled_weight, prior_weight: weights of the embedding similarity, late
            interaction, pooled similarity and hubness correction in text-to-image search, as in `score`.
        caption_weights: weight of each part in image-to-text search, as in `score`.
        bank_unused: a hubness bank was requested, but the hubness correction got no weight on the dev captions.
        fitting: settings of the final score, which were applied to the last checkpoint.
        dev: fitted weights and recalls of the candidates "images" and "captions", see
            `edje_index.training.fitting.fit_weights`; None without dev captions.
        already_finished: the training had been finished before, so this run did nothing.

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
    already_finished: bool = False
