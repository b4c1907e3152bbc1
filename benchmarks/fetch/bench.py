"""Runs `bench fetch` and returns the report."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.block_device import storage
from benchmarks.fetch.fio import Fio, find_fio
from benchmarks.fetch.memory_pressure import check_memory_cap, memory_cap
from benchmarks.fetch.plan import (
    CAPPED_POOL,
    DEVICE_DEPTH,
    FetchBench,
    Participants,
    Section,
    blocks_of_large_fetch,
    plan_sections,
    same_size_label,
)
from benchmarks.fetch.records import StoredRecords
from benchmarks.fetch.runner import FIO, Measurement, Runner, Say
from benchmarks.fetch.subjects import PEERS, installed_version, subject_class
from benchmarks.fetch.summary import paired_ratio, rate, summarise
from benchmarks.fetch.targets import judge
from benchmarks.fetch.worker_process import WorkerError
from benchmarks.synthetic import make_synthetic
from pipelines.environment import environment
from storage_formats.codecs import BF16, codec
from storage_formats.errors import UsageError
from storage_formats.format.layout import IndexSpec
from storage_formats.format.manifest import Manifest

_PROBE = "direct probe"
_SPARE_BYTES = 1 << 30
_NO_DISK = ("tmpfs", "ramfs")
_WORKER_BYTES = 512 << 20  # memory of a worker without its buffers
_SMALL_BYTES = 1 << 30  # a smaller index may fit in a cache of the host or of the drive


def bench_fetch(bench: FetchBench, say: Say) -> dict[str, Any]:
    """Run the benchmark and return the report.

    Temporary files are removed at the end unless `bench.keep` is True.

    Args:
        bench: settings.
        say: function that receives one line of text after each run.

    Raises:
        UsageError: the index or a precision does not exist, a folder is not on a disk, or disk space or memory is
            short. No file has been written in these cases.
    """
    if platform.system() != "Linux":
        raise UsageError(
            "bench fetch runs only on Linux, because it evicts files from the page cache and reads kernel counters"
        )
    bench.scratch.mkdir(parents=True, exist_ok=True)
    notes: list[str] = []
    peers = _installed(notes) if bench.peers else []
    _check_space(bench, peers)
    spec = _spec(bench)
    notes += _small_index(bench, spec)
    for note in notes:
        say(note)
    needed = _needed_pairs(bench)
    with _folder(bench) as folder:
        root = _index(bench, folder, say)
        precisions = bench.precisions or Manifest.load(root).spec.precisions[:1]
        load = os.getloadavg()[0]
        fio = find_fio(StoredRecords(root, precisions[0]).files()[0])
        session = Session(bench, root, folder, fio, say, notes)
        entries = {precision: session.measure(precision, tuple(peers)) for precision in precisions}
        disk = storage(root)
    return {
        "environment": {**environment(), "disk": disk, "peers": _versions(peers), "load_before": load},
        "settings": _settings(bench, spec.rows),
        "device": session.device,
        "notes": notes,
        "precisions": entries,
        "targets": [target for entry in entries.values() for target in entry.pop("targets")],
        "joint_encoder": needed,
        "verdict": [_verdict(precision, entry, needed) for precision, entry in entries.items()],
    }


@dataclass
class Session:
    """Settings and objects that the measurements of all precisions use."""

    bench: FetchBench
    root: Path
    folder: Path
    fio: Fio | None
    say: Say
    notes: list[str]

    @property
    def device(self) -> str:
        """Text for the report: how the speed of the disk is measured."""
        if self.fio is not None:
            return self.fio.describe(DEVICE_DEPTH)
        return f"{DEVICE_DEPTH} threads of O_DIRECT reads, because fio is not installed"

    def measure(self, precision: str, peers: tuple[str, ...]) -> dict[str, Any]:
        source = StoredRecords(self.root, precision)
        copies = self.folder / "peers" / precision
        runner = Runner(source, copies, self.fio, self.bench.repeats, self.bench.seconds, self.say)
        try:
            ready = tuple(name for name in peers if self._prepared(runner, name))
            participants = Participants(FIO if self.fio else _PROBE, ready, self.bench.engines)
            sections = []
            runs = {}
            for planned in plan_sections(self.bench, source.rows, participants):
                self.say(f"{planned.name}: {planned.title}")
                sections.append(runner.within_time(planned, participants.primary))
                runs[planned.name] = self._run(runner, sections[-1])
        finally:
            if not self.bench.keep:
                shutil.rmtree(copies, ignore_errors=True)
        return {
            "rows": source.rows,
            "record_bytes": source.record_bytes,
            "direct_bytes": source.direct_bytes,
            "primary": participants.primary,
            "sections": {
                section.name: _section(section, runs[section.name], source.record_bytes, participants.primary)
                for section in sections
            },
            "targets": judge(precision, runs, participants.primary) if self.bench.targets else [],
        }

    def _prepared(self, runner: Runner, name: str) -> bool:
        try:
            runner.prepare(name)
        except WorkerError as error:
            self.notes.append(
                f"{name} is left out at {runner.source.precision}, because the copy of the records failed: {error}"
            )
            return False
        return True

    def _run(self, runner: Runner, section: Section) -> dict[str, list[Measurement]]:
        if not section.name.startswith("capped"):
            return runner.run(section)
        assert self.bench.memory_cap is not None
        with memory_cap(self.bench.memory_cap, _capped_bytes(runner.source.spec)) as state:
            self.notes.append(f"little memory: {state}")
            return runner.run(section)


def _section(section: Section, runs: dict[str, list[Measurement]], record_bytes: int, primary: str) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for entry in section.entries:
        entry_runs = runs[entry.label]
        primary_runs = runs.get(same_size_label(primary, entry.label), runs.get(primary, []))
        ratio = None if entry.label == primary else paired_ratio(primary_runs, entry_runs, rate)
        entries[entry.label] = {
            "subject": entry.subject,
            "setting": "" if entry.subject == FIO else subject_class(entry.subject).setting,
            "workload": asdict(entry.workload),
            "options": entry.options,
            "summary": summarise(entry_runs, record_bytes) | {"ratio": ratio},
            "runs": entry_runs,
        }
    return {"title": section.title, "entries": entries}


def _settings(bench: FetchBench, rows: int) -> dict[str, Any]:
    """Return the settings for the report. Paths of this machine are left out."""
    settings = asdict(bench)
    settings |= {name: settings[name].name if settings[name] else None for name in ("index", "model")}
    settings["rows"] = rows
    del settings["scratch"], settings["keep"]
    return settings


def _installed(notes: list[str]) -> list[str]:
    """Return the names of the installed compared libraries. Add a note for each library that is not installed."""
    installed = [name for name in PEERS if installed_version(name) is not None]
    for name in PEERS:
        if name not in installed:
            notes.append(f"{name} is left out: the package {subject_class(name).package} is not installed")
    return installed


def _versions(peers: list[str]) -> dict[str, str]:
    return {name: version for name in peers if (version := installed_version(name))}


def _small_index(bench: FetchBench, spec: IndexSpec) -> list[str]:
    """Return warnings if the index is so small that the results differ from those of large indexes."""
    warnings = []
    fetched = blocks_of_large_fetch(bench, spec.rows)
    if fetched < bench.pool:
        warnings.append(
            f"warning: {spec.rows:,} rows are too few for fetches of {bench.pool:,} blocks, so large fetches read "
            f"{fetched:,}; fixed costs lower the measured rates"
        )
    for name in bench.precisions or spec.precisions[:1]:
        size = spec.rows * codec(name, spec.block_shape).record_bytes
        if size < _SMALL_BYTES:
            warnings.append(
                f"warning: {name} holds {size / 1e6:,.1f} MB, which may fit in a cache of the drive or the host; "
                "use an index of at least 1 GiB to measure cold reads"
            )
    return warnings


def _check_space(bench: FetchBench, peers: list[str]) -> None:
    """Raise UsageError if a folder is not on a disk, or if disk space or memory is short."""
    index = bench.scratch if bench.index is None else bench.index
    for path in {bench.scratch, index} if peers or bench.index is None else {index}:
        if path.exists() and storage(path)["file_system"] in _NO_DISK:
            raise UsageError(
                f"{path} is in a file system in memory, so reads are never cold; choose a folder on a disk"
            )
    spec = _spec(bench)
    if bench.memory_cap is not None:
        check_memory_cap(bench.memory_cap, _capped_bytes(spec))
    sizes = {name: spec.rows * codec(name, spec.block_shape).record_bytes for name in spec.precisions}
    copies = [
        sum(subject_class(peer).copy_bytes(spec.rows, sizes[name] // spec.rows) for peer in peers)
        for name in bench.precisions or spec.precisions[:1]
    ]
    needed = (sum(copies) if bench.keep else max(copies)) + _SPARE_BYTES
    if bench.index is None:
        needed += int(sum(sizes.values()) * 1.05)
    free = shutil.disk_usage(bench.scratch).free
    if needed > free:
        raise UsageError(
            f"{bench.scratch} has {free / 1000000000.0:.1f} GB free, but the benchmark needs "
            f"{needed / 1000000000.0:.1f} GB; choose another scratch folder, fewer rows or no compared "
            "libraries"
        )


def _capped_bytes(spec: IndexSpec) -> int:
    """Return the bytes of memory that a run needs in the section with little memory."""
    tokens, width = spec.block_shape
    return _WORKER_BYTES + 2 * CAPPED_POOL * tokens * width * int(
        BF16.itemsize
    )  # the buffer, and the array that a compared library returns


def _spec(bench: FetchBench) -> IndexSpec:
    if bench.index is None:
        if bench.synthetic is None:
            raise UsageError("give either an index, or the number of rows of a synthetic index")
        names = tuple(dict.fromkeys(bench.precisions or ("bf16",)))
        return IndexSpec(bench.synthetic, min(1024, bench.synthetic), bench.block_shape, bench.block_shape[1], names)
    spec = Manifest.load(bench.index).spec
    for name in bench.precisions:
        if name not in spec.precisions:
            stored = ", ".join(spec.precisions)
            raise UsageError(
                f"{bench.index} does not have precision '{name}', only {stored}; run 'edje-index quantize' first"
            )
    return spec


@contextlib.contextmanager
def _folder(bench: FetchBench) -> Iterator[Path]:
    """Return a context with a new folder in `bench.scratch`.

    The folder is removed at the end unless `bench.keep` is True.
    """
    if bench.keep:
        yield Path(tempfile.mkdtemp(prefix="bench-fetch-", dir=bench.scratch))
        return
    with tempfile.TemporaryDirectory(prefix="bench-fetch-", dir=bench.scratch, ignore_cleanup_errors=True) as name:
        yield Path(name)


def _index(bench: FetchBench, folder: Path, say: Say) -> Path:
    if bench.index is not None:
        return bench.index
    spec = _spec(bench)
    say(f"writing a synthetic index of {spec.rows:,} rows: {', '.join(spec.precisions)}")
    make_synthetic(folder / "synthetic.edje", spec)
    return folder / "synthetic.edje"


def _needed_pairs(bench: FetchBench) -> dict[str, Any] | None:
    """Measure how many pairs per second the joint encoder scores. Return None if there is no model bundle."""
    if bench.model is None:
        return None
    from benchmarks.rerank import needed_pairs_per_second

    return needed_pairs_per_second(bench.model)


def _verdict(precision: str, entry: dict[str, Any], needed: dict[str, Any] | None) -> str:
    """Return a sentence that compares the fetch rate with the speed of the joint encoder."""
    for name in ("cold random", "warm random"):
        summary = entry["sections"].get(name, {"entries": {}})["entries"].get(entry["primary"], {}).get("summary", {})
        if "blocks_per_s" in summary:
            break
    else:
        return f"{precision}: every run was discarded"
    fetched = summary["blocks_per_s"]
    text = f"{precision}: {name.split()[0]} fetches deliver {fetched:,.0f} blocks/s"
    if needed is None:
        return text + "; with a model bundle, the report compares this rate with the speed of the joint encoder"
    scored = needed["pairs_per_s"]
    share = f"{fetched / scored:.1f} times" if fetched >= scored else f"only {fetched / scored:.0%}"
    encoder = f"the joint encoder ({needed['setting']}, {needed['device']})"
    return f"{text}, {share} the {scored:,.0f} pairs/s that {encoder} scores"
