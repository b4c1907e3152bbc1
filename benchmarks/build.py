"""Compares the processor time and memory of an index build with a loop that only decodes and encodes images.

The loop (`benchmarks.bare_loop`) and one build per engine run alternately. Each run is a new process. Beside them,
`benchmarks.flop_limit` measures how many operations per second the processor executes at most.
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
        dtype: data type of the model's matrix products: "float32" or "bfloat16".
        repeats: number of runs of each engine and of the loop.
        engines: execution engines to compare with the loop.
    """

    images: list[Path]
    model: Path
    folder: Path
    threads: int = 2
    batch_size: int = 8
    dtype: str = "float32"
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
    limits: list[dict[str, float]] = []
    for _ in range(bench.repeats):
        limits.append(_flop_limit(bench))
        for name, command in subjects.items():
            shutil.rmtree(bench.folder / "index", ignore_errors=True)
            runs[name].append(measure_in_new_process(command))
    shutil.rmtree(bench.folder / "index", ignore_errors=True)
    settings = {**asdict(bench), "images": len(bench.images), "model": bench.model.name}
    settings.pop("folder")
    summary = _summary(runs, limits)
    return {"environment": environment(), "settings": settings, "limits": limits, "runs": runs, "summary": summary}


def report_lines(report: dict[str, Any]) -> list[str]:
    """Return the summary of the report of `bench_build` as lines of text."""
    lines = []
    for name, row in report["summary"].items():
        stages = "  ".join(f"{stage} {seconds:.1f}" for stage, seconds in row["stage_seconds"].items())
        lines += [
            f"{name:10} cpu {row['cpu']:8.1f} s  x{row['cpu_ratio']:.3f}   wall {row['wall']:8.1f} s   "
            f"memory {row['peak_pss'] / 2**20:6.0f} MiB ({row['extra_pss'] / 2**20:+.0f})",
            f"{'':10} seconds per stage: {stages}   model {row['model_images_per_second']:.1f} images/s, "
            f"{row['flop_share']:.0%} of the limit",
        ]
    limit = max(report["limits"], key=lambda measured: measured["flop_per_second"])
    lines.append(
        f"limit      {limit['flop_per_second'] / 1e9:.0f} GFLOP/s in a large matrix product; "
        f"the model takes {limit['flop_per_image'] / 1e9:.2f} GFLOP per image"
    )
    return lines


def _flop_limit(bench: BuildBench) -> dict[str, float]:
    options = ["--threads", str(bench.threads), "--dtype", bench.dtype]
    limit: dict[str, float] = measure_in_new_process(
        [sys.executable, "-m", "benchmarks.flop_limit", str(bench.model), *options]
    )["stdout"]
    return limit


def _bare_loop(bench: BuildBench, listing: Path) -> list[str]:
    options = ["--threads", str(bench.threads), "--batch-size", str(bench.batch_size), "--dtype", bench.dtype]
    return [sys.executable, "-m", "benchmarks.bare_loop", str(bench.model), str(listing), *options]


def _build(bench: BuildBench, engine: str, source: Path) -> list[str]:
    options = {"--out": bench.folder / "index", "--model": bench.model, "--engine": engine, "--device": "cpu"}
    options |= {"--threads": bench.threads, "--batch-size": bench.batch_size, "--workers": 1, "--dtype": bench.dtype}
    flat = [str(part) for pair in options.items() for part in pair]
    return [sys.executable, "-m", "pipelines.cli", "build", str(source), *flat, "--json", "--quiet"]


def _summary(runs: dict[str, list[dict[str, Any]]], limits: list[dict[str, float]]) -> dict[str, dict[str, Any]]:
    """Return medians over the runs of the loop and of each engine."""
    # `cpu_ratio` and `extra_pss` (bytes) compare each run with the bare-loop run of the same round.
    bare_runs = runs["bare loop"]
    images = bare_runs[0]["stdout"]["images"]
    limit = max(limits, key=lambda measured: measured["flop_per_second"])
    summary = {}
    for name, subject_runs in runs.items():
        pairs = list(zip(subject_runs, bare_runs, strict=True))
        stages = [run["stdout"]["stage_seconds"] for run in subject_runs]
        median_stages = {stage: statistics.median(run[stage] for run in stages) for stage in stages[0]}
        model_rate = images / median_stages["encode"]
        summary[name] = {
            "wall": statistics.median(run["wall"] for run in subject_runs),
            "cpu": statistics.median(run["cpu"] for run in subject_runs),
            "peak_pss": statistics.median(run["peak_pss"] for run in subject_runs),
            "cpu_ratio": statistics.median(run["cpu"] / bare["cpu"] for run, bare in pairs),
            "extra_pss": statistics.median(run["peak_pss"] - bare["peak_pss"] for run, bare in pairs),
            "stage_seconds": median_stages,
            "model_images_per_second": model_rate,
            "flop_share": model_rate * limit["flop_per_image"] / limit["flop_per_second"],
        }
    return summary
