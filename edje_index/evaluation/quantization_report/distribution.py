"""Summary statistics of numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PERCENTILES = (1, 5, 50, 95, 99)


@dataclass(frozen=True)
class Distribution:
    """Mean, minimum, maximum and percentiles of `count` numbers. Percentiles are linearly interpolated."""

    count: int
    mean: float
    lowest: float
    p1: float
    p5: float
    p50: float
    p95: float
    p99: float
    highest: float

    @classmethod
    def of(cls, numbers: NDArray[np.floating]) -> Distribution:
        """Compute the statistics of `numbers` [n], which must not be empty."""
        p1, p5, p50, p95, p99 = (float(value) for value in np.percentile(numbers, PERCENTILES))
        return cls(
            count=len(numbers),
            mean=float(numbers.mean(dtype=np.float64)),
            lowest=float(numbers.min()),
            p1=p1,
            p5=p5,
            p50=p50,
            p95=p95,
            p99=p99,
            highest=float(numbers.max()),
        )
