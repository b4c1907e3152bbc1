from __future__ import annotations

import numpy as np
import pytest
from matplotlib.text import Text
from PIL import Image

from edje_index.evaluation.plots import COLOURS, label_points, new_figure, save_figure

CROWDED = [(1.0, 1.0), (1.01, 1.0), (1.0, 1.01), (1.01, 0.99), (1.02, 1.0), (9.0, 9.0), (5.0, 1.0)]


def labels(points, **options):
    """Boxes of the labels of `points`, and those of the points' marks."""
    figure, axes = new_figure("Title", "x", "y")
    axes.scatter([x for x, _ in points], [y for _, y in points], color=COLOURS[0])
    label_points(axes, points, [f"name {at}" for at in range(len(points))], **options)
    figure.canvas.draw()
    return figure, axes, [Text.get_window_extent(text) for text in axes.texts]


def test_labels_of_crowded_points_do_not_overlap(tmp_path):
    figure, axes, boxes = labels(CROWDED)
    assert len(boxes) == len(CROWDED)
    for at, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:at])
        frame = axes.get_window_extent()
        assert frame.x0 <= box.x0
        assert box.x1 <= frame.x1
    save_figure(figure, tmp_path / "new" / "plot.png")
    pixels = np.asarray(Image.open(tmp_path / "new" / "plot.png").convert("RGB"))
    assert pixels.shape[:2] == pytest.approx((619, 1008), abs=2)  # 7.0 x 4.3 inches at 144 dots
    assert (pixels == 255).all(axis=-1).mean() > 0.5


def test_labels_keep_clear_of_what_they_are_told():
    points = [(1.0, 1.0), (9.0, 9.0)]
    bar = [(1.5, 0.5 + step / 20) for step in range(21)]
    _, axes, boxes = labels(points, avoid=bar)
    marks = [axes.transData.transform(point) for point in bar]
    assert not any(boxes[0].contains(*mark) for mark in marks)
    _, axes, boxes = labels(points)
    assert any(boxes[0].contains(*axes.transData.transform(point)) for point in bar)


def test_no_display_is_loaded():
    import sys

    new_figure("Title", "x", "y")
    assert "matplotlib.pyplot" not in sys.modules
