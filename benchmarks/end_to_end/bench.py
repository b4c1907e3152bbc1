"""Compares whole search systems on the same embeddings, tokens and queries: recall, latency, memory and disk space."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.end_to_end.collection import Collection, sample_queries, write_collection
from benchmarks.end_to_end.systems import SYSTEMS, FinalScoreSearch
from benchmarks.plots import COLOURS, new_figure, save_figure
from benchmarks.report import Say, machine, table
from edje_index.search.token_index import TokenIndex
from pipelines.environment import environment
from storage_formats.errors import UsageError

CUTOFFS = (1, 5, 10)


def bench_end_to_end(
    index: Path,
    captions: Path,
    folder: Path,
    say: Say,
    *,
    images: Path | None = None,
    model: Path | None = None,
    systems: Sequence[str] = (),
    queries: int = 200,
    seed: int = 0,
) -> dict[str, Any]:
    """Build every system from the same vectors, search with each, and return the report.

    Args:
        index: index that the embeddings and tokens come from.
        captions: caption file of images in the index. Its captions are the queries.
        folder: missing or empty directory for the files of the systems. It is removed at the end.
        say: receives one line of text per system.
        images: base directory of relative image paths; None for the directory of `captions`.
        model: model bundle; None for the bundle that built the index.
        systems: names of the systems to measure, keys of `SYSTEMS`; empty for all.
        queries: number of random captions to search for.
        seed: seed of the sample of captions.

    Raises:
        UsageError: the folder is not empty, a system is unknown, or no caption can be searched for.
    """
    names = systems or tuple(SYSTEMS)
    unknown = sorted(set(names) - set(SYSTEMS))
    if unknown:
        raise UsageError(f"there is no system {unknown[0]!r}; choose from: {', '.join(SYSTEMS)}", parameter="systems")
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} exists and is not empty; choose a new folder", parameter="folder")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        opened = TokenIndex.open(index, model)
        write_collection(folder, opened, sample_queries(opened, captions, images, queries, seed))
        collection = Collection.open(folder)
        exact = collection.exact(max(CUTOFFS))
        results = []
        for number, name in enumerate(names):
            say(f"measuring {name}, {number + 1} of {len(names)}")
            results.append(_measure(folder, name, collection, opened, exact))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    count, m, d = collection.tokens.shape
    return {
        "environment": environment(),
        "settings": {"index": index.name, "captions": captions.name, "queries": queries, "seed": seed},
        "collection": {"images": count, "block_shape": [m, d], "queries": len(collection.queries)},
        "systems": results,
    }


def _measure(
    folder: Path, name: str, collection: Collection, index: TokenIndex, exact: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Build one system and search with it, each in a process of its own."""

    def step(*arguments: object) -> dict[str, Any]:
        command = [sys.executable, "-m", "benchmarks.end_to_end.systems", *map(str, arguments)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result

    system = SYSTEMS[name]
    result: dict[str, Any] = {"name": name, "settings": system.settings, "effort": system.effort, "runs": []}
    if system.package is not None and importlib.util.find_spec(system.package) is None:
        return {**result, "problem": f"{system.package} is not installed"}
    files = folder / name.replace(" ", "-")
    files.mkdir()
    if system is FinalScoreSearch:
        (files / "source").symlink_to(index.root)
        (files / "model").symlink_to(index.model.info.path.resolve())
    try:
        built = step("build", name, folder)
        for effort in system.efforts:
            searched = step("search", name, folder, effort, max(CUTOFFS))
            result["runs"].append({"effort": effort, **figures(searched, collection, exact)})
    except subprocess.CalledProcessError:
        return {**result, "problem": "the system failed; the error message is on standard error"}
    finally:
        shutil.rmtree(files)
    stored = built["bytes"] or sum(path.stat().st_size for path in index.root.rglob("*") if path.is_file())
    return {**result, "build_seconds": built["seconds"], "bytes_per_image": stored / len(collection.tokens)}


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


_METHOD = """Every system gets the same embeddings, tokens and queries. Each run is a process of its own that searches
for one caption after the other, after three searches to warm up.

- R@k: percentage of the captions whose photo is among the first k hits.
- Of exact ten: percentage of the ten photos with the highest MaxSim that the system finds. The joint encoder sorts by
  another score, so it may find fewer of these photos.
- Memory: peak resident memory, including mapped files. The number in brackets is the memory of the imported libraries.
- Bytes per photo: all files of the system. The row with the joint encoder counts the index with all its precisions.
- Only the row with the joint encoder includes the time of the text tower."""
_COLUMNS = ("R@1", "R@5", "R@10", "of exact ten", "p50 ms", "p95 ms", "memory MiB", "bytes per photo", "build s")


def report_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the report in Markdown."""
    collection = report["collection"]
    m, d = collection["block_shape"]
    yield f"# Whole systems, {report['environment']['date']}\n"
    yield machine(report["environment"])
    yield f"{collection['images']:,} photos of {m} x {d} tokens, {collection['queries']:,} captions.\n"
    rows = []
    for system in report["systems"]:
        if "problem" in system:
            rows.append((system["name"], system["problem"], *[""] * len(_COLUMNS)))
        else:
            rows += [
                (system["name"], f"{system['effort']} {run['effort']}", *_cells(system, run)) for run in system["runs"]
            ]
    yield from table(("system", "setting", *_COLUMNS), rows)
    yield "\n## Settings\n"
    yield from (f"- {system['name']}: {system['settings']}." for system in report["systems"])
    yield f"\n## Method\n\n{_METHOD}"


def _cells(system: dict[str, Any], run: dict[str, Any]) -> list[str]:
    return [
        *(f"{value:.1f}" for value in run["recall"].values()),
        f"{run['of_exact']:.1f}",
        f"{run['p50_ms']:.1f}",
        f"{run['p95_ms']:.1f}",
        f"{run['memory_bytes'] / 2**20:.0f} ({run['libraries_bytes'] / 2**20:.0f})",
        f"{system['bytes_per_image']:,.0f}",
        f"{system['build_seconds']:.1f}",
    ]


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw R@10 against p95, one line per system."""
    figure, axes = new_figure("Recall by latency", "p95 of a search, ms", "R@10, %")
    for number, system in enumerate(report["systems"]):
        runs = system["runs"]
        if "problem" not in system:
            times, recalls = [run["p95_ms"] for run in runs], [run["recall"]["10"] for run in runs]
            axes.plot(times, recalls, color=COLOURS[number % len(COLOURS)], marker="o", label=system["name"])
    axes.set_xscale("log")
    axes.legend(frameon=False)
    save_figure(figure, path)
