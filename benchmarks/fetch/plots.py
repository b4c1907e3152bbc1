"""The pictures of a fetch benchmark, drawn from the report's figures of one precision."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.fetch.plan import companion
from edje_index.evaluation.plots import COLOURS, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Entries = dict[str, dict[str, Any]]
_OURS, _DEVICE, _PEER = COLOURS[0], COLOURS[6], COLOURS[5]


def draw_plots(entry: dict[str, Any], folder: Path, stem: str) -> list[Path]:
    """Draw what the sections of `entry` allow; returns the files."""
    drawn = []
    for name, section, draw in (
        ("throughput", "cold sweep", _throughput),
        ("latency", "cold queries", _latency),
        ("peers", "cold random", _peers),
    ):
        entries = entry["sections"].get(section, {"entries": {}})["entries"]
        good = {label: found for label, found in entries.items() if found["summary"]["runs"]}
        if good:
            path = folder / f"{stem}-{name}.png"
            draw(good, entry["judged"], path)
            drawn.append(path)
    return drawn


def _throughput(entries: Entries, judged: str, path: Path) -> None:
    """GB/s against the blocks of a call, and against the device's queue depth."""
    figure, axes = new_figure(
        "Cold throughput by requests that may be in flight", "queue depth of the device; blocks a call of fetch", "GB/s"
    )
    for word, colour, name in (
        ("depth", _DEVICE, "device, by queue depth"),
        ("pool", _OURS, "fetch, by blocks a call"),
    ):
        found = {int(label.split()[-1]): row["summary"] for label, row in entries.items() if f", {word} " in label}
        if not found:
            continue
        sizes = sorted(found)
        middle = np.array([found[size]["gb_per_s"] for size in sizes])
        low, high = np.array([found[size]["gb_per_s_range"] for size in sizes]).T
        spread = [np.maximum(middle - low, 0), np.maximum(high - middle, 0)]
        axes.errorbar(sizes, middle, yerr=spread, color=colour, marker="o", capsize=3, label=name)
    _plain_log(axes)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    save_figure(figure, path)


def _latency(entries: Entries, judged: str, path: Path) -> None:
    """Share of queries that are answered within a time."""
    workload = entries[next(iter(entries))]["workload"]
    figure, axes = new_figure(f"Cold query of {workload['pool']} blocks", "milliseconds", "share of queries")
    for at, (label, found) in enumerate(entries.items()):
        calls = np.sort(
            [seconds * 1e3 for run in found["runs"] if not run["discarded"] for seconds in run["latencies"]]
        )
        colour = {"device": _DEVICE, judged: _OURS}.get(label, COLOURS[1 + at % 5])
        width = 2.4 if label == judged else 1.4
        axes.step(calls, np.arange(1, len(calls) + 1) / len(calls), where="post", color=colour, lw=width, label=label)
    _plain_log(axes)
    axes.set_ylim(0, 1.02)
    axes.legend(frameon=False, loc="lower right")
    save_figure(figure, path)


def _peers(entries: Entries, judged: str, path: Path) -> None:
    """GB/s of everybody, with how many times as fast the judged reader is."""
    shown = {label: found for label, found in entries.items() if not label.startswith(companion(judged, ""))}
    rows = sorted(shown.items(), key=lambda row: row[1]["summary"]["gb_per_s"])
    values = [found["summary"]["gb_per_s"] for _, found in rows]
    figure, axes = new_figure(
        "Cold random fetch", "GB/s of stored bytes, logarithmic", "", size=(7.0, 1.2 + 0.36 * len(rows))
    )
    colours = [_DEVICE if label == "device" else _OURS if label.startswith("edje") else _PEER for label, _ in rows]
    axes.barh([label for label, _ in rows], values, color=colours, height=0.68)
    _plain_log(axes)
    least, most = min(values) / 2, max(values)
    axes.set_xlim(least, most * max(10.0, (most / least) ** 0.65))  # room for what is written beside the longest bar
    axes.grid(False, axis="y")
    for at, (label, found) in enumerate(rows):
        ratio = found["summary"]["ratio"]
        text = f" {values[at]:.3g} GB/s" + (f"  ({judged} is {ratio:.3g}x)" if ratio and label != judged else "")
        axes.text(values[at], at, text, va="center", fontsize=9)
    save_figure(figure, path)


def _plain_log(axes: Axes) -> None:
    """A logarithmic x axis with numbers written out."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
