"""Plots: their common style, and the plots of an evaluation."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edje_index.scoring.weights import TEXT_TO_IMAGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from edje_index.evaluation.bootstrap import Estimate
    from edje_index.evaluation.results import Evaluation, Result

# Distinguishable with colour blindness: M. Okabe and K. Ito, "Color Universal Design", 2008.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_INK = "#333333"
_GRID = "#dddddd"
_GREY = "#888888"
_DPI = 144
_TITLES = {True: "text-to-image", False: "image-to-text"}


def new_figure(title: str, xlabel: str, ylabel: str, *, size: tuple[float, float] = (7.0, 4.3)) -> tuple[Figure, Axes]:
    """Create a figure with one set of axes in the common style. `size` is (width, height) in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=11, color=_INK, fontweight="bold")
    axes.set_xlabel(xlabel, color=_INK)
    axes.set_ylabel(ylabel, color=_INK)
    axes.set_prop_cycle(color=COLOURS)
    axes.grid(True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_INK)
    return figure, axes


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write `figure` to the file `path`. The file suffix determines the format. A PNG has 144 dots per inch."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=_DPI, facecolor="white")


def plain_ticks(axes: Axes, values: Iterable[float]) -> None:
    """Set ticks on a logarithmic x axis at `values`. A value close to the previous tick gets no tick."""
    ticks: list[float] = []
    for value in sorted(values):
        if not ticks or value > 1.25 * ticks[-1]:
            ticks.append(value)
    axes.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
    axes.minorticks_off()


def write_figures(evaluation: Evaluation, folder: Path) -> list[Path]:
    """Write PNG plots of every direction into `folder`, and return their paths.

    An evaluation without re-ranking has no plots.
    """
    written = []
    for direction in dict.fromkeys(result.direction for result in evaluation.results if result.pool is not None):
        results = [result for result in evaluation.results if result.direction == direction]
        for system in evaluation.systems:
            name = re.sub(r"[^\w.-]+", "-", system.name)
            written.append(folder / f"recall-pool-{direction}-{name}.png")
            _plot_pools(evaluation, [result for result in results if result.system == system.name], written[-1])
        written.append(folder / f"recall-bytes-{direction}.png")
        _plot_bytes(evaluation, results, written[-1])
    return written


def _plot_pools(evaluation: Evaluation, results: Sequence[Result], path: Path) -> None:
    """Plot R@k of one index against the pool size. The dashed lines show R@k of the embeddings alone."""
    embedding = next(result for result in results if result.precision is None)
    finest = next(result for result in results if result.change is None and result.precision is not None)
    shown = [result for result in results if result.precision == finest.precision]
    pools = [int(result.pool or 0) for result in shown]
    title = f"{embedding.system}, {_TITLES[embedding.direction == TEXT_TO_IMAGE]}, {finest.precision}"
    figure, axes = new_figure(title, "re-ranked pool, candidates", "recall, %")
    for cutoff, colour in zip(evaluation.cutoffs, COLOURS, strict=False):
        _line(axes, pools, [result.recall[cutoff] for result in shown], colour, f"R@{cutoff}, re-ranked")
        axes.axhline(
            embedding.recall[cutoff].value, color=colour, linestyle="--", linewidth=1, label=f"R@{cutoff}, embedding"
        )
    ceiling = [result.in_pool.value for result in shown if result.in_pool is not None]
    axes.plot(pools, ceiling, color=_GREY, linestyle=":", marker=".", label="relevant candidate in pool")
    axes.set_xscale("log")
    axes.set_xticks(pools, [str(pool) for pool in pools])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    save_figure(figure, path)


def _plot_bytes(evaluation: Evaluation, results: Sequence[Result], path: Path) -> None:
    """Plot R@k of every index and precision against the bytes per image."""
    pool, cutoff = max(evaluation.pools), evaluation.cutoffs[0]
    direction = _TITLES[results[0].direction == TEXT_TO_IMAGE]
    figure, axes = new_figure(
        f"R@{cutoff} by storage, {direction}, pool {pool}", "tokens per image, kB (1,000 bytes)", f"R@{cutoff}, %"
    )
    ticks: list[float] = []
    for system, colour in zip(evaluation.systems, itertools.cycle(COLOURS), strict=False):
        shown = [result for result in results if (result.system, result.pool) == (system.name, pool)]
        sizes = [(result.bytes_per_image or 0) / 1000 for result in shown]
        label = f"{system.name}, m = {system.block_shape[0]}"
        _line(axes, sizes, [result.recall[cutoff] for result in shown], colour, label)
        embedding = next(each for each in results if each.system == system.name and each.precision is None)
        value = embedding.recall[cutoff].value
        axes.axhline(value, color=colour, linestyle="--", linewidth=1, label=f"{system.name}, embedding only")
        for result, kilobytes in zip(shown, sizes, strict=True):
            name = f"{result.precision}{'*' if result.simulated_from else ''}"
            point = (kilobytes, result.recall[cutoff].value)
            axes.annotate(name, point, (4, 4), textcoords="offset points", fontsize=9, color=colour)
        ticks += sizes
    axes.set_xscale("log")
    axes.margins(0.15)
    plain_ticks(axes, ticks)
    figure.legend(loc="outside lower center", frameon=False, fontsize=9, ncols=2)
    save_figure(figure, path)


def _line(axes: Axes, xs: Sequence[float], estimates: Sequence[Estimate], colour: str, label: str) -> None:
    axes.plot(xs, [each.value for each in estimates], color=colour, marker="o", markersize=4, label=label)
    for x, each in zip(xs, estimates, strict=True):
        if each.low is not None and each.high is not None:
            axes.vlines(x, each.low, each.high, color=colour, linewidth=1, alpha=0.6)
