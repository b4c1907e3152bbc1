"""Runs the entries of a section in turn and keeps every run, with the reason where it does not count.

A cold run counts when at most 1 % of the subject's pages were in the page cache right before it, and when the kernel
counted nearly all the asked bytes as read from storage during it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.fetch import page_cache
from benchmarks.fetch.fio import Fio, measure_with_fio
from benchmarks.fetch.plan import Entry, Section, companion
from benchmarks.fetch.records import StoredRecords
from benchmarks.fetch.subjects import PEERS, Subject, subject_class
from benchmarks.fetch.worker_process import WorkerError, WorkerProcess
from benchmarks.fetch.workloads import Workload
from storage_formats.errors import EdjeError

Measurement: TypeAlias = dict[str, Any]
Say: TypeAlias = Callable[[str], None]
FIO = "fio"
_PROBE_BLOCKS = 256  # of a run that tells how slow a peer is
_READ_AT_LEAST = 0.9  # of the asked bytes, in a cold run


@dataclass
class Runner:
    """Everything that the runs on one precision of one index share."""

    source: StoredRecords
    copies: Path
    fio: Fio | None
    repeats: int
    seconds: float
    say: Say

    def prepare(self, name: str) -> None:
        """Make a peer's copy of the records, if it reads one. Raises WorkerError."""
        folder = self._folder(name)
        if subject_class(name).copies and not folder.exists():
            self.say(f"{self.source.precision}: making the copy for {name}")
            folder.mkdir(parents=True)
            with WorkerProcess(self._job(Entry(name, name, Workload("", "random", 1, 1)), None, 0)) as worker:
                worker.wait(3600)

    def within_time(self, section: Section, judged: str) -> Section:
        """The section with fewer blocks for peers that would take too long, each beside as many for the judged reader.

        What a reader makes of a call depends on how many blocks it asks for.
        """
        entries: list[Entry] = []
        ours = next((entry for entry in section.entries if entry.label == judged), None)
        for entry in section.entries:
            entries.append(fitted := self._within_time(entry))
            if ours is not None and fitted is not entry:
                label = companion(judged, entry.label)
                entries.append(replace(ours, label=label, workload=fitted.workload))
        return replace(section, entries=tuple(entries))

    def run(self, section: Section) -> dict[str, list[Measurement]]:
        """Measurements of each entry, by its label, a repeat each."""
        entries = section.entries
        found: dict[str, list[Measurement]] = {entry.label: [] for entry in entries}
        for repeat in range(self.repeats):
            turn = repeat % len(entries)
            for entry in (*entries[turn:], *entries[:turn]):
                run = {"repeat": repeat, **self._measure(entry, repeat)}
                found[entry.label].append(run)
                self.say(f"{section.name} {self.source.precision} {repeat + 1}/{self.repeats}  {_line(entry, run)}")
        return found

    def _measure(self, entry: Entry, seed: int) -> Measurement:
        if entry.subject == FIO:
            assert self.fio is not None
            depth = int(entry.options["depth"])
            run = measure_with_fio(self.fio, self.source, entry.workload, depth, seed)
            return {"resident": None, "discarded": None, **run}
        try:
            if entry.workload.cache == "warm":
                self._put_cache_in_order(entry)  # so that the warm-up is warm too: what it imports depends on that
            with WorkerProcess(self._job(entry, entry.workload, seed)) as worker:
                worker.wait()
                resident = self._put_cache_in_order(entry)
                if reason := _wrong_state(entry.workload, resident):
                    return {"resident": resident, "discarded": reason}
                run = worker.run(self.seconds * 10 + 120)
        except WorkerError as error:
            return self._failed(entry, str(error))
        if run["wrong_blocks"]:
            return self._failed(entry, f"{run['wrong_blocks']} of the checked blocks were wrong")
        return {"resident": resident, "discarded": _not_cold(entry, run), **run}

    def _put_cache_in_order(self, entry: Entry) -> float | None:
        """Fraction of the subject's pages that are resident afterwards; None for one that reads no file."""
        files = self._subject(entry).files()
        if not files:
            return None
        return page_cache.evict(files) if entry.workload.cache == "cold" else page_cache.load(files)

    def _within_time(self, entry: Entry) -> Entry:
        """The entry, with fewer blocks where one call for all would take a peer longer than a run may."""
        workload = entry.workload
        if entry.subject not in PEERS or workload.pool < workload.blocks or workload.blocks <= _PROBE_BLOCKS:
            return entry
        probe = self._measure(replace(entry, workload=_shorter(workload, _PROBE_BLOCKS)), seed=self.repeats)
        if probe["discarded"]:
            self.say(f"{entry.label}: its trial is DISCARDED, {probe['discarded']}")
        blocks = int(probe["blocks"] / probe["seconds"] * self.seconds) if "seconds" in probe else _PROBE_BLOCKS
        if blocks >= workload.blocks:
            return entry
        blocks = max(blocks, _PROBE_BLOCKS)
        self.say(f"{entry.label} fetches {blocks:,} blocks of {workload.blocks:,}, to take {self.seconds:g} s a run")
        return replace(entry, workload=_shorter(workload, blocks))

    def _failed(self, entry: Entry, reason: str) -> Measurement:
        """A peer's failure is a run that does not count; our own ends everything."""
        if entry.subject in PEERS:
            return {"resident": None, "discarded": f"failed: {reason}"}
        raise EdjeError(f"a run of {entry.label} ({entry.workload.name}) failed: {reason}")

    def _job(self, entry: Entry, workload: Workload | None, seed: int) -> dict[str, Any]:
        return {
            "subject": entry.subject,
            "root": str(self.source.root),
            "precision": self.source.precision,
            "folder": str(self._folder(entry.subject)),
            "options": entry.options,
            "workload": None if workload is None else asdict(workload),
            "seed": seed,
            "max_seconds": self.seconds,
        }

    def _subject(self, entry: Entry) -> Subject:
        return subject_class(entry.subject)(self.source, self._folder(entry.subject), entry.options)

    def _folder(self, name: str) -> Path:
        """Where a peer's copy is; both memory maps read the same."""
        return self.copies / name.split(" ")[0]


def _shorter(workload: Workload, blocks: int) -> Workload:
    return replace(workload, blocks=blocks, pool=blocks)


def _wrong_state(workload: Workload, resident: float | None) -> str | None:
    """Why the page cache is not as the workload wants it; None if it is."""
    if resident is None or workload.cache == "capped":
        return None
    if workload.cache == "cold" and resident > page_cache.COLD:
        return f"not cold: {resident:.1%} of its pages could not be evicted"
    if workload.cache == "warm" and resident < page_cache.WARM:
        return f"not warm: only {resident:.1%} of its pages fit in the page cache"
    return None


def _not_cold(entry: Entry, run: Measurement) -> str | None:
    """Why a finished run was not cold after all; None if it was, or was not meant to be."""
    if entry.workload.cache != "cold" or run["read_bytes"] >= _READ_AT_LEAST * run["asked_bytes"]:
        return None
    return f"not cold: only {run['read_bytes'] / run['asked_bytes']:.0%} of the asked bytes were counted as read"


def _line(entry: Entry, run: Measurement) -> str:
    """A run, for people."""
    if run["discarded"]:
        return f"{entry.label}: DISCARDED, {run['discarded']}"
    rate = run["blocks"] / run["seconds"]
    return f"{entry.label}: {rate:,.0f} blocks/s, {run['cpu_seconds'] / run['blocks'] * 1e6:.0f} us CPU a block"
