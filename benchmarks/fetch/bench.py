"""The whole of `bench fetch`: from settings to one report, leaving nothing behind."""

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

from benchmarks.environment import environment, storage
from benchmarks.fetch.fio import Fio, find_fio
from benchmarks.fetch.memory_pressure import check_memory_cap, memory_cap
from benchmarks.fetch.plan import CAPPED_POOL, CEILING_DEPTH, Cast, FetchBench, Section, companion, plan_sections
from benchmarks.fetch.records import StoredRecords
from benchmarks.fetch.runner import FIO, Measurement, Runner, Say
from benchmarks.fetch.subjects import PEERS, installed_version, subject_class
from benchmarks.fetch.summary import paired_ratio, rate, summarise
from benchmarks.fetch.targets import judge
from benchmarks.fetch.worker_process import WorkerError
from benchmarks.synthetic import make_synthetic
from storage_formats.codecs import BF16, codec
from storage_formats.errors import UsageError
from storage_formats.format.layout import IndexSpec
from storage_formats.format.manifest import Manifest

_PROBE = "direct probe"
_SPARE_BYTES = 1 << 30
_NO_DISK = ("tmpfs", "ramfs")
_WORKER_BYTES = 512 << 20  # of a process beside its buffers


def bench_fetch(bench: FetchBench, say: Say) -> dict[str, Any]:
    """Run everything that `bench` asks for; `say` is told of each run.

    Raises:
        UsageError: no such index or precision, no disk, too little space or memory; before anything is written.
    """
    if platform.system() != "Linux":
        raise UsageError("bench fetch needs Linux: it empties the page cache and asks the kernel what was read")
    bench.scratch.mkdir(parents=True, exist_ok=True)
    skipped: list[str] = []
    peers = _installed(skipped) if bench.peers else []
    _check_place(bench, peers)
    needed = _needed(bench)
    with _folder(bench) as folder:
        root = _index(bench, folder, say)
        precisions = bench.precisions or Manifest.load(root).spec.precisions[:1]
        load = os.getloadavg()[0]
        fio = find_fio(StoredRecords(root, precisions[0]).files()[0])
        stage = Stage(bench, root, folder, fio, say, skipped)
        found = {precision: stage.measure(precision, tuple(peers)) for precision in precisions}
        disk = storage(root)
    for note in skipped:
        say(note)
    return {
        "environment": {**environment(), "disk": disk, "peers": _versions(peers), "load_before": load},
        "settings": _settings(bench, found),
        "ceiling": stage.ceiling,
        "skipped": skipped,
        "precisions": found,
        "marks": [mark for entry in found.values() for mark in entry.pop("marks")],
        "joint_encoder": needed,
        "verdict": [_verdict(precision, entry, needed) for precision, entry in found.items()],
    }


@dataclass
class Stage:
    """Where the runs take place."""

    bench: FetchBench
    root: Path
    folder: Path
    fio: Fio | None
    say: Say
    skipped: list[str]

    @property
    def ceiling(self) -> str:
        """What measures the device, in words."""
        if self.fio is not None:
            return self.fio.describe(CEILING_DEPTH)
        return f"no fio here: our own probe, {CEILING_DEPTH} threads of O_DIRECT reads"

    def measure(self, precision: str, peers: tuple[str, ...]) -> dict[str, Any]:
        """All sections for one precision, and the marks that it meets or misses."""
        source = StoredRecords(self.root, precision)
        copies = self.folder / "peers" / precision
        runner = Runner(source, copies, self.fio, self.bench.repeats, self.bench.seconds, self.say)
        try:
            ready = [name for name in peers if self._prepared(runner, name)]
            cast = Cast(FIO if self.fio else _PROBE, tuple(ready), self.bench.engines)
            sections = []
            runs = {}
            for planned in plan_sections(self.bench, source.rows, cast):
                self.say(f"{planned.name}: {planned.title}")
                sections.append(runner.within_time(planned, cast.judged))
                runs[planned.name] = self._run(runner, sections[-1])
        finally:
            if not self.bench.keep:
                shutil.rmtree(copies, ignore_errors=True)
        return {
            "rows": source.rows,
            "record_bytes": source.record_bytes,
            "direct_bytes": source.direct_bytes,
            "judged": cast.judged,
            "sections": {
                section.name: _section(section, runs[section.name], source.record_bytes, cast.judged)
                for section in sections
            },
            "marks": judge(precision, runs, cast.judged),
        }

    def _prepared(self, runner: Runner, name: str) -> bool:
        try:
            runner.prepare(name)
        except WorkerError as error:
            self.skipped.append(f"{name} skipped at {runner.source.precision}: its copy failed: {error}")
            return False
        return True

    def _run(self, runner: Runner, section: Section) -> dict[str, list[Measurement]]:
        if not section.name.startswith("capped"):
            return runner.run(section)
        assert self.bench.memory_cap is not None
        with memory_cap(self.bench.memory_cap, _capped_bytes(runner.source.spec)) as how:
            self.skipped.append(f"capped section: {how}")
            return runner.run(section)


def _section(section: Section, runs: dict[str, list[Measurement]], record_bytes: int, judged: str) -> dict[str, Any]:
    """A section's figures; `ratio` is the judged reader's rate with as many blocks, of the entry's, run by run."""
    entries: dict[str, Any] = {}
    for entry in section.entries:
        found = runs[entry.label]
        ours = runs.get(companion(judged, entry.label), runs.get(judged, []))
        ratio = None if entry.label == judged else paired_ratio(ours, found, rate)
        entries[entry.label] = {
            "subject": entry.subject,
            "setting": "" if entry.subject == FIO else subject_class(entry.subject).setting,
            "workload": asdict(entry.workload),
            "options": entry.options,
            "summary": summarise(found, record_bytes) | {"ratio": ratio},
            "runs": found,
        }
    return {"title": section.title, "entries": entries}


def _settings(bench: FetchBench, found: dict[str, Any]) -> dict[str, Any]:
    """Settings without the paths of this machine."""
    settings = asdict(bench)
    settings |= {name: settings[name].name if settings[name] else None for name in ("index", "model")}
    settings["rows"] = next(iter(found.values()))["rows"]
    del settings["scratch"], settings["keep"]
    return settings


def _installed(skipped: list[str]) -> list[str]:
    """Peers whose packages are here; the others are noted."""
    here = [name for name in PEERS if installed_version(name) is not None]
    for name in PEERS:
        if name not in here:
            skipped.append(f"{name} skipped: {subject_class(name).package} is not installed")
    return here


def _versions(peers: list[str]) -> dict[str, str]:
    return {name: found for name in peers if (found := installed_version(name))}


def _check_place(bench: FetchBench, peers: list[str]) -> None:
    """UsageError where a folder is on no disk, or there is too little space or memory for what is asked."""
    place = bench.scratch if bench.index is None else bench.index
    for path in {bench.scratch, place} if peers or bench.index is None else {place}:
        if path.exists() and storage(path)["file_system"] in _NO_DISK:
            raise UsageError(f"{path} is kept in memory, so nothing read from it is cold; name a folder on a disk")
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
            f"{bench.scratch} has {free / 1e9:.1f} GB free and the benchmark needs {needed / 1e9:.1f} GB there; "
            "give another --scratch, fewer rows, or leave out --peers"
        )


def _capped_bytes(spec: IndexSpec) -> int:
    """Memory that a run of the capped section needs for itself."""
    tokens, width = spec.block_shape
    return _WORKER_BYTES + 2 * CAPPED_POOL * tokens * width * int(BF16.itemsize)  # buffer, and what a peer makes


def _spec(bench: FetchBench) -> IndexSpec:
    """Of the index that will be fetched from. UsageError where it does not hold an asked precision."""
    if bench.index is None:
        if bench.synthetic is None:
            raise UsageError("name an INDEX to fetch from, or give --synthetic and a number of rows")
        names = tuple(dict.fromkeys(bench.precisions or ("bf16",)))
        return IndexSpec(bench.synthetic, min(1024, bench.synthetic), bench.block_shape, bench.block_shape[1], names)
    spec = Manifest.load(bench.index).spec
    for name in bench.precisions:
        if name not in spec.precisions:
            held = ", ".join(spec.precisions)
            raise UsageError(
                f"{bench.index} does not hold '{name}'; it holds: {held}. 'edje-index quantize --to {name}' adds it"
            )
    return spec


@contextlib.contextmanager
def _folder(bench: FetchBench) -> Iterator[Path]:
    """A folder of this run's own in the scratch folder, removed afterwards unless it is to be kept."""
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


def _needed(bench: FetchBench) -> dict[str, Any] | None:
    """What the joint encoder of the bundle can take here; None without a bundle."""
    if bench.model is None:
        return None
    from benchmarks.rerank import needed_pairs_per_second

    return needed_pairs_per_second(bench.model)


def _verdict(precision: str, entry: dict[str, Any], needed: dict[str, Any] | None) -> str:
    """What the figures mean for somebody who wants to re-rank."""
    for name in ("cold random", "warm random"):
        summary = entry["sections"].get(name, {"entries": {}})["entries"].get(entry["judged"], {}).get("summary", {})
        if "blocks_per_s" in summary:
            break
    else:
        return f"{precision}: no run counts, so there is nothing to say"
    fed = summary["blocks_per_s"]
    text = f"{precision}: {name.split()[0]} fetches feed {fed:,.0f} pairs/s"
    if needed is None:
        return text + "; give --model to see how many your joint encoder needs"
    wants = needed["pairs_per_s"]
    share = f"{fed / wants:.1f} times what it can score" if fed >= wants else f"only {fed / wants:.0%} of that"
    return f"{text}; your joint encoder ({needed['setting']}, {needed['device']}) needs {wants:,.0f}: {share}"
