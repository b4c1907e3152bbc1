"""Measures fetches from an index on an object store, without and with the block cache."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np

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
_PLAIN, _CACHED = "edje", "edje, cached"


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
    url: str, say: Say, *, precision: str | None = None, pool: int = 50_000, repeats: int = 5
) -> dict[str, Any]:
    """Measure the index at `url` and return the results as a JSON object.

    The other arguments are options of `edje-index bench fetch`. `say` receives one line of text before each round.

    Raises:
        UsageError: the index does not have the precision, or has fewer than two rows.
    """
    index = open_index(url)
    assert index.remote is not None
    precision = precision or finest(index.manifest.spec.precisions)
    rng, pool = np.random.default_rng(_SEED), min(pool, index.manifest.spec.used_rows // 2)
    if not pool:
        raise UsageError(f"the index at {url} has fewer than two rows; measure a larger index")
    with contextlib.ExitStack() as stack:
        folders, stores = {}, {}
        for name in (_PLAIN, _CACHED) if cache_bytes() else (_PLAIN,):
            folders[name] = CountingFolder(index.remote.url, index.remote.store)
            with mock.patch.dict(os.environ, {} if name == _CACHED else {SETTING: "0"}):
                store = TokenStore(replace(index, remote=folders[name]), precision)
            stores[name] = stack.enter_context(store)
        rows = store.row_ids()
        draws = [rng.choice(rows, pool, replace=False) for _ in range(repeats)]
        queries = [rng.choice(rows, min(_QUERY_ROWS, pool), replace=False) for _ in range(_QUERIES)]
        for name, each in stores.items():
            each.fetch_records(np.concatenate([*draws, *queries]))  # downloads checksums, and fills the block cache
            folders[name].lengths.clear()
        seconds: dict[str, list[list[float]]] = {name: [] for name in stores}  # of the draw, then of each query
        for number, draw in enumerate(draws):
            say(f"round {number + 1} of {repeats}")
            for name, each in stores.items():
                seconds[name].append([])
                for ids in (draw, *queries):
                    started = time.perf_counter()
                    each.fetch_records(ids)
                    seconds[name][-1].append(time.perf_counter() - started)
        if _CACHED in stores and folders[_CACHED].lengths:
            say(f"'{_CACHED}' is left out, because the block cache did not hold all blocks; raise {SETTING}")
            del stores[_CACHED]
        lengths = folders[_PLAIN].lengths
        lengths.clear()
        for query in queries:
            stores[_PLAIN].fetch_records(query)
    readers = {}
    for name in stores:
        p50, p99 = np.percentile([each[1:] for each in seconds[name]], [50, 99])
        rate = pool * store.record_bytes / float(np.median([each[0] for each in seconds[name]])) / 1e9
        readers[name] = {"gigabytes_per_second": rate, "query_p50_ms": p50 * 1e3, "query_p99_ms": p99 * 1e3}
    return {
        "url": url,
        "precision": precision,
        "blocks": pool,
        "query_blocks": len(queries[0]),
        "record_bytes": store.record_bytes,
        "requests_per_query": len(lengths) / len(queries),
        "bytes_per_query": sum(lengths) / len(queries),
        "dollars_per_million_queries": len(lengths) / len(queries) * _DOLLARS_PER_REQUEST * 1e6,
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
