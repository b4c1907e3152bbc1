"""Runs the entries of a section alternately, and keeps the results of all runs.

A cold run is valid under two conditions. Before the run, at most 1 % of the pages are in the page cache. During the
run, nearly all requested bytes are read from the disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.fetch import page_cache
from benchmarks.fetch.fio import Fio, measure_with_fio
from benchmarks.fetch.plan import PEER_BLOCKS, PEER_SECONDS, Entry, Section, same_size_label
from benchmarks.fetch.records import StoredRecords
from benchmarks.fetch.subjects import PEERS, Subject, subject_class
from benchmarks.fetch.worker_process import WorkerError, WorkerProcess
from benchmarks.fetch.workloads import Workload
from storage_formats.errors import EdjeError

Measurement: TypeAlias = dict[str, Any]
Say: TypeAlias = Callable[[str], None]
FIO = "fio"
_TRIAL_BLOCKS = 256  # blocks of the first trial run, which estimates the speed of a compared library
_READ_AT_LEAST = 0.9  # smallest fraction of the requested bytes that a cold run must read from the disk


@dataclass
class Runner:
    """Runs entries on one precision of one index."""

    source: StoredRecords
    copies: Path
    fio: Fio | None
    repeats: int
    seconds: float
    say: Say

    def prepare(self, name: str) -> None:
        """Write a copy of the records for the library `name`, if the library needs one.

        Raise WorkerError if this fails.
        """
        folder = self._folder(name)
        if subject_class(name).copies and not folder.exists():
            self.say(f"{self.source.precision}: writing the copy for {name}")
            folder.mkdir(parents=True)
            with WorkerProcess(self._job(Entry(name, name, Workload("", "random", 1, 1)), None, 0)) as worker:
                worker.wait(3600)

    def within_time(self, section: Section, primary: str) -> Section:
        """Return the section with fewer blocks per run for compared libraries that would take too long."""
        # Throughput depends on the number of blocks, so the primary reader gets another entry with as few blocks.
        entries: list[Entry] = []
        primary_entry = next((entry for entry in section.entries if entry.label == primary), None)
        for entry in section.entries:
            entries.append(fitted := self._within_time(entry))
            if primary_entry is not None and fitted is not entry:
                label = same_size_label(primary, entry.label)
                entries.append(replace(primary_entry, label=label, workload=fitted.workload))
        return replace(section, entries=tuple(entries))

    def run(self, section: Section) -> dict[str, list[Measurement]]:
        """Run each entry once per repeat. Return the measurements by label of the entry."""
        entries = section.entries
        runs: dict[str, list[Measurement]] = {entry.label: [] for entry in entries}
        for repeat in range(self.repeats):
            turn = repeat % len(entries)
            for entry in (*entries[turn:], *entries[:turn]):
                run = {"repeat": repeat, **self._measure(entry, repeat)}
                runs[entry.label].append(run)
                self.say(f"{section.name} {self.source.precision} {repeat + 1}/{self.repeats}  {_line(entry, run)}")
        return runs

    def _measure(self, entry: Entry, seed: int) -> Measurement:
        if entry.subject == FIO:
            assert self.fio is not None
            depth = int(entry.options["depth"])
            run = measure_with_fio(self.fio, self.source, entry.workload, depth, seed)
            return {"resident": None, "discarded": None, **run}
        try:
            if entry.workload.cache == "warm":
                self._prepare_page_cache(entry)  # a warm-up on cold files would import other modules
            with WorkerProcess(self._job(entry, entry.workload, seed)) as worker:
                worker.wait()
                resident = self._prepare_page_cache(entry)
                if reason := _wrong_state(entry.workload, resident):
                    return {"resident": resident, "discarded": reason}
                run = worker.run(max(self.seconds, PEER_SECONDS) * 10 + 120)
        except WorkerError as error:
            return self._failed(entry, str(error))
        if run["wrong_blocks"]:
            return self._failed(entry, f"{run['wrong_blocks']} of the checked blocks were wrong")
        return {"resident": resident, "discarded": _not_cold(entry, run), **run}

    def _prepare_page_cache(self, entry: Entry) -> float | None:
        """Evict or load the files of the entry.

        Return the fraction of pages in the page cache; None if there are no files.
        """
        files = self._subject(entry).files()
        if not files:
            return None
        return page_cache.evict(files) if entry.workload.cache == "cold" else page_cache.load(files)

    def _within_time(self, entry: Entry) -> Entry:
        workload = entry.workload
        if entry.subject not in PEERS or workload.pool < workload.blocks or workload.blocks <= _TRIAL_BLOCKS:
            return entry
        blocks = self._affordable_blocks(entry, _TRIAL_BLOCKS)
        if _TRIAL_BLOCKS < blocks < PEER_BLOCKS:  # rates of few blocks mislead, so estimate again with more
            blocks = self._affordable_blocks(entry, min(blocks, workload.blocks))
        if blocks >= workload.blocks:
            return entry
        self.say(f"{entry.label} is slow, so each run fetches {blocks:,} instead of {workload.blocks:,} blocks")
        return replace(entry, workload=_shorter(workload, blocks))

    def _affordable_blocks(self, entry: Entry, trial_blocks: int) -> int:
        """Estimate with a trial run how many blocks the subject can fetch within the time limit."""
        trial = self._measure(replace(entry, workload=_shorter(entry.workload, trial_blocks)), seed=self.repeats)
        if trial["discarded"]:
            self.say(f"{entry.label}: trial run DISCARDED, {trial['discarded']}")
        if "seconds" not in trial:
            return PEER_BLOCKS
        blocks_per_s = trial["blocks"] / trial["seconds"]
        least = min(PEER_BLOCKS, int(blocks_per_s * PEER_SECONDS))
        return max(int(blocks_per_s * self.seconds), least, _TRIAL_BLOCKS)

    def _failed(self, entry: Entry, reason: str) -> Measurement:
        """Return the result of a failed run of a compared library. For other subjects, raise EdjeError."""
        if entry.subject in PEERS:
            return {"resident": None, "discarded": f"failed: {reason}"}
        raise EdjeError(f"the run of {entry.label} ({entry.workload.name}) failed: {reason}")

    def _job(self, entry: Entry, workload: Workload | None, seed: int) -> dict[str, Any]:
        return {
            "subject": entry.subject,
            "root": str(self.source.root),
            "precision": self.source.precision,
            "folder": str(self._folder(entry.subject)),
            "options": entry.options,
            "workload": None if workload is None else asdict(workload),
            "seed": seed,
            "max_seconds": max(self.seconds, PEER_SECONDS),
        }

    def _subject(self, entry: Entry) -> Subject:
        return subject_class(entry.subject)(self.source, self._folder(entry.subject), entry.options)

    def _folder(self, name: str) -> Path:
        """Return the folder with the copy of the records for the library `name`.

        Both libraries that read a memory-mapped array share one copy.
        """
        return self.copies / name.split(" ")[0]


def _shorter(workload: Workload, blocks: int) -> Workload:
    return replace(workload, blocks=blocks, pool=blocks)


def _wrong_state(workload: Workload, resident: float | None) -> str | None:
    """Return the reason why the page cache is not in the state that the workload needs; None if the state is right."""
    if resident is None or workload.cache == "capped":
        return None
    if workload.cache == "cold" and resident > page_cache.COLD:
        return f"not cold: {resident:.1%} of the pages could not be evicted"
    if workload.cache == "warm" and resident < page_cache.WARM:
        return f"not warm: only {resident:.1%} of the pages fit in the page cache"
    return None


def _not_cold(entry: Entry, run: Measurement) -> str | None:
    """Return the reason why a finished run was not cold; None if the run was cold, or need not be cold."""
    if entry.workload.cache != "cold" or run["read_bytes"] >= _READ_AT_LEAST * run["requested_bytes"]:
        return None
    return (
        f"not cold: only {run['read_bytes'] / run['requested_bytes']:.0%} of the requested bytes were counted as read"
    )


def _line(entry: Entry, run: Measurement) -> str:
    if run["discarded"]:
        return f"{entry.label}: DISCARDED, {run['discarded']}"
    rate = run["blocks"] / run["seconds"]
    return f"{entry.label}: {rate:,.0f} blocks/s, {run['cpu_seconds'] / run['blocks'] * 1e6:.0f} us CPU per block"
