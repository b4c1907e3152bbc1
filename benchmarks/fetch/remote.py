"""Measures fetches from an index on an object store. Other libraries fetch the same ranges in turn."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks.fetch.workloads import Ids
from pipelines.environment import environment
from storage_formats.codecs import Records, codec
from storage_formats.errors import UsageError
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.mirror import open_index
from storage_formats.format.object_store import ObjectFolder
from storage_formats.reading.block_cache import SETTING, cache_bytes
from storage_formats.token_store import TokenStore

_DOLLARS_PER_REQUEST = 0.4e-6  # GET requests of S3 Standard, us-east-1; transfers within a region are free
_QUERY_ROWS = 100
_QUERIES = 50
_CONCURRENCY = 64
_GAP_BYTES = 64 << 10
_SEED = 17
_CACHED = "edje, cached"
_CACHE_REMEDY = f"raise {SETTING}, or free space on the disk of the cache directory"

Fetch = Callable[[Ids], Records]


@dataclass(frozen=True)
class RemoteBench:
    """What to measure.

    Attributes:
        url: URL of the index.
        precision: precision to read; None means the first of the index.
        pool: number of blocks of a large fetch, at most half the rows of the index.
        repeats: number of large fetches and of rounds of queries.
        peers: whether to measure other libraries too.
    """

    url: str
    precision: str | None = None
    pool: int = 50_000
    repeats: int = 5
    peers: bool = False


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


def bench_remote(bench: RemoteBench, on_line: Callable[[str], None]) -> dict[str, Any]:
    """Measure the index at `bench.url` and return the results as a JSON object.

    Raises:
        UsageError: the index does not have the precision, or has fewer than two rows.
    """
    index = open_index(bench.url)
    assert index.remote is not None
    folder, cached_folder = (CountingFolder(index.remote.url, index.remote.store) for _ in range(2))
    precision = bench.precision or index.manifest.spec.precisions[0]
    rng, pool = np.random.default_rng(_SEED), min(bench.pool, index.manifest.spec.used_rows // 2)
    if not pool:
        raise UsageError(f"the index at {bench.url} has fewer than two rows; measure a larger index")
    with contextlib.ExitStack() as stack:
        with _no_cached_blocks():
            store = stack.enter_context(TokenStore(replace(index, remote=folder), precision))
        rows = store.row_ids()
        subjects: dict[str, Fetch] = {"edje": store.fetch_records}
        if cache_bytes():
            cached_store = stack.enter_context(TokenStore(replace(index, remote=cached_folder), precision))
            subjects[_CACHED] = cached_store.fetch_records
        subjects |= dict(_peers(index, precision)) if bench.peers else {}
        draws = [rng.choice(rows, pool, replace=False) for _ in range(bench.repeats)]
        queries = [rng.choice(rows, min(_QUERY_ROWS, pool), replace=False) for _ in range(_QUERIES)]
        for name in [name for name in subjects if name.startswith("edje")]:
            subjects[name](np.concatenate([*draws, *queries]))  # downloads the checksums, and fills the block cache
        cached_folder.lengths.clear()
        _compare(subjects, queries[0])
        seconds: dict[str, list[float]] = {name: [] for name in subjects}
        latencies: dict[str, list[float]] = {name: [] for name in subjects}
        for number, draw in enumerate(draws):
            on_line(f"round {number + 1} of {bench.repeats}")
            for name, fetch in subjects.items():
                seconds[name].append(_timed(fetch, draw))
                latencies[name] += [_timed(fetch, query) for query in queries]
        requests, query_bytes = _requests(store, folder, queries)
    if cached_folder.lengths:
        on_line(f"'{_CACHED}' is left out, because the block cache did not hold all blocks; {_CACHE_REMEDY}")
        del subjects[_CACHED]
    return {
        "url": bench.url,
        "precision": precision,
        "blocks": pool,
        "query_blocks": len(queries[0]),
        "record_bytes": store.record_bytes,
        "requests_per_query": requests,
        "bytes_per_query": query_bytes,
        "dollars_per_million_queries": requests * _DOLLARS_PER_REQUEST * 1e6,
        "readers": {name: _summary(seconds[name], latencies[name], pool * store.record_bytes) for name in subjects},
        "environment": environment(),
    }


@contextlib.contextmanager
def _no_cached_blocks() -> Iterator[None]:
    """Context manager in which stores are opened without the block cache."""
    before = os.environ.get(SETTING)
    os.environ[SETTING] = "0"
    try:
        yield
    finally:
        os.environ.pop(SETTING)
        if before is not None:
            os.environ[SETTING] = before


def _summary(seconds: list[float], latencies: list[float], size: int) -> dict[str, float]:
    p50, p99 = np.percentile(latencies, [50, 99])
    return {
        "gigabytes_per_second": size / float(np.median(seconds)) / 1e9,
        "query_p50_ms": float(p50) * 1e3,
        "query_p99_ms": float(p99) * 1e3,
    }


def _timed(fetch: Fetch, ids: Ids) -> float:
    started = time.perf_counter()
    fetch(ids)
    return time.perf_counter() - started


def _compare(subjects: Mapping[str, Fetch], ids: Ids) -> None:
    """Raise RuntimeError unless all readers return the same bytes for the rows `ids`."""
    expected = subjects["edje"](ids)
    for name, fetch in subjects.items():
        if not np.array_equal(np.asarray(fetch(ids)).reshape(len(ids), -1), expected):
            raise RuntimeError(f"the library {name} reads other bytes than edje, so the two cannot be compared")


def _requests(store: TokenStore, folder: CountingFolder, queries: list[Ids]) -> tuple[float, float]:
    """Return the mean number of requests per query, and the mean number of bytes per query."""
    folder.lengths.clear()
    for query in queries:
        store.fetch_records(query)
    return len(folder.lengths) / len(queries), sum(folder.lengths) / len(queries)


def _peers(index: CommittedIndex, precision: str) -> Iterator[tuple[str, Fetch]]:
    """Yield the name and the fetch function of each installed library."""
    yield "obstore", _obstore(index, precision)
    for name, package, make in (("tensorstore", "tensorstore", _tensorstore), ("zarrs", "zarrs", _zarrs)):
        try:
            import_module(package)
        except ModuleNotFoundError:
            continue
        yield name, make(index, precision)


def _array_key(index: CommittedIndex, precision: str) -> str:
    layout = Layout(index.root)
    return layout.relative(layout.token_array(precision))


def _obstore(index: CommittedIndex, precision: str) -> Fetch:
    """Return a function that fetches with obstore.

    All shards are read at the same time. Neighbouring ranges are merged in the same way as by this project's reader.
    """
    import obstore

    assert index.remote is not None
    spec, store = index.manifest.spec, index.remote.store
    token_codec, layout = codec(precision, spec.block_shape), Layout(index.root)
    size, dimensions = token_codec.record_bytes, len(token_codec.record_shape)

    async def read(shard: int, positions: Ids) -> list[Any]:
        key = layout.relative(layout.token_shard(precision, shard, dimensions))
        starts = (positions * size).tolist()
        return list(
            await obstore.get_ranges_async(store, key, starts=starts, lengths=[size] * len(starts), coalesce=_GAP_BYTES)
        )

    async def read_all(ids: Ids) -> Records:
        order, out = np.argsort(ids), np.empty((len(ids), size), np.uint8)
        shards, firsts = np.unique(ids[order] // spec.shard_size, return_index=True)
        parts = np.split(order, firsts[1:])
        pairs = zip(shards.tolist(), parts, strict=True)
        blocks = await asyncio.gather(*(read(shard, ids[part] % spec.shard_size) for shard, part in pairs))
        for part, of_shard in zip(parts, blocks, strict=True):
            for position, data in zip(part.tolist(), of_shard, strict=True):
                out[position] = np.frombuffer(data, np.uint8)
        return out

    return lambda ids: asyncio.run(read_all(ids))


def _tensorstore(index: CommittedIndex, precision: str) -> Fetch:
    ts: Any = import_module("tensorstore")
    _, bucket, path, *_ = urlsplit(str(index.location))
    kvstore = {"driver": "s3", "bucket": bucket, "path": f"{path.strip('/')}/{_array_key(index, precision)}/"}
    if endpoint := os.environ.get("AWS_ENDPOINT_URL"):
        kvstore |= {"endpoint": endpoint, "aws_region": os.environ.get("AWS_REGION", "us-east-1")}
    context = {"s3_request_concurrency": {"limit": _CONCURRENCY}, "cache_pool": {"total_bytes_limit": 0}}
    array = ts.open(
        {"driver": "zarr3", "kvstore": kvstore},
        read=True,
        context=ts.Context(context),
        recheck_cached_metadata=False,
        recheck_cached_data=False,
    ).result()
    return lambda ids: np.ascontiguousarray(array[ids].read().result()).view(np.uint8).reshape(len(ids), -1)


def _zarrs(index: CommittedIndex, precision: str) -> Fetch:
    """Return a function that fetches blocks with zarr-python. It reads through obstore and decodes with zarrs."""
    zarr: Any = import_module("zarr")
    storage: Any = import_module("zarr.storage")
    stores: Any = import_module("obstore.store")
    # zarrs contains an older obstore, which does not know every option of the store that edje uses.
    store = stores.from_url(str(index.location), client_options={"allow_http": True})
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline", "async.concurrency": _CONCURRENCY}):
        array = zarr.open_array(storage.ObjectStore(store, read_only=True), path=_array_key(index, precision), mode="r")

    def fetch(ids: Ids) -> Records:
        order = np.argsort(ids)
        out = np.empty((len(ids), codec(precision, index.manifest.spec.block_shape).record_bytes), np.uint8)
        out[order] = np.ascontiguousarray(array.oindex[ids[order]]).view(np.uint8).reshape(len(ids), -1)
        return out

    return fetch


def write_remote_report(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write `<date>-fetch-url.md` and `<date>-fetch-url.json` to `folder`. Return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{result['environment']['date']}-fetch-url"
    text, data = folder / f"{stem}.md", folder / f"{stem}.json"
    text.write_text("\n".join(describe_remote(result)) + "\n")
    data.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    return [text, data]


def describe_remote(result: Mapping[str, Any]) -> list[str]:
    """Format the result of `bench_remote` as lines of Markdown."""
    lines = [
        f"{result['url']}, {result['precision']}: random blocks of {result['record_bytes']:,} bytes; fetches of "
        f"{result['blocks']:,} blocks, queries of {result['query_blocks']}",
        "",
        "| reader | GB/s | query p50, ms | query p99, ms |",
        "|---|---|---|---|",
    ]
    for name, each in result["readers"].items():
        values = each["gigabytes_per_second"], each["query_p50_ms"], each["query_p99_ms"]
        lines.append(f"| {name} | {values[0]:.3f} | {values[1]:.1f} | {values[2]:.1f} |")
    cost = f"{result['dollars_per_million_queries']:.2f} USD per million queries at the price of S3 Standard"
    size = f"{result['bytes_per_query'] / 1e6:.2f} MB"
    return [*lines, "", f"edje: {result['requests_per_query']:.1f} requests and {size} per query; {cost}"]
