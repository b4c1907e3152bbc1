"""Measures searches in which the joint encoder scores part of the pool: ranking, recall and time.

    python -m benchmarks.joint_pool INDEX captions.jsonl --model BUNDLE --joint-pool 10 --joint-pool 20

In the reference search, the joint encoder scores the whole pool in float32. The rankings for smaller joint pools are
computed from the scores of such full searches. The times are measured in searches with `joint_pool`, one query at a
time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.joint_runtimes import kendall_tau
from edje_index.captions.matching import NAME_COLUMNS, match_items
from edje_index.captions.reading import read_captions
from edje_index.scoring.cascade import Cascade
from edje_index.scoring.final_score import FinalScore
from edje_index.scoring.weights import LOGIT
from edje_index.search.hits import Hits
from edje_index.search.token_index import TokenIndex
from pipelines.environment import environment
from storage_formats.format.rows import read_all_rows

_QUERIES_AT_ONCE = 8
_WARM_UP = 2
_SHOWN = 10  # hits that a user sees
CUTOFFS = (1, 5, 10)


@dataclass(frozen=True)
class Query:
    """A caption, and the row id of its image."""

    text: str
    row_id: int


def sample_queries(index: TokenIndex, captions: Path, images: Path | None, count: int, seed: int) -> list[Query]:
    """Return `count` random captions of images in the index."""
    items = read_captions(captions, images)
    items, rows = match_items(index.root, read_all_rows(index.committed, NAME_COLUMNS), items).indexed(items)
    every = [Query(text, int(row)) for item, row in zip(items, rows, strict=True) for text in item.captions]
    chosen = np.random.default_rng(seed).permutation(len(every))[:count]
    return [every[position] for position in chosen]


def full_searches(index: TokenIndex, queries: Sequence[Query], pool: int) -> list[Hits]:
    """Return every candidate of each query, re-ranked with every part of the score."""
    hits = []
    for start in range(0, len(queries), _QUERIES_AT_ONCE):
        texts = [query.text for query in queries[start : start + _QUERIES_AT_ONCE]]
        hits += index.search(texts, pool, pool)
    return hits


def ranking(hits: Hits, score: FinalScore, joint_pool: int | None) -> NDArray[np.int64]:
    """Return the row ids of `hits`, best first, as a search with `joint_pool` ranks them."""
    rows = np.array([hit.row_id for hit in hits], dtype=np.int64)
    parts = {part: np.array([hit.parts[part] for hit in hits], dtype=np.float32) for part in score.parts}
    if joint_pool is not None:
        cascade = Cascade(score, joint_pool)
        logits = np.where(cascade.chosen(parts, rows), parts[LOGIT], np.float32(np.nan))
        parts = cascade.with_every_logit({**parts, LOGIT: logits})
    return rows[np.lexsort((rows, -score.sum(parts)))]


def agreement(
    orders: Sequence[NDArray[np.int64]], expected: Sequence[NDArray[np.int64]], queries: Sequence[Query]
) -> dict[str, float]:
    """Compare rankings with the reference rankings in `expected`.

    Returns:
        Kendall's tau (`mean_tau`, `lowest_tau`), the percentage of queries with the same first hits (`same_1`, ...),
        and the recall in percent (`recall_1`, ...).
    """
    taus, same_hits, ranks = [], {1: 0, _SHOWN: 0}, []
    for order, reference, query in zip(orders, expected, queries, strict=True):
        rank_of_each_row = (torch.from_numpy(np.argsort(rows)) for rows in (order, reference))
        taus.append(kendall_tau(*rank_of_each_row))
        for count in same_hits:
            same_hits[count] += set(order[:count]) == set(reference[:count])
        at = np.flatnonzero(order == query.row_id)
        ranks.append(at[0] if len(at) else len(order))
    recall = {f"recall_{k}": 100 * float(np.mean(np.array(ranks) < k)) for k in CUTOFFS}
    same = {f"same_{count}": 100 * number / len(queries) for count, number in same_hits.items()}
    return {"mean_tau": statistics.mean(taus), "lowest_tau": min(taus), **same, **recall}


def times(index: TokenIndex, queries: Sequence[Query], pool: int, joint_pool: int | None) -> dict[str, float]:
    """Return the median processor time (`cpu_ms`) and the median elapsed time (`ms`) of a search in milliseconds."""
    processor, elapsed = [], []
    for query in [*queries[:_WARM_UP], *queries]:
        before = time.process_time(), time.perf_counter()
        index.search(query.text, min(_SHOWN, pool), pool, joint_pool=joint_pool)
        processor.append(1000 * (time.process_time() - before[0]))
        elapsed.append(1000 * (time.perf_counter() - before[1]))
    return {"cpu_ms": statistics.median(processor[_WARM_UP:]), "ms": statistics.median(elapsed[_WARM_UP:])}


def main() -> None:
    """Measure each data type and joint pool, and print one line of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("index", type=Path)
    parser.add_argument("captions", type=Path)
    parser.add_argument("--images", type=Path, help="base directory of relative image paths")
    parser.add_argument("--model", type=Path, help="bundle of the model that built the index")
    parser.add_argument("--queries", type=int, default=1000, help="number of captions to rank")
    parser.add_argument("--timed", type=int, default=30, help="number of captions to measure times with; 0 for none")
    parser.add_argument("--pool", type=int, default=100, help="candidates per query")
    parser.add_argument("--joint-pool", type=int, action="append", help="joint pool to measure; repeatable")
    parser.add_argument("--dtype", action="append", choices=["float32", "bfloat16"], help="data type; repeatable")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(json.dumps(environment()))
    expected = None
    for dtype in dict.fromkeys(["float32", *(options.dtype or [])]):
        index = TokenIndex.open(options.index, options.model, dtype=dtype)
        queries = sample_queries(index, options.captions, options.images, options.queries, options.seed)
        score = FinalScore.of(index.model.weights("t2i"))
        hits = full_searches(index, queries, options.pool)
        expected = expected or [ranking(each, score, None) for each in hits]
        for joint_pool in (None, *(options.joint_pool or (10, 20, 50))):
            orders = [ranking(each, score, joint_pool) for each in hits]
            figures = agreement(orders, expected, queries)
            if options.timed:
                figures |= times(index, queries[: options.timed], options.pool, joint_pool)
            name = f"{dtype}, joint pool {joint_pool or 'all'}"
            print(f"{name:26} " + "  ".join(f"{key} {value:.4g}" for key, value in figures.items()), flush=True)


if __name__ == "__main__":
    main()
