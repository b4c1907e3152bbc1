"""Measures what `edje-index report` shows: failures, sizes, precisions, times, and sample searches."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edje_index.progress import OnProgress
from storage_formats.codecs import Blocks, codec
from storage_formats.errors import EdjeError
from storage_formats.format.manifest import CommittedIndex, Manifest
from storage_formats.format.rows import FAILED, INDEXED, TIMING_COLUMNS, iter_rows
from storage_formats.format.shard_table import read_shard_tables
from storage_formats.token_store import TokenStore

if TYPE_CHECKING:
    from edje_index.search.hits import Hit

SAMPLES_PER_REASON = 5
_COMPARED_ROWS = 256
_FETCHED_ROWS = 100
_FETCHES = 9
_ROW_COLUMNS = ["row_id", "uri", "status", "reason", "detail", *TIMING_COLUMNS]


@dataclass(frozen=True)
class FailedInput:
    """One input that could not be indexed. `detail` describes the failure, and may be empty."""

    row_id: int
    uri: str
    detail: str


@dataclass
class StageTime:
    """Time of one stage of the build.

    Attributes:
        seconds: total seconds of all inputs.
        slowest_seconds: seconds of the slowest input.
        slowest_uri: uri of the slowest input.
    """

    seconds: float = 0.0
    slowest_seconds: float = 0.0
    slowest_uri: str = ""


@dataclass
class RowFacts:
    """Facts from the rows table.

    Attributes:
        samples: the first failed inputs, by reason of failure.
        stages: times by stage of the build; empty if no times were recorded.
        timed: number of inputs with recorded times.
        indexed: row ids of the first rows that have tokens.
    """

    samples: dict[str, list[FailedInput]] = field(default_factory=dict)
    stages: dict[str, StageTime] = field(default_factory=dict)
    timed: int = 0
    indexed: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class PrecisionFacts:
    """One stored precision.

    Attributes:
        name: name of the precision.
        record_bytes: bytes of one record.
        total_bytes: bytes of all shard files of the precision.
        encoded_from: precisions that the tokens were converted from, first to last; empty if the model encoded them.
        error: median relative error of the tokens; None for the reference precision, or if all tokens are zero.
        cosine: lowest cosine similarity between a token and its reference token; None if `error` is None.
        fetch_seconds: median seconds to fetch `fetched` random blocks. Most blocks come from the page cache.
        fetched: number of blocks per fetch.
    """

    name: str
    record_bytes: int
    total_bytes: int
    encoded_from: tuple[str, ...]
    error: float | None
    cosine: float | None
    fetch_seconds: float
    fetched: int


@dataclass(frozen=True)
class SampleSearch:
    """A query, its best hits, and the time of the search in seconds."""

    query: str
    hits: Sequence[Hit]
    seconds: float


@dataclass(frozen=True)
class IndexReport:
    """Everything that the report shows.

    Attributes:
        root: directory of the index.
        manifest: manifest of the index.
        bytes_by_part: total file size in bytes of each part of the index, such as "tokens" or "embeddings".
        rows: facts from the rows table.
        reference: the precision that the other precisions are compared with.
        precisions: facts about each stored precision.
        searches: the sample searches.
        searches_left_out: reason why `searches` is empty; empty if the sample searches were run.
    """

    root: Path
    manifest: Manifest
    bytes_by_part: Mapping[str, int]
    rows: RowFacts
    reference: str
    precisions: Sequence[PrecisionFacts]
    searches: Sequence[SampleSearch]
    searches_left_out: str


def measure_index(root: Path, queries: Sequence[str], k: int, on_progress: OnProgress) -> IndexReport:
    """Read and measure the index at `root`.

    Args:
        root: directory of the index.
        queries: texts of the sample searches.
        k: number of hits per search.
        on_progress: called with the name of the activity, the number of finished items and the number of all items.

    Raises:
        UsageError, IncompleteIndexError, CorruptIndexError: the index cannot be opened, or a file is damaged.
    """
    from pipelines.jobs.quantize import precision_to_read

    manifest = Manifest.load(root)
    rows = _read_row_facts(root, manifest, on_progress)
    sizes = _bytes_by_folder(root, manifest)
    reference = precision_to_read(root, manifest, None)
    precisions = _precisions(root, manifest, reference, rows.indexed, sizes)
    searches, left_out = _sample_searches(root, queries, k, on_progress)
    by_part: Counter[str] = Counter()
    for folder, size in sizes.items():
        by_part[folder.split("/")[0]] += size
    by_part["ann"] += sum(int(file["bytes"]) for file in manifest.ann.get("files", []))
    return IndexReport(root, manifest, by_part, rows, reference, precisions, searches, left_out)


def _read_row_facts(root: Path, manifest: Manifest, on_progress: OnProgress) -> RowFacts:
    """Read facts from the rows table, one shard at a time."""
    facts, spec = RowFacts(), manifest.spec
    shards = spec.used_shards
    for done, table in enumerate(iter_rows(CommittedIndex(root, manifest), _ROW_COLUMNS)):
        on_progress("reading the rows table, shards", done, shards)
        for row in table.to_pylist():
            _add_row(facts, row)
    return facts


def _add_row(facts: RowFacts, row: dict[str, Any]) -> None:
    if row["status"] == FAILED:
        samples = facts.samples.setdefault(row["reason"] or "unknown", [])
        if len(samples) < SAMPLES_PER_REASON:
            samples.append(FailedInput(row["row_id"], row["uri"], row["detail"] or ""))
    elif row["status"] == INDEXED and len(facts.indexed) < _COMPARED_ROWS * 16:
        facts.indexed.append(row["row_id"])
    if not any(row[column] for column in TIMING_COLUMNS):
        return
    facts.timed += 1
    for column in TIMING_COLUMNS:
        stage = facts.stages.setdefault(column.removesuffix("_seconds"), StageTime())
        seconds = float(row[column] or 0)
        stage.seconds += seconds
        if seconds > stage.slowest_seconds:
            stage.slowest_seconds, stage.slowest_uri = seconds, row["uri"]


def _bytes_by_folder(root: Path, manifest: Manifest) -> dict[str, int]:
    """Return the total size of the committed files in bytes, by folder such as "tokens/fp8"."""
    sizes: Counter[str] = Counter()
    for _, file in read_shard_tables(root, manifest.shard_tables):
        sizes[file.path.rpartition("/")[0]] += file.bytes
    return dict(sizes)


def _precisions(
    root: Path, manifest: Manifest, reference: str, indexed: Sequence[int], sizes: Mapping[str, int]
) -> list[PrecisionFacts]:
    rng = np.random.default_rng(0)
    count = min(_COMPARED_ROWS, len(indexed))
    sampled = np.sort(rng.choice(np.array(indexed, np.int64), count, replace=False)) if count else np.empty(0, np.int64)
    blocks = TokenStore.open(root, reference).fetch(sampled)
    facts = []
    for name in sorted(manifest.spec.precisions, key=lambda name: -codec(name, manifest.spec.block_shape).record_bytes):
        with TokenStore.open(root, name) as store:
            error, cosine = (None, None) if name == reference else _token_error(blocks, store.fetch(sampled))
            facts.append(
                PrecisionFacts(
                    name=name,
                    record_bytes=store.record_bytes,
                    total_bytes=sizes.get(f"tokens/{name}", 0),
                    encoded_from=manifest.encoded_from.get(name, ()),
                    error=error,
                    cosine=cosine,
                    fetch_seconds=_fetch_seconds(store, rng.permutation(sampled)[:_FETCHED_ROWS]),
                    fetched=min(_FETCHED_ROWS, count),
                )
            )
    return facts


def _token_error(reference: Blocks, other: Blocks) -> tuple[float | None, float | None]:
    """Return (median relative error, lowest cosine similarity), or (None, None) if every token is zero."""
    from edje_index.evaluation.quantization_report.token_errors import compare_tokens

    errors, cosines = compare_tokens(reference, other)
    return (float(np.median(errors)), float(cosines.min())) if len(errors) else (None, None)


def _fetch_seconds(store: TokenStore, row_ids: np.ndarray[Any, np.dtype[np.int64]]) -> float:
    times = []
    for _ in range(_FETCHES):
        started = time.perf_counter()
        store.fetch(row_ids)
        times.append(time.perf_counter() - started)
    return float(np.median(times))


def _sample_searches(
    root: Path, queries: Sequence[str], k: int, on_progress: OnProgress
) -> tuple[list[SampleSearch], str]:
    """Return (searches, ""), or ([], reason) if the index cannot be searched."""
    from edje_index.search.token_index import TokenIndex

    on_progress("sample searches", 0, len(queries))
    try:
        index = TokenIndex.open(root)
        index.model.weights("t2i")
        searches = []
        for done, query in enumerate(queries):
            on_progress("sample searches", done, len(queries))
            started = time.perf_counter()
            hits = index.search(query, k)
            searches.append(SampleSearch(query, hits, time.perf_counter() - started))
    except EdjeError as error:  # an index without a model has a report too
        return [], str(error)
    return searches, ""
