"""Metrics of the service for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import Scope

_SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_SIZES = (1, 2, 4, 8, 16, 32, 64)
_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"})


class Metrics:
    """The Prometheus metrics of one service."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        labels = ["route", "method", "status"]
        self._requests = Counter("edje_requests", "Answered requests.", labels, registry=self._registry)
        self._seconds = Histogram(
            "edje_request_seconds",
            "Seconds from the arrival of a request to the end of its response.",
            ["route"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._batches = Histogram(
            "edje_batch_requests", "Number of requests in a batch.", buckets=_SIZES, registry=self._registry
        )
        self._tokens = Counter("edje_image_tokens", "Image tokens that the model read.", registry=self._registry)
        self._waiting = Gauge(
            "edje_waiting_requests", "Requests that are waiting for the model.", registry=self._registry
        )

    def watch_queue(self, length: Callable[[], int]) -> None:
        """Register a function that returns the current length of the queue."""
        self._waiting.set_function(length)

    def count_request(self, scope: Scope, status: int, seconds: float) -> None:
        """Count a response with its duration. Unknown paths and methods get the label "other"."""
        route = getattr(scope.get("route"), "path", "other")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._requests.labels(route, method, str(status or "none")).inc()
        self._seconds.labels(route).observe(seconds)

    def count_batch(self, requests: int, tokens: int) -> None:
        self._batches.observe(requests)
        self._tokens.inc(tokens)

    def text(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self._registry)
