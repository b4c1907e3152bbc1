"""Checks of the disk that contains a directory or an index: space, direct I/O, and measured random reads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipelines.doctor.block_device import storage
from pipelines.doctor.finding import Finding, judged
from pipelines.planning.machine import free_disk
from pipelines.progress.wording import human_bytes
from storage_formats.codecs import codec
from storage_formats.format.layout import PAGE_BYTES, Layout
from storage_formats.format.manifest import CommittedIndex, Manifest
from storage_formats.reading.engine_selection import engines
from storage_formats.reading.syscalls import sector_bytes

_FREE_BYTES = 10**9
_SCRATCH_ROWS = 4096
_SCRATCH_BATCH = 512
_BLOCK_SHAPE = (64, 384)  # of a published model
_EMBED_DIM = 64
_BATCH = 256  # records per fetch, as many as a search with a pool of this size reads
_SAMPLED_ROWS = 16_384
_SECONDS = 1.0
_FIO_TIMEOUT = 60.0
_SLOW_BYTES_PER_SECOND = 100e6  # a search reads 256 blocks of 48 KiB: more than 0.1 s on such a disk
_NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "lustre", "glusterfs")


@dataclass(frozen=True)
class ReadSpeed:
    """Measured random reads of records, in batches.

    Attributes:
        record_bytes: length of a record.
        records_per_second: number of records read per second.
        bytes_per_second: number of bytes read per second.
    """

    record_bytes: int
    records_per_second: float
    bytes_per_second: float

    def __str__(self) -> str:
        return (
            f"{self.records_per_second:,.0f} random records of {human_bytes(self.record_bytes)} per second, "
            f"{human_bytes(self.bytes_per_second)}/s"
        )


def disk_findings(path: Path) -> Iterator[Finding]:
    """Yield findings on the disk that contains `path`, an index or another directory.

    In a directory that is not an index, a temporary index is written and removed.
    """
    yield _disk(path)
    writable = os.access(path, os.W_OK)
    is_index = Layout(path).manifest.exists()
    if not writable and not is_index:
        yield Finding("writing", f"{path} cannot be written", "problem", "choose another directory, or allow writing")
        return
    free = free_disk(path)
    low = free < _FREE_BYTES
    yield judged(
        "free space",
        f"{human_bytes(free)} free",
        "free some space before a build or a conversion" if low else "",
        values={"free_bytes": free},
    )
    if is_index:
        yield from _reads(path, *_first_tokens(path))
    elif low:
        yield Finding("reading", "not measured, because little space is free", "advice", "free some space")
    else:
        with _scratch_index(path) as scratch:
            yield from _reads(scratch, *_first_tokens(scratch))


def measure_reads(root: Path, precision: str) -> ReadSpeed | None:
    """Measure random reads of records of the index at `root` for about one second.

    The reads bypass the page cache if that is possible. Return None if the index has no rows to read.
    """
    from storage_formats.token_store import TokenStore

    available = engines()
    engine = next(name for name in ("io_uring", "direct", "portable") if name in available)
    rng = np.random.default_rng(0)
    row_ids = _row_sample(CommittedIndex.open(root), rng)
    if not len(row_ids):
        return None
    with TokenStore.open(root, precision, engine) as store:
        store.fetch_records(row_ids[:1])  # compiles the copying loops
        records, started = 0, time.perf_counter()
        while (seconds := time.perf_counter() - started) < _SECONDS:
            batch = rng.choice(row_ids, min(_BATCH, len(row_ids)), replace=False)
            records += len(store.fetch_records(batch))
        return ReadSpeed(store.record_bytes, records / seconds, records * store.record_bytes / seconds)


def _row_sample(index: CommittedIndex, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return random ids of rows that are not deleted, int64 [n]. The memory does not depend on the number of rows."""
    segments = index.manifest.spec.used_segments
    stops = np.cumsum([segment.rows for segment in segments])
    offsets = np.unique(rng.integers(0, stops[-1], _SAMPLED_ROWS))
    numbers = np.searchsorted(stops, offsets, side="right")
    last_rows = np.array([segment.stop for segment in segments])
    row_ids = last_rows[numbers] - (stops[numbers] - offsets)
    return np.asarray(row_ids[~index.deleted.contain(row_ids)], dtype=np.int64)


def measure_with_fio(file: Path, record_bytes: int) -> ReadSpeed | None:
    """Measure random reads of `file` with fio for one second. Return None if fio is missing or cannot read the file."""
    block_bytes = -(-record_bytes // PAGE_BYTES) * PAGE_BYTES
    fio = shutil.which("fio")
    if fio is None or file.stat().st_size < block_bytes:
        return None
    options = {
        "name": "edje-index-doctor",
        "filename": str(file.resolve()).replace(":", "\\:"),  # fio separates file names by colons
        "rw": "randread",
        "bs": block_bytes,
        "direct": 1,
        "ioengine": "io_uring" if "io_uring" in engines() else "libaio",
        "iodepth": 64,
        "runtime": _SECONDS,
        "allow_file_create": 0,
        "output-format": "json",
    }
    command = [fio, "--readonly", "--time_based", *(f"--{name}={value}" for name, value in options.items())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_FIO_TIMEOUT)
        read = json.loads(done.stdout)["jobs"][0]["read"]
        return ReadSpeed(block_bytes, float(read["iops"]), float(read["bw_bytes"])) if read["total_ios"] else None
    except (ValueError, LookupError, TypeError, OSError, subprocess.SubprocessError):
        return None


def _disk(path: Path) -> Finding:
    disk = storage(path)
    name = " ".join(filter(None, (disk["device"], disk["model"])))
    kind = disk["file_system"] or "unknown file system"
    advice = ""
    if kind in _NETWORK_FILE_SYSTEMS:
        advice = f"{kind} is a network file system: random reads are slow; copy the index to a local SSD"
    return judged("disk", f"{name}, {kind}", advice, values=dict(disk))


def _first_tokens(root: Path) -> tuple[str, Path]:
    """Return the first precision that the index at `root` stores, and the first token file of this precision."""
    spec = Manifest.load(root).spec
    stored = codec(spec.precisions[0], spec.block_shape)
    shard = spec.used_segments[0].first_row // spec.shard_size
    return stored.name, Layout(root).token_shard(stored.name, shard, len(stored.record_shape))


def _reads(root: Path, precision: str, file: Path) -> Iterator[Finding]:
    yield _direct_reads(file)
    speed = measure_reads(root, precision)
    if speed is None:
        yield Finding("reading", "not measured, because every row is deleted")
        return
    slow = speed.bytes_per_second < _SLOW_BYTES_PER_SECOND
    yield judged(
        "reading",
        str(speed),
        "searches wait for this disk; move the index to a faster one" if slow else "",
        values=asdict(speed),
    )
    limit = measure_with_fio(file, speed.record_bytes)
    if limit is not None:
        share = speed.bytes_per_second / limit.bytes_per_second
        yield Finding(
            "fio", f"{limit}; edje-index reaches {share:.0%} of this speed", values={**asdict(limit), "share": share}
        )


def _direct_reads(file: Path) -> Finding:
    try:
        os.close(os.open(file, os.O_RDONLY | os.O_DIRECT))
    except (OSError, AttributeError):  # AttributeError: not on macOS
        return Finding(
            "direct I/O",
            "the file system does not support direct I/O",
            "advice",
            "cold reads go through the page cache; ext4 and XFS on a local disk have direct I/O",
            {"direct": False},
        )
    sector = sector_bytes(file)
    aligned = PAGE_BYTES % sector == 0
    return judged(
        "direct I/O",
        f"works, with an alignment of {sector:,} bytes",
        "" if aligned else f"records are aligned to {PAGE_BYTES:,} bytes, so every read is longer than its record",
        values={"direct": True, "alignment_bytes": sector},
    )


@contextmanager
def _scratch_index(directory: Path) -> Iterator[Path]:
    """Write a temporary index of random blocks below `directory`, and yield its path. Remove the index at the end."""
    from storage_formats.writing.index_writer import IndexWriter

    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix=".edje-doctor-", dir=directory) as temporary:
        root = Path(temporary) / "index"
        with IndexWriter.create(root, block_shape=_BLOCK_SHAPE, embed_dim=_EMBED_DIM) as writer:
            for _ in range(_SCRATCH_ROWS // _SCRATCH_BATCH):
                blocks = rng.standard_normal((_SCRATCH_BATCH, *_BLOCK_SHAPE), dtype=np.float32)
                writer.append(blocks, rng.standard_normal((_SCRATCH_BATCH, _EMBED_DIM), dtype=np.float32))
        yield root
