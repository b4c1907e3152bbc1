"""Overloads a service: sends more searches than the service can answer, and hostile requests. Checks every response."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from benchmarks.serve.hostile import hostile_clients
from benchmarks.serve.load import Exchange, Searches, open_loop, poisson_times, summary
from benchmarks.serve.service_process import PeakMemory, ServiceProcess, running_service

if TYPE_CHECKING:
    from benchmarks.serve.bench import ServeBench
    from edje_index.search.hits import Hits

OVERLOAD = 1.5
"""Offered load of searches, as a multiple of the knee."""
DEADLINE = 8.0
_LATE = 2.0  # tolerance in seconds: a batch that runs at the deadline is finished, and clients are busy
_QUEUE = 16
_QUERIES = 32
_MAX_GROWTH = 256 << 20
_TOLERANCE = {"float32": 2e-4, "bfloat16": 0.1, "auto": 0.1}  # scores depend a little on the batch


@dataclass(frozen=True)
class _Load:
    """What happened during a load: exchanges, numbers of hostile requests by kind, and peak memory in bytes."""

    exchanges: list[Exchange]
    hostile: Counter[str]
    peak: int


def overload(bench: ServeBench, searches: Searches, knee: float, options: Sequence[str]) -> dict[str, Any]:
    """Send hostile requests and `OVERLOAD` times the load of the knee to a service. Return a report.

    Args:
        bench: settings of the benchmark.
        searches: searches to send.
        knee: highest load that the service keeps up with, in searches per second.
        options: options of `edje-index serve`.
    """
    searches = replace(searches, queries=list(dict.fromkeys(searches.queries))[:_QUERIES])
    expected = library_hits(bench, searches)
    limits = ["--deadline", str(DEADLINE), "--queue", str(_QUEUE)]
    with running_service([bench.index], [*options, *limits]) as service:
        warm_up = _offer(service, searches, poisson_times(OVERLOAD * knee, bench.overload_seconds / 10, bench.seed + 1))
        load = _offer(service, searches, poisson_times(OVERLOAD * knee, bench.overload_seconds, bench.seed))
        after = asyncio.run(open_loop(service.url, searches, [0.0]))
        crashed, tracebacks = not service.running, service.tracebacks
    wrong = [each.query for each in load.exchanges if each.status == 200 and differs(each, expected, bench.dtype)]
    answered = [each.answered_in for each in load.exchanges if each.status == 200]
    growth = load.peak - warm_up.peak
    statuses = Counter(each.status for each in load.exchanges)
    problems = {
        "crashed": crashed or after[0].status != 200,
        "tracebacks": tracebacks > 0,
        "wrong answers": bool(wrong),
        "no answers": not answered,
        "answers after the deadline": bool(answered) and max(answered) > DEADLINE + _LATE,
        "memory grew": growth > _MAX_GROWTH,
        "unexpected statuses": bool(set(statuses) - {200, 429, 504}),
    }
    return {
        "offered_per_s": OVERLOAD * knee,
        "seconds": bench.overload_seconds,
        **summary(load.exchanges, bench.overload_seconds),
        "compared": len(answered),
        "wrong": wrong[:5],
        "slowest_s": max(answered, default=None),
        "deadline_s": DEADLINE,
        "hostile": dict(load.hostile),
        "memory_peak": load.peak,
        "memory_growth": growth,
        "problems": [name for name, is_problem in problems.items() if is_problem],
        "verdict": "; ".join(name for name, is_problem in problems.items() if is_problem) or "no problem",
    }


def library_hits(bench: ServeBench, searches: Searches) -> dict[str, Hits]:
    """Return the hits of `TokenIndex.search` for each query."""
    from edje_index.search.token_index import TokenIndex

    index = TokenIndex.open(bench.index, bench.model, dtype=bench.dtype, precision=searches.precision)
    texts = list(searches.queries)
    every = index.search(texts, searches.k, max(searches.pool, searches.k))
    return dict(zip(texts, every, strict=True))


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


def _offer(service: ServiceProcess, searches: Searches, times: Sequence[float]) -> _Load:
    async def run() -> tuple[list[Exchange], Counter[str]]:
        done = asyncio.Event()
        hostile = asyncio.create_task(hostile_clients(service.url, done))
        exchanges = await open_loop(service.url, searches, times)
        done.set()
        return exchanges, await hostile

    with PeakMemory(service) as memory:
        exchanges, hostile = asyncio.run(run())
    return _Load(exchanges, hostile, memory.peak)
