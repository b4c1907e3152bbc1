"""Plots the results of a fetch benchmark for one precision."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.fetch.plan import same_size_label
from edje_index.evaluation.plots import COLOURS, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Entries = dict[str, dict[str, Any]]
_OURS, _DEVICE, _PEER = COLOURS[0], COLOURS[6], COLOURS[5]


def draw_plots(entry: dict[str, Any], folder: Path, stem: str) -> list[Path]:
    """Draw one plot for each section with valid runs. Return the paths of the plots."""
    drawn = []
    for name, section, draw in (
        ("throughput", "cold sweep", _throughput),
        ("latency", "cold queries", _latency),
        ("peers", "cold random", _peers),
    ):
        entries = entry["sections"].get(section, {"entries": {}})["entries"]
        valid = {label: result for label, result in entries.items() if result["summary"]["runs"]}
        if valid:
            path = folder / f"{stem}-{name}.png"
            draw(valid, entry["primary"], path)
            drawn.append(path)
    return drawn


def _throughput(entries: Entries, primary: str, path: Path) -> None:
    figure, axes = new_figure(
        "Cold throughput by requests in flight", "queue depth of the device; blocks per call of fetch", "GB/s"
    )
    for word, colour, name in (
        ("depth", _DEVICE, "device, by queue depth"),
        ("pool", _OURS, "fetch, by blocks per call"),
    ):
        summaries = {int(label.split()[-1]): row["summary"] for label, row in entries.items() if f", {word} " in label}
        if not summaries:
            continue
        sizes = sorted(summaries)
        middle = np.array([summaries[size]["gb_per_s"] for size in sizes])
        low, high = np.array([summaries[size]["gb_per_s_range"] for size in sizes]).T
        spread = [np.maximum(middle - low, 0), np.maximum(high - middle, 0)]
        axes.errorbar(sizes, middle, yerr=spread, color=colour, marker="o", capsize=3, label=name)
    _plain_log(axes)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    save_figure(figure, path)


def _latency(entries: Entries, primary: str, path: Path) -> None:
    workload = entries[next(iter(entries))]["workload"]
    figure, axes = new_figure(f"Cold query of {workload['pool']} blocks", "milliseconds", "share of queries")
    for position, (label, result) in enumerate(entries.items()):
        calls = np.sort(
            [seconds * 1e3 for run in result["runs"] if not run["discarded"] for seconds in run["latencies"]]
        )
        colour = {"device": _DEVICE, primary: _OURS}.get(label, COLOURS[1 + position % 5])
        width = 2.4 if label == primary else 1.4
        axes.step(calls, np.arange(1, len(calls) + 1) / len(calls), where="post", color=colour, lw=width, label=label)
    _plain_log(axes)
    axes.set_ylim(0, 1.02)
    axes.legend(frameon=False, loc="lower right")
    save_figure(figure, path)


def _peers(entries: Entries, primary: str, path: Path) -> None:
    shown = {label: result for label, result in entries.items() if not label.startswith(same_size_label(primary, ""))}
    rows = sorted(shown.items(), key=lambda row: row[1]["summary"]["gb_per_s"])
    values = [result["summary"]["gb_per_s"] for _, result in rows]
    figure, axes = new_figure(
        "Cold random fetch", "GB/s of stored bytes, logarithmic", "", size=(7.0, 1.2 + 0.36 * len(rows))
    )
    colours = [_DEVICE if label == "device" else _OURS if label.startswith("edje") else _PEER for label, _ in rows]
    axes.barh([label for label, _ in rows], values, color=colours, height=0.68)
    least, most = min(values) / 2, max(values)
    axes.set_xlim(least, most * max(10.0, (most / least) ** 0.65))  # space for the label beside the longest bar
    _plain_log(axes)
    axes.grid(False, axis="y")
    for position, (label, result) in enumerate(rows):
        ratio = result["summary"]["ratio"]
        text = f" {values[position]:.3g} GB/s" + (
            f"  ({primary} is {ratio:.3g}x)" if ratio and label != primary else ""
        )
        axes.text(values[position], position, text, va="center", fontsize=9)
    save_figure(figure, path)


def _plain_log(axes: Axes) -> None:
    """Make the x axis logarithmic, with labels such as 1,000 instead of powers of ten.

    Call this after setting the limits.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    few_decades = LogLocator(subs=(1.0, 2.0, 5.0)) if high < 300 * low else LogLocator()
    # Within a decade, powers of ten would label at most one tick.
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6) if high < 10 * low else few_decades)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
