"""The results of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edje_index.evaluation.bootstrap import Estimate


@dataclass(frozen=True)
class Inputs:
    """How many images and captions an evaluation uses. ``missing`` counts unused images by reason."""

    images: int
    used: int
    missing: dict[str, int]
    captions: int
    captions_used: int


@dataclass(frozen=True)
class System:
    """An index and a bundle that were evaluated together.

    Attributes:
        name: file name of the index.
        index: path of the index.
        bundle: path of the bundle.
        fingerprint: fingerprint of the bundle.
        trained: False if the weights of the bundle are random.
        block_shape: shape of a block, (m, d): number of tokens and width of a token.
        weights: weights of the final score by direction, see `scoring.weights.ScoreWeights`.
        candidates: number of candidates by direction.
        queries: number of queries by direction.
        dtype: data type of matrix products in the joint encoder; None without re-ranking.
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
    """Recall in percent, for one index, direction, precision and pool size.

    In the result for the embeddings alone, `precision` and all fields after it are None.

    Attributes:
        system: name of the index.
        direction: "t2i" or "i2t".
        recall: R@k by cutoff k.
        precision: precision of the tokens.
        simulated_from: stored precision that was converted to `precision` in memory; None if `precision` is stored.
        bytes_per_image: length of one record in bytes.
        pool: number of candidates that were re-ranked.
        in_pool: percentage of queries with a relevant candidate in the pool.
        gain: R@k minus R@k of the embeddings alone, by cutoff k.
        change: R@k minus R@k with the precision `change_from`, by cutoff k.
        change_from: reference precision of `change`; None if `precision` is the reference precision.
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
    """The settings and results of an evaluation.

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
    joint_pool: int | None = None
