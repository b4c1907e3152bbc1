"""Measures the speed of the disk with fio (https://fio.readthedocs.io).

fio reads the files of the index with O_DIRECT. A read is one record, rounded up to whole sectors.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fetch.records import StoredRecords
from benchmarks.fetch.workloads import Workload
from storage_formats.errors import EdjeError

_SEQUENTIAL_BYTES = 1 << 20
_SEQUENTIAL_DEPTH = 32
_MAX_FILES = 1000  # all names go on one command line
_ENGINES = ("io_uring", "libaio")


@dataclass(frozen=True)
class Fio:
    """An installed fio program: the version, and the fastest I/O engine that the kernel permits."""

    version: str
    engine: str

    def describe(self, depth: int) -> str:
        return f"{self.version}, {self.engine}, O_DIRECT, depth {depth}"


def find_fio(sample: Path) -> Fio | None:
    """Return the installed fio program. Return None if fio is missing or cannot read the file `sample`."""
    if not shutil.which("fio"):
        return None
    version = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=False).stdout.strip()
    options = [
        f"--filename={_escape(sample)}",
        "--rw=randread",
        "--bs=4096",
        "--io_size=4096",
        "--direct=1",
        "--readonly",
    ]
    for engine in _ENGINES:
        command = ["fio", "--name=try", *options, f"--ioengine={engine}"]
        if not subprocess.run(command, capture_output=True, check=False).returncode:
            return Fio(version, engine)
    return None


def measure_with_fio(fio: Fio, source: StoredRecords, workload: Workload, depth: int, seed: int) -> dict[str, Any]:
    """Measure fio reads, one read per block of `workload`, in random order or in file order.

    Reads are made in batches of `workload.pool` reads. The latency of a batch is the time from the start of its first
    read to the end of its last read.
    """
    pool = min(workload.pool, source.rows)
    calls = max(1, min(workload.blocks, source.rows) // pool)
    shared = _pattern(source, workload, pool) | {"directory": _escape(source.array_path), "filename": _names(source)}
    if calls > 1:
        shared |= {"iodepth": pool, "iodepth_batch_submit": pool, "iodepth_batch_complete_min": pool}
    elif workload.pattern == "random":
        shared |= {"iodepth": depth}
    jobs = _run(fio, shared, [seed * calls + call for call in range(calls)])
    reads = [job["read"] for job in jobs]
    milliseconds = [max(read["runtime"], 1) for read in reads]
    latencies = [read["lat_ns"]["max"] / 1e9 for read in reads] if calls > 1 else [milliseconds[0] / 1e3]
    total = sum(read["io_bytes"] for read in reads)
    percents = [job["usr_cpu"] + job["sys_cpu"] for job in jobs]
    return {
        "seconds": sum(latencies),
        "cpu_seconds": sum(share * wall for share, wall in zip(percents, milliseconds, strict=True)) / 1e5,
        "blocks": total / (source.record_bytes if workload.pattern == "contiguous" else source.direct_bytes),
        "read_bytes": total,
        "requested_bytes": total,
        "page_bytes": total,
        "latencies": latencies,
    }


def _pattern(source: StoredRecords, workload: Workload, pool: int) -> dict[str, Any]:
    if workload.pattern != "contiguous":
        size = source.direct_bytes
        return {"rw": "randread", "bs": size, "io_size": pool * size, "file_service_type": "random"}
    block = min(_SEQUENTIAL_BYTES, source.files()[0].stat().st_size)
    total = max(block, pool * source.record_bytes // block * block)
    order = {"rw": "read", "file_service_type": "sequential"}
    return {**order, "bs": block, "io_size": total, "iodepth": _SEQUENTIAL_DEPTH}


def _run(fio: Fio, shared: dict[str, Any], seeds: list[int]) -> list[dict[str, Any]]:
    """Run one fio process with one job per seed. Return one report per job."""
    command = ["fio", "--readonly", f"--ioengine={fio.engine}", "--direct=1", "--output-format=json"]
    command += [f"--{name}={value}" for name, value in shared.items()]
    for seed in seeds:
        command += [f"--name=batch{seed}", f"--randseed={seed + 1}", "--stonewall"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EdjeError(f"fio failed with exit code {done.returncode}: {(done.stderr or done.stdout)[-500:]}")
    report = json.loads(done.stdout[done.stdout.index("{") :])
    jobs: list[dict[str, Any]] = report["jobs"]
    return jobs


def _names(source: StoredRecords) -> str:
    """Return the names of the shard files for the fio command. If there are too many files, return only a sample."""
    files = source.files()
    return ":".join(_escape(Path(path.name)) for path in files[:: -(-len(files) // _MAX_FILES)])


def _escape(path: Path) -> str:
    return str(path).replace(":", "\\:")
