"""Compares the processor time and memory of an index build with a loop that only
decodes and encodes images.

Linux only. The loop and one build per engine run alternately. Each run is a new
process.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from benchmarks.process import call_in_process
from benchmarks.report import Report
from pipelines.environment import environment
from storage_formats.errors import EdjeError

# batch size that a build uses by default, by device
_BATCH = {"cpu": 8, "cuda": 128}
_THREADS = 2
# workers of a build, by device; two workers share a GPU
_WORKERS = {"cpu": 1, "cuda": 2}
# option of prctl(2), from <linux/prctl.h>
_PR_SET_CHILD_SUBREAPER = 36
_SAMPLE_SECONDS = 0.5


def bench_build(
    images: Sequence[Path],
    model: Path,
    *,
    repeats: int = 3,
    engines: Sequence[str] = ("inline", "ray"),
    device: str = "cpu",
) -> Report:
    """Measure all runs on `images`, and return a report that compares each engine with
    the loop.

    Args:
        repeats: number of runs of the loop and of each engine.
        device: "cpu" or "cuda".
    """
    runs: dict[str, list[Report]] = {"bare loop": []}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "images.jsonl"
        index = Path(folder) / "index"
        # Paths in a list are relative to the directory of the list, so write absolute
        # paths.
        lines = [json.dumps({"path": str(path.absolute())}) + "\n" for path in images]
        source.write_text("".join(lines))
        python = [sys.executable, "-m"]
        loop = [*python, "benchmarks.build", str(source), str(model), device]
        commands = {"bare loop": loop}
        for engine in engines:
            options = (
                f"--engine {engine} --device {device} --workers {_WORKERS[device]}"
                f" --threads {_THREADS} --json --quiet"
            ).split()
            build = [*python, "pipelines.cli", "build", str(source), *options]
            commands[engine] = [*build, "--out", str(index), "--model", str(model)]
            runs[engine] = []
        for _ in range(repeats):
            for name, command in commands.items():
                shutil.rmtree(index, ignore_errors=True)
                runs[name].append(call_in_process("benchmarks.build:measure", *command))
    settings = {
        "images": len(images),
        "model": model.name,
        "device": device,
        "threads": _THREADS,
        "batch_size": _BATCH[device],
        "repeats": repeats,
        "engines": list(engines),
    }
    summary = {}
    for name, of_name in runs.items():
        # Ratios and differences compare a build with the loop of the same round.
        rounds = list(zip(of_name, runs["bare loop"], strict=True))
        stages = {
            stage: statistics.median(
                run["stdout"]["stage_seconds"][stage] for run in of_name
            )
            for stage in of_name[0]["stdout"]["stage_seconds"]
        }
        summary[name] = {
            **{
                key: statistics.median(run[key] for run in of_name)
                for key in ("wall", "cpu", "peak_pss")
            },
            "cpu_ratio": statistics.median(a["cpu"] / b["cpu"] for a, b in rounds),
            "extra_pss": statistics.median(
                a["peak_pss"] - b["peak_pss"] for a, b in rounds
            ),
            "stage_seconds": stages,
            "model_images_per_second": len(images) / stages["encode"],
        }
    return {
        "environment": environment(),
        "settings": settings,
        "runs": runs,
        "summary": summary,
    }


def report_lines(report: Report) -> Iterator[str]:
    """Yield the lines of the report as text."""
    for name, row in report["summary"].items():
        yield (
            f"{name:10} cpu {row['cpu']:8.1f} s  x{row['cpu_ratio']:.3f}   wall"
            f" {row['wall']:8.1f} s   memory {row['peak_pss'] / 2**20:6.0f} MiB"
            f" ({row['extra_pss'] / 2**20:+.0f})"
        )
        stages = "  ".join(
            f"{stage} {seconds:.1f}" for stage, seconds in row["stage_seconds"].items()
        )
        yield (
            f"{'':10} seconds per stage: {stages}   model"
            f" {row['model_images_per_second']:.1f} images/s"
        )


def bare_loop(image_list: str, model: str, device: str) -> Report:
    """Do the minimum work of a build: decode and preprocess every image in the list,
    and run the model.

    Returns:
        The number of images, and the seconds of both stages.
    """
    from PIL import Image

    from edje_index.indexing.image_encoder import ImageEncoder

    encoder = ImageEncoder.open(model, device=device, threads=_THREADS)
    size = _BATCH[device]
    paths = [
        json.loads(line)["path"] for line in Path(image_list).read_text().splitlines()
    ]
    batch = encoder.new_batch(size)
    count = 0
    decode_seconds = 0.0
    model_seconds = 0.0
    for start in range(0, len(paths), size):
        started = time.perf_counter()
        part = paths[start : start + size]
        for position, path in enumerate(part):
            with Image.open(path) as image:
                encoder.preprocess(image.convert("RGB"), batch[position])
        loaded = time.perf_counter()
        encoder.encode(batch[: len(part)])
        count += len(part)
        decode_seconds += loaded - started
        model_seconds += time.perf_counter() - loaded
    return {
        "images": count,
        "stage_seconds": {"decode": decode_seconds, "encode": model_seconds},
    }


def measure(*command: str) -> Report:
    """Run a command that prints a JSON object, and return the cost of the command and
    its descendants.

    Returns:
        `wall`: seconds; `cpu`: user and system seconds; `peak_pss`: largest sampled sum
        of the proportional set sizes of all processes, in bytes; `stdout`: the object
        that the command printed.
    """
    # Daemons of Ray outlive the process that started them. As a subreaper, this process
    # becomes their parent and can measure them.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    peak = 0
    cpu_of_process = dict[int, float]()
    here = psutil.Process()
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr)
        while process.poll() is None:
            pss = 0
            for child in here.children(recursive=True):
                # psutil raises an error if the child ended after it was listed.
                with contextlib.suppress(psutil.Error):
                    times = child.cpu_times()
                    cpu_of_process[child.pid] = max(
                        cpu_of_process.get(child.pid, 0.0), times.user + times.system
                    )
                    pss += child.memory_full_info().pss
            peak = max(peak, pss)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_SAMPLE_SECONDS)
        wall = time.perf_counter() - started
        stdout.seek(0)
        stderr.seek(0)
        if process.returncode:
            raise EdjeError(
                f"'{' '.join(command[:4])} ...' failed:"
                f" {' '.join(stderr.read().splitlines()[-3:])}"
            )
        printed = json.load(stdout)
    # `usage` includes only children that have ended. The sampled times also include
    # daemons that are still running, but miss the time after the last sample of each
    # process. The larger sum is nearer to the true time.
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = max(usage.ru_utime + usage.ru_stime, sum(cpu_of_process.values()))
    return {"wall": wall, "cpu": cpu, "peak_pss": peak, "stdout": printed}


if __name__ == "__main__":
    print(json.dumps(bare_loop(*sys.argv[1:])))
