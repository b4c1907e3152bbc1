"""Writes the report of a fetch benchmark: Markdown with plots, and JSON with all runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.fetch.plots import draw_plots

_METHOD = """Every run is a process of its own, which imports, opens and warms up before the timing starts. The warm-up
reads other rows. Subjects take turns, so that a change of the disk's speed affects all of them.

- Cold: the pages of the files were evicted, and at most 1 % of them were in the page cache right before the run.
  All other cold runs are discarded and listed above.
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


def write_report(report: dict[str, Any], folder: Path) -> list[Path]:
    """Write `<date>-fetch.md`, `<date>-fetch.json` and plots to `folder`.

    Return the paths, with the Markdown file first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{report['environment']['date']}-fetch"
    plots = {
        precision: draw_plots(entry, folder, f"{stem}-{precision}") for precision, entry in report["precisions"].items()
    }
    text = folder / f"{stem}.md"
    text.write_text("\n".join(_markdown(report, plots)) + "\n")
    data = folder / f"{stem}.json"
    data.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    return [text, data, *(path for paths in plots.values() for path in paths)]


def describe(report: dict[str, Any]) -> list[str]:
    """Return the report as lines of text."""
    lines = [f"device: {report['device']}"]
    for precision, entry in report["precisions"].items():
        for name, section in entry["sections"].items():
            lines.append(f"{precision}, {name}: {section['title']}")
            lines += [f"  {label:26} {_short(result['summary'])}" for label, result in section["entries"].items()]
    for target in report["targets"]:
        word = "met" if target["met"] else "NOT MET"
        figure = f"{target['name']}: {target['measured']:.2f} ({target['bound']})"
        lines.append(f"{word:8} {target['precision']:6} {figure}")
    lines += [f"discarded: {line}" for line in discarded(report)]
    return [*lines, *report["notes"], *_shared_disk(report), *report["verdict"]]


def discarded(report: dict[str, Any]) -> list[str]:
    """Return one line for each discarded run, with the reason."""
    return [
        f"{precision}, {name}, {label}, repeat {run['repeat'] + 1}: {run['discarded']}"
        for precision, entry in report["precisions"].items()
        for name, section in entry["sections"].items()
        for label, result in section["entries"].items()
        for run in result["runs"]
        if run["discarded"]
    ]


def _shared_disk(report: dict[str, Any]) -> list[str]:
    """Return a line that compares the bytes that all processes read with the bytes that the benchmark read."""
    runs = [
        run
        for entry in report["precisions"].values()
        for section in entry["sections"].values()
        for result in section["entries"].values()
        for run in result["runs"]
        if run.get("device_bytes") is not None and not run["discarded"]
    ]
    worker_reads, all_reads = (sum(run[name] for run in runs) for name in ("read_bytes", "device_bytes"))
    if not worker_reads:
        return []
    return [
        f"the block device counted {all_reads / worker_reads:.2f} times the bytes that the workers read: "
        "1.00 means that no other process read from the disk"
    ]


def _short(summary: dict[str, Any]) -> str:
    if not summary["runs"]:
        return "every run was discarded"
    text = (
        f"{summary['blocks']:9,.0f} blocks  {summary['gb_per_s']:7.3f} GB/s  {summary['cpu_us_per_block']:7.1f} us CPU"
    )
    if summary["ratio"] is not None:
        text += f"  ratio {summary['ratio']:.2f}"
    if "latency_ms" in summary:
        text += "  " + " ".join(f"{name} {value:.2f} ms" for name, value in summary["latency_ms"].items())
    return text


def _markdown(report: dict[str, Any], plots: dict[str, list[Path]]) -> Iterator[str]:
    where = report["environment"]
    yield f"# Fetching blocks, {where['date']}\n"
    yield from _environment(report)
    yield "\n## Verdict\n"
    yield from (f"- {line}" for line in report["verdict"])
    if report["targets"]:
        yield "\n## Targets\n"
        yield from _targets(report["targets"])
    for precision, entry in report["precisions"].items():
        yield f"\n## {precision}: records of {entry['record_bytes']:,} bytes\n"
        yield from (f"![{path.stem}]({path.name})" for path in plots[precision])
        for section in entry["sections"].values():
            yield f"\n### {section['title'][0].upper()}{section['title'][1:]}\n"
            yield from _section(section["entries"])
    yield "\n## Notes and discarded runs\n"
    lines = [*report["notes"], *discarded(report), *_shared_disk(report)]
    yield from (f"- {line}" for line in lines or ["None: all libraries were measured, and all runs are valid."])
    yield "\n## Method\n"
    yield _METHOD


def _environment(report: dict[str, Any]) -> Iterator[str]:
    where, settings = report["environment"], report["settings"]
    disk = where["disk"]
    machine = f"{where['cores']} cores of {where['processor']}, {where['memory_gib']} GiB"
    yield f"{machine}, Linux {where['kernel']}, Python {where['python']}."
    yield (
        f"Disk: {disk['device']} ({disk['model'] or 'model unknown'}), scheduler {disk['scheduler']}, "
        f"{disk['file_system']} ({disk['mount_options']}). Device measured by {report['device']}."
    )
    versions = {**where["versions"], **where["peers"]}
    yield f"Versions: {', '.join(f'{name} {version}' for name, version in versions.items())}."
    yield f"Load average before the first run: {where['load_before']:.1f}."
    yield f"{settings['rows']:,} rows, medians of {settings['repeats']}, engines: {', '.join(settings['engines'])}."


def _targets(targets: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| figure | precision | target | measured | |"
    yield "|---|---|---|---|---|"
    for target in targets:
        met = "met" if target["met"] else "**not met**"
        cells = (target["name"], target["precision"], target["bound"], f"{target['measured']:.2f}", met)
        yield f"| {' | '.join(cells)} |"


def _section(entries: dict[str, dict[str, Any]]) -> Iterator[str]:
    timed = any("latency_ms" in result["summary"] for result in entries.values())
    yield "| | blocks | GB/s (range) | ratio | CPU us per block | read |" + (" p50 / p95 / p99 ms |" if timed else "")
    yield "|---|---|---|---|---|---|" + ("---|" if timed else "")
    for label, result in entries.items():
        yield f"| {label} | " + " | ".join(_cells(result["summary"], timed)) + " |"
    settings = {result["subject"]: result["setting"] for result in entries.values() if result["setting"]}
    yield "\n" + "; ".join(f"{name}: {setting}" for name, setting in settings.items()) + "."


def _cells(summary: dict[str, Any], timed: bool) -> list[str]:
    if not summary["runs"]:
        return ["every run was discarded", *[""] * (5 if timed else 4)]
    low, high = summary["gb_per_s_range"]
    cells = [
        f"{summary['blocks']:,.0f}",
        f"{summary['gb_per_s']:.3f} ({low:.3f} - {high:.3f})",
        "" if summary["ratio"] is None else f"{summary['ratio']:.2f}",
        f"{summary['cpu_us_per_block']:.1f}",
        f"{summary['amplification']:.3f}",
    ]
    if timed:
        latencies = summary.get("latency_ms")
        names = ("p50", "p95", "p99")
        cells.append(" / ".join(f"{latencies[name]:.2f}" for name in names) if latencies else "")
    return cells
