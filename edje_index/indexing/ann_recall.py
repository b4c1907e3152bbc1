"""Recall of a nearest-neighbour index against exact search, measured with stored embeddings as queries."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edje_index.indexing.ann_parts import AnnParts
from edje_index.indexing.faiss_part import Vectors
from edje_index.progress import OnProgress
from storage_formats.errors import UsageError
from storage_formats.format.tombstones import Tombstones
from storage_formats.reading.embeddings import IndexedEmbeddings, read_uncompared_embeddings

TARGET_RECALL = 0.95
_QUERIES = 200
_NEIGHBOURS = 100
_LEAST_PROBES = 4


@dataclass(frozen=True)
class Measurement:
    """Recall and speed of a search with some number of probes.

    Attributes:
        probes: number of inverted lists that each query searches.
        k: number of neighbours per query.
        queries: number of queries. Each is a stored embedding that FAISS was not trained on.
        recall: share of the `k` exact neighbours that the search returns, the query's own row left out.
        milliseconds: processor time per query.
    """

    probes: int
    k: int
    queries: int
    recall: float
    milliseconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the member `recall` of `ann` in `index.json`. It holds no time: equal builds give equal bytes."""
        return {"k": self.k, "queries": self.queries, "value": round(self.recall, 4)}


@dataclass(frozen=True)
class RecallQueries:
    """Queries with their exact nearest rows.

    Attributes:
        row_ids: rows whose embeddings are the queries, int64 [q].
        vectors: the embeddings, [q, embed_dim].
        neighbours: row ids of the nearest other rows of each query.
    """

    row_ids: NDArray[np.int64]
    vectors: Vectors
    neighbours: tuple[NDArray[np.int64], ...]

    @classmethod
    def draw(
        cls, embeddings: IndexedEmbeddings, deleted: Tombstones, on_progress: OnProgress | None = None
    ) -> RecallQueries:
        """Choose queries from all parts of `embeddings`, and find their neighbours by comparing all embeddings."""
        row_ids, vectors = held_out(embeddings, _QUERIES)
        live = ~deleted.contain(row_ids)
        row_ids, vectors = row_ids[live], vectors[live]
        neighbours = _exact_neighbours(embeddings, deleted, row_ids, vectors, on_progress)
        return cls(row_ids, vectors, neighbours)

    def measure(self, parts: AnnParts, probes: int, live: NDArray[np.uint8] | None = None) -> Measurement:
        """Search the queries in `parts`, and compare the results with the exact neighbours."""
        started = time.process_time()
        results = parts.nearest(self.vectors, _NEIGHBOURS + 1, probes=probes, live=live)
        seconds = time.process_time() - started
        shares = []
        for row_id, (rows, _), exact in zip(self.row_ids, results, self.neighbours, strict=True):
            others = rows[rows != row_id][:_NEIGHBOURS]
            shares.append(len(np.intersect1d(others, exact)) / max(1, len(exact)))
        count = len(self.row_ids)
        return Measurement(probes, _NEIGHBOURS, count, float(np.mean(shares)), 1000 * seconds / count)


def measure_probes(
    queries: RecallQueries, parts: AnnParts, target: float, live: NDArray[np.uint8] | None = None
) -> list[Measurement]:
    """Measure growing numbers of probes until the recall reaches `target`, or all lists are searched.

    Returns:
        The measurements. The last one has the number of probes to use. The list is empty if no row is indexed.

    Raises:
        UsageError: `target` is not between 0 and 1.
    """
    if not 0 < target <= 1:
        raise UsageError(f"the target recall must be above 0 and at most 1, got {target}", parameter="recall")
    measurements: list[Measurement] = []
    for probes in _numbers_of_probes(parts.lists) if len(queries.row_ids) else ():
        measurements.append(queries.measure(parts, probes, live))
        if measurements[-1].recall >= target:
            break
    return measurements


def _numbers_of_probes(lists: int) -> Iterator[int]:
    probes = _LEAST_PROBES
    while probes < lists:
        yield probes
        probes *= 2
    yield max(1, lists)


def held_out(embeddings: IndexedEmbeddings, count: int) -> tuple[NDArray[np.int64], Vectors]:
    """Return row ids and embeddings of at most `count` rows that are spread over all shards.

    The rows are odd, so FAISS was not trained on them. Only the last row of a segment may be even.
    """
    spec, rng = embeddings.spec, np.random.default_rng(0)
    shards = [embeddings.shards[int(i)] for i in np.linspace(0, len(embeddings.shards) - 1, count)]
    row_ids = np.empty(count, dtype=np.int64)
    for number, shard in enumerate(shards):
        rows = spec.shard_rows(shard)
        row_ids[number] = min(int(rng.integers(rows.start, rows.stop)) | 1, rows.stop - 1)
    row_ids = np.unique(row_ids)
    vectors = read_uncompared_embeddings(embeddings.layout.root, spec, row_ids)
    indexed = ~np.isnan(vectors[:, 0])
    return row_ids[indexed], vectors[indexed]


def _exact_neighbours(
    embeddings: IndexedEmbeddings,
    deleted: Tombstones,
    row_ids: NDArray[np.int64],
    queries: Vectors,
    on_progress: OnProgress | None,
) -> tuple[NDArray[np.int64], ...]:
    best_scores = np.full((len(queries), _NEIGHBOURS), -np.inf, dtype=np.float32)
    best_rows = np.full((len(queries), _NEIGHBOURS), -1, dtype=np.int64)
    for done, (rows, vectors) in enumerate(embeddings, 1):
        if on_progress:
            on_progress("measuring the recall", done, len(embeddings.shards))
        scores = queries @ vectors.T
        scores[:, deleted.contain(rows)] = -np.inf
        scores[row_ids[:, None] == rows] = -np.inf
        for query in np.flatnonzero(scores.max(axis=1, initial=-np.inf) > best_scores[:, -1]):
            both_scores = np.concatenate([best_scores[query], scores[query]])
            order = np.argsort(-both_scores, kind="stable")[:_NEIGHBOURS]
            best_rows[query] = np.concatenate([best_rows[query], rows])[order]
            best_scores[query] = both_scores[order]
    return tuple(rows[np.isfinite(scores)] for rows, scores in zip(best_rows, best_scores, strict=True))
