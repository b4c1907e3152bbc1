"""Plots recall against the pool size, and recall against the bytes per image."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edje_index.evaluation.bootstrap import Estimate
from edje_index.evaluation.plots import COLOURS, new_figure, save_figure
from edje_index.evaluation.results import Evaluation, Result
from edje_index.scoring.weights import TEXT_TO_IMAGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TITLES = {True: "text-to-image", False: "image-to-text"}
_GREY = "#888888"


def write_figures(evaluation: Evaluation, folder: Path) -> list[Path]:
    """Write PNG plots of every direction into `folder`, and return their paths.

    An evaluation without re-ranking has no plots.
    """
    written = []
    for direction in dict.fromkeys(result.direction for result in evaluation.results if result.pool is not None):
        for system in evaluation.systems:
            results = [
                result for result in evaluation.results if (result.direction, result.system) == (direction, system.name)
            ]
            path = folder / f"recall-pool-{direction}-{_file_name(system.name)}.png"
            _plot_pools(evaluation, results, path)
            written.append(path)
        path = folder / f"recall-bytes-{direction}.png"
        _plot_bytes(evaluation, [each for each in evaluation.results if each.direction == direction], path)
        written.append(path)
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
    ticks: set[float] = set()
    for number, (system, colour) in enumerate(zip(evaluation.systems, itertools.cycle(COLOURS), strict=False)):
        system_results = [result for result in results if result.system == system.name]
        shown = [result for result in system_results if result.pool == pool]
        sizes = [(result.bytes_per_image or 0) / 1000 for result in shown]
        m = system.block_shape[0]
        _line(axes, sizes, [result.recall[cutoff] for result in shown], colour, f"{system.name}, m = {m}")
        embedding = next(result.recall[cutoff].value for result in system_results if result.precision is None)
        axes.axhline(embedding, color=colour, linestyle="--", linewidth=1, label=f"{system.name}, embedding only")
        for result, size in zip(shown, sizes, strict=True):
            name = f"{result.precision}{'*' if result.simulated_from else ''}"
            _label(axes, name, (size, result.recall[cutoff].value), colour, above=number % 2 == 0)
        ticks |= {float(f"{size:.3g}") for size in sizes}
    axes.set_xscale("log")
    axes.margins(0.15)
    _plain_ticks(axes, sorted(ticks))
    figure.legend(loc="outside lower center", frameon=False, fontsize=9, ncols=2)
    save_figure(figure, path)


def _line(axes: Axes, xs: Sequence[float], estimates: Sequence[Estimate], colour: str, label: str) -> None:
    values = [each.value for each in estimates]
    axes.plot(xs, values, color=colour, marker="o", markersize=4, label=label)
    spans = [(each.low, each.high) for each in estimates if each.low is not None and each.high is not None]
    if len(spans) == len(values):
        axes.vlines(xs, [low for low, _ in spans], [high for _, high in spans], color=colour, linewidth=1, alpha=0.6)


def _label(axes: Axes, name: str, point: tuple[float, float], colour: str, *, above: bool) -> None:
    (x, horizontal), (y, vertical) = ((-4, "right"), (4, "bottom")) if above else ((4, "left"), (-4, "top"))
    axes.annotate(name, point, (x, y), textcoords="offset points", ha=horizontal, va=vertical, fontsize=9, color=colour)


def _plain_ticks(axes: Axes, sizes: Sequence[float]) -> None:
    """Set a tick at each size in `sizes`. Sizes close to the previous tick get no tick."""
    ticks: list[float] = []
    for size in sizes:
        if not ticks or size > 1.25 * ticks[-1]:
            ticks.append(size)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name)
