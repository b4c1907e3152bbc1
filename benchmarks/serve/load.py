"""Starts `edje-index serve`, and sends searches to it in an open loop or in a closed loop.

In an open loop, searches are sent at the times of a Poisson process, without waiting for earlier responses. The latency
is measured from the planned time of a search, so that time in queues is included. In a closed loop, each client sends
its next search after the response to the previous search.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from storage_formats.errors import EdjeError

_CONNECTIONS = 400  # below the limit of the service
_SAMPLE_SECONDS = 0.2
_STOP_SECONDS = 60


class Service:
    """A process of `edje-index serve`.

    Attributes:
        url: address of the service.
        process: the process.
        log: file with the standard error of the process.
        peak: largest number of resident bytes so far. Set it to 0 to measure a part of the run.
    """

    def __init__(self, url: str, process: subprocess.Popen[str], log: Path) -> None:
        self.url = url
        self.process = process
        self.log = log
        self.peak = 0

    def memory(self) -> int:
        """Return the resident bytes of the process; 0 if the process has ended."""
        try:
            return int(psutil.Process(self.process.pid).memory_info().rss)
        except psutil.Error:
            return 0


@contextmanager
def running_service(index: Path, options: Sequence[str]) -> Iterator[Service]:
    """Run `edje-index serve INDEX OPTIONS` during the `with` block, on a free port of the local host.

    Raises:
        EdjeError: the service does not start.
    """
    command = [sys.executable, "-m", "pipelines.cli", "serve", str(index), "--port", "0", *options]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "service.log"
        with log.open("w") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        stopped = threading.Event()
        try:
            url = process.stdout.readline().strip()
            if not url.startswith("http://"):
                raise EdjeError(f"the service did not start: {log.read_text(errors='replace')[-2000:].strip()}")
            service = Service(url, process, log)

            def sample() -> None:
                while not stopped.wait(_SAMPLE_SECONDS):
                    service.peak = max(service.peak, service.memory())

            threading.Thread(target=sample, daemon=True).start()
            yield service
        finally:
            stopped.set()
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


@dataclass(frozen=True)
class Exchange:
    """One search request and its response.

    Attributes:
        query: text of the search.
        seconds: seconds from the planned time of the request to the end of the response.
        answered_in: seconds from the sending of the request to the end of the response.
        status: HTTP status; 0 if the connection failed.
        body: parsed response; None if the status is not 200.
    """

    query: str
    seconds: float
    answered_in: float
    status: int
    body: Any = None


@dataclass(frozen=True)
class Searches:
    """The searches of a load.

    Attributes:
        queries: texts. After the last text, the first text is used again.
        k: number of hits.
        pool: number of candidates to re-rank.
        precision: precision of the tokens; None for the first precision of the index.
    """

    queries: Sequence[str]
    k: int = 10
    pool: int = 100
    precision: str | None = None

    async def send(self, client: httpx.AsyncClient, number: int, planned: float) -> Exchange:
        """Send one search now, and wait for its response."""
        query, sent = self.queries[number % len(self.queries)], time.perf_counter()
        body = {"query": query, "k": self.k, "pool": max(self.pool, self.k), "precision": self.precision}
        status, parsed = 0, None
        try:
            answer = await client.post("/search", json=body)
            status, parsed = answer.status_code, answer.json() if answer.status_code == 200 else None
        except httpx.HTTPError:
            pass
        now = time.perf_counter()
        return Exchange(query, now - planned, now - sent, status, parsed)


def poisson_times(rate: float, seconds: float, seed: int) -> list[float]:
    """Return the times of a Poisson process of `rate` events per second, between 0 and `seconds`."""
    draw, times, now = random.Random(seed), [], 0.0
    while (now := now + draw.expovariate(rate)) < seconds:
        times.append(now)
    return times


def _client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=_CONNECTIONS, max_keepalive_connections=_CONNECTIONS)
    return httpx.AsyncClient(base_url=url, timeout=120.0, limits=limits)


async def open_loop(url: str, searches: Searches, times: Sequence[float]) -> list[Exchange]:
    """Send one search at each time in `times`, in seconds from now. Return the exchanges in the order of `times`."""
    async with _client(url) as client:
        start = time.perf_counter()
        sent = []
        for number, planned in enumerate(times):
            await asyncio.sleep(max(0.0, start + planned - time.perf_counter()))
            sent.append(asyncio.create_task(searches.send(client, number, start + planned)))
        return list(await asyncio.gather(*sent))


async def closed_loop(url: str, searches: Searches, clients: int, seconds: float) -> list[Exchange]:
    """Let `clients` clients send searches for `seconds`, each client one search at a time. Return the exchanges."""
    async with _client(url) as client:
        end = time.perf_counter() + seconds

        async def run(number: int) -> list[Exchange]:
            exchanges = []
            while (now := time.perf_counter()) < end:
                exchanges.append(await searches.send(client, number, now))
                number += clients
            return exchanges

        return [exchange for each in await asyncio.gather(*map(run, range(clients))) for exchange in each]


def summary(exchanges: Sequence[Exchange], seconds: float) -> dict[str, Any]:
    """Return the rate and share of answered requests, quantiles of the latency, and medians of the stages.

    Searches in the same batch have the same stage times.

    Args:
        exchanges: all exchanges of a load.
        seconds: duration of the load.
    """
    answered = [exchange for exchange in exchanges if exchange.status == 200]
    statuses = [exchange.status for exchange in exchanges]
    quantiles: list[float | None] = [None] * 3
    if answered:
        quantiles = (1e3 * np.quantile([exchange.seconds for exchange in answered], [0.5, 0.95, 0.99])).tolist()
    stages = [exchange.body["timing"]["stages_ms"] for exchange in answered]
    names = dict.fromkeys(name for each in stages for name in each)
    return {
        "requests": len(exchanges),
        "answered_per_s": len(answered) / seconds,
        "answered_share": len(answered) / max(1, len(exchanges)),
        "statuses": {str(status): statuses.count(status) for status in sorted(set(statuses))},
        **dict(zip(("p50_ms", "p95_ms", "p99_ms"), quantiles, strict=True)),
        "stages_ms": {name: float(np.median([each[name] for each in stages if name in each])) for name in names},
        "batch": float(np.mean([each.body["timing"]["batch"] for each in answered])) if answered else None,
    }
