"""Overloads a service: sends more searches than the service can answer, and hostile requests. Checks every response."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.serve.load import Exchange, Searches, open_loop, poisson_times, running_service, summary
from edje_index.search.hits import Hits
from edje_index.search.token_index import TokenIndex

OVERLOAD = 1.5
"""Offered load of searches, as a multiple of the knee."""
DEADLINE = 8.0
_LATE = 2.0  # tolerance in seconds: a batch that runs at the deadline is finished, and clients are busy
_QUEUE = 16
_QUERIES = 32
_MAX_GROWTH = 256 << 20
_TOLERANCE = {"float32": 2e-4, "bfloat16": 0.1, "auto": 0.1}  # scores depend a little on the batch
_SLOW_CONNECTIONS = 40
_PAUSE = 0.1
_SEARCH = b"POST /search HTTP/1.1\r\nHost: localhost\r\n"
_WRONG_ITEMS = b'{"query": "a", "texts": [' + b"null," * 900_000 + b"null]}"
HOSTILE = {
    "malformed": (
        b"GET /thumbnails/0 HTT",
        b"\x16\x03\x01garbage\r\n\r\n",
        _SEARCH + b'Content-Length: 9\r\n\r\n{"query":',
        _SEARCH + b"Content-Length: -5\r\n\r\n",
    ),
    "oversized": (
        _SEARCH + b"Content-Length: 99999999999\r\n\r\n",
        _SEARCH + b"Transfer-Encoding: chunked\r\n\r\nFFFFFF\r\n" + b"x" * 100_000,
        b"POST /rerank HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(_WRONG_ITEMS) + _WRONG_ITEMS,
    ),
    "slow": (b"POST /search HTTP/1.1\r\nHost: loc", _SEARCH + b"Content-Length: 40\r\n\r\n{"),
}


def overload(
    index: Path,
    searches: Searches,
    knee: float,
    options: Sequence[str],
    *,
    model: Path | None,
    dtype: str,
    seconds: float,
) -> dict[str, Any]:
    """Send hostile requests and `OVERLOAD` times the load of the knee to a service. Return a report.

    Args:
        index: index to serve.
        searches: searches to send.
        knee: highest load that the service keeps up with, in searches per second.
        options: options of `edje-index serve`.
        model: model bundle; None for the bundle that built the index.
        dtype: data type of the joint encoder's matrix products.
        seconds: duration of the overload.
    """
    texts = list(dict.fromkeys(searches.queries))[:_QUERIES]
    searches = replace(searches, queries=texts)
    library = TokenIndex.open(index, model, dtype=dtype, precision=searches.precision)
    every = library.search(texts, searches.k, max(searches.pool, searches.k))
    expected = dict(zip(texts, every, strict=True))

    async def offer(url: str, duration: float, seed: int) -> tuple[list[Exchange], Counter[str]]:
        done = asyncio.Event()
        hostile = asyncio.create_task(hostile_clients(url, done))
        exchanges = await open_loop(url, searches, poisson_times(OVERLOAD * knee, duration, seed))
        done.set()
        return exchanges, await hostile

    limits = ["--deadline", str(DEADLINE), "--queue", str(_QUEUE)]
    with running_service(index, [*options, *limits]) as service:
        asyncio.run(offer(service.url, seconds / 10, seed=1))
        warm_peak, service.peak = service.peak, 0
        exchanges, hostile = asyncio.run(offer(service.url, seconds, seed=0))
        peak = service.peak
        after = asyncio.run(open_loop(service.url, searches, [0.0]))
        crashed = service.process.poll() is not None or after[0].status != 200
        has_traceback = "Traceback (most recent call last)" in service.log.read_text(errors="replace")
    wrong = [each.query for each in exchanges if each.status == 200 and differs(each, expected, dtype)]
    answered = [each.answered_in for each in exchanges if each.status == 200]
    found = {
        "crashed": crashed,
        "tracebacks": has_traceback,
        "wrong answers": bool(wrong),
        "no answers": not answered,
        "answers after the deadline": bool(answered) and max(answered) > DEADLINE + _LATE,
        "memory grew": peak - warm_peak > _MAX_GROWTH,
        "unexpected statuses": bool({each.status for each in exchanges} - {200, 429, 504}),
    }
    problems = [name for name, is_problem in found.items() if is_problem]
    return {
        "offered_per_s": OVERLOAD * knee,
        "seconds": seconds,
        **summary(exchanges, seconds),
        "compared": len(answered),
        "wrong": wrong[:5],
        "slowest_s": max(answered, default=None),
        "deadline_s": DEADLINE,
        "hostile": dict(hostile),
        "memory_peak": peak,
        "memory_growth": peak - warm_peak,
        "problems": problems,
        "verdict": "; ".join(problems) or "no problem",
    }


def differs(exchange: Exchange, expected: Mapping[str, Hits], dtype: str) -> bool:
    """Return True if the scores or the order of the hits in a response differ from `expected`.

    Rows with equal scores, within a tolerance, may be in any order.
    """
    hits, tolerance = expected[exchange.query], _TOLERANCE[dtype]
    answer = exchange.body["hits"]
    if len(answer) != len(hits):
        return True
    scores = {hit.row_id: hit.score for hit in hits}
    for given, hit in zip(answer, hits, strict=True):
        if abs(given["score"] - hit.score) > tolerance:
            return True
        if given["row_id"] != hit.row_id and abs(scores.get(given["row_id"], hits[-1].score) - hit.score) > tolerance:
            return True
    return False


async def hostile_clients(url: str, until: asyncio.Event) -> Counter[str]:
    """Send hostile requests until the event `until` is set. Return the number of sent requests by kind."""
    address = urlsplit(url)
    sent: Counter[str] = Counter()

    async def run(kind: str) -> None:
        kept = _SLOW_CONNECTIONS if kind == "slow" else 0
        connections: list[asyncio.StreamWriter] = []
        while not until.is_set():
            for request in HOSTILE[kind]:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection(address.hostname, address.port)
                    connections.append(writer)
                    writer.write(request)
                    sent[kind] += 1
            while len(connections) > kept:
                connections.pop(0).close()
            await asyncio.sleep(_PAUSE)
        for writer in connections:
            writer.close()

    await asyncio.gather(*map(run, HOSTILE))
    return sent
