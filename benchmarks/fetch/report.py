"""The report of a fetch benchmark for people: Markdown with its pictures, and the JSON that it was made from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.fetch.plots import draw_plots

_NOTES = """How to read this. Every run is a process of its own that imports, opens and warms up before it is timed.
Cold: the files' pages were evicted from the page cache and at most 1 % were found there right before the run; a run
that was not cold is discarded and listed. Subjects take turns, so that a disk that changes its speed does so for all;
ratios are medians of ratios of runs of the same repeat, `ratio` being the judged reader's rate of the row's. A peer
whose call would take too long asks for fewer blocks, and its ratio is of runs of the reader with as many. A warm-up
reads other rows. GB/s are stored bytes of the asked blocks; the reader decodes them to bfloat16, peers give the stored
bytes. Read: bytes that the kernel counted as read from storage, of the bytes of the asked blocks; whole pages, or
sectors with O_DIRECT, are more. The device is asked for blocks of whole sectors. CPU: user and system time of the
process. The queries of a run follow one eviction and ask for no block twice, but readahead may serve later ones."""


def write_report(report: dict[str, Any], folder: Path) -> list[Path]:
    """Write `<date>-fetch.md`, `.json` and pictures into `folder`; returns what was written, the Markdown first."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{report['environment']['date']}-fetch"
    pictures = {
        precision: draw_plots(entry, folder, f"{stem}-{precision}") for precision, entry in report["precisions"].items()
    }
    text = folder / f"{stem}.md"
    text.write_text("\n".join(_markdown(report, pictures)) + "\n")
    data = folder / f"{stem}.json"
    data.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    return [text, data, *(path for found in pictures.values() for path in found)]


def describe(report: dict[str, Any]) -> list[str]:
    """The verdict and the marks in lines for a terminal."""
    lines = [f"device: {report['ceiling']}"]
    for precision, entry in report["precisions"].items():
        for name, section in entry["sections"].items():
            lines.append(f"{precision}, {name}: {section['title']}")
            lines += [f"  {label:26} {_short(found['summary'])}" for label, found in section["entries"].items()]
    for mark in report["marks"]:
        word = "met   " if mark["met"] else "NOT MET"
        lines.append(f"{word:8} {mark['precision']:6} {mark['mark']}: {mark['measured']:.2f} ({mark['target']})")
    lines += [f"discarded: {line}" for line in discarded(report)]
    return [*lines, *report["skipped"], *_shared_disk(report), *report["verdict"]]


def discarded(report: dict[str, Any]) -> list[str]:
    """Every run that does not count, with the reason."""
    return [
        f"{precision}, {name}, {label}, repeat {run['repeat'] + 1}: {run['discarded']}"
        for precision, entry in report["precisions"].items()
        for name, section in entry["sections"].items()
        for label, found in section["entries"].items()
        for run in found["runs"]
        if run["discarded"]
    ]


def _shared_disk(report: dict[str, Any]) -> list[str]:
    """What the block device delivered to others during the runs that count, where it tells."""
    runs = [
        run
        for entry in report["precisions"].values()
        for section in entry["sections"].values()
        for found in section["entries"].values()
        for run in found["runs"]
        if run.get("device_bytes") is not None and not run["discarded"]
    ]
    ours, all_reads = (sum(run[name] for run in runs) for name in ("read_bytes", "device_bytes"))
    if not ours:
        return []
    return [
        f"the block device counted {all_reads / ours:.2f} times the bytes that were counted for the workers: "
        "1.00 where nobody else reads from it"
    ]


def _short(summary: dict[str, Any]) -> str:
    if not summary["runs"]:
        return "no run counts"
    text = f"{summary['gb_per_s']:7.3f} GB/s  {summary['cpu_us_per_block']:7.1f} us CPU"
    if summary["ratio"] is not None:
        text += f"  ratio {summary['ratio']:.2f}"
    if "latency_ms" in summary:
        text += "  " + " ".join(f"{name} {value:.2f} ms" for name, value in summary["latency_ms"].items())
    return text


def _markdown(report: dict[str, Any], pictures: dict[str, list[Path]]) -> Iterator[str]:
    where = report["environment"]
    yield f"# Fetching blocks, {where['date']}\n"
    yield from _environment(report)
    yield "\n## Verdict\n"
    yield from (f"- {line}" for line in report["verdict"])
    yield "\n## Marks\n"
    yield from _marks(report["marks"])
    for precision, entry in report["precisions"].items():
        yield f"\n## {precision}: records of {entry['record_bytes']:,} bytes\n"
        yield from (f"![{path.stem}]({path.name})" for path in pictures[precision])
        for section in entry["sections"].values():
            yield f"\n### {section['title'][0].upper()}{section['title'][1:]}\n"
            yield from _section(section["entries"])
    yield "\n## Not measured, not counted\n"
    lines = [*report["skipped"], *discarded(report), *_shared_disk(report)]
    yield from (f"- {line}" for line in lines or ["Nothing: every peer was there and every run counts."])
    yield f"\n{_NOTES}"


def _environment(report: dict[str, Any]) -> Iterator[str]:
    where, settings = report["environment"], report["settings"]
    disk = where["disk"]
    machine = f"{where['cores']} cores of {where['processor']}, {where['memory_gib']} GiB"
    yield f"{machine}, Linux {where['kernel']}, Python {where['python']}."
    yield (
        f"Disk: {disk['device']} ({disk['model'] or 'the model is not told'}), scheduler {disk['scheduler']}, "
        f"{disk['file_system']} ({disk['mount_options']}). Device's ceiling: {report['ceiling']}."
    )
    versions = {**where["versions"], **where["peers"]}
    yield f"Versions: {', '.join(f'{name} {found}' for name, found in versions.items())}."
    yield f"Load average before the first run: {where['load_before']:.1f}."
    yield f"{settings['rows']:,} rows, medians of {settings['repeats']}, engines: {', '.join(settings['engines'])}."


def _marks(marks: Sequence[dict[str, Any]]) -> Iterator[str]:
    if not marks:
        yield "None applies to what was measured."
        return
    yield "| mark | precision | wanted | measured | |"
    yield "|---|---|---|---|---|"
    for mark in marks:
        met = "met" if mark["met"] else "**not met**"
        yield f"| {mark['mark']} | {mark['precision']} | {mark['target']} | {mark['measured']:.2f} | {met} |"


def _section(entries: dict[str, dict[str, Any]]) -> Iterator[str]:
    timed = any("latency_ms" in found["summary"] for found in entries.values())
    yield "| | blocks | GB/s (range) | ratio | CPU us a block | read |" + (" p50 / p95 / p99 ms |" if timed else "")
    yield "|---|---|---|---|---|---|" + ("---|" if timed else "")
    for label, found in entries.items():
        yield f"| {label} | " + " | ".join(_cells(found["summary"], timed)) + " |"
    settings = {found["subject"]: found["setting"] for found in entries.values() if found["setting"]}
    yield "\n" + "; ".join(f"{name}: {setting}" for name, setting in settings.items()) + "."


def _cells(summary: dict[str, Any], timed: bool) -> list[str]:
    if not summary["runs"]:
        return ["no run counts", *[""] * (5 if timed else 4)]
    low, high = summary["gb_per_s_range"]
    cells = [
        f"{summary['blocks']:,.0f}",
        f"{summary['gb_per_s']:.3f} ({low:.3f} - {high:.3f})",
        "" if summary["ratio"] is None else f"{summary['ratio']:.2f}",
        f"{summary['cpu_us_per_block']:.1f}",
        f"{summary['amplification']:.3f}",
    ]
    if timed:
        found = summary.get("latency_ms")
        cells.append(" / ".join(f"{found[name]:.2f}" for name in ("p50", "p95", "p99")) if found else "")
    return cells
