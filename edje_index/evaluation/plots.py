"""Common style of all plots: size, grid, colours and point labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

# Distinguishable with colour blindness: M. Okabe and K. Ito, "Color Universal Design", 2008.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_INK = "#333333"
_GRID = "#dddddd"
_DPI = 144


def new_figure(title: str, xlabel: str, ylabel: str, *, size: tuple[float, float] = (7.0, 4.3)) -> tuple[Figure, Axes]:
    """Create a figure with one set of axes. `size` is (width, height) in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    style_axes(axes, title, xlabel, ylabel)
    return figure, axes


def style_axes(axes: Axes, title: str, xlabel: str, ylabel: str) -> None:
    """Set the title, labels, colours and grid of `axes`."""
    axes.set_title(title, loc="left", fontsize=11, color=_INK, fontweight="bold")
    axes.set_xlabel(xlabel, color=_INK)
    axes.set_ylabel(ylabel, color=_INK)
    axes.set_prop_cycle(color=COLOURS)
    axes.grid(True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_INK)


def label_points(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    names: Sequence[str],
    *,
    avoid: Sequence[tuple[float, float]] = (),
    colour: str = _INK,
) -> None:
    """Write each name in `names` beside the point with the same index, without covering points or other names.

    Names do not cover positions in `avoid` either. A line connects a distant name to the point. Call this function
    last, because later changes to the limits of the axes move the points.
    """
    axes.get_figure(root=True).canvas.draw()  # type: ignore[union-attr]  # fixes the scale of pixel positions
    taken = [_mark(axes, point) for point in (*points, *avoid)]
    for point, name in zip(points, names, strict=True):
        label = _place(axes, point, name, colour, taken)
        taken.append(_extent(label))


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write `figure` to the file `path`. The file suffix determines the format. A PNG has 144 dots per inch."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=_DPI, facecolor="white")


def _mark(axes: Axes, point: tuple[float, float]) -> Bbox:
    from matplotlib.transforms import Bbox

    x, y = axes.transData.transform(point)
    return Bbox.from_bounds(x - 4, y - 4, 8, 8)


def _extent(label: Annotation) -> Bbox:
    """Return the bounding box of the text, without the line to the point."""
    from matplotlib.text import Text

    label.update_positions(label.get_figure(root=True).canvas.get_renderer())  # type: ignore[union-attr]
    return Text.get_window_extent(label)


def _place(axes: Axes, point: tuple[float, float], name: str, colour: str, taken: Sequence[Bbox]) -> Annotation:
    """Write `name` at the first free position around `point`."""
    frame = axes.get_window_extent()
    label: Annotation | None = None
    for distance in (6, 18, 30, 42):
        for x, y in ((1, 0), (0, 1), (0, -1), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1)):
            if label is not None:
                label.remove()
            label = axes.annotate(
                name,
                point,
                (x * distance, y * distance),
                textcoords="offset points",
                ha=("right", "center", "left")[x + 1],
                va=("top", "center", "bottom")[y + 1],
                fontsize=9,
                color=colour,
                arrowprops={"arrowstyle": "-", "color": _GRID, "shrinkA": 0, "shrinkB": 3} if distance > 6 else None,
            )
            label.set_in_layout(False)
            box = _extent(label)
            inside = frame.contains(box.x0, box.y0) and frame.contains(box.x1, box.y1)
            if inside and not any(box.overlaps(other) for other in taken):
                return label
    assert label is not None
    return label
