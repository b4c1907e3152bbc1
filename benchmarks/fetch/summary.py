"""From runs to figures: medians of the runs that count, and medians of ratios of runs of the same repeat."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.fetch.runner import Measurement

Measure = Callable[[Measurement], float]


def rate(run: Measurement) -> float:
    """Blocks a second."""
    return float(run["blocks"] / run["seconds"])


def cpu_per_block(run: Measurement) -> float:
    """Seconds of processor time a block."""
    return float(run["cpu_seconds"] / run["blocks"])


def amplification(run: Measurement) -> float:
    """Bytes read from storage, of the bytes of the asked records."""
    return float(run["read_bytes"] / run["asked_bytes"])


def page_amplification(run: Measurement) -> float:
    """Bytes read from storage, of the bytes of all pages that the asked records touch."""
    return float(run["read_bytes"] / run["page_bytes"])


def median_latency(run: Measurement) -> float:
    """Seconds of the median call."""
    return float(statistics.median(run["latencies"]))


def kept(runs: Sequence[Measurement]) -> list[Measurement]:
    """Runs that count."""
    return [run for run in runs if not run["discarded"]]


def summarise(runs: Sequence[Measurement], record_bytes: int) -> dict[str, Any]:
    """Medians of the runs that count; only their numbers where none does.

    `gb_per_s` counts stored bytes of the asked blocks. `latency_ms` is of all calls of all
    runs, where runs have several.
    """
    good = kept(runs)
    found: dict[str, Any] = {"runs": len(good), "discarded": len(runs) - len(good)}
    if not good:
        return found
    rates = [rate(run) for run in good]
    calls = [seconds for run in good for seconds in run["latencies"]]
    found |= {
        "blocks": good[0]["blocks"],
        "blocks_per_s": statistics.median(rates),
        "gb_per_s": statistics.median(rates) * record_bytes / 1e9,
        "gb_per_s_range": [min(rates) * record_bytes / 1e9, max(rates) * record_bytes / 1e9],
        "cpu_us_per_block": statistics.median(cpu_per_block(run) for run in good) * 1e6,
        "amplification": statistics.median(amplification(run) for run in good),
        "page_amplification": statistics.median(page_amplification(run) for run in good),
        "read_bytes": statistics.median(run["read_bytes"] for run in good),
        "device_bytes": _median_known(good, "device_bytes"),
        "major_faults": _median_known(good, "major_faults"),
        "refaults": _median_known(good, "refaults"),
    }
    if len(calls) > len(good):
        percentiles = np.percentile(np.array(calls) * 1e3, (50, 95, 99)).tolist()
        found["latency_ms"] = dict(zip(("p50", "p95", "p99"), percentiles, strict=True))
    return found


def paired_ratio(left: Sequence[Measurement], right: Sequence[Measurement], measure: Measure) -> float | None:
    """Median of `measure(left) / measure(right)` over the repeats in which both runs count; None if there is none."""
    others = {run["repeat"]: run for run in kept(right)}
    pairs = [(measure(run), measure(others[run["repeat"]])) for run in kept(left) if run["repeat"] in others]
    ratios = [ours / theirs for ours, theirs in pairs if theirs > 0]
    return statistics.median(ratios) if ratios else None


def _median_known(runs: Sequence[Measurement], name: str) -> float | None:
    values = [run[name] for run in runs if run.get(name) is not None]
    return statistics.median(values) if values else None
