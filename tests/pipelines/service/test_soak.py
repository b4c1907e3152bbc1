"""More load than the service can take, for a while, with hostile clients mixed in."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from edje_index import Client, ServiceError, TokenIndex
from tests.pipelines.service.server import Service, resident_bytes, serve_with

SECONDS = 45
DEADLINE = 8.0
QUERIES = [f"{number} red canoes" for number in range(8)]
ROWS = [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11] * 40
MAX_GROWTH = 256 << 20


def honest(service: Service, end: float, expected: dict[str, list[int]]) -> dict[str, list[float]]:
    """Re-rank until `end`; returns the seconds of each outcome. Fails on a wrong answer."""
    seconds: dict[str, list[float]] = {"answered": [], "refused": []}
    with Client(service.url) as client:
        number = 0
        while time.monotonic() < end:
            number += 1
            query, started = QUERIES[number % len(QUERIES)], time.monotonic()
            try:
                order = [ROWS[position] for position, _ in client.rerank(query, ROWS)]
            except ServiceError as error:
                if error.status != 429:
                    raise
                seconds["refused"].append(time.monotonic() - started)
                time.sleep(0.2)
            else:
                assert list(dict.fromkeys(order)) == expected[query]
                seconds["answered"].append(time.monotonic() - started)
    return seconds


def hostile(service: Service, end: float) -> None:
    """Send what no client should, until `end`."""
    requests = [
        b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n",
        b"POST /search HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFF\r\n" + b"x" * 100_000,
        b"GET /thumbnails/0 HTT",
        b"\x16\x03\x01garbage\r\n\r\n",
    ]
    connections = []
    while time.monotonic() < end:
        for request in requests:
            with contextlib.suppress(OSError):
                connection = socket.create_connection(("127.0.0.1", service.port), timeout=1)
                connections.append(connection)
                connection.sendall(request)
        with contextlib.suppress(httpx.HTTPError):
            httpx.post(f"{service.url}/rerank", content=b'{"query": "a", "texts": [' + b'"1",' * 900_000, timeout=5)
        for connection in connections[:-40]:
            connection.close()
        connections = connections[-40:]
        time.sleep(0.1)
    for connection in connections:
        connection.close()


def run_until(end: float, calls: list[Callable[[], object]]) -> list[object]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(timeout=end - time.monotonic() + 60) for future in [pool.submit(call) for call in calls]]


@pytest.mark.slow
def test_overload_with_hostile_clients(index, tmp_path):
    library = TokenIndex.open(index)
    rows = sorted(set(ROWS))
    expected = {query: [hit.row_id for hit in library.rerank(query, rows)] for query in QUERIES}
    limits = {"deadline_seconds": DEADLINE, "body_seconds": 2.0, "waiting": 8}
    with serve_with(tmp_path, index, **limits) as service:
        run_until(time.monotonic() + 5, [lambda: honest(service, time.monotonic() + 5, expected)] * 4)
        before = resident_bytes(service.process.pid)
        end = time.monotonic() + SECONDS
        calls: list[Callable[[], object]] = [lambda: honest(service, end, expected)] * 16
        *outcomes, _, _ = run_until(end, [*calls, *[lambda: hostile(service, end)] * 2])
        answered = [seconds for outcome in outcomes for seconds in outcome["answered"]]
        refused = [seconds for outcome in outcomes for seconds in outcome["refused"]]
        assert answered
        assert refused, "the load was too small"
        assert max(answered) < DEADLINE + 2
        assert resident_bytes(service.process.pid) - before < MAX_GROWTH
        assert service.process.poll() is None
        assert httpx.post(f"{service.url}/search", json={"query": "a dog"}, timeout=30).status_code == 200
