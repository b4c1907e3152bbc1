"""Computes medians over the valid runs, and median ratios of runs in the same repeat."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.fetch.runner import Measurement

Measure = Callable[[Measurement], float]


def rate(run: Measurement) -> float:
    """Return the blocks per second of a run."""
    return float(run["blocks"] / run["seconds"])


def cpu_per_block(run: Measurement) -> float:
    """Return the processor seconds per block."""
    return float(run["cpu_seconds"] / run["blocks"])


def amplification(run: Measurement) -> float:
    """Return (bytes read from the disk) / (bytes of the requested records)."""
    return float(run["read_bytes"] / run["requested_bytes"])


def page_amplification(run: Measurement) -> float:
    """Return (bytes read from the disk) / (bytes of all pages that contain requested records)."""
    return float(run["read_bytes"] / run["page_bytes"])


def median_latency(run: Measurement) -> float:
    """Return the median duration of a call in seconds."""
    return float(statistics.median(run["latencies"]))


def valid_runs(runs: Sequence[Measurement]) -> list[Measurement]:
    """Return the runs that were not discarded."""
    return [run for run in runs if not run["discarded"]]


def summarise(runs: Sequence[Measurement], record_bytes: int) -> dict[str, Any]:
    """Return medians over the valid runs. If no run is valid, return only the numbers of valid and discarded runs.

    `gb_per_s` is the rate of stored bytes, not of decoded bytes.
    """
    valid = valid_runs(runs)
    summary: dict[str, Any] = {"runs": len(valid), "discarded": len(runs) - len(valid)}
    if not valid:
        return summary
    rates = [rate(run) for run in valid]
    calls = [seconds for run in valid for seconds in run["latencies"]]
    summary |= {
        "blocks": valid[0]["blocks"],
        "blocks_per_s": statistics.median(rates),
        "gb_per_s": statistics.median(rates) * record_bytes / 1e9,
        "gb_per_s_range": [min(rates) * record_bytes / 1e9, max(rates) * record_bytes / 1e9],
        "cpu_us_per_block": statistics.median(cpu_per_block(run) for run in valid) * 1e6,
        "amplification": statistics.median(amplification(run) for run in valid),
        "page_amplification": statistics.median(page_amplification(run) for run in valid),
        "read_bytes": statistics.median(run["read_bytes"] for run in valid),
        "device_bytes": _median_reported(valid, "device_bytes"),
        "major_faults": _median_reported(valid, "major_faults"),
        "refaults": _median_reported(valid, "refaults"),
    }
    if len(calls) > len(valid):
        percentiles = np.percentile(np.array(calls) * 1e3, (50, 95, 99)).tolist()
        summary["latency_ms"] = dict(zip(("p50", "p95", "p99"), percentiles, strict=True))
    return summary


def paired_ratio(left: Sequence[Measurement], right: Sequence[Measurement], measure: Measure) -> float | None:
    """Return the median of `measure(left) / measure(right)` over the repeats in which both runs are valid.

    Returns None if there are no such repeats.
    """
    others = {run["repeat"]: run for run in valid_runs(right)}
    pairs = [(measure(run), measure(others[run["repeat"]])) for run in valid_runs(left) if run["repeat"] in others]
    ratios = [numerator / denominator for numerator, denominator in pairs if denominator > 0]
    return statistics.median(ratios) if ratios else None


def _median_reported(runs: Sequence[Measurement], name: str) -> float | None:
    values = [run[name] for run in runs if run.get(name) is not None]
    return statistics.median(values) if values else None
