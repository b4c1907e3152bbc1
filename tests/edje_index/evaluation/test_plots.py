from __future__ import annotations

import sys

import numpy as np
import pytest
from PIL import Image

from edje_index.evaluation.plots import new_figure, plain_ticks, save_figure


def test_a_plot_is_written_without_a_display(tmp_path):
    figure, axes = new_figure("Title", "x", "y")
    axes.set_xscale("log")
    axes.plot([1.0, 9.0], [2.0, 3.0])
    plain_ticks(axes, [9.0, 1.0, 1.1, 2.5])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2.5", "9"]
    save_figure(figure, tmp_path / "new" / "plot.png")
    pixels = np.asarray(Image.open(tmp_path / "new" / "plot.png").convert("RGB"))
    assert pixels.shape[:2] == pytest.approx((619, 1008), abs=2)  # 7.0 x 4.3 inches at 144 dots
    assert 0.5 < (pixels == 255).all(axis=-1).mean() < 0.99
    assert "matplotlib.pyplot" not in sys.modules
