"""What `bench fetch` runs: settings, and from them sections of entries that are measured in turn and compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.fetch.workloads import CacheState, Pattern, Workload

QUERY_POOL = 100  # candidates of one query
CEILING_DEPTH = 64
CAPPED_POOL = 1_000  # blocks a call where memory is short
POOLS = (10, 100, 1_000, 10_000, 50_000)
DEPTHS = (1, 4, 16, 64, 128)
READERS = (1, 2, 4, 8)
_QUERIES = 50
_SWEEP_BLOCKS = 4_000


@dataclass(frozen=True)
class FetchBench:
    """Settings.

    Attributes:
        scratch: where copies for peers, and a synthetic index, are made and removed; on the disk to measure.
        index: index to fetch from; None for a synthetic one.
        synthetic: rows of the synthetic index.
        precisions: precisions to measure; empty for the first that the index holds.
        pool: blocks of the large fetches; half of the index where that is less.
        states: "cold", "warm" or both.
        peers: whether other readers are measured too.
        engines: I/O engines of the reader; the first is the one that is judged.
        repeats: runs of everything.
        seconds: how long a run of a peer may take; slower ones fetch fewer blocks.
        memory_cap: bytes of memory to leave to a further section, which reads a store larger than that.
        model: bundle whose joint encoder says how many pairs a second are needed.
        keep: leave what was made in `scratch`.
        block_shape: (m, d) of the synthetic index.
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
    block_shape: tuple[int, int] = (64, 384)


@dataclass(frozen=True)
class Entry:
    """One thing to measure: a subject with its options under a workload. `label` is unique in its section."""

    label: str
    subject: str
    workload: Workload
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """Entries that are run in turn, each repeat in another order, and compared run by run."""

    name: str
    title: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Cast:
    """Who takes part: the ceiling's subject, peers that are installed, engines of the reader."""

    ceiling: str
    peers: tuple[str, ...]
    engines: tuple[str, ...]

    @property
    def judged(self) -> str:
        """Label of the entries that are held against the others."""
        return self.readers(Workload("", "random", 1, 1))[0].label

    def readers(self, workload: Workload) -> list[Entry]:
        """The reader of this project, once an engine."""
        labels = {engine: "edje" if len(self.engines) == 1 else f"edje {engine}" for engine in self.engines}
        return [Entry(label, "edje", workload, {"engine": engine}) for engine, label in labels.items()]

    def reader(self, label: str, workload: Workload) -> Entry:
        """The judged reader under another label."""
        return Entry(label, "edje", workload, {"engine": self.engines[0]})

    def limit(self, workload: Workload, depth: int = CEILING_DEPTH, label: str = "device") -> Entry:
        """The device itself."""
        return Entry(label, self.ceiling, workload, {"depth": depth, "merge": workload.pattern == "contiguous"})

    def others(self, workload: Workload, names: Iterable[str] | None = None) -> list[Entry]:
        """Peers that are here, or those of them that are named."""
        chosen = self.peers if names is None else [name for name in names if name in self.peers]
        return [Entry(name, name, workload) for name in chosen]


def companion(judged: str, peer: str) -> str:
    """Label of the judged reader's runs with as few blocks as a slow `peer` fetches, which that is compared with."""
    return f"{judged}, as many as {peer}"


def plan_sections(bench: FetchBench, rows: int, cast: Cast) -> list[Section]:
    """Sections for one precision of an index of `rows` rows."""
    count = max(1, min(bench.pool, rows // 2))
    sections: list[Section] = []
    if "cold" in bench.states:
        sections += [
            _large("random", count, "cold", cast),
            _large("contiguous", count, "cold", cast),
            _queries(count, cast),
            _sweep(count, cast),
            _readers(count, cast),
        ]
    if "warm" in bench.states:
        sections += _warm(count, cast)
    if bench.memory_cap is not None:
        sections.append(_capped(count, cast))
    return sections


def _large(pattern: Pattern, count: int, state: CacheState, cast: Cast) -> Section:
    workload = Workload(pattern, pattern, count, count, state)
    peers = cast.others(workload, None if pattern == "random" else ["np.memmap", "tensorstore"])
    title = f"{count:,} {pattern} blocks in one call, {state}"
    return Section(f"{state} {pattern}", title, (cast.limit(workload), *cast.readers(workload), *peers))


def _query_workload(count: int) -> Workload:
    pool = min(QUERY_POOL, count)
    return Workload("queries", "random", min(_QUERIES, count // pool) * pool, pool)


def _queries(count: int, cast: Cast) -> Section:
    """Single queries, from random places and from places as an index in the order of its lists has them."""
    workload = _query_workload(count)
    entries = [cast.limit(workload), *cast.readers(workload)]
    entries += cast.others(workload, ["np.memmap", "tensorstore"])
    entries.append(cast.reader("edje, rows in list order", replace(workload, name="listed", pattern="listed")))
    return Section("cold queries", f"queries of {workload.pool} new blocks each, one at a time, cold", tuple(entries))


def _sweep(count: int, cast: Cast) -> Section:
    entries = []
    for pool in sorted({min(pool, count) for pool in POOLS}):
        blocks = max(pool, min(count, _SWEEP_BLOCKS) // pool * pool)
        entries.append(cast.reader(f"edje, pool {pool}", Workload(f"pool {pool}", "random", blocks, pool)))
    blocks = min(count, _SWEEP_BLOCKS)
    for depth in DEPTHS:
        workload = Workload(f"depth {depth}", "random", blocks, blocks)
        entries.append(cast.limit(workload, depth, f"device, depth {depth}"))
    return Section("cold sweep", "blocks a call, and the device's queue depth, cold", tuple(entries))


def _readers(count: int, cast: Cast) -> Section:
    workload = _query_workload(count)
    entries = [
        cast.reader(f"edje, readers {readers}", replace(workload, name=f"readers {readers}", threads=readers))
        for readers in READERS
    ]
    return Section("cold readers", f"threads that fetch pools of {workload.pool} at once, cold", tuple(entries))


def _warm(count: int, cast: Cast) -> list[Section]:
    workload = Workload("random", "random", count, count, "warm")
    entries = [Entry("memcpy", "memcpy", workload), *cast.readers(workload)]
    entries += cast.others(workload, ["np.memmap", "tensorstore"])
    queries = replace(_query_workload(count), cache="warm")
    readers = [*cast.readers(queries), *cast.others(queries, ["np.memmap", "tensorstore"])]
    return [
        Section("warm random", f"{count:,} random blocks in one call, in the page cache", tuple(entries)),
        Section("warm queries", f"queries of {queries.pool} blocks, in the page cache", tuple(readers)),
    ]


def _capped(count: int, cast: Cast) -> Section:
    workload = Workload("capped", "random", count, min(count, CAPPED_POOL), "capped")
    entries = (*cast.readers(workload), *cast.others(workload, ["np.memmap", "tensorstore"]))
    return Section("capped random", f"{count:,} random blocks, {workload.pool:,} a call, little memory", entries)
