"""Measures how fast blocks of a local index are fetched, beside other libraries and the
disk itself.

A subject is this project's reader, another library (a peer) or the disk itself. Every
run is a process of its own, which measures one subject: first with a cold page cache
and then, unless the subject is the disk, with a warm one. The subjects of a workload
take turns, so that a change of the disk's speed affects all of them. Ratios compare
runs of the same turn.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from benchmarks.disk import COLD, WARM, bytes_read, describe_disk, evict, load, resident
from benchmarks.fetch.peers import (
    PEERS,
    READER,
    SUBJECTS,
    StoredRecords,
    Subject,
    installed_version,
)
from benchmarks.process import call_in_process
from benchmarks.report import Report, Say
from pipelines.environment import available_memory, environment
from storage_formats.arrays import Ints
from storage_formats.codecs import Records, codec, finest
from storage_formats.errors import EdjeError, UsageError
from storage_formats.format.manifest import Manifest
from storage_formats.reading.files import sector_bytes
from storage_formats.reading.memory import aligned_bytes
from storage_formats.token_store import TokenStore

FIO = "the device"
# number of candidates in a typical query
QUERY = 100
# A workload with small calls repeats them until it has fetched about this number of
# blocks.
_BLOCKS = 5_000
# limits of `--quick`: blocks per large fetch, number of runs, and bytes that the rows
# take in the largest precision
_QUICK_POOL = 2_000
_QUICK_REPEATS = 2
_QUICK_BYTES = 1 << 30
# free disk space that must remain beside the copies
_SPARE_BYTES = 1 << 30
# Largest size of a copy, relative to the stored records. It is that of LMDB, which
# stores a long value in whole pages.
_COPY_RATIO = 1.4
# The report warns about smaller indexes, which may fit in a cache of the host or of the
# drive.
_SMALL_BYTES = 1 << 30
# time limit for a run, including its warm-up and the copy of the records for a peer
_TIMEOUT_SECONDS = 1800.0
# number of blocks in the warm-up call, which is enough to trigger the imports and the
# compilation that large calls need
_WARM_UP = 1024
# Of the last call, this number of blocks is compared with the results of plain file
# reads.
_CHECKED = 32
DEPTH = 64
"""Largest number of reads that fio has in flight."""
SEQUENTIAL_BYTES = 1 << 20
"""Number of bytes in a contiguous read of fio."""
_FIO_OPTIONS = ("--readonly", "--ioengine=io_uring", "--direct=1")
# Largest number of files that fio reads. If an index has more files, fio gets a sample
# of them, because it opens all its files at once.
_FIO_FILES = 100
_PERCENTILES = (50, 95, 99)
# smallest fraction of the requested bytes that a cold run must read from the disk
_READ_AT_LEAST = 0.9
# assumed duration of a run, for the forecast: a fixed part, and a part per gigabyte
# that the run reads
_RUN_SECONDS = 2.0
_GIGABYTE_SECONDS = 1.0

Run: TypeAlias = Report
"""The result of one run in one state of the page cache, as `measure` describes it."""


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
        if self.pool < self.blocks:
            return f"{self.blocks:,} random blocks, {self.pool:,} per call"
        order = "contiguous" if self.is_contiguous else "random"
        return f"{self.blocks:,} {order} blocks in one call"


PAPER = Workload(rows=100_000, blocks=50_000, pool=50_000)
"""The test of the EDJE paper with random blocks. The paper repeats it with contiguous
blocks.
"""


class Task(NamedTuple):
    """One run: what a process measures."""

    precision: str
    workload: Workload
    subject: str
    repeat: int


def bench_fetch(
    index: Path,
    say: Say,
    *,
    precisions: Sequence[str],
    pool: int,
    repeats: int,
    quick: bool,
    paper: bool,
) -> Report:
    """Run the benchmark and return the report.

    `say` receives one line of text after each run. The other arguments are options of
    `edje-index bench fetch`. If `precisions` names only some of the stored precisions,
    only the large fetch is measured for the others. Copies for peers and finished runs
    are kept in a directory beside the index until the end, so that the same call
    continues after an interruption.

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
    default = (finest(spec.precisions),) if quick else spec.precisions
    compared = precisions or default
    record_bytes = {
        name: codec(name, spec.block_shape).record_bytes for name in spec.precisions
    }
    versions = {name: installed_version(name) for name in SUBJECTS}
    peers = [name for name in PEERS if versions[name]]
    rows = spec.rows
    if quick:
        pool = min(pool, _QUICK_POOL)
        repeats = min(repeats, _QUICK_REPEATS)
        rows = min(rows, _QUICK_BYTES // max(record_bytes.values()))
    if paper:
        pool = PAPER.pool
        peers = ["np.memmap"]
        rows = PAPER.rows
        if spec.rows < rows:
            raise UsageError(
                f"the paper's test needs {rows:,} rows, and the index has"
                f" {spec.rows:,}; write a larger one with 'edje-index bench"
                " make-synthetic'"
            )
    device = [FIO] if shutil.which("fio") else []
    tasks = [
        Task(name, workload, subject, repeat)
        for name in spec.precisions
        for number, (workload, with_peers) in enumerate(workloads(rows, pool, paper))
        if name in compared or not number
        for repeat in range(repeats)
        # The subjects take turns, and each repeat begins with another subject.
        for subject in np.roll(
            [*device, READER, *(peers if with_peers and name in compared else [])],
            -repeat,
        ).tolist()
    ]
    scratch = index.with_name(f".{index.name}.bench-fetch")
    copies = sum(PEERS[name].copies for name in peers)
    copy_bytes = int(
        copies * _COPY_RATIO * rows * max(record_bytes[name] for name in compared)
    )
    free = shutil.disk_usage(index.parent).free
    if not scratch.exists() and copy_bytes + _SPARE_BYTES > free:
        raise UsageError(
            f"{scratch.parent} has {free / 1e9:.1f} GB free, but the copies for other"
            f" libraries need {copy_bytes / 1e9:.1f} GB; make room, or measure a part"
            " of the index in a quick run"
        )
    notes = [
        f"{name} is left out: {PEERS[name].package} is not installed"
        for name in PEERS
        if versions[name] is None
    ]
    if not device:
        notes.append(
            "the device alone is not measured: the program fio is not installed"
        )
    notes += [
        f"warning: {name} holds {rows * size / 1e6:,.1f} MB, which may fit in a cache"
        " of the drive or the host; use an index of at least 1 GiB to measure cold"
        " reads"
        for name, size in record_bytes.items()
        if rows * size < _SMALL_BYTES
    ]
    for note in notes:
        say(note)
    costs = [
        _RUN_SECONDS
        + _GIGABYTE_SECONDS
        * (2 * task.workload.blocks + rows)
        * record_bytes[task.precision]
        / 1e9
        for task in tasks
    ]
    say(
        f"{len(tasks)} runs take about {max(1, round(sum(costs) / 60))} min, and"
        f" copies for other libraries up to {copy_bytes / 1e9:.1f} GB. If you interrupt"
        " the command, run it again to continue"
    )
    where = {
        **environment(),
        "disk": describe_disk(index),
        "load_before": os.getloadavg()[0],
    }
    settings = {
        "index": index.name,
        "compared": compared,
        "rows": rows,
        "pool": pool,
        "repeats": repeats,
        "quick": quick,
        "paper": paper,
    }
    # Finished runs of an interrupted benchmark are used only if they were logged with
    # an equal key. The key contains the plan of the index, because an index with
    # another plan has other blocks.
    log_key = json.dumps([settings, versions, manifest.plan])
    log_path = scratch / "runs.jsonl"
    runs = dict[Task, dict[str, Run]]()
    if log_path.exists() and log_path.read_text().startswith(log_key + "\n"):
        for line in log_path.read_text().splitlines()[1:]:
            (name, workload, *rest), states = json.loads(line)
            runs[Task(name, Workload(*workload), *rest)] = states
        notes.append(f"{len(runs)} runs were measured before an interruption")
    else:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        log_path.write_text(log_key + "\n")
    started = time.monotonic()
    before = len(runs)
    for number, task in enumerate(tasks, 1):
        if task in runs:
            continue
        states = _measure_task(index, scratch, task)
        runs[task] = states
        # The file is closed after each line, so that a killed process loses no run.
        with log_path.open("a") as log:
            log.write(json.dumps([task, states]) + "\n")
        passed = (time.monotonic() - started) / sum(costs[before:number])
        text = ", ".join(
            f"{state} {run['discarded'] or f'{rate(run):,.0f} blocks/s'}"
            for state, run in states.items()
        )
        say(
            f"{number}/{len(tasks)} {task.precision}, {task.workload.title},"
            f" {task.subject}: {text} ({passed * sum(costs[number:]) / 60:.1f} minutes"
            " left)"
        )
        # After the last task of a precision, its copies are not needed any more.
        if [each.precision for each in tasks[number : number + 1]] != [task.precision]:
            for copy in scratch.glob(f"{task.precision}-*"):
                shutil.rmtree(copy)
    shutil.rmtree(scratch)
    versions[FIO] = where["disk"]["fio"]
    return {
        "environment": where,
        "settings": settings,
        "notes": notes,
        "rows": summaries(runs, index.name, record_bytes, versions),
        "runs": [{**task._asdict(), **states} for task, states in runs.items()],
    }


def workloads(rows: int, pool: int, paper: bool = False) -> list[tuple[Workload, bool]]:
    """Return (workload, with_peers) for each workload on an index of `rows` rows, the
    large random fetch first. `with_peers` is True if other libraries are measured, too.
    """
    count = max(1, min(pool, rows // 2))
    large = [
        (Workload(rows, count, count), True),
        (Workload(rows, count, count, is_contiguous=True), True),
    ]
    if paper:
        return large
    sizes = (size for size in (1, 10, QUERY, 1_000, 10_000) if size < count)
    return large + [
        (
            Workload(rows, max(size, min(_BLOCKS, count) // size * size), size),
            size == QUERY,
        )
        for size in sizes
    ]


def _measure_task(index: Path, scratch: Path, task: Task) -> dict[str, Run]:
    """Measure one run in a new process, and return the result of `measure`. If a run of
    another library fails, it is discarded. If a run of this project fails, EdjeError is
    raised.
    """
    if task.subject == FIO:
        source = StoredRecords(index, task.precision, task.workload.rows)
        return {"cold": run_fio(source, task.workload, task.repeat)}
    copy = scratch / f"{task.precision}-{task.subject}"
    try:
        states: dict[str, Run] = call_in_process(
            "benchmarks.fetch.bench:measure",
            str(index),
            str(copy),
            *task,
            timeout=_TIMEOUT_SECONDS,
        )
    except EdjeError as error:
        if task.subject == READER:
            raise EdjeError(f"the run of edje-index failed: {error}") from None
        return {"cold": {"discarded": f"failed: {error}"}}
    return states


def command_line(index: str, task: Task) -> str:
    """Return the command that repeats the run of a library. If the library needs a copy
    of the records, the command writes the copy to the working directory.
    """
    arguments = json.dumps([index, f"{task.precision}-{task.subject}", *task])
    function = "benchmarks.fetch.bench:measure"
    return f"python -m benchmarks.process {function} {shlex.quote(arguments)}"


def run_fio(source: StoredRecords, workload: Workload, seed: int) -> Run:
    """Let the program fio read as many records as `workload` requests from the files of
    the index. fio bypasses the page cache.

    A random read takes all sectors of one record. A contiguous read takes 1 MiB. The
    number of reads in flight is the number of blocks per call, but at most 64.
    """
    files = source.files()
    files = files[:: -(-len(files) // _FIO_FILES)]
    sector = sector_bytes(source.root)
    size = -(-source.record_bytes // sector) * sector
    order = ["--rw=randread", "--file_service_type=random"]
    total = workload.blocks * size
    if workload.is_contiguous:
        size = min(SEQUENTIAL_BYTES, files[-1].stat().st_size // sector * sector)
        total = max(size, workload.blocks * source.record_bytes)
        order = ["--rw=read", "--file_service_type=sequential"]
    command = [
        "fio",
        "--name=device",
        f"--filename={':'.join(path.name for path in files)}",
        *_FIO_OPTIONS,
        f"--bs={size}",
        f"--iodepth={min(DEPTH, workload.pool)}",
        *order,
        f"--io_size={total}",
        f"--randseed={seed + 1}",
        "--output-format=json",
    ]
    done = subprocess.run(
        command, cwd=source.array_path, capture_output=True, text=True, check=False
    )
    if done.returncode:
        return {"discarded": f"failed: {(done.stderr or done.stdout).strip()[-500:]}"}
    # fio may print notes before the JSON object.
    (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    read = job["read"]
    blocks = read["total_ios"]
    if workload.is_contiguous:
        blocks = read["io_bytes"] / source.record_bytes
    folder = source.array_path.relative_to(source.root.parent)
    return {
        "discarded": None,
        "command": f"(cd {shlex.quote(str(folder))} && {shlex.join(command)})",
        "blocks": blocks,
        "seconds": max(1, read["runtime"]) / 1e3,
        "cpu_seconds": (
            (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
        ),
        "read_bytes": read["io_bytes"],
        # percentiles of single reads, not of calls
        "latency_ms": [
            read["clat_ns"]["percentile"][f"{each:.6f}"] / 1e6 for each in _PERCENTILES
        ],
    }


def measure(
    root: str,
    copy: str,
    precision: str,
    workload_values: Sequence[Any],
    name: str,
    seed: int,
) -> dict[str, Run]:
    """Measure all calls of a subject, first with a cold page cache and then with a
    warm one.

    `copy` is the directory for a copy of the records. If the subject needs a copy, the
    copy is written before the measurement. `workload_values` are the attributes of a
    `Workload`.

    Returns:
        For each of the states "cold" and "warm", an object. Its key `discarded` is the
        reason why the run does not count, or None. If it is None, `blocks`, `seconds`,
        `cpu_seconds` and `read_bytes` are sums over all calls, and `latency_ms` has
        percentiles of the milliseconds of a call.

    Raises:
        EdjeError: the subject returned wrong blocks.
    """
    workload = Workload(*workload_values)
    source = StoredRecords(Path(root), precision, workload.rows)
    folder = Path(copy)
    kind = SUBJECTS[name]
    if kind.copies and not folder.exists():
        # The copy is renamed when it is complete, so that an interruption leaves no
        # incomplete copy under the final name.
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        kind(source, part).prepare()
        part.rename(folder)
    subject = kind(source, folder)
    calls = [
        source.row_ids[positions]
        for positions in draw_calls(workload, len(source.row_ids), seed)
    ]
    buffer = aligned_bytes(len(calls[0]) * subject.output_bytes).reshape(
        len(calls[0]), subject.output_bytes
    )
    # Write to the buffer once. Otherwise, the page faults of fresh memory would be
    # measured as a part of the first fetch.
    buffer.fill(1)
    files = subject.files()
    subject.open()
    # The warm-up fetches rows that no timed call requests, if there are any.
    unused = np.setdiff1d(source.row_ids, np.concatenate(calls))
    if not len(unused):
        unused = calls[0]
    warm_up = np.random.default_rng(0).permutation(unused)[:_WARM_UP]
    records = aligned_bytes(len(warm_up) * subject.output_bytes)
    subject.fetch(warm_up, records.reshape(len(warm_up), subject.output_bytes))
    # A subject may use other code for short calls. A call of at most the size of the
    # timed calls therefore warms up this code, too.
    subject.fetch(warm_up[: len(buffer)], buffer[: len(warm_up)])
    # Open the subject again, which closes the files of the warm-up. Pages that are
    # mapped into memory cannot be evicted.
    subject = kind(source, folder)
    subject.open()
    left = evict(files)
    if left > COLD:
        text = f"not cold: {left:.1%} of the pages could not be evicted"
        cold: Run = {"discarded": text}
    else:
        cold = _timed(subject, calls, buffer)
        share = cold["read_bytes"] / (cold["blocks"] * source.record_bytes)
        if share < _READ_AT_LEAST:
            cold["discarded"] = (
                f"not cold: only {share:.0%} of the requested bytes were counted as"
                " read"
            )
    if sum(path.stat().st_size for path in files) > available_memory():
        return {"cold": cold, "warm": {"discarded": "the files do not fit in memory"}}
    load(files)
    # Open the subject again, because a reader may remember for some seconds that the
    # files were not in the page cache.
    subject = kind(source, folder)
    subject.open()
    for ids in calls:
        subject.fetch(ids, buffer[: len(ids)])
    cached = resident(files)
    if cached < WARM:
        text = f"not warm: only {cached:.1%} of the pages are cached"
        return {"cold": cold, "warm": {"discarded": text}}
    return {"cold": cold, "warm": _timed(subject, calls, buffer)}


def _timed(subject: Subject, calls: Sequence[Ints], buffer: Records) -> Run:
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
    return {
        "discarded": None,
        "blocks": sum(map(len, calls)),
        "seconds": sum(seconds),
        "cpu_seconds": cpu,
        "read_bytes": read,
        "latency_ms": (np.percentile(seconds, _PERCENTILES) * 1e3).tolist(),
    }


def draw_calls(workload: Workload, rows: int, seed: int) -> Sequence[Ints]:
    """Draw the rows of each call. A row is a number from 0 to `rows` - 1.

    Equal seeds give equal rows for all subjects. No row is drawn twice, so that a cold
    run does not read rows that earlier calls have cached.
    """
    rng = np.random.default_rng([seed, workload.blocks, workload.pool])
    blocks = min(workload.blocks, rows)
    if workload.is_contiguous:
        ids = np.arange(blocks) + int(rng.integers(0, rows - blocks + 1))
    else:
        ids = rng.choice(rows, blocks, replace=False)
    return [
        ids[start : start + workload.pool].astype(np.int64)
        for start in range(0, blocks, workload.pool)
    ]


def rate(run: Run) -> float:
    """Return the blocks per second of a run."""
    return float(run["blocks"] / run["seconds"])


def summaries(
    runs: dict[Task, dict[str, Run]],
    index: str,
    record_bytes: dict[str, int],
    versions: dict[str, str | None],
) -> list[Report]:
    """Return one row for each precision, workload, subject and state of the page cache,
    with medians over the valid runs.

    `ratio` is the rate of edje-index divided by the rate of the row, computed in each
    repeat in which both runs are valid. The median over these repeats is returned, or
    None if there is no such repeat. Rows without a valid run have no rates. Rates count
    stored bytes, not decoded bytes.
    """
    groups = dict[tuple[str, Workload, str, str], dict[int, Run]]()
    for task, states in runs.items():
        for state, run in states.items():
            key = (task.precision, task.workload, task.subject, state)
            groups.setdefault(key, {})[task.repeat] = run
    rows = []
    for (precision, workload, subject, state), of_row in groups.items():
        of_reader = groups[precision, workload, READER, state]
        valid = {key: run for key, run in of_row.items() if not run["discarded"]}
        size = record_bytes[precision]
        is_device = subject == FIO
        command = command_line(index, Task(precision, workload, subject, 0))
        row: Report = {
            "precision": precision,
            "record_bytes": size,
            "workload": workload._asdict(),
            "title": workload.title,
            "subject": subject,
            "version": versions[subject],
            "setting": (
                " ".join(_FIO_OPTIONS) if is_device else SUBJECTS[subject].setting
            ),
            "cache": state,
            "command": of_row[0].get("command", command),
            "runs": len(valid),
            "discarded": [run["discarded"] for run in of_row.values()],
        }
        rows.append(row)
        if not valid:
            continue
        rates = [rate(run) for run in valid.values()]
        ratios = [
            rate(of_reader[key]) / rate(run)
            for key, run in valid.items()
            if not of_reader[key]["discarded"]
        ]
        row |= {
            "blocks_per_s": statistics.median(rates),
            "gb_per_s": [
                each * size / 1e9
                for each in (statistics.median(rates), min(rates), max(rates))
            ],
            "cpu_us_per_block": statistics.median(
                run["cpu_seconds"] / run["blocks"] * 1e6 for run in valid.values()
            ),
            "read_per_requested": statistics.median(
                run["read_bytes"] / run["blocks"] / size for run in valid.values()
            ),
            "ratio": statistics.median(ratios) if ratios else None,
            "latency_ms": np.median(
                [run["latency_ms"] for run in valid.values()], axis=0
            ).tolist(),
        }
    return rows
