"""The results of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edje_index.evaluation.bootstrap import Estimate


@dataclass(frozen=True)
class Inputs:
    """Counts of captioned images and their captions; ``missing`` counts the unused images by reason."""

    images: int
    used: int
    missing: dict[str, int]
    captions: int
    captions_used: int


@dataclass(frozen=True)
class System:
    """One index with its bundle, as it was evaluated.

    Attributes:
        name: file name of the index.
        index, bundle: their paths.
        fingerprint: that of the bundle.
        trained: False for a bundle of random weights.
        block_shape: (m, d) of one image's tokens.
        weights: weights of the final score by direction, see `scoring.weights.ScoreWeights`.
        candidates, queries: number of candidates and of queries, by direction.
        dtype: data type of the joint encoder's matrix products; None without re-ranking.
    """

    name: str
    index: str
    bundle: str
    fingerprint: str
    trained: bool
    block_shape: tuple[int, int]
    weights: dict[str, dict[str, Any]]
    candidates: dict[str, int]
    queries: dict[str, int]
    dtype: str | None = "float32"


@dataclass(frozen=True)
class Result:
    """Recall of one index in one direction, precision and pool size, in percent.

    Attributes:
        system: name of the index.
        direction: "t2i" or "i2t".
        recall: R@k by cutoff k.
        precision: precision of the tokens. None for the embeddings alone; the fields below are None then, too.
        simulated_from: the stored precision that tokens were converted from in memory, if they were.
        bytes_per_image: length of one record.
        pool: number of candidates that were re-ranked.
        in_pool: queries whose pool holds a right answer, the upper limit of re-ranking.
        gain: R@k minus that of the embeddings alone, by cutoff (paired).
        change: R@k minus that of the precision `change_from`, by cutoff (paired); None for that precision itself.
        change_from: "bf16", or the highest-fidelity precision measured.
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
    """All results of an evaluation, with the settings that produced them.

    Example:
        >>> from pathlib import Path
        >>> from edje_index import EvaluationConfig, evaluate
        >>> config = EvaluationConfig(
        ...     systems=((Path("photos.edje"), None),),
        ...     captions=Path("captions.jsonl"),
        ...     images=Path("photos"),
        ...     pools=(3,),
        ...     resamples=0,
        ... )
        >>> evaluation = evaluate(config)
        >>> evaluation.inputs.images, evaluation.cutoffs
        (6, (1, 5, 10))
    """

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
