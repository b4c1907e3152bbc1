"""What an evaluation found."""

from __future__ import annotations

from dataclasses import dataclass

from edje_index.evaluation.bootstrap import Estimate


@dataclass(frozen=True)
class Inputs:
    """Where every captioned image went: images = used + missing, the latter by reason."""

    images: int
    used: int
    missing: dict[str, int]
    captions: int
    captions_used: int


@dataclass(frozen=True)
class System:
    """One index with its bundle, as evaluated; `queries` and `candidates` by direction.

    Attributes:
        weights, caption_weights: of the final score that images and captions are sorted by, see `score_weights`.
        dtype: of the joint encoder's matrix products; None without re-ranking.
    """

    name: str
    index: str
    bundle: str
    fingerprint: str
    trained: bool
    block_shape: tuple[int, int]
    weights: dict[str, float]
    caption_weights: dict[str, float]
    candidates: dict[str, int]
    queries: dict[str, int]
    dtype: str | None = "float32"


@dataclass(frozen=True)
class Result:
    """Figures of one system, direction, precision and pool, in percent; by cutoff k where they are R@k.

    Attributes:
        system: its name.
        direction: "t2i" or "i2t".
        precision: None for the embeddings alone, as the fields below.
        simulated_from: the stored precision that tokens were converted from in memory.
        bytes_per_image: of the tokens.
        pool: candidates that were re-ranked.
        recall: R@k.
        in_pool: queries whose pool holds a right answer: no re-ranking can do better.
        gain: R@k less that of the embeddings alone (paired).
        change: R@k less that of `change_from`, the reference precision (paired); None for the reference itself.
        change_from: "bf16", or the longest precision that was measured.
    """

    system: str
    direction: str
    recall: dict[int, Estimate]
    precision: str | None = None
    simulated_from: str | None = None
    bytes_per_image: int | None = None
    pool: int | None = None
    in_pool: Estimate | None = None
    gain: dict[int, Estimate] | None = None
    change: dict[int, Estimate] | None = None
    change_from: str | None = None


@dataclass(frozen=True)
class Evaluation:
    """Everything that was measured."""

    protocol: str
    captions: str
    split: str | None
    cutoffs: tuple[int, ...]
    pools: tuple[int, ...]
    resamples: int
    seed: int
    inputs: Inputs
    systems: tuple[System, ...]
    results: tuple[Result, ...]
    pairs: int
    seconds: float
