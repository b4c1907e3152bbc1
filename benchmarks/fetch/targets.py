"""The marks that the reader is held to, and whether it meets them. A mark whose peer was not measured is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.fetch.plan import companion
from benchmarks.fetch.runner import Measurement
from benchmarks.fetch.summary import cpu_per_block, kept, median_latency, page_amplification, paired_ratio, rate

Runs = dict[str, list[Measurement]]


@dataclass(frozen=True)
class Mark:
    """A ratio, or figure, of `section` that must be at least, or at most, `target`.

    `against` is the label to compare with; None where the figure stands for itself.
    """

    text: str
    section: str
    against: str | None
    target: float
    at_least: bool
    measure: Callable[[Measurement], float] = rate
    precisions: tuple[str, ...] | None = None


MARKS = (
    Mark("cold random, of the device's rate", "cold random", "device", 0.9, True),
    Mark("cold contiguous, of the device's sequential rate", "cold contiguous", "device", 0.9, True),
    Mark("cold random, of np.memmap", "cold random", "np.memmap", 8.0, True),
    Mark("cold random, of TensorStore", "cold random", "tensorstore", 1.0, True),
    Mark("CPU a block, cold random, of TensorStore", "cold random", "tensorstore", 0.5, False, cpu_per_block),
    Mark("cold random, of Lance", "cold random", "lance", 5.0, True),
    Mark("cold random, of zarr-python", "cold random", "zarr-python", 20.0, True),
    Mark("warm random, of memcpy", "warm random", "memcpy", 0.6, True, precisions=("bf16",)),
    Mark("warm random, of TensorStore", "warm random", "tensorstore", 4.0, True, precisions=("bf16",)),
    Mark("cold query, p50, of the device", "cold queries", "device", 1.5, False, median_latency, ("fp8",)),
    Mark("bytes read, of the asked pages", "cold random", None, 1.05, False, page_amplification, ("bf16",)),
)


def judge(precision: str, sections: dict[str, Runs], judged: str) -> list[dict[str, Any]]:
    """Each mark that applies to `precision`, with what was measured and whether it is met."""
    return list(_judged(precision, sections, judged))


def _judged(precision: str, sections: dict[str, Runs], judged: str) -> Iterator[dict[str, Any]]:
    for mark in MARKS:
        runs = sections.get(mark.section, {})
        if judged not in runs or (mark.precisions and precision not in mark.precisions):
            continue
        value = _value(mark, runs, judged)
        if value is None:
            continue
        yield {
            "mark": mark.text,
            "precision": precision,
            "against": mark.against,
            "target": f"{'at least' if mark.at_least else 'at most'} {mark.target:g}",
            "measured": value,
            "met": value >= mark.target if mark.at_least else value <= mark.target,
        }


def _value(mark: Mark, runs: Runs, judged: str) -> float | None:
    if mark.against is not None:
        ours = runs.get(companion(judged, mark.against), runs[judged])
        return paired_ratio(ours, runs.get(mark.against, []), mark.measure)
    values = sorted(mark.measure(run) for run in kept(runs[judged]))
    return values[len(values) // 2] if values else None
