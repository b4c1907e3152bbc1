"""What a training was asked for, and what it came to: plain values without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TrainRequest:
    """Where everything is, and how to run; what is trained is in `edje_index.training.config`.

    Attributes:
        captions: files of captions, in any form of `edje_index.captions.reading`.
        out: bundle to write.
        images: folder that image names begin at.
        split: part of the captions to take.
        model: bundle with the frozen towers; or `vision`, their name in open_clip.
        language: folder of a Hugging Face BERT, or a bundle whose joint encoder to begin with.
        features: index of the frozen tower's tokens; None makes it in the run's folder.
        view_features: index of the features of views, made by another run on the same photos; None makes it.
        init: bundle to go on from.
        teacher: bundle to distil from; `teacher_features` is an index that it built, or of its tower's patches.
        miner: bundle whose embeddings mine negatives; `miner_features` is an index that it built.
        dev: captions that the weights of the final score are fitted to, of images that are not trained on; `dev_split`
            is the part of them to take.
        run_dir: checkpoints, log, and what is made on the way; None is the name of `out` with ".run" added.
        workers: ranks; more than one run on Ray.
        address: Ray cluster to join.
        device, threads, checkpoint_every, log_every, compile: see `edje_index.training.loop.training_loop.Runtime`.
        export: write the bundle of the last checkpoint and train no further.
    """

    captions: tuple[Path, ...]
    out: Path
    images: Path | None = None
    split: str | None = None
    model: Path | None = None
    vision: str | None = None
    language: Path | None = None
    features: Path | None = None
    view_features: Path | None = None
    init: Path | None = None
    teacher: Path | None = None
    teacher_features: Path | None = None
    miner: Path | None = None
    miner_features: Path | None = None
    dev: Path | None = None
    dev_split: str | None = None
    run_dir: Path | None = None
    workers: int = 1
    address: str | None = None
    device: str = "auto"
    threads: int | None = None
    checkpoint_every: int = 200
    log_every: int = 10
    compile: bool = False
    export: bool = False

    @property
    def run_folder(self) -> Path:
        """`run_dir`, or its default."""
        return self.run_dir or self.out.with_name(f"{self.out.name}.run")


@dataclass(frozen=True)
class TrainResult:
    """What a training came to.

    Attributes:
        bundle: the bundle that was written.
        fingerprint: of it.
        run: fingerprint of the training's settings and data.
        images, captions: trained on.
        left_out: images without features, by reason.
        steps: of the joint phase.
        seconds: wall time of this command.
        last: the last line of the log.
        embedding_weight, late_weight, pooled_weight, prior_weight: of the final score that images are sorted by.
        caption_weights: of the one that captions are sorted by, see `edje_index.scoring.weights`.
        bank_unused: a query bank was asked for, and left out for it made nothing likelier on --dev.
        selection: the settings that decide what is made of the last checkpoint.
        dev: the choice of weights for `images` and `captions` with its recalls, where --dev was given; see
            `edje_index.training.fitting.weight_choice`.
        already_finished: nothing was left to do.
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
    embedding_weight: float = 0.0
    late_weight: float = 0.0
    pooled_weight: float = 0.0
    prior_weight: float = 0.0
    caption_weights: dict[str, float] = field(default_factory=dict)
    bank_unused: bool = False
    selection: dict[str, Any] = field(default_factory=dict)
    dev: dict[str, Any] | None = None
    already_finished: bool = False
