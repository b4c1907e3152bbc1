"""Compares the processor time and memory of an index build with a loop that only decodes and encodes images.

The loop (`benchmarks.bare_loop`) and one build per engine run alternately. Each run is a new process.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.process_tree import measure_in_new_process
from pipelines.environment import environment


@dataclass(frozen=True)
class BuildBench:
    """Settings of `bench_build`.

    Attributes:
        images: paths of images that can be decoded.
        model: directory of the model bundle.
        folder: folder for temporary indexes, which are removed.
        threads: CPU threads of the model.
        batch_size: images per forward pass of the model.
        repeats: number of runs of each engine and of the loop.
        engines: execution engines to compare with the loop.
    """

    images: list[Path]
    model: Path
    folder: Path
    threads: int = 2
    batch_size: int = 32
    repeats: int = 3
    engines: tuple[str, ...] = ("inline", "ray")


def bench_build(bench: BuildBench) -> dict[str, Any]:
    """Measure all runs, and return a report that compares each engine with the loop."""
    bench.folder.mkdir(parents=True, exist_ok=True)
    listing = bench.folder / "images.txt"
    images = [str(path.absolute()) for path in bench.images]  # paths of a list are relative to the list
    listing.write_text("".join(f"{path}\n" for path in images))
    source = bench.folder / "images.jsonl"
    source.write_text("".join(json.dumps({"path": path}) + "\n" for path in images))
    subjects = {"bare loop": _bare_loop(bench, listing)}
    subjects |= {engine: _build(bench, engine, source) for engine in bench.engines}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in subjects}
    for _ in range(bench.repeats):
        for name, command in subjects.items():
            shutil.rmtree(bench.folder / "index", ignore_errors=True)
            runs[name].append(measure_in_new_process(command))
    shutil.rmtree(bench.folder / "index", ignore_errors=True)
    settings = {**asdict(bench), "images": len(bench.images), "model": bench.model.name}
    settings.pop("folder")
    return {"environment": environment(), "settings": settings, "runs": runs, "summary": _summary(runs)}


def _bare_loop(bench: BuildBench, listing: Path) -> list[str]:
    options = ["--threads", str(bench.threads), "--batch-size", str(bench.batch_size)]
    return [sys.executable, "-m", "benchmarks.bare_loop", str(bench.model), str(listing), *options]


def _build(bench: BuildBench, engine: str, source: Path) -> list[str]:
    options = {"--out": bench.folder / "index", "--model": bench.model, "--engine": engine, "--device": "cpu"}
    options |= {"--threads": bench.threads, "--batch-size": bench.batch_size, "--workers": 1}
    flat = [str(part) for pair in options.items() for part in pair]
    return [sys.executable, "-m", "pipelines.cli", "build", str(source), *flat, "--json", "--quiet"]


def _summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Return medians over the runs of the loop and of each engine."""
    # `cpu_ratio` and `extra_pss` (bytes) compare each run with the bare-loop run of the same round.
    bare_runs = runs["bare loop"]
    return {
        name: {
            "wall": statistics.median(run["wall"] for run in subject_runs),
            "cpu": statistics.median(run["cpu"] for run in subject_runs),
            "peak_pss": statistics.median(run["peak_pss"] for run in subject_runs),
            "cpu_ratio": statistics.median(
                run["cpu"] / bare["cpu"] for run, bare in zip(subject_runs, bare_runs, strict=True)
            ),
            "extra_pss": statistics.median(
                run["peak_pss"] - bare["peak_pss"] for run, bare in zip(subject_runs, bare_runs, strict=True)
            ),
        }
        for name, subject_runs in runs.items()
    }
