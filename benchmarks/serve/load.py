"""Sends searches to a service in an open loop or in a closed loop.

In an open loop, searches are sent at the times of a Poisson process, without waiting for earlier responses. The latency
is measured from the planned time of a search, so that time in queues is included.

In a closed loop, each client sends its next search after the response to the previous search.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

_CONNECTIONS = 400  # below the limit of the service


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
        timeout: seconds after which a client gives up.
    """

    queries: Sequence[str]
    k: int = 10
    pool: int = 100
    precision: str | None = None
    timeout: float = 120.0

    def body(self, query: str) -> dict[str, Any]:
        """Return the JSON body of a search request for `query`."""
        return {"query": query, "k": self.k, "pool": max(self.pool, self.k), "precision": self.precision}


def poisson_times(rate: float, seconds: float, seed: int) -> list[float]:
    """Return the times of a Poisson process of `rate` events per second, between 0 and `seconds`."""
    return list(_poisson(rate, seconds, random.Random(seed)))


def _poisson(rate: float, seconds: float, draw: random.Random) -> Iterator[float]:
    now = draw.expovariate(rate)
    while now < seconds:
        yield now
        now += draw.expovariate(rate)


async def open_loop(url: str, searches: Searches, times: Sequence[float]) -> list[Exchange]:
    """Send one search at each time in `times`, in seconds from now. Return the exchanges in the order of `times`."""
    async with _client(url, searches.timeout) as client:
        start = time.perf_counter()
        sent = []
        for number, planned in enumerate(times):
            await asyncio.sleep(max(0.0, start + planned - time.perf_counter()))
            query = searches.queries[number % len(searches.queries)]
            sent.append(asyncio.create_task(_search(client, searches, query, start + planned)))
        return list(await asyncio.gather(*sent))


async def closed_loop(url: str, searches: Searches, clients: int, seconds: float) -> list[Exchange]:
    """Let `clients` clients send searches for `seconds`, each client one search at a time. Return the exchanges."""
    async with _client(url, searches.timeout) as client:
        end = time.perf_counter() + seconds

        async def run(first: int) -> list[Exchange]:
            exchanges: list[Exchange] = []
            while time.perf_counter() < end:
                query = searches.queries[(first + len(exchanges) * clients) % len(searches.queries)]
                exchanges.append(await _search(client, searches, query, time.perf_counter()))
            return exchanges

        return [exchange for each in await asyncio.gather(*map(run, range(clients))) for exchange in each]


def _client(url: str, timeout: float) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=_CONNECTIONS, max_keepalive_connections=_CONNECTIONS)
    return httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits)


async def _search(client: httpx.AsyncClient, searches: Searches, query: str, planned: float) -> Exchange:
    sent, status, body = time.perf_counter(), 0, None
    try:
        answer = await client.post("/search", json=searches.body(query))
        status, body = answer.status_code, answer.json() if answer.status_code == 200 else None
    except httpx.HTTPError:
        pass
    now = time.perf_counter()
    return Exchange(query, now - planned, now - sent, status, body)


def summary(exchanges: Sequence[Exchange], seconds: float) -> dict[str, Any]:
    """Return the rate and share of answered requests, and quantiles of the latency in milliseconds.

    Args:
        exchanges: all exchanges of a load.
        seconds: duration of the load.
    """
    answered = [exchange for exchange in exchanges if exchange.status == 200]
    statuses = [exchange.status for exchange in exchanges]
    quantiles: list[float | None] = [None] * 3
    if answered:
        quantiles = (1e3 * np.quantile([exchange.seconds for exchange in answered], [0.5, 0.95, 0.99])).tolist()
    return {
        "requests": len(exchanges),
        "answered_per_s": len(answered) / seconds,
        "answered_share": len(answered) / max(1, len(exchanges)),
        "statuses": {str(status): statuses.count(status) for status in sorted(set(statuses))},
        "p50_ms": quantiles[0],
        "p95_ms": quantiles[1],
        "p99_ms": quantiles[2],
        "stages_ms": _stages(answered),
        "batch": float(np.mean([each.body["timing"]["batch"] for each in answered])) if answered else None,
    }


def _stages(answered: Sequence[Exchange]) -> dict[str, float]:
    """Return the median milliseconds of each stage. Searches in the same batch have the same stage times."""
    stages = [exchange.body["timing"]["stages_ms"] for exchange in answered]
    names = list(dict.fromkeys(name for each in stages for name in each))
    return {name: float(np.median([each[name] for each in stages if name in each])) for name in names}
