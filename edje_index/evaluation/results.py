"""The settings and the results of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edje_index.evaluation.bootstrap import Estimate
from edje_index.scoring.weights import BUNDLE_SCORE, DIRECTIONS, ScoreWeights

CUTOFFS = (1, 5, 10)
FULL_CUTOFFS = (5, 10, 20)
POOLS = (10, 20, 50)
FULL_POOLS = (100,)


@dataclass(frozen=True)
class EvaluationConfig:
    """Settings of `evaluate`.

    Example:
        >>> from pathlib import Path
        >>> from edje_index import EvaluationConfig
        >>> EvaluationConfig(systems=((Path("photos.edje"), None),), captions=Path("captions.jsonl")).pool_sizes
        (10, 20, 50)

    Attributes:
        systems: (index, bundle) pairs to evaluate. If a bundle is None, the bundle that built the index is used.
        captions: caption file, see `captions.reading.read_captions`.
        images: base directory of relative image paths.
        split: split of the caption file to take queries from; None for the whole file.
        precisions: precisions to measure; empty for all precisions stored in an index. Stored tokens are converted in
            memory to a precision that is not stored.
        pools: pool sizes; empty for the default pool sizes.
        directions: search directions: "t2i", "i2t" or both.
        full: use the full-dataset protocol instead of the split protocol, see `edje_index.evaluation.protocol`.
        rerank: False measures the embeddings alone. True also measures the re-ranked pools.
        score: final score for re-ranking, see `scoring.weights.parse_score`.
        joint_pool: number of candidates per query that the joint encoder scores, see `scoring.final_score`.
            None for all.
        resamples: number of bootstrap resamples; 0 for no confidence intervals.
        queries: maximum number of queries per direction, sampled at random; None for all queries.
        seed: seed of the query sample and of the bootstrap.
        device: "auto", "cpu" or "cuda".
        dtype: data type of matrix products in the joint encoder: "auto", "float32" or "bfloat16".
        cache: directory for computed scores, from which an interrupted evaluation resumes; None stores no scores.
    """

    systems: tuple[tuple[Path, Path | None], ...]
    captions: Path
    images: Path | None = None
    split: str | None = None
    precisions: tuple[str, ...] = ()
    pools: tuple[int, ...] = ()
    directions: tuple[str, ...] = DIRECTIONS
    full: bool = False
    rerank: bool = True
    score: str | ScoreWeights = BUNDLE_SCORE
    joint_pool: int | None = None
    resamples: int = 1000
    queries: int | None = None
    seed: int = 0
    device: str = "auto"
    dtype: str = "float32"
    cache: Path | None = None

    @property
    def cutoffs(self) -> tuple[int, ...]:
        """The values of k in R@k."""
        return FULL_CUTOFFS if self.full else CUTOFFS

    @property
    def pool_sizes(self) -> tuple[int, ...]:
        """Pool sizes in ascending order, without duplicates."""
        return tuple(sorted(set(self.pools or (FULL_POOLS if self.full else POOLS))))


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
