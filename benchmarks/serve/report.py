"""Writes the report of a service benchmark: Markdown with a plot, and JSON with all values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.serve.bench import described
from edje_index.evaluation.plots import COLOURS, new_figure, save_figure

_METHOD = """One process runs `edje-index serve`, and another process on the same machine sends searches over HTTP. Both
share the processors.

- Clients: each client sends its next search after the response to the previous search.
- Offered load: searches are sent at the times of a Poisson process. Latency is measured from the planned time.
- Batch: mean number of searches per batch.
- Knee: highest offered load before the first load at which less than 99 % of the searches were answered, or p95 was
  more than 5 times p95 at the lowest load.
- Cold: the tokens were evicted from the page cache before each search.
- Memory: resident memory of the service."""


def write_report(report: dict[str, Any], folder: Path) -> list[Path]:
    """Write `<date>-serve.md`, `<date>-serve.json` and a plot to `folder`.

    Return the paths, with the Markdown file first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{report['environment']['date']}-serve"
    text, data, plot = folder / f"{stem}.md", folder / f"{stem}.json", folder / f"{stem}-latency.png"
    draw(report, plot)
    text.write_text("\n".join(_markdown(report, plot.name)) + "\n")
    data.write_text(json.dumps(report, indent=1, sort_keys=True, default=str) + "\n")
    return [text, data, plot]


def draw(report: dict[str, Any], path: Path) -> None:
    """Plot the median latency (p50) and p99 of each workload against the offered load."""
    figure, axes = new_figure("Latency by offered load", "offered load, searches per second", "latency, ms")
    for number, entry in enumerate(report["workloads"]):
        colour = COLOURS[number % len(COLOURS)]
        loads = [load for load in entry["loads"] if load["p50_ms"] is not None]
        offered = [load["offered_per_s"] for load in loads]
        name = f"pool {entry['pool']}, {entry['precision']}"
        axes.plot(offered, [load["p50_ms"] for load in loads], color=colour, marker="o", label=f"{name}, p50")
        axes.plot(offered, [load["p99_ms"] for load in loads], color=colour, marker="o", ls="--", label=f"{name}, p99")
        axes.axvline(entry["knee_per_s"], color=colour, linewidth=0.8)
    axes.set_yscale("log")
    axes.legend(frameon=False)
    save_figure(figure, path)


def _markdown(report: dict[str, Any], plot: str) -> Iterator[str]:
    facts, settings = report["environment"], report["settings"]
    yield f"# Service under load, {facts['date']}\n"
    yield f"{facts['processor']}, {facts['cores']} cores, {facts['memory_gib']} GiB. {settings['queries']} queries, "
    yield f"`--dtype {settings['dtype']}`, {settings['seconds']:g} s per measurement.\n"
    yield f"{_METHOD}\n"
    yield f"![Latency by offered load]({plot})\n"
    for entry in report["workloads"]:
        yield f"## Pool {entry['pool']}, {entry['precision']}\n"
        cold = _ms(entry["cold_ms"]["p50_ms"])
        yield f"Knee: {entry['knee_per_s']:.2f} searches per second. Cold, one at a time: p50 {cold}.\n"
        yield "| load | answered per second | answered | p50 | p95 | p99 | batch |"
        yield "|---|---|---|---|---|---|---|"
        for clients, result in entry["clients"].items():
            yield _row(f"clients: {clients}", result)
        for result in entry["loads"]:
            yield _row(f"{result['offered_per_s']:.2f} per second", result)
        yield ""
        stages = ", ".join(f"{name} {value:.1f} ms" for name, value in entry["loads"][0]["stages_ms"].items())
        yield f"Stages at the lowest load, p50: {stages}.\n"
    yield "## Memory\n"
    sizes = [f"{report[key] / 2**20:.0f} MiB" for key in ("memory_at_start", "memory_peak", "memory_at_end")]
    yield f"{sizes[0]} at the start, {sizes[1]} at most, {sizes[2]} at the end."
    if "overload" in report:
        yield from _overload(report["overload"])


def _overload(result: dict[str, Any]) -> Iterator[str]:
    yield "\n## Overload\n"
    hostile = ", ".join(f"{count} {kind}" for kind, count in result["hostile"].items())
    yield f"{result['seconds']:g} s at {result['offered_per_s']:.2f} searches per second, 1.5 times the knee, with"
    yield f"hostile requests ({hostile}): {described(result)}. Statuses: {result['statuses']}."
    yield f"{result['compared']} answers compared with the library, {len(result['wrong'])} wrong. Slowest answer"
    yield f"{result['slowest_s'] or 0:.2f} s (deadline {result['deadline_s']:g} s). Memory grew by"
    yield f"{result['memory_growth'] / 2**20:.0f} MiB. Result: {result['verdict']}."


def _row(name: str, result: dict[str, Any]) -> str:
    times = " | ".join(_ms(result[key]) for key in ("p50_ms", "p95_ms", "p99_ms"))
    batch = "-" if result["batch"] is None else f"{result['batch']:.1f}"
    return f"| {name} | {result['answered_per_s']:.2f} | {result['answered_share']:.1%} | {times} | {batch} |"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"
