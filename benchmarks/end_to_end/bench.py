"""Builds every system from the same vectors, and measures recall, latency, memory and disk space."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.end_to_end.collection import Collection, sample_queries, write_collection
from benchmarks.end_to_end.systems import SYSTEMS, FinalScoreSearch
from benchmarks.fetch.memory_pressure import memory_cap
from benchmarks.steps import run_step
from edje_index.progress import OnProgress
from edje_index.search.token_index import TokenIndex
from pipelines.environment import environment
from storage_formats.errors import UsageError

_MODULE = "benchmarks.end_to_end.run"
_NEEDED_BYTES = 2 << 30  # memory of a process that searches with torch
CUTOFFS = (1, 5, 10)


@dataclass(frozen=True)
class EndToEndBench:
    """Settings of `bench_end_to_end`.

    Attributes:
        index: index that the embeddings and tokens come from.
        captions: caption file of images in the index. Its captions are the queries.
        folder: missing or empty directory for the files of the systems. It is removed at the end.
        images: base directory of relative image paths; None for the directory of `captions`.
        model: model bundle; None for the bundle that built the index.
        systems: names of the systems to measure, keys of `SYSTEMS`; empty for all.
        queries: number of random captions to search for.
        memory_gib: GiB of memory that all searches may use, including the page cache; None for all memory.
        seed: seed of the sample of captions.
    """

    index: Path
    captions: Path
    folder: Path
    images: Path | None = None
    model: Path | None = None
    systems: tuple[str, ...] = ()
    queries: int = 200
    memory_gib: float | None = None
    seed: int = 0


def bench_end_to_end(bench: EndToEndBench, on_progress: OnProgress) -> dict[str, Any]:
    """Run the benchmark and return the report.

    Raises:
        UsageError: the folder is not empty, a system is unknown, no caption can be searched for, or the memory is too
            small for a search.
    """
    names = bench.systems or tuple(SYSTEMS)
    unknown = sorted(set(names) - set(SYSTEMS))
    if unknown:
        raise UsageError(f"there is no system {unknown[0]!r}; choose from: {', '.join(SYSTEMS)}", parameter="systems")
    if bench.folder.exists() and any(bench.folder.iterdir()):
        raise UsageError(f"{bench.folder} exists and is not empty; choose a new folder", parameter="folder")
    bench.folder.mkdir(parents=True, exist_ok=True)
    try:
        index = TokenIndex.open(bench.index, bench.model)
        write_collection(
            bench.folder, index, sample_queries(index, bench.captions, bench.images, bench.queries, bench.seed)
        )
        collection = Collection.open(bench.folder)
        exact = collection.exact(max(CUTOFFS))
        results = []
        for number, name in enumerate(names):
            on_progress(f"measuring {name}", number, len(names))
            results.append(_measure(bench, name, collection, index, exact))
    finally:
        shutil.rmtree(bench.folder, ignore_errors=True)
    count, m, d = collection.tokens.shape
    return {
        "environment": environment(),
        "settings": asdict(bench),
        "collection": {"images": count, "block_shape": [m, d], "queries": len(collection.queries)},
        "systems": results,
    }


def _measure(
    bench: EndToEndBench, name: str, collection: Collection, index: TokenIndex, exact: Sequence[Sequence[int]]
) -> dict[str, Any]:
    system = SYSTEMS[name]
    result: dict[str, Any] = {"name": name, "settings": system.settings, "effort": system.effort, "runs": []}
    if system.package is not None and importlib.util.find_spec(system.package) is None:
        return {**result, "problem": f"{system.package} is not installed"}
    folder = bench.folder / name.replace(" ", "-")
    folder.mkdir()
    if system is FinalScoreSearch:
        (folder / "source").symlink_to(index.root)
        (folder / "model").symlink_to(index.model.info.path.resolve())
    try:
        built = run_step(_MODULE, "build", name, bench.folder)
        with _memory(bench.memory_gib) as described:
            for effort in system.efforts:
                searched = run_step(_MODULE, "search", name, bench.folder, effort, max(CUTOFFS))
                result["runs"].append({"effort": effort, **figures(searched, collection, exact)})
    except subprocess.CalledProcessError:
        return {**result, "problem": "the system failed; the error message is on standard error"}
    finally:
        shutil.rmtree(folder)
    stored = built["bytes"] or sum(path.stat().st_size for path in index.root.rglob("*") if path.is_file())
    return {
        **result,
        "build_seconds": built["seconds"],
        "bytes_per_image": stored / len(collection.tokens),
        "memory_cap": described,
    }


def _memory(gib: float | None) -> contextlib.AbstractContextManager[str | None]:
    """Return a context in which about `gib` GiB of memory are free. None leaves all memory free."""
    return contextlib.nullcontext() if gib is None else memory_cap(int(gib * 2**30), _NEEDED_BYTES)


def figures(searched: dict[str, Any], collection: Collection, exact: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the recall in percent, the latency, and the memory of one run.

    Args:
        searched: result of the step `search`.
        collection: provides the queries.
        exact: positions of the exact best images for each query.
    """
    hits = [
        [position == query.relevant for position in positions]
        for query, positions in zip(collection.queries, searched["positions"], strict=True)
    ]
    shared = [len(set(found) & set(best)) / len(best) for found, best in zip(searched["positions"], exact, strict=True)]
    p50, p95 = np.percentile(searched["milliseconds"], [50, 95])
    return {
        "recall": {str(k): 100 * float(np.mean([any(row[:k]) for row in hits])) for k in CUTOFFS},
        "of_exact": 100 * float(np.mean(shared)),
        "p50_ms": float(p50),
        "p95_ms": float(p95),
        "memory_bytes": searched["peak_bytes"],
        "libraries_bytes": searched["libraries_bytes"],
    }
