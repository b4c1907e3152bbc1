"""Measures how much each precision of an index changes the tokens and the rankings, and
recommends a precision to keep. Each precision is compared with a reference precision.
Nothing is written to the index.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from edje_index.captions.reading import usable_captions
from edje_index.errors import BundleNotFoundError
from edje_index.evaluation.evaluate import Result, measure
from edje_index.evaluation.pools import EvaluationSet, token_sources
from edje_index.evaluation.recall import Estimate, Pools
from edje_index.indexing.faiss_index import AnnIndex
from edje_index.progress import OnProgress
from edje_index.scoring.weights import TEXT_TO_IMAGE
from edje_index.search.query import read_queries
from edje_index.search.token_index import TokenIndex
from storage_formats.arguments import as_count
from storage_formats.codecs.formats import FORMATS
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.rows import INDEXED, iter_rows
from storage_formats.format.source_columns import caption_columns
from storage_formats.format.tombstones import live_rows

_BATCH_ROWS = 128
_ROWS = 2000
_POOL = 20
_QUERIES = 1000
# With fewer queries, there is no advice. If none of 300 first hits changes, at most 1 %
# of all first hits change, with a confidence of 95 %.
_MIN_QUERIES = 300
# The precisions that are compared if only the reference is stored. If several
# precisions have the same size, only the most accurate of them is in this list.
RECOMMENDED = ("fp8", "nvfp4", "gauss2", "sign1")
# The advice accepts a precision that loses at most this number of points of R@1.
_ACCEPTED_LOSS = 1.0
# If the correct hits are not known, the advice accepts a precision that changes at most
# this percentage of the first hits.
_ACCEPTED_CHANGE = 3.0


@dataclass(frozen=True)
class PrecisionCost:
    """One precision, compared with the reference. The estimates have 95 % confidence
    intervals from a paired bootstrap over queries.

    Attributes:
        stored: True if the index stores the precision, False if the tokens were
            converted in memory for this report, as `quantize` would convert them.
        relative_error: norm of the errors of all tokens, divided by the norm of all
            tokens; None if there are no tokens.
        first_kept: percentage of queries whose first hit stays the same; None if
            re-ranking was not measured.
        loss: R@1 of the reference minus R@1 of the precision, in points; None if
            re-ranking was not measured, or the correct hits are not known.
    """

    name: str
    stored: bool
    bytes_per_image: int
    relative_error: float | None
    first_kept: Estimate | None = None
    loss: Estimate | None = None


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
        query_source: where the queries come from.
        queries: number of queries whose candidates were re-ranked; 0 if re-ranking was
            not measured.
        pool: number of candidates per query.
        trained: False if the weights of the bundle are random, or there is no bundle.
        recall: R@1 of the reference in percent; None if re-ranking was not measured, or
            the correct hits are not known.
        ranking_left_out: why re-ranking was not measured; None if it was measured.
        advice: a sentence that names the precision to keep, or says that there are too
            few queries; None if re-ranking was not measured, or the model is untrained.
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
    recall: Estimate | None
    ranking_left_out: str | None
    precisions: tuple[PrecisionCost, ...]
    advice: str | None


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
        names: the precisions to measure; empty for all stored precisions, or for
            `RECOMMENDED` if only the reference is stored.
        queries: file of queries, see `read_queries`; None for a sample of the captions
            that the index stores. If it stores none, only the tokens are compared.
        model: bundle to re-rank with; None for the bundle that built the index.
        pool: number of candidates per query, at least 2.

    Raises:
        UsageError: there is no index, a precision is unknown, the index does not store
            the reference precision, or the file of queries is invalid.
        ModelError: the bundle cannot be used, or another bundle built the index.
    """
    pool = as_count(pool, "pool", least=2)
    index = CommittedIndex.open(root)
    manifest = index.manifest
    spec = manifest.spec
    texts, correct, query_source = _queries(index, queries)
    compared = [name for name in names or spec.precisions if name != reference]
    if not names and not compared:
        compared = [
            name
            for name in RECOMMENDED
            if spec.block_shape[1] % FORMATS[name].width_multiple == 0
        ]
    sources = {
        source.codec.name: source
        for source in token_sources(index, [reference, *compared], reference)
    }
    store = sources[reference].store

    live = live_rows(index)
    sampled = np.sort(
        np.random.default_rng(0).choice(live, min(_ROWS, len(live)), replace=False)
    )
    squares = dict.fromkeys(sources, 0.0)
    holes = 0
    for start in range(0, len(sampled), _BATCH_ROWS):
        on_progress("comparing tokens, rows", start, len(sampled))
        rows = sampled[start : start + _BATCH_ROWS]
        blocks = store.fetch(rows)
        kept = ~store.holes(blocks)
        holes += int((~kept).sum())
        exact = blocks[kept].astype(np.float64)
        squares[reference] += float(np.square(exact).sum())
        for name in compared:
            other = sources[name].fetch(rows[kept])
            squares[name] += float(np.square(other.astype(np.float64) - exact).sum())

    opened, left_out = _ranking_index(index, model, has_queries=bool(texts))
    results: dict[str, Result] = {}
    used: list[int] = []
    if opened is not None:
        neighbours = AnnIndex(opened.committed).nearest_to_each(
            opened.model.text.encode(texts), pool
        )
        # Queries with fewer candidates than others are left out. If there are fewer
        # than two candidates, nothing can be ranked.
        width = max(2, *(len(rows) for rows, _ in neighbours))
        used = [at for at, (rows, _) in enumerate(neighbours) if len(rows) == width]
        left_out = None if used else "no query has two candidates"
        if used:
            # A query whose correct row is not known has a negative number instead.
            labels = np.array([correct[at] if correct else -1 - at for at in used])
            candidates = np.array([neighbours[at][0] for at in used])
            similarities = np.array([neighbours[at][1] for at in used])
            relevant = candidates == labels[:, None]
            ranks = np.where(relevant.any(axis=1), relevant.argmax(axis=1), width)
            results = {
                str(result.precision): result
                for result in measure(
                    opened.model,
                    EvaluationSet(
                        rows=np.arange(spec.rows),
                        captions=tuple(texts[at] for at in used),
                        caption_rows=labels,
                        query_captions=np.arange(len(used)),
                        query_rows=np.array([], dtype=np.int64),
                    ),
                    {TEXT_TO_IMAGE: Pools(candidates, similarities, relevant, ranks)},
                    list(sources.values()),
                    {TEXT_TO_IMAGE: opened.model.weights(TEXT_TO_IMAGE)},
                    cutoffs=(1,),
                    pools=(width,),
                    reference=reference,
                    on_progress=on_progress,
                )
            }
    costs = []
    for name, source in sources.items():
        if name == reference:
            continue
        error = None
        if squares[reference]:
            error = (squares[name] / squares[reference]) ** 0.5
        is_stored = source.simulated_from is None
        cost = PrecisionCost(name, is_stored, source.codec.record_bytes, error)
        if name in results:
            change = results[name].change or {}
            cost = replace(
                cost,
                first_kept=results[name].first_kept,
                loss=change[1].subtracted_from(0.0) if correct else None,
            )
        costs.append(cost)
    recall = results[reference].recall[1] if results and correct else None
    size = sources[reference].codec.record_bytes
    trained = opened is not None and opened.model.info.trained
    return QuantizationReport(
        index=str(root),
        rows=spec.rows,
        block_shape=spec.block_shape,
        reference=reference,
        reference_encoded_from=manifest.encoded_from.get(reference, ()),
        reference_bytes_per_image=size,
        sampled_rows=len(sampled),
        holes=holes,
        query_source=query_source,
        queries=len(used),
        pool=pool,
        trained=trained,
        recall=recall,
        ranking_left_out=left_out,
        precisions=tuple(costs),
        advice=advice(reference, size, costs, len(used)) if trained else None,
    )


def _queries(
    index: CommittedIndex, path: Path | None
) -> tuple[list[str], list[int], str]:
    """Return the queries, the row id of the correct image of each query, and a
    description of their source. If the correct images are not known, the list of row
    ids is empty.
    """
    if path is not None:
        return list(dict.fromkeys(read_queries(path))), [], str(path)
    columns = caption_columns(index.manifest.columns)
    rng = np.random.default_rng(0)
    tables = iter_rows(index, ["row_id", "status", *columns]) if columns else ()
    captions = (
        (rng.random(), text, row["row_id"])
        for table in tables
        for row in table.to_pylist()
        if row["status"] == INDEXED
        for text in usable_captions(row)[0]
    )
    # The captions with the lowest random numbers are a random sample of all captions.
    sample = heapq.nsmallest(_QUERIES, captions)
    texts = [text for _, text, _ in sample]
    return texts, [row for *_, row in sample], "captions of the index"


def _ranking_index(
    index: CommittedIndex, model: Path | None, *, has_queries: bool
) -> tuple[TokenIndex | None, str | None]:
    """Return (opened index, None), or (None, reason) if no model can re-rank."""
    if model is None and "bundle" not in index.manifest.model:
        return None, "the index was not built by a model"
    if not has_queries:
        return None, "advice needs queries, and the index holds no captions"
    try:
        opened = TokenIndex.open(index.root, model)
    except BundleNotFoundError as error:
        return None, str(error)
    if opened.model.adapter_config.is_feature:
        return None, (
            "the index stores features to train on, which the joint encoder cannot"
            " score"
        )
    return opened, None


def advice(
    reference: str,
    reference_bytes: int,
    costs: Sequence[PrecisionCost],
    queries: int,
) -> str | None:
    """Return a sentence that names the precision to keep, or says that there are too
    few `queries`. Return None if re-ranking was not measured.

    The precision to keep is the smallest precision whose loss is acceptable, or the
    reference if there is none. A loss is acceptable if the upper bound of its
    confidence interval is at most 1 point of R@1. If the correct hits are not known,
    the loss is the percentage of queries whose first hit differs from that of the
    reference, and its upper bound must be at most 3 %. If a smaller precision was also
    measured, the sentence also names the loss of the next smaller one.
    """
    ranked = [cost for cost in costs if cost.first_kept is not None]
    if not ranked:
        return None
    if queries < _MIN_QUERIES:
        return (
            f"no advice: {queries} queries are too few, at least {_MIN_QUERIES} are"
            " needed"
        )
    is_labelled = ranked[0].loss is not None
    verb = "lose" if is_labelled else "change"
    unit = "points of R@1" if is_labelled else "% of the first hits"
    limit = _ACCEPTED_LOSS if is_labelled else _ACCEPTED_CHANGE
    chosen = f"keep {reference}: {reference_bytes / 1000:.1f} kB per image"
    refused = ""
    for cost in sorted(ranked, key=lambda cost: -cost.bytes_per_image):
        assert cost.first_kept is not None
        lost = cost.loss or cost.first_kept.subtracted_from(100.0)
        low, high = lost.bounds
        amount = f"{lost.value:.1f} {unit} ({low:+.1f} to {high:+.1f}"
        if high <= limit:
            size = f"{cost.bytes_per_image / 1000:.1f} kB per image"
            chosen = f"keep {cost.name}: {size}, {verb}s {amount})"
            refused = ""
        elif not refused:
            refused = f"; {cost.name} would {verb} {amount}, the limit is {limit:+.1f})"
    return chosen + refused
