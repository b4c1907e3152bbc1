"""Measures how fast blocks of a local index are fetched, beside other libraries and the
disk itself.

Every run is a process of its own, which measures one subject once. The subjects of a
section take turns, so that a change of the disk's speed affects all of them, and ratios
compare runs of the same turn.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from benchmarks.disk import COLD, WARM, bytes_read, describe_disk, evict, load
from benchmarks.fetch.peers import (
    PEERS,
    SUBJECTS,
    Ids,
    StoredRecords,
    installed_version,
)
from benchmarks.process import call_in_process
from benchmarks.report import Say, machine, median_ratio, table
from pipelines.environment import environment
from storage_formats.codecs import codec, finest
from storage_formats.errors import EdjeError, UsageError
from storage_formats.format.manifest import Manifest
from storage_formats.reading.files import sector_bytes
from storage_formats.reading.memory import aligned_bytes
from storage_formats.token_store import TokenStore

_QUERIES = 50
_QUERY_POOL = 100
_SPARE_BYTES = 1 << 30
# of LMDB, in which a long value takes whole pages; other copies are smaller
_COPY_RATIO = 1.4
# a smaller index may fit in a cache of the host or of the drive
_SMALL_BYTES = 1 << 30
# of a run; no further call begins
_LONGEST_SECONDS = 30.0
# of a run with its warm-up, or of a copy
_TIMEOUT_SECONDS = 1800.0
# blocks of the warm-up call: enough to trigger imports and compilation of large calls
_WARM_UP = 1024
# blocks of the last call that are compared with plain reads
_CHECKED = 32
FIO = "the device (fio)"
_FIO_OPTIONS = ("--ioengine=io_uring", "--direct=1", "--iodepth=64")
SETTINGS = {
    FIO: f"the program fio with {' '.join(_FIO_OPTIONS)}, data discarded",
    **{name: subject.setting for name, subject in SUBJECTS.items()},
}
# a sample of a larger index, because fio opens all files at once
_FIO_FILES = 500
# smallest fraction of the requested bytes that a cold run must read from the disk
_READ_AT_LEAST = 0.9

Run: TypeAlias = dict[str, Any]
"""The result of one run, see `measure`, and the number of its repeat."""


@dataclass(frozen=True)
class Workload:
    """The blocks that each run of a section fetches.

    Attributes:
        is_contiguous: whether the rows are contiguous. Otherwise they are random.
        blocks: number of blocks in all calls together. No row is requested twice.
        cache: state of the page cache before the run, "cold" or "warm".
    """

    is_contiguous: bool
    blocks: int
    pool: int
    cache: str

    @property
    def title(self) -> str:
        if self.pool < self.blocks:
            return f"Queries of {self.pool} blocks each, one at a time, {self.cache}"
        order = "contiguous" if self.is_contiguous else "random"
        return f"{self.blocks:,} {order} blocks in one call, {self.cache}"


def bench_fetch(
    index: Path,
    say: Say,
    *,
    precisions: Sequence[str] = (),
    pool: int = 50_000,
    cold: bool | None = None,
    peers: bool = False,
    repeats: int = 5,
) -> dict[str, Any]:
    """Run the benchmark and return the report. Temporary files are removed at the end.

    The other arguments are options of `edje-index bench fetch`; `cold` is None for both
    states of the page cache. `say` receives one line of text after each run.

    Raises:
        UsageError: the index or a precision does not exist, or disk space is short. No
            file has been written then.
    """
    if platform.system() != "Linux":
        raise UsageError(
            "bench fetch runs only on Linux, because it evicts files from the page"
            " cache and reads kernel counters"
        )
    spec = Manifest.load(index).spec
    precisions = tuple(dict.fromkeys(precisions)) or (finest(spec.precisions),)
    for name in precisions:
        TokenStore.open(index, name).close()
    scratch = index.resolve().parent
    versions = {name: installed_version(name) for name in PEERS if peers}
    ready = [name for name, version in versions.items() if version is not None]
    sizes = {
        name: spec.rows * codec(name, spec.block_shape).record_bytes
        for name in precisions
    }
    copies = sum(PEERS[name].copies for name in ready)
    free = shutil.disk_usage(scratch).free
    needed_bytes = int(copies * _COPY_RATIO * max(sizes.values())) + _SPARE_BYTES
    if copies and needed_bytes > free:
        raise UsageError(
            f"{scratch} has {free / 1e9:.1f} GB free, but the copies for other"
            f" libraries need {needed_bytes / 1e9:.1f} GB; make room, or leave"
            " out --peers"
        )
    notes = [
        f"{name} is left out: {PEERS[name].package} is not installed"
        for name in versions
        if name not in ready
    ]
    if not shutil.which("fio"):
        notes.append(
            "the device alone is not measured: the program fio is not installed"
        )
    notes += [
        f"warning: {name} holds {size / 1e6:,.1f} MB, which may fit in a cache of the"
        " drive or the host; use an index of at least 1 GiB to measure cold reads"
        for name, size in sizes.items()
        if size < _SMALL_BYTES
    ]
    for note in notes:
        say(note)
    where = {
        **environment(),
        "disk": describe_disk(index),
        "peers": versions,
        "load_before": os.getloadavg()[0],
    }
    entries: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(
        prefix="bench-fetch-", dir=scratch, ignore_cleanup_errors=True
    ) as temporary:
        for precision in precisions:
            source = StoredRecords(index, precision)
            copies_folder = Path(temporary) / precision
            measured_peers = []
            for name in ready:
                folder = copies_folder / name
                folder.mkdir(parents=True)
                try:
                    if PEERS[name].copies:
                        say(f"{precision}: writing the copy for {name}")
                        call_in_process(
                            "benchmarks.fetch.bench:write_copy",
                            str(index),
                            precision,
                            str(folder),
                            name,
                            timeout=_TIMEOUT_SECONDS,
                        )
                    measured_peers.append(name)
                except EdjeError as error:
                    notes.append(
                        f"{name} is left out at {precision}, because the copy failed:"
                        f" {error}"
                    )
            sections = {}
            for name, (workload, subjects) in sections_of(
                len(source.row_ids), pool, cold, measured_peers
            ).items():
                say(f"{name}: {workload.title}")
                runs: dict[str, list[Run]] = {subject: [] for subject in subjects}
                for repeat in range(repeats):
                    turn = repeat % len(subjects)
                    for subject in (*subjects[turn:], *subjects[:turn]):
                        folder = copies_folder / subject
                        run = _run(source, folder, subject, workload, repeat)
                        runs[subject].append({"repeat": repeat, **run})
                        if run["discarded"]:
                            text = f"DISCARDED, {run['discarded']}"
                        else:
                            text = f"{rate(run):,.0f} blocks/s"
                        say(
                            f"{name} {precision} {repeat + 1}/{repeats}  {subject}:"
                            f" {text}"
                        )
                sections[name] = {
                    "title": workload.title,
                    "workload": asdict(workload),
                    "entries": {
                        subject: {
                            "setting": SETTINGS[subject],
                            "summary": summarise(
                                runs[subject], source.record_bytes, runs["edje"]
                            ),
                            "runs": runs[subject],
                        }
                        for subject in subjects
                    },
                }
            entries[precision] = {
                "rows": len(source.row_ids),
                "record_bytes": source.record_bytes,
                "sections": sections,
            }
            shutil.rmtree(copies_folder, ignore_errors=True)
    settings = {"index": index.name, "pool": pool, "peers": peers, "repeats": repeats}
    return {
        "environment": where,
        "settings": settings,
        "notes": notes,
        "precisions": entries,
    }


def sections_of(
    rows: int, pool: int, cold: bool | None, peers: Sequence[str]
) -> dict[str, tuple[Workload, list[str]]]:
    """Return the workload and the subjects of each section for an index of `rows`
    rows, by name of the section.
    """
    count = max(1, min(pool, rows // 2))
    query = min(_QUERY_POOL, count)
    queries = min(_QUERIES, count // query) * query
    device = [FIO] if shutil.which("fio") else []
    fast = [name for name in ("np.memmap", "tensorstore") if name in peers]
    sections = {
        "cold random": (
            Workload(False, count, count, "cold"),
            [*device, "edje", *peers],
        ),
        "cold contiguous": (
            Workload(True, count, count, "cold"),
            [*device, "edje", *fast],
        ),
        "cold queries": (Workload(False, queries, query, "cold"), ["edje", *fast]),
        "warm random": (
            Workload(False, count, count, "warm"),
            ["memcpy", "edje", *fast],
        ),
        "warm queries": (Workload(False, queries, query, "warm"), ["edje", *fast]),
    }
    return {
        name: each
        for name, each in sections.items()
        if cold in (None, each[0].cache == "cold")
    }


def _run(
    source: StoredRecords, folder: Path, subject: str, workload: Workload, seed: int
) -> Run:
    """Measure one run in a new process, see `measure`. A run that fails is
    discarded, except one of this project.
    """
    if subject == FIO:
        return run_fio(source, workload, seed)
    try:
        run: Run = call_in_process(
            "benchmarks.fetch.bench:measure",
            str(source.root),
            source.precision,
            str(folder),
            subject,
            asdict(workload),
            seed,
            timeout=_TIMEOUT_SECONDS,
        )
    except EdjeError as error:
        if subject == "edje":
            raise EdjeError(f"the run of edje failed: {error}") from None
        run = {"discarded": f"failed: {error}"}
    return run


def run_fio(source: StoredRecords, workload: Workload, seed: int) -> Run:
    """Read as many bytes as `workload` from the files of the index with the program
    fio, without the page cache.

    A random read is one record, rounded up to whole sectors. A contiguous read has 1
    MiB.
    """
    files = source.files()
    files = files[:: -(-len(files) // _FIO_FILES)]
    sector = sector_bytes(source.root)
    size = -(-source.record_bytes // sector) * sector
    order = [f"--bs={size}", "--rw=randread", "--file_service_type=random"]
    if workload.is_contiguous:
        size = source.record_bytes
        order = [
            f"--bs={min(1 << 20, files[-1].stat().st_size)}",
            "--rw=read",
            "--file_service_type=sequential",
        ]
    names = ":".join(path.name for path in files)
    command = [
        "fio",
        "--name=device",
        f"--filename={names}",
        "--readonly",
        *_FIO_OPTIONS,
        "--output-format=json",
    ]
    command += [*order, f"--io_size={workload.blocks * size}", f"--randseed={seed + 1}"]
    done = subprocess.run(
        command, cwd=source.array_path, capture_output=True, text=True, check=False
    )
    if done.returncode:
        return {"discarded": f"failed: {(done.stderr or done.stdout).strip()[-500:]}"}
    # notes may precede the report
    (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    blocks = max(1, job["read"]["io_bytes"] // size)
    return {
        "discarded": None,
        "blocks": blocks,
        "seconds": max(1, job["read"]["runtime"]) / 1e3,
        "cpu_seconds": (
            (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
        ),
        "read_bytes": job["read"]["io_bytes"],
        "requested_bytes": blocks * source.record_bytes,
        # of single reads
        "latencies": [],
    }


def write_copy(root: str, precision: str, folder: str, subject: str) -> None:
    """Write the copy of the records that a peer reads."""
    PEERS[subject](StoredRecords(Path(root), precision), Path(folder)).prepare()


def measure(
    root: str,
    precision: str,
    folder: str,
    name: str,
    workload_values: dict[str, Any],
    seed: int,
) -> Run:
    """Warm the libraries up, bring the page cache into the state of a workload, and
    measure all calls of a subject.

    `folder` contains the copy of the records of the subject `name`. `workload_values`
    are attributes of a `Workload`.

    Returns:
        `discarded`: the reason why the run does not count, or None; `resident`:
        fraction of the subject's pages in the page cache right before the run. Unless
        the cache was in the wrong state: blocks, seconds, processor seconds, bytes read
        and requested, and the seconds of each call.

    Raises:
        EdjeError: the subject returned wrong blocks.
    """
    source = StoredRecords(Path(root), precision)
    workload = Workload(**workload_values)
    subject = SUBJECTS[name](source, Path(folder))
    calls = [
        source.row_ids[positions]
        for positions in draw_calls(workload, len(source.row_ids), seed)
    ]
    buffer = aligned_bytes(len(calls[0]) * subject.output_bytes).reshape(
        len(calls[0]), subject.output_bytes
    )
    # page faults of fresh memory would be measured as reading
    buffer.fill(1)
    files = subject.files()
    is_cold = workload.cache == "cold"
    subject.open()
    if is_cold:
        # rows that no timed call requests
        unused = np.setdiff1d(source.row_ids, np.concatenate(calls))
        if not len(unused):
            unused = calls[0]
        count = min(_WARM_UP, len(buffer))
        warm_up = np.random.default_rng(0).permutation(unused)[:count]
        subject.fetch(warm_up, buffer[: len(warm_up)])
        # the pages that the first one mapped could not be evicted
        subject = SUBJECTS[name](source, Path(folder))
        subject.open()
        resident = evict(files)
        if resident > COLD:
            return {
                "resident": resident,
                "discarded": (
                    f"not cold: {resident:.1%} of the pages could not be evicted"
                ),
            }
    else:
        load(files)
        for ids in calls:
            subject.fetch(ids, buffer[: len(ids)])
        resident = load(files) if files else 1.0
        if resident < WARM:
            return {
                "resident": resident,
                "discarded": f"not warm: only {resident:.1%} of the pages are cached",
            }
    latencies: list[float] = []
    records = buffer
    read_before = bytes_read()
    cpu_before = time.process_time()
    started = time.perf_counter()
    for ids in calls:
        now = time.perf_counter()
        if latencies and now > started + _LONGEST_SECONDS:
            break
        records = subject.fetch(ids, buffer[: len(ids)])
        latencies.append(time.perf_counter() - now)
    seconds = time.perf_counter() - started
    cpu = time.process_time() - cpu_before
    read = bytes_read() - read_before
    last = calls[len(latencies) - 1][:_CHECKED]
    wrong = int((records[: len(last)] != subject.expected(last)).any(axis=1).sum())
    requested = sum(map(len, calls[: len(latencies)])) * source.record_bytes
    if wrong:
        raise EdjeError(f"{wrong} of the checked blocks were wrong")
    discarded = None
    if is_cold and read < _READ_AT_LEAST * requested:
        discarded = (
            f"not cold: only {read / requested:.0%} of the requested bytes were counted"
            " as read"
        )
    return {
        "resident": resident,
        "discarded": discarded,
        "blocks": requested // source.record_bytes,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "read_bytes": read,
        "requested_bytes": requested,
        "latencies": [round(value, 7) for value in latencies],
    }


def draw_calls(workload: Workload, rows: int, seed: int) -> Sequence[Ids]:
    """Draw the rows of each call. A row is given by its position among all `rows` rows.

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


def summarise(
    runs: Sequence[Run], record_bytes: int, of_reader: Sequence[Run]
) -> dict[str, Any]:
    """Return medians over the valid runs. If no run is valid, return only the numbers
    of valid and discarded runs.

    `gb_per_s` is the rate of stored bytes, not of decoded bytes. `ratio` is the rate of
    the runs `of_reader` divided by the rate of `runs`, as the median over the repeats
    in which both are valid; None if there are no such repeats.
    """
    valid = [run for run in runs if not run["discarded"]]
    summary: dict[str, Any] = {"runs": len(valid), "discarded": len(runs) - len(valid)}
    if not valid:
        return summary
    pairs = [
        (a, b)
        for a, b in zip(of_reader, runs, strict=True)
        if not (a["discarded"] or b["discarded"])
    ]
    rates = [rate(run) for run in valid]
    calls = [seconds for run in valid for seconds in run["latencies"]]
    summary |= {
        "blocks": valid[0]["blocks"],
        "blocks_per_s": statistics.median(rates),
        "gb_per_s": statistics.median(rates) * record_bytes / 1e9,
        "gb_per_s_range": [
            min(rates) * record_bytes / 1e9,
            max(rates) * record_bytes / 1e9,
        ],
        "cpu_us_per_block": (
            statistics.median(run["cpu_seconds"] / run["blocks"] for run in valid) * 1e6
        ),
        "ratio": (
            median_ratio([rate(a) for a, _ in pairs], [rate(b) for _, b in pairs])
            if pairs
            else None
        ),
        "amplification": statistics.median(
            run["read_bytes"] / run["requested_bytes"] for run in valid
        ),
    }
    if len(calls) > len(valid):
        percentiles = np.percentile(np.array(calls) * 1e3, (50, 95, 99)).tolist()
        summary["latency_ms"] = dict(
            zip(("p50", "p95", "p99"), percentiles, strict=True)
        )
    return summary


_METHOD = """Every run is a process of its own, which imports, opens and warms up before
the timing starts. The warm-up reads other rows. Subjects take turns, so that a change
of the disk's speed affects all of them.

- Cold: the pages of the files were evicted, and at most 1 % of them were in the page
  cache right before the run. All other cold runs are discarded and listed above.
- GB/s: stored bytes of the requested blocks, median and range. The reader decodes them
  to bfloat16; peers return the stored bytes. The program fio reads whole sectors past
  the page cache, and discards the data.
- Ratio: the rate of the reader divided by the rate of the row, as the median over
  repeats.
- CPU: user and system time of the process.
- Read: bytes that the kernel counted as read from storage, divided by the bytes of the
  requested blocks.
- Latency: the files are evicted once, before the first query of a run. No block is
  requested twice, but readahead may load blocks of later queries into the page
  cache."""


def report_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the report in Markdown."""
    where = report["environment"]
    settings = report["settings"]
    disk = report["environment"]["disk"]
    yield f"# Fetching blocks, {where['date']}\n"
    yield machine(where)
    yield (
        f"Disk: {disk['device']} ({disk['model'] or 'model unknown'}),"
        f" {disk['file_system']}."
    )
    installed = [
        f"{name} {version}".strip()
        for name, version in where["peers"].items()
        if version is not None
    ]
    yield (
        f"Peers: {', '.join(installed) or 'none'}. Load average before the first run:"
        f" {where['load_before']:.1f}."
    )
    yield f"Medians of {settings['repeats']}."
    discarded = []
    for precision, measured in report["precisions"].items():
        yield (
            f"\n## {precision}: {measured['rows']:,} records of"
            f" {measured['record_bytes']:,} bytes"
        )
        for name, section in measured["sections"].items():
            entries = section["entries"]
            yield f"\n### {section['title']}\n"
            header = (
                "",
                "blocks",
                "GB/s (range)",
                "ratio",
                "CPU us per block",
                "read",
                "p50 / p95 / p99 ms",
            )
            rows = []
            for subject, entry in entries.items():
                summary = entry["summary"]
                if not summary["runs"]:
                    rows.append([subject, "every run was discarded", *[""] * 5])
                    continue
                low, high = summary["gb_per_s_range"]
                ratio = "" if summary["ratio"] is None else f"{summary['ratio']:.2f}"
                rows.append(
                    [
                        subject,
                        f"{summary['blocks']:,.0f}",
                        f"{summary['gb_per_s']:.3f} ({low:.3f} - {high:.3f})",
                        ratio,
                        f"{summary['cpu_us_per_block']:.1f}",
                        f"{summary['amplification']:.3f}",
                        " / ".join(
                            f"{value:.2f}"
                            for value in summary.get("latency_ms", {}).values()
                        ),
                    ]
                )
            yield from table(header, rows)
            yield (
                "\n"
                + "; ".join(
                    f"{subject}: {entry['setting']}"
                    for subject, entry in entries.items()
                )
                + "."
            )
            discarded += [
                f"{precision}, {name}, {subject}, repeat {run['repeat'] + 1}:"
                f" {run['discarded']}"
                for subject, entry in entries.items()
                for run in entry["runs"]
                if run["discarded"]
            ]
    yield "\n## Notes and discarded runs\n"
    yield from (
        f"- {line}"
        for line in [*report["notes"], *discarded] or ["None: all runs are valid."]
    )
    yield f"\n## Method\n\n{_METHOD}"
