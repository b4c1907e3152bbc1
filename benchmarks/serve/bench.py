"""Measures a running service under load.

In a closed loop, clients wait for each response before they send the next search. In an open loop, searches are sent at
planned times. The knee is the highest load in the open loop that the service keeps up with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.disk import evict
from benchmarks.plots import COLOURS, new_figure, save_figure
from benchmarks.report import Say, machine, table
from benchmarks.serve.load import Searches, closed_loop, open_loop, poisson_times, running_service, summary
from benchmarks.serve.overload import overload
from pipelines.environment import environment
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import Manifest

_ANSWERED, _SLOWDOWN = 0.99, 5.0
"""Up to the knee, this share of searches is answered, and p95 is at most this multiple of p95 at the lowest load."""
_LOADS = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.2)
"""Offered loads, as multiples of the highest rate in the closed loop."""
_COLD_SEARCHES = 10


def bench_serve(
    index: Path,
    queries: Sequence[str],
    say: Say,
    *,
    model: Path | None = None,
    dtype: str = "float32",
    pools: Sequence[int] = (100,),
    precisions: Sequence[str] = (),
    clients: Sequence[int] = (1, 4, 16, 64),
    seconds: float = 20.0,
    overload_seconds: float = 0.0,
) -> dict[str, Any]:
    """Measure every pool and precision, and return the report.

    Args:
        index: index to serve.
        queries: texts to search for.
        say: receives one line of text after each measurement.
        model: model bundle; None for the bundle that built the index.
        dtype: data type of the joint encoder's matrix products.
        pools: numbers of candidates to measure. The overload uses the first number.
        precisions: precisions to measure; empty for only the first precision of the index.
        clients: numbers of clients of the closed loop to measure.
        seconds: duration of each measurement.
        overload_seconds: duration of the overload in seconds; 0 for no overload.
    """
    options = ["--dtype", dtype, *([] if model is None else ["--model", str(model)])]
    settings = {"queries": len(queries), "dtype": dtype, "pools": pools, "clients": clients, "seconds": seconds}
    report: dict[str, Any] = {"environment": environment(), "settings": settings, "workloads": []}
    with running_service(index, options) as service:
        report["memory_at_start"] = service.memory()
        for precision in precisions or Manifest.load(index).spec.precisions[:1]:
            for pool in pools:
                searches = Searches(queries, pool=pool, precision=precision)
                report["workloads"].append(_workload(index, service.url, searches, clients, seconds, say))
        report["memory_at_end"] = service.memory()
        report["memory_peak"] = max(service.peak, report["memory_at_start"], report["memory_at_end"])
    if overload_seconds:
        searches = Searches(queries, pool=pools[0])
        rate = report["workloads"][0]["knee_per_s"]
        report["overload"] = overload(
            index, searches, rate, options, model=model, dtype=dtype, seconds=overload_seconds
        )
        say(f"overload: {report['overload']['verdict']}")
    return report


def _workload(
    index: Path, url: str, searches: Searches, clients: Sequence[int], seconds: float, say: Say
) -> dict[str, Any]:
    assert searches.precision is not None
    name = f"pool {searches.pool}, {searches.precision}"
    entry: dict[str, Any] = {"pool": searches.pool, "precision": searches.precision, "clients": {}, "loads": []}
    files = [path for path in Layout(index).token_array(searches.precision).rglob("*") if path.is_file()]
    exchanges = []
    for number in range(_COLD_SEARCHES):  # single searches, with the tokens evicted from the page cache before each
        evict(files)
        one = replace(searches, queries=[searches.queries[number % len(searches.queries)]])
        exchanges += asyncio.run(open_loop(url, one, [0.0]))
    cold = summary(exchanges, 1.0)
    entry["cold_ms"] = {"p50_ms": cold["p50_ms"], "stages_ms": cold["stages_ms"]}
    for count in clients:
        result = summary(asyncio.run(closed_loop(url, searches, count, seconds)), seconds)
        entry["clients"][str(count)] = result
        say(f"{name}, {count} clients: {described(result)}")
    capacity = max(result["answered_per_s"] for result in entry["clients"].values())
    for load in _LOADS:
        offered = load * capacity
        exchanges = asyncio.run(open_loop(url, searches, poisson_times(offered, seconds, seed=0)))
        entry["loads"].append({"offered_per_s": offered, **summary(exchanges, seconds)})
        say(f"{name}, offered {offered:.2f}/s: {described(entry['loads'][-1])}")
    entry["knee_per_s"] = knee(entry["loads"])
    say(f"{name}: knee at {entry['knee_per_s']:.2f} searches per second")
    return entry


def knee(loads: Sequence[dict[str, Any]]) -> float:
    """Return the knee: the highest offered load before the first load that the service does not keep up with.

    The service keeps up with a load if nearly all requests are answered, and if p95 is not much higher than at the
    lowest load.
    """
    best = 0.0
    lowest = loads[0]["p95_ms"]
    for load in loads:
        if load["p95_ms"] is None or load["answered_share"] < _ANSWERED or load["p95_ms"] > _SLOWDOWN * lowest:
            break
        best = float(load["offered_per_s"])
    return best or float(loads[0]["offered_per_s"])


def described(result: dict[str, Any]) -> str:
    """Return a one-line summary of the result of a load."""
    if result["p50_ms"] is None:
        return f"no request was answered ({result['statuses']})"
    return (
        f"{result['answered_per_s']:.2f} answered/s ({result['answered_share']:.1%}), p50 {result['p50_ms']:.0f} ms, "
        f"p95 {result['p95_ms']:.0f} ms, p99 {result['p99_ms']:.0f} ms, {result['batch']:.1f} requests per batch"
    )


_METHOD = """One process runs `edje-index serve`, and another process on the same machine sends searches over HTTP. Both
share the processors.

- Clients: each client sends its next search after the response to the previous search.
- Offered load: searches are sent at the times of a Poisson process. Latency is measured from the planned time.
- Batch: mean number of searches per batch.
- Knee: highest offered load before the first load at which less than 99 % of the searches were answered, or p95 was
  more than 5 times p95 at the lowest load.
- Cold: the tokens were evicted from the page cache before each search.
- Memory: resident memory of the service."""


def draw(report: dict[str, Any], path: Path) -> None:
    """Plot the median latency (p50) and p99 of each workload against the offered load."""
    figure, axes = new_figure("Latency by offered load", "offered load, searches per second", "latency, ms")
    for number, entry in enumerate(report["workloads"]):
        colour = COLOURS[number % len(COLOURS)]
        loads = [load for load in entry["loads"] if load["p50_ms"] is not None]
        for key, style in (("p50", "-"), ("p99", "--")):
            label = f"pool {entry['pool']}, {entry['precision']}, {key}"
            times = [load[f"{key}_ms"] for load in loads]
            axes.plot([load["offered_per_s"] for load in loads], times, style, color=colour, marker="o", label=label)
        axes.axvline(entry["knee_per_s"], color=colour, linewidth=0.8)
    axes.set_yscale("log")
    axes.legend(frameon=False)
    save_figure(figure, path)


def report_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the report in Markdown."""
    settings = report["settings"]
    yield f"# Service under load, {report['environment']['date']}\n"
    yield machine(report["environment"])
    yield f"{settings['queries']} queries, `--dtype {settings['dtype']}`, {settings['seconds']:g} s per measurement.\n"
    yield f"{_METHOD}\n"
    for entry in report["workloads"]:
        yield f"## Pool {entry['pool']}, {entry['precision']}\n"
        cold = _ms(entry["cold_ms"]["p50_ms"])
        yield f"Knee: {entry['knee_per_s']:.2f} searches per second. Cold, one at a time: p50 {cold}.\n"
        results = [(f"clients: {count}", result) for count, result in entry["clients"].items()]
        results += [(f"{result['offered_per_s']:.2f} per second", result) for result in entry["loads"]]
        yield from table(
            ("load", "answered per second", "answered", "p50", "p95", "p99", "batch"),
            (
                (
                    name,
                    f"{result['answered_per_s']:.2f}",
                    f"{result['answered_share']:.1%}",
                    *(_ms(result[key]) for key in ("p50_ms", "p95_ms", "p99_ms")),
                    "-" if result["batch"] is None else f"{result['batch']:.1f}",
                )
                for name, result in results
            ),
        )
        stages = ", ".join(f"{name} {value:.1f} ms" for name, value in entry["loads"][0]["stages_ms"].items())
        yield f"\nStages at the lowest load, p50: {stages}.\n"
    sizes = [f"{report[key] / 2**20:.0f} MiB" for key in ("memory_at_start", "memory_peak", "memory_at_end")]
    yield f"## Memory\n\n{sizes[0]} at the start, {sizes[1]} at most, {sizes[2]} at the end."
    if "overload" in report:
        result = report["overload"]
        hostile = ", ".join(f"{count} {kind}" for kind, count in result["hostile"].items())
        yield "\n## Overload\n"
        yield f"{result['seconds']:g} s at {result['offered_per_s']:.2f} searches per second, 1.5 times the knee, with"
        yield f"hostile requests ({hostile}): {described(result)}. Statuses: {result['statuses']}."
        yield f"{result['compared']} answers compared with the library, {len(result['wrong'])} wrong. Slowest answer"
        yield f"{result['slowest_s'] or 0:.2f} s (deadline {result['deadline_s']:g} s). Memory grew by"
        yield f"{result['memory_growth'] / 2**20:.0f} MiB. Result: {result['verdict']}."


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"
