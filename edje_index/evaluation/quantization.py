"""Measures how much each precision of an index changes the tokens and the rankings.

No labels are needed: each precision is compared with a reference precision. Nothing is
written to the index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edje_index.errors import BundleNotFoundError
from edje_index.evaluation.pool_scores import TokenSource
from edje_index.indexing.faiss_index import AnnIndex
from edje_index.progress import OnProgress
from edje_index.search.query import read_queries
from storage_formats.codecs import Blocks, codec, precisions
from storage_formats.errors import UsageError
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.tombstones import live_rows
from storage_formats.token_store import TokenStore

if TYPE_CHECKING:
    from edje_index.search.token_index import TokenIndex

# tokens compared at once: 100 MB of float64 at a width of 384
_BATCH_TOKENS = 8192
_PERCENTILES = (1, 5, 50, 95, 99)
_OVERLAP_AT = 10
_ROWS = 2000
_POOL = 50

GENERIC_CAPTIONS = (
    "a dog runs across a field of grass",
    "a cat sleeps on a couch",
    "two people walk along the beach",
    "a child plays with a ball in a park",
    "a man rides a bicycle down a street",
    "a woman holds a cup of coffee",
    "a group of friends sit around a table",
    "a plate of food with vegetables and meat",
    "a red car parked beside a building",
    "a train arrives at a station",
    "a boat on a calm lake",
    "mountains covered with snow",
    "the sun sets over the sea",
    "a city skyline at night",
    "a narrow street between old houses",
    "a bridge over a river",
    "a kitchen with a stove and cupboards",
    "a bunch of flowers in a vase",
    "a bird sits on a branch",
    "a horse stands in a meadow",
    "players fight for the ball in a football match",
    "a person throws a frisbee",
    "a baby smiles at the camera",
    "a sign with words on it",
)
"""The built-in queries. A query need not match any image: the joint encoder ranks the
candidates of any query. The list is short because every precision re-ranks each query.
24 queries take minutes on two CPU cores, and seconds on a GPU.
"""

Scores = NDArray[np.float32]


@dataclass(frozen=True)
class Distribution:
    """Mean, minimum, maximum and percentiles of `count` numbers. Percentiles are
    linearly interpolated.
    """

    count: int
    mean: float
    lowest: float
    p1: float
    p5: float
    p50: float
    p95: float
    p99: float
    highest: float

    @classmethod
    def of(cls, numbers: NDArray[np.floating]) -> Distribution:
        """Compute the statistics of `numbers` [n], which must not be empty."""
        p1, p5, p50, p95, p99 = np.percentile(numbers, _PERCENTILES).tolist()
        mean = float(numbers.mean(dtype=np.float64))
        return cls(
            len(numbers),
            mean,
            float(numbers.min()),
            p1,
            p5,
            p50,
            p95,
            p99,
            float(numbers.max()),
        )


@dataclass(frozen=True)
class RankingChange:
    """Changes of rankings when other scores replace reference scores.

    Attributes:
        top1_kept: fraction of queries with the same best candidate in both rankings.
        overlap_at_10: fraction of the ten best candidates that both rankings share,
            averaged over queries.
        kendall_tau: Kendall's tau-b between both rankings, as a distribution over
            queries.
        score_change: absolute difference between both scores of a candidate, averaged
            over candidates and queries.
        score_change_relative: for one query, mean absolute difference / standard
            deviation of the reference scores. This ratio is averaged over queries.
    """

    queries: int
    top1_kept: float
    overlap_at_10: float
    kendall_tau: Distribution
    score_change: float
    score_change_relative: float


@dataclass(frozen=True)
class PrecisionCost:
    """One precision, compared with the reference.

    Attributes:
        stored: True if the index stores the precision, False if the tokens were
            converted in memory for this report.
        relative_error: distribution of |token - reference| / |reference| over the
            tokens whose reference is not a zero vector. Its maximum is the worst value.
            None if there are no such tokens.
        cosine: distribution of the cosine similarity between these tokens and their
            references. Its minimum is the worst value. The similarity to a zero vector
            is 0.
        ranking: changes of the ranking; None if re-ranking was not measured.
    """

    name: str
    stored: bool
    bytes_per_image: int
    relative_error: Distribution | None
    cosine: Distribution | None
    ranking: RankingChange | None


@dataclass(frozen=True)
class QuantizationReport:
    """Comparison of the precisions of an index with a reference precision.

    Attributes:
        block_shape: (m, d), the shape of one image's tokens.
        reference: the precision that all other precisions are compared with.
        reference_encoded_from: precisions that the reference was converted from, first
            to last.
        reference_bytes_per_image: length of a record of the reference in bytes.
        sampled_rows: number of random rows whose tokens were compared, holes included.
        holes: number of sampled rows without tokens. These rows were skipped.
        query_source: path of the file of queries, or "built-in captions".
        queries: number of queries whose candidates were re-ranked; 0 if re-ranking was
            not measured.
        ranking_left_out: why re-ranking was not measured; None if it was measured.
        impossible: reason why a precision cannot encode tokens of this width, by name
            of the precision.
    """

    index: str
    rows: int
    block_shape: tuple[int, int]
    reference: str
    reference_encoded_from: tuple[str, ...]
    reference_bytes_per_image: int
    sampled_rows: int
    holes: int
    query_source: str
    queries: int
    pool: int
    trained: bool
    ranking_left_out: str | None
    impossible: dict[str, str]
    precisions: tuple[PrecisionCost, ...]


def measure_precisions(
    root: Path,
    reference: str,
    names: Sequence[str] = (),
    *,
    queries: Path | None = None,
    model: Path | None = None,
    pool: int = _POOL,
    on_progress: OnProgress = lambda activity, done, total: None,
) -> QuantizationReport:
    """Compare the precisions `names` of the index at `root` with the stored precision
    `reference`.

    Args:
        names: the precisions to measure; empty for all.
        queries: file of queries, see `read_queries`; None for `GENERIC_CAPTIONS`.
        model: bundle to re-rank with; None for the bundle that built the index.

    Raises:
        UsageError: there is no index, a precision is unknown, the index does not store
            the reference precision, or the file of queries is invalid.
        ModelError: the bundle cannot be used, or another bundle built the index.
    """
    texts = (
        list(GENERIC_CAPTIONS)
        if queries is None
        else list(dict.fromkeys(read_queries(queries)))
    )
    index = CommittedIndex.open(root)
    spec = index.manifest.spec
    manifest = index.manifest
    store = TokenStore(index, reference)
    sources: dict[str, TokenSource] = {}
    impossible: dict[str, str] = {}
    for name in dict.fromkeys(names or precisions()):
        if name == reference:
            continue
        try:
            entry = codec(name, spec.block_shape)
        except UsageError as error:
            if names:
                raise
            impossible[name] = str(error)
            continue
        sources[name] = TokenSource(
            TokenStore(index, name) if name in spec.precisions else store, entry
        )

    live = live_rows(index)
    sampled = np.sort(
        np.random.default_rng(0).choice(live, min(_ROWS, len(live)), replace=False)
    )
    errors: dict[str, tuple[list[Scores], list[Scores]]] = {
        name: ([], []) for name in sources
    }
    holes = 0
    step = max(1, _BATCH_TOKENS // spec.block_shape[0])
    for start in range(0, len(sampled), step):
        on_progress("comparing tokens, rows", start, len(sampled))
        batch = sampled[start : start + step]
        blocks = store.fetch(batch)
        is_block = ~np.isnan(blocks[:, 0, 0].astype(np.float32))
        batch = batch[is_block]
        blocks = blocks[is_block]
        holes += int((~is_block).sum())
        for name, source in sources.items():
            relative_errors, cosines = compare_tokens(
                blocks, source.fetch(batch, blocks)
            )
            errors[name][0].append(relative_errors)
            errors[name][1].append(cosines)

    opened, left_out = _ranking_index(index, model)
    scores: dict[str, list[Scores]] = {name: [] for name in (reference, *sources)}
    if opened is not None:
        weights = opened.model.weights("t2i")
        activity = f"re-ranking at {len(sources) + 1} precisions, queries"
        nearest = AnnIndex(opened.committed).nearest_to_each(
            opened.model.text.encode(texts), pool
        )
        for done, (text, candidates) in enumerate(zip(texts, nearest, strict=True)):
            on_progress(activity, done, len(texts))
            if len(candidates[0]) < 2:
                continue
            blocks = store.fetch(candidates[0])
            for name in scores:
                changed = (
                    blocks
                    if name == reference
                    else sources[name].fetch(candidates[0], blocks)
                )
                (scored,) = opened.score_candidates(
                    [text], [candidates], opened.model.scorer.images(changed), weights
                )
                scores[name].append(scored.final)
        left_out = None if scores[reference] else "no query has two candidates"
    costs = []
    for name, source in sorted(
        sources.items(), key=lambda item: -item[1].codec.record_bytes
    ):
        ranking = (
            compare_rankings(scores[reference], scores[name])
            if scores[reference]
            else None
        )
        numbers = [
            np.concatenate([np.empty(0, np.float32), *parts]) for parts in errors[name]
        ]
        relative_error, cosine = (
            Distribution.of(values) if len(values) else None for values in numbers
        )
        stored = name in spec.precisions
        size = source.codec.record_bytes
        costs.append(PrecisionCost(name, stored, size, relative_error, cosine, ranking))
    return QuantizationReport(
        index=str(root),
        rows=spec.rows,
        block_shape=spec.block_shape,
        reference=reference,
        reference_encoded_from=manifest.encoded_from.get(reference, ()),
        reference_bytes_per_image=codec(reference, spec.block_shape).record_bytes,
        sampled_rows=len(sampled),
        holes=holes,
        query_source="built-in captions" if queries is None else str(queries),
        queries=len(texts) if left_out is None else 0,
        pool=pool,
        trained=opened is not None and opened.model.info.trained,
        ranking_left_out=left_out,
        impossible=impossible,
        precisions=tuple(costs),
    )


def _ranking_index(
    index: CommittedIndex, model: Path | None
) -> tuple[TokenIndex | None, str | None]:
    """Return (index to search, None), or (None, reason) if no model can re-rank."""
    if model is None and "bundle" not in index.manifest.model:
        return None, "the index was not built by a model"
    from edje_index.search.token_index import TokenIndex

    try:
        opened = TokenIndex.open(index.root, model)
    except BundleNotFoundError as error:
        return None, str(error)
    if opened.model.adapter_config.is_feature:
        return (
            None,
            (
                "the index stores features to train on, which the joint encoder cannot"
                " score"
            ),
        )
    width = index.manifest.spec.block_shape[1]
    if opened.model.joint.width != width:
        return (
            None,
            (
                f"the joint encoder reads tokens of width {opened.model.joint.width},"
                f" but the index stores {width}"
            ),
        )
    return opened, None


def compare_tokens(reference: Blocks, other: Blocks) -> tuple[Scores, Scores]:
    """Return the relative errors and the cosine similarities of n tokens, float32 [n]
    each.

    Tokens are left out if the reference token is a zero vector.
    """
    # Sums are computed in float64, because squares of bfloat16 numbers overflow
    # float32.
    left = reference.astype(np.float64).reshape(-1, reference.shape[-1])
    right = other.astype(np.float64).reshape(left.shape)
    squares = np.einsum("td,td->t", left, left)
    is_nonzero = squares > 0
    left = left[is_nonzero]
    right = right[is_nonzero]
    lengths = np.sqrt(squares[is_nonzero])
    products = np.einsum("td,td->t", left, right)
    other_lengths = np.sqrt(np.einsum("td,td->t", right, right))
    cosines = np.divide(
        products,
        lengths * other_lengths,
        out=np.zeros_like(products),
        where=other_lengths > 0,
    )
    right -= left
    errors = np.sqrt(np.einsum("td,td->t", right, right)) / lengths
    return errors.astype(np.float32), np.clip(cosines, -1, 1).astype(np.float32)


def compare_rankings(
    reference: Sequence[Scores], other: Sequence[Scores]
) -> RankingChange:
    """Compare two sets of scores for the same candidates of each query.

    Args:
        reference: for each query, reference scores of k candidates, float32 [k], k >=
            2.
        other: for each query, other scores of the same candidates in the same order,
            float32 [k].
    """
    changes = []
    relative = []
    top1_kept = []
    overlaps = []
    taus = []
    for left, right in zip(reference, other, strict=True):
        # Equal scores keep the order of the candidates.
        orders = [np.argsort(-scores, kind="stable") for scores in (left, right)]
        k = min(_OVERLAP_AT, len(left))
        top1_kept.append(orders[0][0] == orders[1][0])
        overlaps.append(len(np.intersect1d(orders[0][:k], orders[1][:k])) / k)
        taus.append(kendall_tau(left, right))
        changes.append(np.abs(left - right).mean(dtype=np.float64))
        if (spread := left.std(dtype=np.float64)) > 0:
            relative.append(changes[-1] / spread)
    return RankingChange(
        queries=len(taus),
        top1_kept=float(np.mean(top1_kept)),
        overlap_at_10=float(np.mean(overlaps)),
        kendall_tau=Distribution.of(np.array(taus)),
        score_change=float(np.mean(changes)),
        score_change_relative=float(np.mean(relative)) if relative else 0.0,
    )


def kendall_tau(left: Scores, right: Scores) -> float:
    """Return Kendall's tau-b of two arrays of scores [k], k >= 2.

    If both arrays are constant, the result is 1. If only one array is constant, the
    result is 0.
    """
    from scipy.stats import kendalltau

    constant = [len(np.unique(scores)) == 1 for scores in (left, right)]
    return (
        float(all(constant))
        if any(constant)
        else float(kendalltau(left, right).statistic)
    )
