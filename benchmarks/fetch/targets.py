"""The performance targets of this project's reader, and a check whether a report meets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.fetch.plan import same_size_label
from benchmarks.fetch.runner import Measurement
from benchmarks.fetch.summary import cpu_per_block, median_latency, page_amplification, paired_ratio, rate, valid_runs

Runs = dict[str, list[Measurement]]


@dataclass(frozen=True)
class Target:
    """A limit for a result of this project's reader, or for the ratio of its result to the result of another entry.

    Attributes:
        text: name for reports.
        section: name of the section with the measurement.
        against: label of the other entry; None if `bound` limits the result itself, not a ratio.
        bound: limit of the result or ratio.
        at_least: True if `bound` is a minimum, False if `bound` is a maximum.
        measure: function that computes the result of a run.
        precisions: precisions that the target applies to; None for all.
    """

    text: str
    section: str
    against: str | None
    bound: float
    at_least: bool
    measure: Callable[[Measurement], float] = rate
    precisions: tuple[str, ...] | None = None


TARGETS = (
    Target("cold random, relative to the device", "cold random", "device", 0.9, True),
    Target("cold contiguous, relative to the device reading sequentially", "cold contiguous", "device", 0.9, True),
    Target("cold random, relative to np.memmap", "cold random", "np.memmap", 8.0, True),
    Target("cold random, relative to TensorStore", "cold random", "tensorstore", 1.0, True),
    Target(
        "CPU per block, cold random, relative to TensorStore", "cold random", "tensorstore", 0.5, False, cpu_per_block
    ),
    Target("cold random, relative to Lance", "cold random", "lance", 5.0, True),
    Target("cold random, relative to zarr-python", "cold random", "zarr-python", 20.0, True),
    Target("warm random, relative to memcpy", "warm random", "memcpy", 0.6, True, precisions=("bf16",)),
    Target("warm random, relative to TensorStore", "warm random", "tensorstore", 4.0, True, precisions=("bf16",)),
    Target("cold query, p50, relative to the device", "cold queries", "device", 1.5, False, median_latency, ("fp8",)),
    Target(
        "bytes read, relative to the requested pages", "cold random", None, 1.05, False, page_amplification, ("bf16",)
    ),
)


def judge(precision: str, sections: dict[str, Runs], primary: str) -> list[dict[str, Any]]:
    """Return the targets that apply to `precision`, each with the measured value and whether the target is met."""
    return list(_judgements(precision, sections, primary))


def _judgements(precision: str, sections: dict[str, Runs], primary: str) -> Iterator[dict[str, Any]]:
    for target in TARGETS:
        runs = sections.get(target.section, {})
        if primary not in runs or (target.precisions and precision not in target.precisions):
            continue
        value = _value(target, runs, primary)
        if value is None:
            continue
        yield {
            "name": target.text,
            "precision": precision,
            "against": target.against,
            "bound": f"{'at least' if target.at_least else 'at most'} {target.bound:g}",
            "measured": value,
            "met": value >= target.bound if target.at_least else value <= target.bound,
        }


def _value(target: Target, runs: Runs, primary: str) -> float | None:
    if target.against is not None:
        primary_runs = runs.get(same_size_label(primary, target.against), runs[primary])
        return paired_ratio(primary_runs, runs.get(target.against, []), target.measure)
    values = sorted(target.measure(run) for run in valid_runs(runs[primary]))
    return values[len(values) // 2] if values else None
