"""Measures the recall of a nearest-neighbour index against exact search. Stored embeddings are the queries."""

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
from storage_formats.reading.embeddings import IndexedEmbeddings

TARGET_RECALL = 0.95
_QUERIES = 200
_NEIGHBOURS = 100
_LEAST_PROBES = 4


@dataclass(frozen=True)
class Measurement:
    """Recall and speed of searches with a certain number of probes.

    Attributes:
        probes: number of inverted lists that a query searches.
        k: number of neighbours per query.
        queries: number of queries.
        recall: share of the `k` exact neighbours that the search returns. The row of the query itself is not counted.
        milliseconds: processor time per query.
    """

    probes: int
    k: int
    queries: int
    recall: float
    milliseconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the value of `ann.recall` in `index.json`.

        Times are left out, so that equal builds write equal bytes.
        """
        return {"k": self.k, "queries": self.queries, "value": round(self.recall, 4)}


@dataclass(frozen=True)
class RecallQueries:
    """Queries and the exact nearest rows of each query.

    Attributes:
        row_ids: rows whose embeddings are the queries, int64 [q].
        vectors: query embeddings [q, embed_dim].
        neighbours: nearest row ids of each query, without the row of the query.
    """

    row_ids: NDArray[np.int64]
    vectors: Vectors
    neighbours: tuple[NDArray[np.int64], ...]

    @classmethod
    def draw(
        cls, embeddings: IndexedEmbeddings, deleted: Tombstones | None, on_progress: OnProgress | None = None
    ) -> RecallQueries:
        """Draw queries from all shards, and find the neighbours of each query by exact search.

        Args:
            embeddings: the embeddings of all shards of the index.
            deleted: deleted rows, which are neither queries nor neighbours; None if no row is deleted.
            on_progress: called after each shard.
        """
        row_ids, vectors = held_out(embeddings, _QUERIES)
        if deleted is not None:
            live = ~deleted.contain(row_ids)
            row_ids, vectors = row_ids[live], vectors[live]
        neighbours = _exact_neighbours(embeddings, deleted, row_ids, vectors, on_progress)
        return cls(row_ids, vectors, neighbours)

    def measure(self, parts: AnnParts, probes: int, live: NDArray[np.uint8] | None = None) -> Measurement:
        """Search for the queries in `parts`, and compare the results with the exact neighbours."""
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
    """Measure increasing numbers of probes until the recall reaches `target` or all inverted lists are searched.

    Args:
        queries: queries and their exact neighbours.
        parts: FAISS indexes to measure.
        target: recall to reach, above 0 and at most 1.
        live: bitmap of the rows to search, as for `AnnParts.nearest`.

    Returns:
        The measurements. The last measurement has the number of probes to use. Empty if no row is indexed.

    Raises:
        UsageError: `target` is not above 0 and at most 1.
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
    """Return row ids and embeddings of at most `count` rows from all shards.

    The row ids are odd, because FAISS is trained on even row ids only. As an exception, the last row id of a
    segment may be even.
    """
    spec, rng = embeddings.spec, np.random.default_rng(0)
    shards = [embeddings.shards[int(i)] for i in np.linspace(0, len(embeddings.shards) - 1, count)]
    row_ids = np.empty(count, dtype=np.int64)
    for number, shard in enumerate(shards):
        rows = spec.shard_rows(shard)
        row_ids[number] = min(int(rng.integers(rows.start, rows.stop)) | 1, rows.stop - 1)
    row_ids = np.unique(row_ids)
    vectors = embeddings[row_ids]
    indexed = ~np.isnan(vectors[:, 0])
    return row_ids[indexed], vectors[indexed]


def _exact_neighbours(
    embeddings: IndexedEmbeddings,
    deleted: Tombstones | None,
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
        if deleted is not None:
            scores[:, deleted.contain(rows)] = -np.inf
        scores[row_ids[:, None] == rows] = -np.inf
        for query in np.flatnonzero(scores.max(axis=1, initial=-np.inf) > best_scores[:, -1]):
            both_scores = np.concatenate([best_scores[query], scores[query]])
            order = np.argsort(-both_scores, kind="stable")[:_NEIGHBOURS]
            best_rows[query] = np.concatenate([best_rows[query], rows])[order]
            best_scores[query] = both_scores[order]
    return tuple(rows[np.isfinite(scores)] for rows, scores in zip(best_rows, best_scores, strict=True))
