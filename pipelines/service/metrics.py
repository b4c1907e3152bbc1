"""Metrics in the format of Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import Scope

_SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_SIZES = (1, 2, 4, 8, 16, 32, 64)
_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"})


class Metrics:
    """Counters of one service."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        labels = ["route", "method", "status"]
        self._requests = Counter("edje_requests", "Answered requests.", labels, registry=self._registry)
        self._seconds = Histogram(
            "edje_request_seconds", "Time to answer.", ["route"], buckets=_SECONDS, registry=self._registry
        )
        self._batches = Histogram(
            "edje_batch_requests", "Requests that shared a batch.", buckets=_SIZES, registry=self._registry
        )
        self._tokens = Counter("edje_image_tokens", "Image tokens read by the model.", registry=self._registry)
        self._waiting = Gauge("edje_waiting_requests", "Requests that wait for the model.", registry=self._registry)

    def watch_queue(self, length: Callable[[], int]) -> None:
        """Report `length()` as the length of the queue."""
        self._waiting.set_function(length)

    def count_request(self, scope: Scope, status: int, seconds: float) -> None:
        """Count an answer. Paths and methods that do not exist share a label, so that clients cannot add labels."""
        route = getattr(scope.get("route"), "path", "other")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._requests.labels(route, method, str(status or "none")).inc()
        self._seconds.labels(route).observe(seconds)

    def count_batch(self, requests: int, tokens: int) -> None:
        """Count a batch of the model."""
        self._batches.observe(requests)
        self._tokens.inc(tokens)

    def text(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        return generate_latest(self._registry)
