"""Settings of `bench fetch`, and the plan of the measurements."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.fetch.workloads import CacheState, Pattern, Workload

QUERY_POOL = 100  # candidates of one query
DEVICE_DEPTH = 64
CAPPED_POOL = 1_000  # blocks per call under memory pressure
# A run of a slow compared library fetches PEER_BLOCKS, or fewer blocks if PEER_BLOCKS take more than PEER_SECONDS.
PEER_BLOCKS = 10_000
PEER_SECONDS = 30.0
POOLS = (10, 100, 1_000, 10_000, 50_000)
DEPTHS = (1, 4, 16, 64, 128)
READERS = (1, 2, 4, 8)
_QUERIES = 50
_SWEEP_BLOCKS = 4_000


@dataclass(frozen=True)
class FetchBench:
    """Settings of `bench_fetch`.

    Attributes:
        scratch: folder for the synthetic index and for copies of records. The disk of this folder is measured.
        index: index to fetch from; None for a synthetic index.
        synthetic: number of rows of the synthetic index.
        precisions: precisions to measure; empty for only the first precision of the index.
        pool: blocks per large fetch. The largest value is half the rows of the index.
        states: states of the page cache to measure: "cold", "warm" or both.
        peers: True to measure the compared libraries too.
        engines: I/O engines of this project's reader. All other entries are compared with the first engine.
        repeats: runs of each entry.
        seconds: target duration of a run of a compared library. A slow library fetches fewer blocks, see
            `PEER_BLOCKS`.
        memory_cap: bytes of free memory in an additional section; None for no such section.
        model: bundle with the joint encoder whose speed is compared with the fetch rate; None for no comparison.
        keep: True to keep the files in `scratch`.
        targets: True to compare the results with the performance targets of this project.
        block_shape: (m, d), the shape of a block of the synthetic index.
    """

    scratch: Path
    index: Path | None = None
    synthetic: int | None = None
    precisions: tuple[str, ...] = ()
    pool: int = 50_000
    states: tuple[CacheState, ...] = ("cold", "warm")
    peers: bool = False
    engines: tuple[str, ...] = ("auto",)
    repeats: int = 5
    seconds: float = 10.0
    memory_cap: int | None = None
    model: Path | None = None
    keep: bool = False
    targets: bool = False
    block_shape: tuple[int, int] = (64, 384)


@dataclass(frozen=True)
class Entry:
    """What one measurement runs: a reader or a reference measurement, its options, and its workload."""

    label: str
    subject: str
    workload: Workload
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """Entries that are compared with each other. Each repeat runs every entry once, in another order."""

    name: str
    title: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Participants:
    """What a benchmark compares: the disk, the other libraries that are installed, and the engines of our reader."""

    device: str
    peers: tuple[str, ...]
    engines: tuple[str, ...]

    @property
    def primary(self) -> str:
        """Label of this project's reader with the first engine. All other entries are compared with it."""
        return self.readers(Workload("", "random", 1, 1))[0].label

    def readers(self, workload: Workload) -> list[Entry]:
        """Return one entry of this project's reader per engine."""
        labels = {engine: "edje" if len(self.engines) == 1 else f"edje {engine}" for engine in self.engines}
        return [Entry(label, "edje", workload, {"engine": engine}) for engine, label in labels.items()]

    def reader(self, label: str, workload: Workload) -> Entry:
        """Return an entry of this project's reader with the first engine."""
        return Entry(label, "edje", workload, {"engine": self.engines[0]})

    def limit(self, workload: Workload, depth: int = DEVICE_DEPTH, label: str = "device") -> Entry:
        """Return an entry that measures the disk without a reader, with `depth` concurrent reads."""
        return Entry(label, self.device, workload, {"depth": depth, "merge": workload.pattern == "contiguous"})

    def others(self, workload: Workload, names: Iterable[str] | None = None) -> list[Entry]:
        """Return one entry per installed library. If `names` is given, only libraries in `names` are used."""
        chosen = self.peers if names is None else [name for name in names if name in self.peers]
        return [Entry(name, name, workload) for name in chosen]


def same_size_label(primary: str, peer: str) -> str:
    """Return the label of the runs in which the primary reader fetches as few blocks as the library `peer`."""
    return f"{primary}, as many as {peer}"


def blocks_of_large_fetch(bench: FetchBench, rows: int) -> int:
    """Return the number of blocks of a large fetch."""
    return max(1, min(bench.pool, rows // 2))


def plan_sections(bench: FetchBench, rows: int, participants: Participants) -> list[Section]:
    """Return the sections for one precision of an index with `rows` rows."""
    count = blocks_of_large_fetch(bench, rows)
    sections: list[Section] = []
    if "cold" in bench.states:
        sections += [
            _large("random", count, "cold", participants),
            _large("contiguous", count, "cold", participants),
            _queries(count, participants),
            _sweep(count, participants),
            _readers(count, participants),
        ]
    if "warm" in bench.states:
        sections += _warm(count, participants)
    if bench.memory_cap is not None:
        sections.append(_capped(count, participants))
    return sections


def _large(pattern: Pattern, count: int, state: CacheState, participants: Participants) -> Section:
    workload = Workload(pattern, pattern, count, count, state)
    peers = participants.others(workload, None if pattern == "random" else ["np.memmap", "tensorstore"])
    title = f"{count:,} {pattern} blocks in one call, {state}"
    return Section(f"{state} {pattern}", title, (participants.limit(workload), *participants.readers(workload), *peers))


def _query_workload(count: int) -> Workload:
    pool = min(QUERY_POOL, count)
    return Workload("queries", "random", min(_QUERIES, count // pool) * pool, pool)


def _queries(count: int, participants: Participants) -> Section:
    """Return the section of single queries, which fetch random rows or neighbouring rows."""
    workload = _query_workload(count)
    entries = [participants.limit(workload), *participants.readers(workload)]
    entries += participants.others(workload, ["np.memmap", "tensorstore"])
    entries.append(participants.reader("edje, rows in list order", replace(workload, name="listed", pattern="listed")))
    return Section("cold queries", f"queries of {workload.pool} new blocks each, one at a time, cold", tuple(entries))


def _sweep(count: int, participants: Participants) -> Section:
    entries = []
    for pool in sorted({min(pool, count) for pool in POOLS}):
        blocks = max(pool, min(count, _SWEEP_BLOCKS) // pool * pool)
        entries.append(participants.reader(f"edje, pool {pool}", Workload(f"pool {pool}", "random", blocks, pool)))
    blocks = min(count, _SWEEP_BLOCKS)
    for depth in DEPTHS:
        workload = Workload(f"depth {depth}", "random", blocks, blocks)
        entries.append(participants.limit(workload, depth, f"device, depth {depth}"))
    return Section("cold sweep", "blocks per call, and the device's queue depth, cold", tuple(entries))


def _readers(count: int, participants: Participants) -> Section:
    workload = _query_workload(count)
    entries = [
        participants.reader(f"edje, readers {readers}", replace(workload, name=f"readers {readers}", threads=readers))
        for readers in READERS
    ]
    return Section("cold readers", f"threads that fetch pools of {workload.pool} at once, cold", tuple(entries))


def _warm(count: int, participants: Participants) -> list[Section]:
    workload = Workload("random", "random", count, count, "warm")
    entries = [Entry("memcpy", "memcpy", workload), *participants.readers(workload)]
    entries += participants.others(workload, ["np.memmap", "tensorstore"])
    queries = replace(_query_workload(count), cache="warm")
    readers = [*participants.readers(queries), *participants.others(queries, ["np.memmap", "tensorstore"])]
    return [
        Section("warm random", f"{count:,} random blocks in one call, in the page cache", tuple(entries)),
        Section("warm queries", f"queries of {queries.pool} blocks, in the page cache", tuple(readers)),
    ]


def _capped(count: int, participants: Participants) -> Section:
    workload = Workload("capped", "random", count, min(count, CAPPED_POOL), "capped")
    entries = (*participants.readers(workload), *participants.others(workload, ["np.memmap", "tensorstore"]))
    return Section("capped random", f"{count:,} random blocks, {workload.pool:,} per call, little memory", entries)
