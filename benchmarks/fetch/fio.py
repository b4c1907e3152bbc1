"""Measures the speed of the disk with fio (https://fio.readthedocs.io).

fio reads the files of the index with O_DIRECT. A read is one record, rounded up to whole sectors.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.fetch.subjects import Entry, StoredRecords
from storage_formats.errors import EdjeError

DEPTH = 64
_SEQUENTIAL_BYTES, _SEQUENTIAL_DEPTH = 1 << 20, 32
_MAX_FILES = 1000  # all names go on one command line


def find_fio(sample: Path) -> tuple[str, str] | None:
    """Return (version, fastest I/O engine that the kernel permits). None if fio is missing or cannot read `sample`."""
    if not shutil.which("fio"):
        return None
    version = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=False).stdout.strip()
    command = ["fio", "--name=try", f"--filename={_escape(sample)}", "--rw=randread", "--bs=4096", "--io_size=4096"]
    for engine in ("io_uring", "libaio"):
        options = ["--direct=1", "--readonly", f"--ioengine={engine}"]
        if not subprocess.run([*command, *options], capture_output=True, check=False).returncode:
            return version, engine
    return None


def measure_with_fio(engine: str, source: StoredRecords, entry: Entry, seed: int) -> dict[str, Any]:
    """Measure fio reads, one read per block of `entry`, in random order or in file order.

    Each call of `entry` is one fio job of `entry.pool` reads. The latency of a call is the time from the start of its
    first read to the end of its last read.
    """
    rows, files = len(source.row_ids), source.files()
    pool = min(entry.pool, rows)
    calls = max(1, min(entry.blocks, rows) // pool)
    names = [_escape(Path(path.name)) for path in files[:: -(-len(files) // _MAX_FILES)]]
    settings: dict[str, Any] = {"directory": _escape(source.array_path), "filename": ":".join(names)}
    if entry.pattern == "contiguous":
        size = min(_SEQUENTIAL_BYTES, files[0].stat().st_size)
        total = max(size, pool * source.record_bytes // size * size)
        settings |= {"rw": "read", "file_service_type": "sequential", "iodepth": _SEQUENTIAL_DEPTH}
    else:
        size, total = source.direct_bytes, pool * source.direct_bytes
        settings |= {"rw": "randread", "file_service_type": "random", "iodepth": DEPTH}
    settings |= {"bs": size, "io_size": total}
    if calls > 1:
        settings |= {"iodepth": pool, "iodepth_batch_submit": pool, "iodepth_batch_complete_min": pool}
    command = ["fio", "--readonly", f"--ioengine={engine}", "--direct=1", "--output-format=json"]
    command += [f"--{name}={value}" for name, value in settings.items()]
    for call in range(calls):
        command += [f"--name=batch{call}", f"--randseed={seed * calls + call + 1}", "--stonewall"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EdjeError(f"fio failed with exit code {done.returncode}: {(done.stderr or done.stdout)[-500:]}")
    jobs = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    reads = [job["read"] for job in jobs]
    milliseconds = [max(read["runtime"], 1) for read in reads]
    latencies = [read["lat_ns"]["max"] / 1e9 for read in reads] if calls > 1 else [milliseconds[0] / 1e3]
    total = sum(read["io_bytes"] for read in reads)
    percents = [job["usr_cpu"] + job["sys_cpu"] for job in jobs]
    return {
        "resident": None,
        "discarded": None,
        "blocks": total / (source.record_bytes if entry.pattern == "contiguous" else source.direct_bytes),
        "seconds": sum(latencies),
        "cpu_seconds": sum(share * wall for share, wall in zip(percents, milliseconds, strict=True)) / 1e5,
        "read_bytes": total,
        "requested_bytes": total,
        "latencies": latencies,
    }


def _escape(path: Path) -> str:
    return str(path).replace(":", "\\:")
