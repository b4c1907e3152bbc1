"""Measures `edje-index serve` under load.

Searches are sent at the times of a Poisson process, without waiting for earlier
responses. The latency is measured from the planned time of a search, so that time in
queues is included. The load grows until the service does not keep up with it. The knee
is the highest load that the service keeps up with.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np

from benchmarks.disk import peak_memory
from benchmarks.report import Report, Say, machine
from edje_index.evaluation.report import table
from pipelines.environment import environment
from storage_formats.codecs import finest
from storage_formats.errors import EdjeError
from storage_formats.format.manifest import Manifest

_ANSWERED = 0.99
_SLOWDOWN = 5.0
"""The service keeps up with a load if it answers at least the share `_ANSWERED` of the
searches, and if p95 is at most `_SLOWDOWN` times p95 at the lowest load.
"""
# lowest offered load in searches per second
_LOWEST = 0.5
# ratio of an offered load to the load before it
_GROWTH = 1.3
# number of connections, which is below the limit of the service (512)
_CONNECTIONS = 400
_STOP_SECONDS = 60


class Exchange(NamedTuple):
    """One search and its response.

    Attributes:
        seconds: seconds from the planned time of the request to the end of the
            response.
        status: HTTP status, or the name of the error of the connection.
        timing: the key `timing` of the response; None if the status is not 200.
    """

    seconds: float
    status: str
    timing: Report | None


def bench_serve(
    index: Path,
    queries: Sequence[str],
    say: Say,
    *,
    model: Path | None,
    pools: Sequence[int],
    seconds: float,
) -> Report:
    """Measure every pool, and return the report. Linux only.

    `queries` are sent in turn, from the first again after the last. `say` receives one
    line of text after each measurement. The other arguments are options of `edje-index
    bench serve`.
    """
    options = [] if model is None else ["--model", str(model)]
    command = [sys.executable, "-m", "pipelines.cli", "serve", str(index)]
    command += ["--port", "0", *options]
    settings = {
        "queries": len(queries),
        "pools": pools,
        "seconds": seconds,
    }
    report: Report = {
        "environment": environment(),
        "settings": settings,
        "workloads": [],
    }
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            if not url.startswith("http://"):
                process.wait()
                errors.seek(0)
                raise EdjeError(
                    f"the service did not start: {errors.read()[-2000:].strip()}"
                )
            precision = finest(Manifest.load(index).spec.precisions)
            report["memory_at_start"] = peak_memory(process.pid)
            for pool in pools:
                say(f"pool {pool}, {precision}")
                bodies = [
                    {
                        "query": each,
                        "k": 10,
                        "pool": max(pool, 10),
                        "precision": precision,
                    }
                    for each in queries
                ]
                loads = list[Report]()
                offered = _LOWEST
                while not loads or keeps_up(loads[-1], loads[0]):
                    draw = random.Random(0)
                    gaps = (draw.expovariate(offered) for _ in itertools.count())
                    times = list(
                        itertools.takewhile(
                            lambda time: time < seconds, itertools.accumulate(gaps)
                        )
                    )
                    result = summary(
                        asyncio.run(open_loop(url, bodies, [0.0, *times])), seconds
                    )
                    loads.append({"offered_per_s": offered, **result})
                    say(f"offered {offered:.2f}/s, p95 {_ms(result['p95_ms'])}")
                    offered *= _GROWTH
                say(f"knee at {knee(loads):.2f} searches per second")
                report["workloads"].append(
                    {
                        "pool": pool,
                        "precision": precision,
                        "loads": loads,
                        "knee_per_s": knee(loads),
                    }
                )
            report["memory_peak"] = peak_memory(process.pid)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
    return report


async def _send(client: httpx.AsyncClient, body: Report, planned: float) -> Exchange:
    """Send one search now, and wait for its response."""
    status = ""
    timing = None
    try:
        answer = await client.post("/search", json=body)
        status = str(answer.status_code)
        if answer.status_code == 200:
            timing = answer.json()["timing"]
    except httpx.HTTPError as error:
        # The report counts a failed request as a search without an answer.
        status = type(error).__name__
    return Exchange(time.perf_counter() - planned, status, timing)


async def open_loop(
    url: str, bodies: Sequence[Report], times: Sequence[float]
) -> list[Exchange]:
    """Send one search at each of `times`, which are seconds from the start of this
    call. Return the exchanges in the order of `times`.
    """
    limits = httpx.Limits(
        max_connections=_CONNECTIONS, max_keepalive_connections=_CONNECTIONS
    )
    async with httpx.AsyncClient(base_url=url, timeout=120.0, limits=limits) as client:
        start = time.perf_counter()
        sent = []
        for number, planned in enumerate(times):
            await asyncio.sleep(max(0.0, start + planned - time.perf_counter()))
            sent.append(
                asyncio.create_task(
                    _send(client, bodies[number % len(bodies)], start + planned)
                )
            )
        return list(await asyncio.gather(*sent))


def summary(exchanges: Sequence[Exchange], seconds: float) -> Report:
    """Return the rate and share of answered requests, quantiles of the latency, and the
    median duration of each stage.

    `seconds` is the duration of the measurement. All searches of a batch have the stage
    times of the batch.
    """
    statuses = [exchange.status for exchange in exchanges]
    timings = [exchange.timing for exchange in exchanges if exchange.timing is not None]
    quantiles: list[float | None] = [None] * 3
    if timings:
        answered = [
            exchange.seconds for exchange in exchanges if exchange.timing is not None
        ]
        quantiles = (1e3 * np.quantile(answered, [0.5, 0.95, 0.99])).tolist()
    stages = [timing["stages_ms"] for timing in timings]
    names = dict.fromkeys(name for each in stages for name in each)
    return {
        "requests": len(exchanges),
        "answered_per_s": len(timings) / seconds,
        "answered_share": len(timings) / max(1, len(exchanges)),
        "statuses": {
            status: statuses.count(status) for status in sorted(set(statuses))
        },
        **dict(zip(("p50_ms", "p95_ms", "p99_ms"), quantiles, strict=True)),
        "stages_ms": {
            name: float(np.median([each[name] for each in stages if name in each]))
            for name in names
        },
        "batch": (
            float(np.mean([timing["batch"] for timing in timings])) if timings else None
        ),
    }


def keeps_up(load: Report, lowest: Report) -> bool:
    """Return True if nearly all requests of `load` are answered, and if its p95 is not
    much higher than that of the lowest load, see `_SLOWDOWN`.
    """
    return (
        load["p95_ms"] is not None
        and load["answered_share"] >= _ANSWERED
        and load["p95_ms"] <= _SLOWDOWN * lowest["p95_ms"]
    )


def knee(loads: Sequence[Report]) -> float:
    """Return the knee: the highest offered load before the first load that the service
    does not keep up with.
    """
    kept = itertools.takewhile(lambda load: keeps_up(load, loads[0]), loads)
    return max((load["offered_per_s"] for load in kept), default=0.0)


def _cells(load: Report) -> tuple[str, ...]:
    batch = "-" if load["batch"] is None else f"{load['batch']:.1f}"
    return (
        f"{load['offered_per_s']:.2f}",
        f"{load['answered_per_s']:.2f}",
        f"{load['answered_share']:.1%}",
        *(_ms(load[key]) for key in ("p50_ms", "p95_ms", "p99_ms")),
        batch,
    )


_METHOD = """One process runs `edje-index serve`, and another process on the same
machine sends searches over HTTP. Both share the processors.

- Offered load: searches are sent at the times of a Poisson process. Latency is measured
  from the planned time.
- Batch: mean number of searches per batch.
- Knee: highest offered load before the first load at which less than 99 % of the
  searches were answered, or p95 was more than 5 times p95 at the lowest load.
- Memory: peak resident memory of the service."""


def report_lines(report: Report) -> Iterator[str]:
    """Yield the lines of the report in Markdown."""
    settings = report["settings"]
    yield f"# Service under load, {report['environment']['date']}\n"
    yield machine(report["environment"])
    yield (
        f"{settings['queries']} queries, {settings['seconds']:g} s per measurement.\n"
    )
    for entry in report["workloads"]:
        yield f"## Pool {entry['pool']}, {entry['precision']}\n"
        yield f"Knee: {entry['knee_per_s']:.2f} searches per second.\n"
        header = ("offered per second", "answered per second", "answered")
        yield from table(
            (*header, "p50", "p95", "p99", "batch"), map(_cells, entry["loads"])
        )
        stages = ", ".join(
            f"{name} {value:.1f} ms"
            for name, value in entry["loads"][0]["stages_ms"].items()
        )
        yield f"\nStages at the lowest load, p50: {stages}.\n"
    start, peak = (
        f"{report[key] / 2**20:.0f} MiB" for key in ("memory_at_start", "memory_peak")
    )
    yield (
        f"## Memory\n\n{start} at the start, {peak} at most.\n\n## Method\n\n{_METHOD}"
    )


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"
