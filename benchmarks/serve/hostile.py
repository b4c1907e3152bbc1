"""Clients that send malformed, oversized and slow requests to a service."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from urllib.parse import urlsplit

_OPEN = 40  # connections that a client of slow requests holds open
_PAUSE = 0.1

MALFORMED = (
    b"GET /thumbnails/0 HTT",
    b"\x16\x03\x01garbage\r\n\r\n",
    b'POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"query":',
    b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
)
_WRONG_ITEMS = b'{"query": "a", "texts": [' + b"null," * 900_000 + b"null]}"
OVERSIZED = (
    b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n",
    b"POST /search HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFF\r\n" + b"x" * 100_000,
    b"POST /rerank HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(_WRONG_ITEMS) + _WRONG_ITEMS,
)
SLOW = (
    b"POST /search HTTP/1.1\r\nHost: loc",
    b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 40\r\n\r\n{",
)


async def hostile_clients(url: str, until: asyncio.Event) -> Counter[str]:
    """Send hostile requests until the event `until` is set. Return the number of sent requests by kind."""
    address = urlsplit(url)
    sent: Counter[str] = Counter()
    kinds = {"malformed": MALFORMED, "oversized": OVERSIZED, "slow": SLOW}

    async def run(kind: str) -> None:
        connections: list[asyncio.StreamWriter] = []
        while not until.is_set():
            for request in kinds[kind]:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection(address.hostname, address.port)
                    connections.append(writer)
                    writer.write(request)
                    sent[kind] += 1
            for writer in connections[: -_OPEN if kind == "slow" else None]:
                writer.close()
            connections = connections[-_OPEN:] if kind == "slow" else []
            await asyncio.sleep(_PAUSE)
        for writer in connections:
            writer.close()

    await asyncio.gather(*map(run, kinds))
    return sent
