"""Measures a running service under load.

In a closed loop, clients wait for each response before they send the next search. In an open loop, searches are sent at
planned times. The knee is the highest load in the open loop that the service keeps up with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.fetch.page_cache import evict
from benchmarks.serve.load import Searches, closed_loop, open_loop, poisson_times, summary
from benchmarks.serve.overload import overload
from benchmarks.serve.service_process import PeakMemory, ServiceProcess, running_service
from pipelines.environment import environment
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import Manifest

OnLine = Callable[[str], None]

_ANSWERED, _SLOWDOWN = 0.99, 5.0
"""Up to the knee, this share of searches is answered, and p95 is at most this multiple of p95 at the lowest load."""
_COLD_SEARCHES = 10


@dataclass(frozen=True)
class ServeBench:
    """Settings of `bench_serve`.

    Attributes:
        index: index to serve.
        queries: texts to search for.
        model: model bundle; None for the bundle that built the index.
        dtype: data type of the joint encoder's matrix products.
        pools: numbers of candidates to measure. The overload uses the first number.
        precisions: precisions to measure; empty for only the first precision of the index.
        clients: numbers of clients of the closed loop to measure.
        loads: offered loads to measure, as multiples of the highest rate in the closed loop.
        seconds: duration of each measurement.
        overload_seconds: duration of the overload in seconds; 0 for no overload.
        seed: seed of the planned times.
    """

    index: Path
    queries: Sequence[str]
    model: Path | None = None
    dtype: str = "float32"
    pools: tuple[int, ...] = (100,)
    precisions: tuple[str, ...] = ()
    clients: tuple[int, ...] = (1, 4, 16, 64)
    loads: tuple[float, ...] = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.2)
    seconds: float = 20.0
    overload_seconds: float = 0.0
    seed: int = 0


def bench_serve(bench: ServeBench, on_line: OnLine) -> dict[str, Any]:
    """Measure every pool and precision, and return the report.

    Args:
        bench: settings.
        on_line: function that receives one line of text after each measurement.
    """
    options = ["--dtype", bench.dtype, *([] if bench.model is None else ["--model", str(bench.model)])]
    settings = {**asdict(bench), "queries": len(bench.queries)}
    report: dict[str, Any] = {"environment": environment(), "settings": settings, "workloads": []}
    with running_service([bench.index], options) as service, PeakMemory(service) as memory:
        report["memory_at_start"] = service.memory()
        for precision in bench.precisions or (None,):
            for pool in bench.pools:
                searches = Searches(bench.queries, pool=pool, precision=precision)
                report["workloads"].append(_workload(bench, service, searches, on_line))
        report["memory_at_end"] = service.memory()
    report["memory_peak"] = memory.peak
    if bench.overload_seconds:
        knee = report["workloads"][0]["knee_per_s"]
        report["overload"] = overload(bench, replace(searches, pool=bench.pools[0], precision=None), knee, options)
        on_line(f"overload: {report['overload']['verdict']}")
    return report


def _workload(bench: ServeBench, service: ServiceProcess, searches: Searches, on_line: OnLine) -> dict[str, Any]:
    manifest = Manifest.load(bench.index)
    precision = searches.precision or manifest.spec.precisions[0]
    name = f"pool {searches.pool}, {precision}"
    entry: dict[str, Any] = {"pool": searches.pool, "precision": precision, "clients": {}, "loads": []}
    entry["cold_ms"] = _cold(bench.index, service, searches, precision)
    for clients in bench.clients:
        exchanges = asyncio.run(closed_loop(service.url, searches, clients, bench.seconds))
        entry["clients"][str(clients)] = summary(exchanges, bench.seconds)
        on_line(f"{name}, {clients} clients: {described(entry['clients'][str(clients)])}")
    capacity = max(result["answered_per_s"] for result in entry["clients"].values())
    for load in bench.loads:
        times = poisson_times(load * capacity, bench.seconds, bench.seed)
        exchanges = asyncio.run(open_loop(service.url, searches, times))
        entry["loads"].append({"offered_per_s": load * capacity, **summary(exchanges, bench.seconds)})
        on_line(f"{name}, offered {load * capacity:.2f}/s: {described(entry['loads'][-1])}")
    entry["knee_per_s"] = knee(entry["loads"])
    on_line(f"{name}: knee at {entry['knee_per_s']:.2f} searches per second")
    return entry


def _cold(index: Path, service: ServiceProcess, searches: Searches, precision: str) -> dict[str, Any]:
    """Measure single searches. Before each search, the tokens are evicted from the page cache."""
    files = [path for path in Layout(index).token_array(precision).rglob("*") if path.is_file()]
    exchanges = []
    for number in range(_COLD_SEARCHES):
        evict(files)
        one = replace(searches, queries=[searches.queries[number % len(searches.queries)]])
        exchanges += asyncio.run(open_loop(service.url, one, [0.0]))
    result = summary(exchanges, 1.0)
    return {"p50_ms": result["p50_ms"], "stages_ms": result["stages_ms"]}


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
