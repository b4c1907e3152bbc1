"""Measures fetches from an index on an object store. Other libraries fetch the same ranges in turn."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.fetch.peers import REMOTE_PEERS, Fetch
from benchmarks.report import Say, table
from pipelines.environment import environment
from storage_formats.codecs import finest
from storage_formats.errors import UsageError
from storage_formats.format.object_store import ObjectFolder
from storage_formats.format.remote import open_index
from storage_formats.reading.block_cache import SETTING, cache_bytes
from storage_formats.token_store import TokenStore

_DOLLARS_PER_REQUEST = 0.4e-6  # GET requests of S3 Standard, us-east-1; transfers within a region are free
_QUERY_ROWS = 100
_QUERIES = 50
_SEED = 17
_CACHED = "edje, cached"
_CACHE_REMEDY = f"raise {SETTING}, or free space on the disk of the cache directory"


@dataclass(frozen=True)
class CountingFolder(ObjectFolder):
    """Counts the range requests to the object store. A request that is repeated after an error counts once.

    Attributes:
        lengths: length in bytes of each range.
    """

    lengths: list[int] = field(default_factory=list)

    def read_range(self, key: str, start: int, stop: int, *, etag: str | None = None) -> memoryview:
        self.lengths.append(stop - start)
        return super().read_range(key, start, stop, etag=etag)


def bench_remote(
    url: str, say: Say, *, precision: str | None = None, pool: int = 50_000, repeats: int = 5, peers: bool = False
) -> dict[str, Any]:
    """Measure the index at `url` and return the results as a JSON object.

    The other arguments are options of `edje-index bench fetch`. `say` receives one line of text before each round.

    Raises:
        UsageError: the index does not have the precision, or has fewer than two rows.
    """
    index = open_index(url)
    assert index.remote is not None
    folder, cached_folder = (CountingFolder(index.remote.url, index.remote.store) for _ in range(2))
    precision = precision or finest(index.manifest.spec.precisions)
    rng, pool = np.random.default_rng(_SEED), min(pool, index.manifest.spec.used_rows // 2)
    if not pool:
        raise UsageError(f"the index at {url} has fewer than two rows; measure a larger index")
    with contextlib.ExitStack() as stack:
        limit = os.environ.get(SETTING)
        os.environ[SETTING] = "0"  # opens a store without the block cache
        try:
            store = stack.enter_context(TokenStore(replace(index, remote=folder), precision))
        finally:
            os.environ.pop(SETTING) if limit is None else os.environ.update({SETTING: limit})
        rows = store.row_ids()
        subjects: dict[str, Fetch] = {"edje": store.fetch_records}
        if cache_bytes():
            cached_store = stack.enter_context(TokenStore(replace(index, remote=cached_folder), precision))
            subjects[_CACHED] = cached_store.fetch_records
        for name, open_peer in REMOTE_PEERS.items() if peers else ():
            with contextlib.suppress(ModuleNotFoundError):
                subjects[name] = open_peer(index, precision)
        draws = [rng.choice(rows, pool, replace=False) for _ in range(repeats)]
        queries = [rng.choice(rows, min(_QUERY_ROWS, pool), replace=False) for _ in range(_QUERIES)]
        for name, fetch in subjects.items():
            if name.startswith("edje"):
                fetch(np.concatenate([*draws, *queries]))  # downloads the checksums, and fills the block cache
        cached_folder.lengths.clear()
        expected = store.fetch_records(queries[0])
        for name, fetch in subjects.items():
            if not np.array_equal(np.asarray(fetch(queries[0])).reshape(expected.shape), expected):
                raise RuntimeError(f"the library {name} reads other bytes than edje, so the two cannot be compared")
        seconds: dict[str, list[float]] = {name: [] for name in subjects}
        latencies: dict[str, list[float]] = {name: [] for name in subjects}
        for number, draw in enumerate(draws):
            say(f"round {number + 1} of {repeats}")
            for name, fetch in subjects.items():
                times = []
                for ids in (draw, *queries):
                    started = time.perf_counter()
                    fetch(ids)
                    times.append(time.perf_counter() - started)
                seconds[name].append(times[0])
                latencies[name] += times[1:]
        folder.lengths.clear()
        for query in queries:
            store.fetch_records(query)
    if cached_folder.lengths:
        say(f"'{_CACHED}' is left out, because the block cache did not hold all blocks; {_CACHE_REMEDY}")
        del subjects[_CACHED]
    requests = len(folder.lengths) / len(queries)
    size = pool * store.record_bytes
    readers = {}
    for name in subjects:
        p50, p99 = np.percentile(latencies[name], [50, 99])
        rate = size / float(np.median(seconds[name])) / 1e9
        readers[name] = {"gigabytes_per_second": rate, "query_p50_ms": p50 * 1e3, "query_p99_ms": p99 * 1e3}
    return {
        "url": url,
        "precision": precision,
        "blocks": pool,
        "query_blocks": len(queries[0]),
        "record_bytes": store.record_bytes,
        "requests_per_query": requests,
        "bytes_per_query": sum(folder.lengths) / len(queries),
        "dollars_per_million_queries": requests * _DOLLARS_PER_REQUEST * 1e6,
        "readers": readers,
        "environment": environment(),
    }


def report_lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield the result of `bench_remote` as lines of Markdown."""
    yield (
        f"{result['url']}, {result['precision']}: random blocks of {result['record_bytes']:,} bytes; fetches of "
        f"{result['blocks']:,} blocks, queries of {result['query_blocks']}\n"
    )
    yield from table(
        ("reader", "GB/s", "query p50, ms", "query p99, ms"),
        (
            (name, f"{row['gigabytes_per_second']:.3f}", f"{row['query_p50_ms']:.1f}", f"{row['query_p99_ms']:.1f}")
            for name, row in result["readers"].items()
        ),
    )
    cost = f"{result['dollars_per_million_queries']:.2f} USD per million queries at the price of S3 Standard"
    size = f"{result['bytes_per_query'] / 1e6:.2f} MB"
    yield f"\nedje: {result['requests_per_query']:.1f} requests and {size} per query; {cost}"
