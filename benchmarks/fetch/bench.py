"""Measures how fast blocks of a local index are fetched, beside other libraries and the disk itself.

Every run is a process of its own. The entries of a section take turns, so that a change of the disk's speed affects all
of them, and ratios compare runs of the same turn.
"""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from benchmarks.disk import describe_disk
from benchmarks.fetch.fio import DEPTH, find_fio, measure_with_fio
from benchmarks.fetch.peers import PEERS, SUBJECTS, installed_version
from benchmarks.fetch.subjects import Entry, StoredRecords
from benchmarks.fetch.worker import WorkerError, run_worker
from benchmarks.report import Say, machine, table
from benchmarks.synthetic import make_synthetic
from pipelines.environment import environment
from storage_formats.codecs import codec
from storage_formats.errors import EdjeError, UsageError
from storage_formats.format.layout import IndexSpec
from storage_formats.format.manifest import Manifest

# A run of a slow peer fetches PEER_BLOCKS, or fewer blocks if PEER_BLOCKS take more than PEER_SECONDS.
PEER_BLOCKS = 10_000
PEER_SECONDS = 30.0
TRIAL_BLOCKS = 256  # blocks of the first trial run, which estimates the speed of a peer
_QUERIES, _QUERY_POOL = 50, 100
_BLOCK_SHAPE = (64, 384)  # of the synthetic index
_SPARE_BYTES = 1 << 30
_SMALL_BYTES = 1 << 30  # a smaller index may fit in a cache of the host or of the drive

Run: TypeAlias = dict[str, Any]
"""The result of one run, see `benchmarks.fetch.worker.measure`, and the number of its repeat."""
Sections: TypeAlias = dict[str, tuple[str, list[Entry]]]
"""Title and entries of each section, by name. The entries of a section are compared with each other."""


def _rate(run: Run) -> float:
    return float(run["blocks"] / run["seconds"])


def _cpu_per_block(run: Run) -> float:
    return float(run["cpu_seconds"] / run["blocks"])


def _latency(run: Run) -> float:
    return float(statistics.median(run["latencies"]))


def _read_ratio(run: Run) -> float:
    return float(run["read_bytes"] / run["requested_bytes"])


# Name, section, compared entry (None: the figure itself), figure, bound, True for a minimum, precisions (empty: all).
TARGETS: Sequence[tuple[str, str, str | None, Callable[[Run], float], float, bool, tuple[str, ...]]] = (
    ("cold random, relative to the device", "cold random", "device", _rate, 0.9, True, ()),
    ("cold contiguous, relative to the device", "cold contiguous", "device", _rate, 0.9, True, ()),
    ("cold random, relative to np.memmap", "cold random", "np.memmap", _rate, 8.0, True, ()),
    ("cold random, relative to TensorStore", "cold random", "tensorstore", _rate, 1.0, True, ()),
    ("CPU per block, relative to TensorStore", "cold random", "tensorstore", _cpu_per_block, 0.5, False, ()),
    ("cold random, relative to Lance", "cold random", "lance", _rate, 5.0, True, ()),
    ("cold random, relative to zarr-python", "cold random", "zarr-python", _rate, 20.0, True, ()),
    ("warm random, relative to memcpy", "warm random", "memcpy", _rate, 0.6, True, ("bf16",)),
    ("warm random, relative to TensorStore", "warm random", "tensorstore", _rate, 4.0, True, ("bf16",)),
    ("cold query, p50, relative to the device", "cold queries", "device", _latency, 1.5, False, ("fp8",)),
    ("bytes read, relative to the requested bytes", "cold random", None, _read_ratio, 1.05, False, ("bf16",)),
)


def bench_fetch(
    index: Path | None,
    say: Say,
    *,
    synthetic: int | None = None,
    precisions: Sequence[str] = (),
    pool: int = 50_000,
    states: Sequence[Literal["cold", "warm"]] = ("cold", "warm"),
    peers: bool = False,
    engines: Sequence[str] = ("auto",),
    repeats: int = 5,
    seconds: float = 10.0,
    model: Path | None = None,
    scratch: Path | None = None,
    targets: bool = False,
) -> dict[str, Any]:
    """Run the benchmark and return the report. Temporary files are removed at the end.

    Args:
        index: index to fetch from; None for a synthetic index.
        say: receives one line of text after each run.
        synthetic: number of rows of the synthetic index.
        precisions: precisions to measure; empty for only the first precision of the index.
        pool: blocks per large fetch, limited to half the rows of the index.
        states: states of the page cache to measure.
        peers: True to measure the compared libraries too.
        engines: I/O engines of this project's reader. All other entries are compared with the first engine.
        repeats: runs of each entry.
        seconds: target duration of a run of a compared library. A slow library fetches fewer blocks, see `PEER_BLOCKS`.
        model: bundle with the joint encoder whose speed is compared with the fetch rate; None for no comparison.
        scratch: folder for the synthetic index and for copies of records; None for the folder that contains `index`.
        targets: True to compare the results with the performance targets of this project.

    Raises:
        UsageError: the index or a precision does not exist, a folder is not on a disk, or disk space is short. No file
            has been written in these cases.
    """
    if platform.system() != "Linux":
        raise UsageError(
            "bench fetch runs only on Linux, because it evicts files from the page cache and reads kernel counters"
        )
    settings: dict[str, Any] = {
        "rows": None,
        "index": index and index.name,
        "model": model and model.name,
        "synthetic": synthetic,
    }
    settings |= {"pool": pool, "states": states, "peers": peers, "engines": engines, "repeats": repeats}
    if index is not None:
        spec = Manifest.load(index).spec
    elif synthetic is not None:
        names = tuple(dict.fromkeys(precisions)) or ("bf16",)
        spec = IndexSpec(synthetic, min(1024, synthetic), _BLOCK_SHAPE, _BLOCK_SHAPE[1], names)
    else:
        raise UsageError("give either an index, or the number of rows of a synthetic index")
    precisions = tuple(dict.fromkeys(precisions)) or spec.precisions[:1]
    scratch = scratch or (index or Path()).resolve().parent
    scratch.mkdir(parents=True, exist_ok=True)
    notes = [
        f"{name} is left out: {PEERS[name].package} is not installed"
        for name in PEERS
        if peers and installed_version(name) is None
    ]
    installed = [name for name in PEERS if peers and installed_version(name) is not None]
    notes += _check(spec, precisions, scratch, index, installed, pool)
    for note in notes:
        say(note)
    needed = None
    if model is not None:
        from benchmarks.rerank import needed_pairs_per_second

        needed = needed_pairs_per_second(model)
    load = os.getloadavg()[0]
    entries: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-fetch-", dir=scratch, ignore_cleanup_errors=True) as folder:
        root = index or Path(folder) / "synthetic.edje"
        if index is None:
            say(f"writing a synthetic index of {spec.rows:,} rows: {', '.join(spec.precisions)}")
            make_synthetic(root, spec)
        disk = describe_disk(root)
        for precision in precisions:
            source = StoredRecords(root, precision)
            fio = find_fio(source.files()[0])
            runner = Runner(source, Path(folder) / "peers", None if fio is None else fio[1], repeats, seconds, say)
            ready = []
            for name in installed:
                try:
                    runner.prepare(name)
                    ready.append(name)
                except WorkerError as error:
                    notes.append(f"{name} is left out at {precision}, because the copy of the records failed: {error}")
            entries[precision] = runner.measure(
                plan_sections(len(source.row_ids), pool, states, fio is not None, engines, ready)
            )
            settings["rows"] = len(source.row_ids)
            shutil.rmtree(runner.copies, ignore_errors=True)
    primary = _reader_labels(engines)[engines[0]]
    judged = [line for precision, entry in entries.items() for line in judge(precision, entry["sections"], primary)]
    device = f"{SUBJECTS['direct reads'].setting}, because fio is not installed"
    if fio is not None:
        device = f"{fio[0]}, {fio[1]}, O_DIRECT, depth {DEPTH}"
    return {
        "environment": {
            **environment(),
            "disk": disk,
            "peers": {name: installed_version(name) for name in installed},
            "load_before": load,
        },
        "settings": settings,
        "device": device,
        "notes": notes,
        "precisions": entries,
        "targets": judged if targets else [],
        "joint_encoder": needed,
        "verdict": [_verdict(precision, entry["sections"], primary, needed) for precision, entry in entries.items()],
    }


def _check(
    spec: IndexSpec, precisions: Sequence[str], scratch: Path, index: Path | None, peers: Sequence[str], pool: int
) -> list[str]:
    """Raise UsageError if the benchmark cannot run. Return warnings if the index is small."""
    for name in precisions:
        if name not in spec.precisions:
            raise UsageError(
                f"{index} does not have precision '{name}', only {', '.join(spec.precisions)}; run 'edje-index "
                "quantize' first"
            )
    for path in {index or scratch, scratch} if peers else {index or scratch}:
        if describe_disk(path)["file_system"] in ("tmpfs", "ramfs"):
            raise UsageError(
                f"{path} is in a file system in memory, so reads are never cold; choose a folder on a disk"
            )
    sizes = {name: spec.rows * codec(name, spec.block_shape).record_bytes for name in spec.precisions}
    copies = sum(PEERS[peer].copy_ratio for peer in peers if PEERS[peer].copies)
    needed = _SPARE_BYTES + int(copies * max(sizes[name] for name in precisions))
    needed += 0 if index else int(1.05 * sum(sizes.values()))
    free = shutil.disk_usage(scratch).free
    if needed > free:
        raise UsageError(
            f"{scratch} has {free / 1e9:.1f} GB free, but the benchmark needs {needed / 1e9:.1f} GB; choose another "
            "scratch folder, fewer rows or no compared libraries"
        )
    warnings = []
    if spec.rows // 2 < pool:
        warnings.append(
            f"warning: {spec.rows:,} rows are too few for fetches of {pool:,} blocks, so large fetches read "
            f"{spec.rows // 2:,}; fixed costs lower the measured rates"
        )
    return warnings + [
        f"warning: {name} holds {sizes[name] / 1e6:,.1f} MB, which may fit in a cache of the drive or the host; "
        "use an index of at least 1 GiB to measure cold reads"
        for name in precisions
        if sizes[name] < _SMALL_BYTES
    ]


def _reader_labels(engines: Sequence[str]) -> dict[str, str]:
    """Return the label of this project's reader for each engine."""
    return {engine: "edje" if len(engines) == 1 else f"edje {engine}" for engine in engines}


def plan_sections(
    rows: int, pool: int, states: Sequence[str], has_fio: bool, engines: Sequence[str], peers: Sequence[str]
) -> Sections:
    """Return what is measured on an index of `rows` rows."""
    device = "fio" if has_fio else "direct reads"
    count = max(1, min(pool, rows // 2))
    query = min(_QUERY_POOL, count)
    queries = min(_QUERIES, count // query) * query
    few = [name for name in ("np.memmap", "tensorstore") if name in peers]

    def entries(
        subjects: Sequence[str],
        pattern: Literal["random", "contiguous", "listed"],
        blocks: int,
        size: int,
        cache: Literal["cold", "warm"],
    ) -> list[Entry]:
        found = []
        for subject in subjects:
            if subject == "edje":
                labels = _reader_labels(engines).items()
                found += [Entry(label, subject, pattern, blocks, size, cache, engine) for engine, label in labels]
            else:
                label = "device" if subject == device else subject
                found.append(Entry(label, subject, pattern, blocks, size, cache))
        return found

    sections: Sections = {}
    if "cold" in states:
        everything, some = (device, "edje", *peers), (device, "edje", *few)
        sections["cold random"] = (
            f"{count:,} random blocks in one call, cold",
            entries(everything, "random", count, count, "cold"),
        )
        sections["cold contiguous"] = (
            f"{count:,} contiguous blocks in one call, cold",
            entries(some, "contiguous", count, count, "cold"),
        )
        listed = Entry("edje, rows in list order", "edje", "listed", queries, query, engine=engines[0])
        sections["cold queries"] = (
            f"queries of {query} new blocks each, one at a time, cold",
            [*entries(some, "random", queries, query, "cold"), listed],
        )
    if "warm" in states:
        sections["warm random"] = (
            f"{count:,} random blocks in one call, in the page cache",
            entries(("memcpy", "edje", *few), "random", count, count, "warm"),
        )
        sections["warm queries"] = (
            f"queries of {query} blocks, in the page cache",
            entries(("edje", *few), "random", queries, query, "warm"),
        )
    return sections


def same_size_label(primary: str, peer: str) -> str:
    """Return the label of the runs in which the primary reader fetches as few blocks as the library `peer`."""
    return f"{primary}, as many as {peer}"


@dataclass
class Runner:
    """Runs entries on one precision of one index.

    Attributes:
        source: the records to fetch.
        copies: folder for the copies of the records that peers read.
        fio_engine: I/O engine of fio; None if fio cannot be used.
        repeats: runs of each entry.
        seconds: target duration of a run of a peer.
        say: receives one line of text after each run.
    """

    source: StoredRecords
    copies: Path
    fio_engine: str | None
    repeats: int
    seconds: float
    say: Say

    def prepare(self, name: str) -> None:
        """Write a copy of the records for a peer, if it needs one. Raise WorkerError if this fails."""
        if PEERS[name].copies and not self._folder(name).exists():
            self.say(f"{self.source.precision}: writing the copy for {name}")
            self._folder(name).mkdir(parents=True)
            entry = Entry(name, name, "random", 1, 1)
            run_worker(self.source, self._folder(name), entry, seed=0, max_seconds=0, prepare=True)

    def measure(self, sections: Sections) -> dict[str, Any]:
        """Measure all sections, and return the entry of this precision in the report."""
        measured: dict[str, dict[str, Any]] = {}
        for name, (title, planned) in sections.items():
            self.say(f"{name}: {title}")
            primary = next(entry for entry in planned if entry.subject == "edje")
            entries = self.within_time(planned, primary)
            runs = self.run(name, entries)
            measured[name] = {"title": title, "entries": {}}
            for entry in entries:
                compared = runs.get(same_size_label(primary.label, entry.label), runs[primary.label])
                ratio = None if entry is primary else paired_ratio(compared, runs[entry.label], _rate)
                measured[name]["entries"][entry.label] = {
                    "subject": entry.subject,
                    "setting": SUBJECTS[entry.subject].setting if entry.subject in SUBJECTS else "",
                    "workload": asdict(entry),
                    "summary": summarise(runs[entry.label], self.source.record_bytes) | {"ratio": ratio},
                    "runs": runs[entry.label],
                }
        return {"rows": len(self.source.row_ids), "record_bytes": self.source.record_bytes, "sections": measured}

    def within_time(self, entries: Sequence[Entry], primary: Entry) -> list[Entry]:
        """Return the entries with fewer blocks per run for peers that would take too long.

        The rate depends on the number of blocks, so the primary reader gets another entry with as few blocks.
        """
        fitted = []
        for entry in entries:
            fitted.append(entry)
            if entry.subject not in PEERS or entry.pool < entry.blocks or entry.blocks <= TRIAL_BLOCKS:
                continue
            blocks = self._affordable_blocks(entry, TRIAL_BLOCKS)
            if TRIAL_BLOCKS < blocks < PEER_BLOCKS:  # rates of few blocks mislead, so estimate again with more
                blocks = self._affordable_blocks(entry, min(blocks, entry.blocks))
            if blocks < entry.blocks:
                self.say(f"{entry.label} is slow, so each run fetches {blocks:,} instead of {entry.blocks:,} blocks")
                fitted[-1] = replace(entry, blocks=blocks, pool=blocks)
                label = same_size_label(primary.label, entry.label)
                fitted.append(replace(primary, label=label, blocks=blocks, pool=blocks))
        return fitted

    def _affordable_blocks(self, entry: Entry, trial_blocks: int) -> int:
        """Estimate with a trial run how many blocks the peer can fetch within the time limit."""
        trial = self._run(replace(entry, blocks=trial_blocks, pool=trial_blocks), seed=self.repeats)
        if "seconds" not in trial:
            return PEER_BLOCKS
        least = min(PEER_BLOCKS, int(_rate(trial) * PEER_SECONDS))
        return max(int(_rate(trial) * self.seconds), least, TRIAL_BLOCKS)

    def run(self, name: str, entries: Sequence[Entry]) -> dict[str, list[Run]]:
        """Run each entry once per repeat, in another order each time. Return the runs by label of the entry."""
        runs: dict[str, list[Run]] = {entry.label: [] for entry in entries}
        for repeat in range(self.repeats):
            turn = repeat % len(entries)
            for entry in (*entries[turn:], *entries[:turn]):
                run = {"repeat": repeat, **self._run(entry, repeat)}
                runs[entry.label].append(run)
                text = f"DISCARDED, {run['discarded']}"
                if not run["discarded"]:
                    text = f"{_rate(run):,.0f} blocks/s, {_cpu_per_block(run) * 1e6:.0f} us CPU per block"
                self.say(f"{name} {self.source.precision} {repeat + 1}/{self.repeats}  {entry.label}: {text}")
        return runs

    def _run(self, entry: Entry, seed: int) -> Run:
        if entry.subject == "fio":
            assert self.fio_engine is not None
            return measure_with_fio(self.fio_engine, self.source, entry, seed)
        longest = max(self.seconds, PEER_SECONDS)
        try:
            run = run_worker(self.source, self._folder(entry.subject), entry, seed=seed, max_seconds=longest)
        except WorkerError as error:
            run = {"resident": None, "discarded": f"failed: {error}"}
        if entry.subject not in PEERS and str(run["discarded"]).startswith("failed: "):
            raise EdjeError(f"the run of {entry.label} ({entry.pattern}) {run['discarded']}")
        return run

    def _folder(self, name: str) -> Path:
        """Return the folder with the copy for a peer. Both peers that map an array share one copy."""
        return self.copies / name.split(" ")[0]


def paired_ratio(left: Sequence[Run], right: Sequence[Run], figure: Callable[[Run], float]) -> float | None:
    """Return the median of `figure(left) / figure(right)` over the repeats in which both runs are valid.

    Returns None if there are no such repeats.
    """
    others = {run["repeat"]: run for run in right if not run["discarded"]}
    pairs = [(run, others[run["repeat"]]) for run in left if not run["discarded"] and run["repeat"] in others]
    ratios = [figure(run) / figure(other) for run, other in pairs if figure(other) > 0]
    return statistics.median(ratios) if ratios else None


def summarise(runs: Sequence[Run], record_bytes: int) -> dict[str, Any]:
    """Return medians over the valid runs. If no run is valid, return only the numbers of valid and discarded runs.

    `gb_per_s` is the rate of stored bytes, not of decoded bytes.
    """
    valid = [run for run in runs if not run["discarded"]]
    summary: dict[str, Any] = {"runs": len(valid), "discarded": len(runs) - len(valid)}
    if not valid:
        return summary
    rates = [_rate(run) for run in valid]
    calls = [seconds for run in valid for seconds in run["latencies"]]
    summary |= {
        "blocks": valid[0]["blocks"],
        "blocks_per_s": statistics.median(rates),
        "gb_per_s": statistics.median(rates) * record_bytes / 1e9,
        "gb_per_s_range": [min(rates) * record_bytes / 1e9, max(rates) * record_bytes / 1e9],
        "cpu_us_per_block": statistics.median(map(_cpu_per_block, valid)) * 1e6,
        "amplification": statistics.median(map(_read_ratio, valid)),
    }
    if len(calls) > len(valid):
        percentiles = np.percentile(np.array(calls) * 1e3, (50, 95, 99)).tolist()
        summary["latency_ms"] = dict(zip(("p50", "p95", "p99"), percentiles, strict=True))
    return summary


def judge(precision: str, sections: dict[str, Any], primary: str) -> list[dict[str, Any]]:
    """Return the targets that apply to `precision` and were measured, each with its value and whether it is met."""
    judged = []
    for name, section, against, figure, bound, at_least, only in TARGETS:
        entries = sections.get(section, {"entries": {}})["entries"]
        if primary not in entries or (only and precision not in only) or (against and against not in entries):
            continue
        if against is None:
            figures = sorted(figure(run) for run in entries[primary]["runs"] if not run["discarded"])
            value = statistics.median(figures) if figures else None
        else:
            compared = entries.get(same_size_label(primary, against), entries[primary])
            value = paired_ratio(compared["runs"], entries[against]["runs"], figure)
        if value is not None:
            met = value >= bound if at_least else value <= bound
            text = f"{'at least' if at_least else 'at most'} {bound:g}"
            judged.append({"name": name, "precision": precision, "bound": text, "measured": value, "met": met})
    return judged


def _verdict(precision: str, sections: dict[str, Any], primary: str, needed: dict[str, Any] | None) -> str:
    """Return a sentence that compares the fetch rate with the speed of the joint encoder."""
    for name in ("cold random", "warm random"):
        fetched = sections[name]["entries"][primary]["summary"].get("blocks_per_s") if name in sections else None
        if fetched is not None:
            break
    else:
        return f"{precision}: every run was discarded"
    text = f"{precision}: {name.split()[0]} fetches deliver {fetched:,.0f} blocks/s"
    if needed is None:
        return text + "; with a model bundle, the report compares this rate with the speed of the joint encoder"
    scored = needed["pairs_per_s"]
    share = f"{fetched / scored:.1f} times" if fetched >= scored else f"only {fetched / scored:.0%}"
    encoder = f"the joint encoder ({needed['setting']}, {needed['device']})"
    return f"{text}, {share} the {scored:,.0f} pairs/s that {encoder} scores"


_METHOD = """Every run is a process of its own, which imports, opens and warms up before the timing starts. The warm-up
reads other rows. Subjects take turns, so that a change of the disk's speed affects all of them.

- Cold: the pages of the files were evicted, and at most 1 % of them were in the page cache right before the run. All
  other cold runs are discarded and listed above.
- Blocks: blocks per run. A slow peer fetches fewer blocks. Its ratio then uses runs in which the reader fetches equally
  few blocks.
- GB/s: stored bytes of the requested blocks, median and range. The reader decodes them to bfloat16; peers return the
  stored bytes. The device reads blocks of whole sectors.
- Ratio: the rate of the reader divided by the rate of the row, as the median over repeats.
- CPU: user and system time of the process.
- Read: bytes that the kernel counted as read from storage, divided by the bytes of the requested blocks. Whole pages
  or sectors make the quotient larger than 1.
- Latency: the files are evicted once, before the first query of a run. No block is requested twice, but readahead may
  load blocks of later queries into the page cache."""


def report_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the report in Markdown."""
    where, settings, disk = report["environment"], report["settings"], report["environment"]["disk"]
    yield f"# Fetching blocks, {where['date']}\n"
    yield machine(where)
    yield (
        f"Disk: {disk['device']} ({disk['model'] or 'model unknown'}), scheduler {disk['scheduler']}, "
        f"{disk['file_system']} ({disk['mount_options']}). Device measured by {report['device']}."
    )
    yield f"Peers: {', '.join(f'{name} {version}'.strip() for name, version in where['peers'].items()) or 'none'}."
    yield f"Load average before the first run: {where['load_before']:.1f}."
    yield f"{settings['rows']:,} rows, medians of {settings['repeats']}, engines: {', '.join(settings['engines'])}."
    yield "\n## Verdict\n"
    yield from (f"- {line}" for line in report["verdict"])
    if report["targets"]:
        yield "\n## Targets\n"
        yield from table(
            ("figure", "precision", "target", "measured", ""),
            (
                (
                    each["name"],
                    each["precision"],
                    each["bound"],
                    f"{each['measured']:.2f}",
                    "met" if each["met"] else "**not met**",
                )
                for each in report["targets"]
            ),
        )
    discarded = []
    for precision, measured in report["precisions"].items():
        yield f"\n## {precision}: records of {measured['record_bytes']:,} bytes"
        for name, section in measured["sections"].items():
            entries = section["entries"]
            yield f"\n### {section['title'][0].upper()}{section['title'][1:]}\n"
            header = ("", "blocks", "GB/s (range)", "ratio", "CPU us per block", "read", "p50 / p95 / p99 ms")
            yield from table(header, ([label, *_cells(entry["summary"])] for label, entry in entries.items()))
            settings_of = {entry["subject"]: entry["setting"] for entry in entries.values() if entry["setting"]}
            yield "\n" + "; ".join(f"{subject}: {setting}" for subject, setting in settings_of.items()) + "."
            discarded += [
                f"{precision}, {name}, {label}, repeat {run['repeat'] + 1}: {run['discarded']}"
                for label, entry in entries.items()
                for run in entry["runs"]
                if run["discarded"]
            ]
    yield "\n## Notes and discarded runs\n"
    yield from (f"- {line}" for line in [*report["notes"], *discarded] or ["None: all runs are valid."])
    yield f"\n## Method\n\n{_METHOD}"


def _cells(summary: dict[str, Any]) -> list[str]:
    if not summary["runs"]:
        return ["every run was discarded", *[""] * 5]
    low, high = summary["gb_per_s_range"]
    return [
        f"{summary['blocks']:,.0f}",
        f"{summary['gb_per_s']:.3f} ({low:.3f} - {high:.3f})",
        "" if summary["ratio"] is None else f"{summary['ratio']:.2f}",
        f"{summary['cpu_us_per_block']:.1f}",
        f"{summary['amplification']:.3f}",
        " / ".join(f"{value:.2f}" for value in summary.get("latency_ms", {}).values()),
    ]
