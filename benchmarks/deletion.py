"""Compares fetches and searches before and after 10 % of the rows of an index are deleted."""

from __future__ import annotations

import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.ann import Clusters
from benchmarks.checked_reads import Setting, fetch_alternately
from benchmarks.synthetic import make_synthetic
from edje_index.indexing.faiss_index import AnnIndex, add_ann
from pipelines import delete_rows
from storage_formats import IndexSpec, TokenStore
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import CommittedIndex

_SHARE = 10  # one row in this many is deleted
_BATCHES = {"warm": 100, "cold": 400}
"""Rows per fetch, by state of the page cache."""
_WIDTH = 384
_QUERIES = 200
_NEIGHBOURS = 100


@dataclass(frozen=True)
class DeletionBench:
    """Settings of the benchmark.

    Attributes:
        scratch: directory for a temporary directory, which holds the indexes.
        fetched: rows of the index to fetch from. Its blocks have 64 x 384 values.
        searched: rows of the indexes to search. Above 100,000 rows, FAISS stores codes in inverted lists.
        rounds: number of measurements before and after the deletion.
        cpu: True to measure processor time.
    """

    scratch: Path
    fetched: int = 20_000
    searched: tuple[int, ...] = (50_000, 200_000)
    rounds: int = 41
    cpu: bool = False

    @property
    def clock(self) -> Callable[[], float]:
        """The function that returns the current time in seconds."""
        return time.process_time if self.cpu else time.perf_counter


def deletion_lines(bench: DeletionBench) -> Iterator[str]:
    """Measure, and yield the lines of a Markdown table."""
    yield "| task | before, us | after, us | before / after | recall before | recall after |"
    yield "|---|---|---|---|---|---|"
    bench.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=bench.scratch, prefix="changes-") as folder:
        root = Path(folder, "fetch.edje")
        make_synthetic(root, IndexSpec(bench.fetched, 1024, (64, _WIDTH), embed_dim=8))
        _delete_share(root)
        for state, batch in _BATCHES.items():
            pairs = fetch_pairs(root, Setting("bf16", state == "cold", batch, bench.rounds), bench.clock)
            yield _line(f"fetch {batch} rows, {state}", pairs)
        shutil.rmtree(root)
        for rows in bench.searched:
            root = Path(folder, "search.edje")
            spec = IndexSpec(rows, 1024, (1, 32), embed_dim=_WIDTH)
            make_synthetic(root, spec, embeddings=Clusters(_WIDTH, clusters=max(1, rows // 100)).draw)
            kind = add_ann(root).ann["kind"]
            before = AnnIndex.open(root)
            _delete_share(root)
            pairs, recall = search_pairs(before, root, bench)
            yield _line(f"search {rows:,} rows ({kind})", pairs, [f"{value:.4f}" for value in recall])
            shutil.rmtree(root)


def _delete_share(root: Path) -> None:
    rows = CommittedIndex.open(root).manifest.spec.rows
    delete_rows(root, rows=np.random.default_rng(1).choice(rows, rows // _SHARE, replace=False).tolist())


def _line(task: str, pairs: list[tuple[float, float]], recall: list[str] | None = None) -> str:
    before, after = (statistics.median(seconds) * 1e6 for seconds in zip(*pairs, strict=True))
    ratio = statistics.median(first / second for first, second in pairs)
    return f"| {task} | {before:,.1f} | {after:,.1f} | {ratio:.3f} | {' | '.join(recall or ['', ''])} |"


def fetch_pairs(root: Path, setting: Setting, clock: Callable[[], float]) -> list[tuple[float, float]]:
    """Return (seconds, seconds) of fetches from the first snapshot and from the current one, for the same rows."""
    engine = "io_uring" if setting.is_cold else "auto"
    files = list(Layout(root).token_array(setting.precision).glob("c.*"))
    rng = np.random.default_rng(0)
    with (
        TokenStore.open(root, setting.precision, engine, snapshot=0) as before,
        TokenStore.open(root, setting.precision, engine) as after,
    ):
        live = after.row_ids()
        batches = (rng.choice(live, setting.batch) for _ in itertools.count())
        return fetch_alternately((before, after), files, batches, setting, clock)


def search_pairs(
    before: AnnIndex, root: Path, bench: DeletionBench
) -> tuple[list[tuple[float, float]], tuple[float, float]]:
    """Search for embeddings of rows that stay, one at a time.

    Returns:
        (seconds before, seconds after) per query of each round. Then the recall before and after the deletion: the
        share of the rows that both searches should find, which are the rows that stay among the 100 nearest ones.
    """
    index = CommittedIndex.open(root)
    live = np.setdiff1d(np.arange(index.manifest.spec.rows), index.deleted.row_ids())
    embeddings = before.parts.embeddings[np.arange(index.manifest.spec.rows)]
    queries = embeddings[np.random.default_rng(2).choice(live, min(_QUERIES, len(live)), replace=False)]
    kinds = (before, AnnIndex(index))
    nearest = [np.argsort(-(embeddings @ query), kind="stable")[:_NEIGHBOURS] for query in queries]
    remaining = [np.intersect1d(row_ids, live) for row_ids in nearest]
    before_recall, after_recall = (
        _recall([kind.nearest(query, _NEIGHBOURS)[0] for query in queries], remaining) for kind in kinds
    )
    pairs = []
    for number in range(bench.rounds):
        seconds = [0.0, 0.0]
        for kind in (0, 1) if number % 2 else (1, 0):
            started = bench.clock()
            for query in queries:
                kinds[kind].nearest(query, _NEIGHBOURS)
            seconds[kind] = (bench.clock() - started) / len(queries)
        pairs.append((seconds[0], seconds[1]))
    return pairs, (before_recall, after_recall)


def _recall(results: list[NDArray[np.int64]], targets: list[NDArray[np.int64]]) -> float:
    """Return the mean share of `targets` that `results` contain."""
    return float(np.mean([np.isin(rows, result).mean() for result, rows in zip(results, targets, strict=True)]))
