"""Settings of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
        precisions: precisions to measure; empty for all precisions stored in an index.
        simulate: allow `precisions` that are not stored. Stored tokens are then converted in memory.
        pools: pool sizes; empty for the default pool sizes.
        directions: search directions: "t2i", "i2t" or both.
        full: use the full-dataset protocol instead of the split protocol, see `edje_index.evaluation.protocol`.
        full_captions: caption files with additional candidates for the full-dataset protocol.
        rerank: False measures the embeddings alone. True also measures the re-ranked pools.
        score: final score for re-ranking, see `scoring.weights.parse_score`.
        joint_pool: number of candidates per query that the joint encoder scores, see `scoring.cascade`; None for all.
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
    simulate: bool = False
    pools: tuple[int, ...] = ()
    directions: tuple[str, ...] = DIRECTIONS
    full: bool = False
    full_captions: tuple[Path, ...] = ()
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
