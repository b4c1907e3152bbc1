"""The common style of the plots of benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Distinguishable with colour blindness: M. Okabe and K. Ito, "Color Universal Design", 2008.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_INK = "#333333"
_GRID = "#dddddd"
_DPI = 144


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
