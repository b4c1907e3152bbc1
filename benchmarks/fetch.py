"""Measures how fast blocks of a local index are fetched, beside other libraries and the
disk itself.

A subject is this project's reader, another library (a peer) or the disk itself. A run
measures one subject: first with a cold page cache and then, unless the subject is the
disk, with a warm one.
"""

from __future__ import annotations

import json
import platform
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.disk import WARM, bytes_read, evict, fio_version, load, resident
from benchmarks.harness import (
    DEVICE,
    READER,
    RECORDS,
    Report,
    Say,
    Task,
    compared,
    faster,
    run,
    select,
)
from benchmarks.peers import (
    PEERS,
    StoredRecords,
    Subject,
    open_subject,
    subject_versions,
)
from storage_formats.arrays import Ints
from storage_formats.cgroups import available_memory
from storage_formats.codecs import BF16, codec, finest
from storage_formats.errors import EdjeError, UsageError
from storage_formats.format.layout import SHARD_SIZE
from storage_formats.format.manifest import Manifest
from storage_formats.reading.files import sector_bytes
from storage_formats.reading.memory import aligned_bytes
from storage_formats.token_store import TokenStore
from storage_formats.writing.index_writer import IndexWriter

# number of candidates in a typical query
QUERY = 100
# number of blocks in all queries together
_QUERY_BLOCKS = 5_000
# Precisions that are compared by default, if the index stores them: those of 16, 8 and
# 4 bits per value.
_COMPARED = ("bf16", "fp8", "nvfp4")
# limits of `--quick`: blocks per large fetch, and number of runs
_QUICK_POOL = 2_000
_QUICK_REPEATS = 2
# free disk space that must remain beside the copies
_SPARE_BYTES = 1 << 30
# Largest size of a copy, relative to the stored records. It is that of LMDB, which
# stores a long value in whole pages.
_COPY_RATIO = 1.4
# Rows of at most this size may fit in a cache of the host or of the drive. `--quick`
# reads no more, in the largest precision.
_SMALL_BYTES = 1 << 30
# number of blocks in the warm-up call, which is enough to trigger the imports and the
# compilation that large calls need
_WARM_UP = 1024
# Of the last call, this number of blocks is compared with the results of plain file
# reads.
_CHECKED = 32
_FIO_JOBS = 4
_FIO_DEPTH = 64
_SEQUENTIAL_BYTES = 1 << 20
_FIO_OPTIONS = "--readonly --ioengine=io_uring --direct=1 --group_reporting"
# Largest number of files that fio reads. If an index has more files, fio gets a sample
# of them, because it opens all its files at once.
_FIO_FILES = 100
_PERCENTILES = (50, 95, 99)
# smallest fraction of the requested bytes that a cold run must read from the disk
_READ_AT_LEAST = 0.9
# rows per batch of a synthetic index
_SYNTHETIC_BATCH = 128
# A search reads the embeddings of twice as many rows as its pool has candidates.
_EMBEDDINGS = 2

_METHOD = """- Cold: the files were evicted from the page cache before the run, which
  read the requested bytes from storage. Warm: at least 99 % of the pages were in the
  page cache, and all blocks were fetched before.
- The device: the program fio reads as many records at random positions, each in whole
  sectors, with up to 4 jobs of 64 reads in flight, but no more reads than a call has
  blocks; or as many bytes in contiguous reads of 1 MiB.
- GB/s: stored bytes of the requested blocks. edje-index checks and decodes them to
  bfloat16 in this time, and "edje-index records" checks and returns them. The others
  return stored bytes unchecked, and fio discards them.
- edje-index / row: ratio of the rates, as the median over repeats. Less than 1: the row
  is faster.
- CPU: user and system time of the process.
- Read: bytes that the kernel counted as read from storage, divided by the bytes of the
  requested blocks.
- p50, p95, p99: of a call, and of a single read for the device. The files are evicted
  once, before the first call. No block is requested twice, but readahead may load
  blocks of later calls into the page cache.
- The report cannot see caches of the drive or, in a virtual machine, of the host.
- Run the commands in the directory of the index."""


class Workload(NamedTuple):
    """The blocks that a run fetches.

    Attributes:
        rows: blocks are drawn from the first `rows` rows of the index.
        blocks: number of blocks in all calls together. No row is requested twice.
        pool: number of blocks per call.
        is_contiguous: True if the requested rows are contiguous, False if they are
            random.
    """

    rows: int
    blocks: int
    pool: int
    is_contiguous: bool = False

    @property
    def title(self) -> str:
        if self.pool <= QUERY and not self.is_contiguous:
            return f"{self.blocks:,} random blocks, {self.pool:,} per call"
        order = "contiguous" if self.is_contiguous else "random"
        return f"{self.blocks:,} {order} blocks in one call"


PAPER = Workload(rows=100_000, blocks=50_000, pool=50_000)
"""The test of the EDJE paper with random blocks. The paper repeats it with contiguous
blocks.
"""


def bench_fetch(
    index: Path,
    say: Say,
    report_folder: Path | None = None,
    *,
    precisions: Sequence[str] = (),
    pool: int = 5_000,
    repeats: int = 3,
    quick: bool = False,
) -> Report:
    """Run the benchmark and return the report.

    The arguments are options of `edje-index bench fetch`. For stored precisions that
    are not compared, only the large fetch is measured. Copies for peers are kept in a
    directory beside the index until the end.

    Raises:
        UsageError: the index or a precision does not exist, the index is too small, or
            the disk has too little free space. The error is raised before any file is
            written.
    """
    if platform.system() != "Linux":
        raise UsageError(
            "bench fetch runs only on Linux, because it evicts files from the page"
            " cache and reads kernel counters"
        )
    manifest = Manifest.load(index)
    spec = manifest.spec
    for name in precisions:
        TokenStore.open(index, name).close()
    if manifest.counts.inputs == manifest.snapshot.deleted_rows:
        raise UsageError(f"{index} has no blocks to fetch; build a larger index")
    index = index.resolve()
    best = (finest(spec.precisions),)
    stored = [name for name in _COMPARED if name in spec.precisions]
    compared_precisions = precisions or (best if quick else stored or best)
    record_bytes = {
        name: codec(name, spec.block_shape).record_bytes for name in spec.precisions
    }
    subjects = {DEVICE: (fio_version(), _FIO_OPTIONS), **subject_versions()}
    installed = [name for name, (version, _) in subjects.items() if version]
    rows = spec.rows
    notes = []
    if missing := [name for name in subjects if name not in installed]:
        notes.append(
            "left out, because they are not installed (the extra 'bench', and for the"
            f" device the program fio): {', '.join(missing)}"
        )
    if quick:
        pool = min(pool, _QUICK_POOL)
        repeats = min(repeats, _QUICK_REPEATS)
        rows = min(rows, _SMALL_BYTES // max(record_bytes.values()))
    small = [name for name, size in record_bytes.items() if rows * size <= _SMALL_BYTES]
    if small:
        notes.append(
            f"warning: {', '.join(small)}: only the first {rows:,} rows are read, which"
            " may fit in a cache of the drive or the host; before you decide, measure"
            " an index of more than 1 GiB without --quick"
        )
    scratch = index.with_name(f".{index.name}.bench-fetch")
    tasks = []
    for name in record_bytes:
        measured = workloads(rows, pool)
        names = installed
        if name not in compared_precisions:
            measured = measured[:1]
            names = [each for each in installed if each in (DEVICE, READER)]
        for workload in measured:
            tasks += [
                Task(
                    name,
                    workload.title,
                    subject,
                    f"benchmarks.fetch:{'run_fio' if subject == DEVICE else 'measure'}",
                    [index.name, scratch.name, name, workload, subject, repeat],
                    repeat,
                )
                for repeat in range(repeats)
                # Each repeat begins with another subject.
                for subject in np.roll(names, -repeat).tolist()
            ]
    copies = sum(PEERS[name].copies for name in PEERS if name in installed)
    compared_bytes = sum(record_bytes[name] for name in compared_precisions)
    copy_bytes = copies * rows * _COPY_RATIO * compared_bytes
    notes.append(f"copies for other libraries take up to {copy_bytes / 1e9:.1f} GB")
    free = shutil.disk_usage(index.parent).free
    if not scratch.exists() and copy_bytes + _SPARE_BYTES > free:
        raise UsageError(
            f"{scratch.parent} has {free / 1e9:.1f} GB free, but the copies for other"
            f" libraries need {copy_bytes / 1e9:.1f} GB; make room, or measure a part"
            " of the index in a quick run"
        )
    about = {
        "name": "fetch",
        "title": "Fetching blocks",
        # An index with another plan has other blocks.
        "settings": {"rows": rows, "plan": manifest.plan},
        "subjects": {name: subjects[name] for name in installed},
        "reference": READER,
        "notes": notes,
        "method": _METHOD,
    }
    say("if you interrupt the command, run it again to continue")
    return run(
        about,
        tasks,
        index.parent,
        scratch,
        say,
        verdict=lambda found: verdict(found, rows / tasks[0].arguments[3].blocks),
        report_folder=report_folder,
    )


def workloads(rows: int, pool: int) -> list[Workload]:
    """Return the workloads on an index of `rows` rows: a large random fetch, a large
    contiguous fetch, and queries.
    """
    count = max(1, min(pool, rows // 2))
    large = Workload(rows, count, count)
    both = [large, large._replace(is_contiguous=True)]
    if count <= QUERY:
        return both
    queries = min(_QUERY_BLOCKS, count) // QUERY
    return [*both, Workload(rows, queries * QUERY, QUERY)]


def run_fio(
    root: str, scratch: str, precision: str, values: Sequence[Any], name: str, seed: int
) -> Iterator[Report]:
    """Let the program fio read as many records as a workload requests from the files of
    the index. fio bypasses the page cache. The arguments are those of `measure`.

    A random read takes all sectors of one record. A contiguous read takes 1 MiB. The
    number of reads in flight is the number of blocks per call, but at most 256, in up
    to 4 jobs.
    """
    workload = Workload(*values)
    source = StoredRecords(Path(root), precision, workload.rows)
    files = source.files()
    files = files[:: -(-len(files) // _FIO_FILES)]
    sector = sector_bytes(source.root)
    size = -(-source.record_bytes // sector) * sector
    total = workload.blocks * size
    jobs = min(_FIO_JOBS, workload.pool)
    order = ["--rw=randread", "--file_service_type=random"]
    if workload.is_contiguous:
        jobs = 1
        size = min(_SEQUENTIAL_BYTES, files[-1].stat().st_size // sector * sector)
        total = max(size, workload.blocks * source.record_bytes)
        order = ["--rw=read", "--file_service_type=sequential"]
    command = [
        "fio",
        "--name=device",
        f"--filename={':'.join(path.name for path in files)}",
        *_FIO_OPTIONS.split(),
        "--output-format=json",
        *order,
        f"--bs={size}",
        f"--numjobs={jobs}",
        f"--iodepth={min(_FIO_DEPTH, workload.pool // jobs)}",
        f"--io_size={total // jobs}",
        f"--randseed={seed + 1}",
    ]
    done = subprocess.run(
        command, cwd=source.array_path, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise EdjeError((done.stderr or done.stdout).strip()[-500:])
    # fio may print notes before the JSON object.
    (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    read = job["read"]
    blocks = read["total_ios"]
    if workload.is_contiguous:
        blocks = read["io_bytes"] / source.record_bytes
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    # percentiles of single reads, not of calls
    percentiles = read["clat_ns"]["percentile"]
    seconds = max(1, read["runtime"]) / 1e3
    rates = _values(blocks, source.record_bytes, seconds, cpu, read["io_bytes"])
    yield {
        "case": "cold",
        "command": f"(cd {source.array_path} && {shlex.join(command)})",
        "values": rates
        | {f"p{each} ms": percentiles[f"{each:.6f}"] / 1e6 for each in _PERCENTILES},
    }


def measure(
    root: str, scratch: str, precision: str, values: Sequence[Any], name: str, seed: int
) -> Iterator[Report]:
    """Measure all calls of a subject, first with a cold page cache and then with a
    warm one.

    Args:
        scratch: directory for the subject's copy of the records.
        values: attributes of a `Workload`.

    Raises:
        EdjeError: the subject returned wrong blocks.
    """
    workload = Workload(*values)
    source = StoredRecords(Path(root), precision, workload.rows)
    copies = Path(scratch)
    subject = open_subject(name, source, copies)
    calls = [
        source.row_ids[positions]
        for positions in draw_calls(workload, len(source.row_ids), seed)
    ]
    size = subject.output_bytes
    buffer = aligned_bytes(len(calls[0]) * size).reshape(len(calls[0]), size)
    # Write to the buffer once. Otherwise, the page faults of fresh memory would be
    # measured as a part of the first fetch.
    buffer.fill(1)
    files = subject.files()
    # The warm-up fetches rows that no timed call requests, if there are any.
    unused = np.setdiff1d(source.row_ids, np.concatenate(calls))
    if not len(unused):
        unused = calls[0]
    warm_up = np.random.default_rng(0).permutation(unused)[:_WARM_UP]
    records = aligned_bytes(len(warm_up) * size).reshape(len(warm_up), size)
    subject.fetch(warm_up, records)
    # A subject may use other code for short calls. A call of at most the size of the
    # timed calls therefore warms up this code, too.
    subject.fetch(warm_up[: len(buffer)], buffer[: len(warm_up)])
    # Open the subject again, which closes the files of the warm-up. Pages that are
    # mapped into memory cannot be evicted.
    del subject
    subject = open_subject(name, source, copies)
    problem = evict(files)
    cold = _timed(subject, calls, buffer)
    if not problem and cold["read"] < _READ_AT_LEAST:
        problem["problem"] = f"not cold: only {cold['read']:.0%} of the bytes were read"
    yield {"case": "cold", "values": cold} | problem
    if sum(path.stat().st_size for path in files) > available_memory():
        yield {"case": "warm", "problem": "the files do not fit in memory"}
        return
    load(files)
    # Open the subject again, because a reader may remember for some seconds that the
    # files were not in the page cache.
    del subject
    subject = open_subject(name, source, copies)
    for ids in calls:
        subject.fetch(ids, buffer[: len(ids)])
    cached = resident(files)
    problem = {"problem": f"not warm: only {cached:.1%} of the pages are cached"}
    warm = _timed(subject, calls, buffer)
    yield {"case": "warm", "values": warm} | ({} if cached >= WARM else problem)


def _timed(subject: Subject, calls: Sequence[Ints], buffer: Any) -> dict[str, float]:
    seconds: list[float] = []
    records = buffer
    read_before = bytes_read()
    cpu_before = time.process_time()
    for ids in calls:
        started = time.perf_counter()
        records = subject.fetch(ids, buffer[: len(ids)])
        seconds.append(time.perf_counter() - started)
    cpu = time.process_time() - cpu_before
    read = bytes_read() - read_before
    last = calls[-1][:_CHECKED]
    wrong = int((records[: len(last)] != subject.expected(last)).any(axis=1).sum())
    if wrong:
        raise EdjeError(f"{wrong} of the checked blocks were wrong")
    blocks = sum(map(len, calls))
    values = _values(blocks, subject.source.record_bytes, sum(seconds), cpu, read)
    for percent in _PERCENTILES:
        values[f"p{percent} ms"] = 1e3 * float(np.percentile(seconds, percent))
    return values


def _values(
    blocks: float,
    record_bytes: int,
    seconds: float,
    cpu_seconds: float,
    read_bytes: int,
) -> dict[str, float]:
    return {
        "GB/s": blocks * record_bytes / seconds / 1e9,
        "blocks/s": blocks / seconds,
        "CPU us per block": cpu_seconds / blocks * 1e6,
        "read": read_bytes / (blocks * record_bytes),
    }


def draw_calls(workload: Workload, rows: int, seed: int) -> Sequence[Ints]:
    """Draw the rows of each call. A row is a number from 0 to `rows` - 1.

    Equal seeds give equal rows for all subjects. No row is drawn twice, so that a cold
    run does not read rows that earlier calls have cached.
    """
    rng = np.random.default_rng([seed, workload.blocks, workload.pool])
    blocks = min(workload.blocks, rows)
    ids = rng.choice(rows, blocks, replace=False)
    if workload.is_contiguous:
        ids = np.arange(blocks) + int(rng.integers(0, rows - blocks + 1))
    return np.split(ids, range(workload.pool, blocks, workload.pool))


def verdict(rows: list[Report], draw: float) -> Iterator[str]:
    """Yield sentences about the rates of the disk, the queries and photos per second
    that it feeds, and the cases in which a library is faster than edje-index. The large
    call draws one row in `draw`.
    """
    cold = select(rows, case="cold")
    for precision in dict.fromkeys(row["group"] for row in cold):
        of_precision = select(cold, group=precision)
        large = of_precision[0]["table"]
        tables = (row["table"] for row in of_precision)
        queried = next((t for t in tables if t.endswith(" per call")), large)
        for device in select(of_precision, table=large, subject=DEVICE):
            values = device["values"]
            yield (
                f"{precision}: the disk delivers records of"
                f" {values['GB/s'] * 1e9 / values['blocks/s']:,.0f} bytes at"
                f" {values['GB/s']:.2f} GB/s ({values['blocks/s']:,.0f} reads/s, p50"
                f" {values['p50 ms']:.2f} ms, p99 {values['p99 ms']:.2f} ms)."
            )
            if ratio := device["ratio"]:
                yield f"{precision}: edje-index reads at {ratio:.2f} of this rate."
        for row in select(of_precision, subject=READER):
            title = row["table"]
            rate = row["values"].get("blocks/s")
            if rate is None:
                yield (
                    f"{precision}, {title}: edje-index was not measured"
                    f" ({row['problems'][0]}); close other programs that have the index"
                    " open, or measure a larger index on a disk."
                )
                continue
            if title == large:
                yield f"{precision}: {rate:,.0f} photos/s in one call from this disk."
            # The large call of a small index is not larger than a query.
            if title == queried:
                queries = rate / QUERY
                yield (
                    f"{precision}: {queries:,.0f} queries of {QUERY} photos per second,"
                    f" one after another ({rate:,.0f} photos/s); about"
                    f" {queries / (1 + _EMBEDDINGS):,.0f} if the disk must also read"
                    f" the embeddings of {_EMBEDDINGS * QUERY} rows per query."
                )
    yield (
        f"The large call draws one row in {draw:.0f}, and neighbours are read in one"
        " request. Among a million rows or more, neighbours are too far apart: then"
        f" count on the rate of the device, which is {QUERY} reads per query. A joint"
        " encoder that scores N pairs/s needs N photos/s."
    )
    yield from faster(rows, READER)
    # The libraries return stored bytes, so they are also compared with a fetch that
    # does not decode.
    yield from faster(compared(rows, RECORDS), RECORDS)


def make_synthetic(
    out: Path,
    *,
    rows: int,
    precisions: Sequence[str] = ("bf16",),
    block_shape: tuple[int, int] = (64, 384),
    shard_size: int = SHARD_SIZE,
) -> Report:
    """Write a finished index of random tokens to the missing or empty directory `out`.
    Equal arguments give equal tokens.

    The index cannot be searched, because it has no model and no nearest-neighbour
    index.

    Returns:
        What `edje-index bench make-synthetic --json` prints.
    """
    embed_dim = block_shape[1]
    rng = np.random.default_rng(0)
    with IndexWriter.create(
        out,
        block_shape=block_shape,
        embed_dim=embed_dim,
        precisions=precisions,
        shard_size=shard_size,
        encoder="synthetic",
    ) as writer:
        for start in range(0, rows, _SYNTHETIC_BATCH):
            count = min(_SYNTHETIC_BATCH, rows - start)
            tokens = rng.standard_normal((count, *block_shape), dtype=np.float32)
            writer.append(
                tokens.astype(BF16),
                rng.standard_normal((count, embed_dim), dtype=np.float32),
            )
        shards = writer.finish().spec.shards
    return {"index": str(out), "rows": rows, "shards": shards}
