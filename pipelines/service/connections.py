"""Closes the connections of clients that send nothing, or that send headers too slowly."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


def timed_protocol(seconds: float) -> type[H11Protocol]:
    """Return an HTTP protocol class for uvicorn that closes slow connections.

    The headers of each request must be complete within `seconds`.
    """

    # Uvicorn itself limits only the time between two requests. `guard.Guard` limits the time for a body.
    class TimedProtocol(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _watch(self) -> None:
            """Start the timer if the service is waiting for a request, else stop the timer."""
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_timer()
            elif self._timer is None:
                self._timer = self.loop.call_later(seconds, self._close)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _close(self) -> None:
            self._timer = None
            if self.transport is not None:
                self.transport.abort()

    return TimedProtocol
