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
        systems: (index, bundle) pairs. None as bundle selects the bundle that built the index.
        captions: caption file, see `captions.reading.read_captions`.
        images: base directory of relative image paths.
        split: split of the caption file to take queries from; None for the whole file.
        precisions: precisions of the tokens to measure; empty for all precisions that an index holds.
        simulate: allow `precisions` that an index does not hold. Stored tokens are then converted in memory.
        pools: pool sizes; empty for the default sizes of the protocol.
        directions: search directions, from `DIRECTIONS`.
        full: use the full-dataset protocol instead of the split protocol, see `edje_index.evaluation.protocol`.
        full_captions: further caption files. Their captions are candidates in the full-dataset protocol.
        rerank: True re-ranks the pools; False measures the embeddings alone.
        score: score that re-ranks the pools, see `scoring.weights.parse_score`.
        resamples: number of bootstrap resamples; 0 for no confidence intervals.
        queries: largest number of queries per direction, sampled with `seed`; None for all queries.
        seed: seed of the query sample and of the bootstrap.
        device: "auto", "cpu" or "cuda".
        dtype: data type of the joint encoder's matrix products, "auto", "float32" or "bfloat16".
        cache: directory that stores computed scores, so that an interrupted evaluation resumes; None stores none.
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
    resamples: int = 1000
    queries: int | None = None
    seed: int = 0
    device: str = "auto"
    dtype: str = "float32"
    cache: Path | None = None

    @property
    def cutoffs(self) -> tuple[int, ...]:
        """Values of k for which R@k is measured."""
        return FULL_CUTOFFS if self.full else CUTOFFS

    @property
    def pool_sizes(self) -> tuple[int, ...]:
        """Pool sizes in ascending order, without duplicates."""
        return tuple(sorted(set(self.pools or (FULL_POOLS if self.full else POOLS))))
