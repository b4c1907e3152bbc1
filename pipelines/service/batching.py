"""Dynamic batching: requests that arrive while the model is busy are put into the next
batch.

One thread runs the model. A batch contains the first request of the queue and later
requests of the same kind, up to a maximum number of image tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from pipelines.service.guard import Limits, Metrics, overloaded

# weight of the newest batch in the moving average of tokens per second
_SMOOTHING = 0.3


class Timing(NamedTuple):
    """Times of a request.

    Attributes:
        waited: seconds that the request waited in the queue.
        computed: seconds that the model took for the batch of the request.
        batch: number of requests in that batch.
    """

    waited: float
    computed: float
    batch: int


@dataclass(frozen=True, eq=False)
class _Job:
    kind: Hashable
    cost: int
    payload: Any
    run: Callable[[Sequence[Any]], Sequence[Any]]
    arrived: float
    answer: asyncio.Future[tuple[Any, Timing]]


class Batcher:
    """Runs the work of requests on one thread, in batches of work of the same kind.

    Args:
        limits: limits on the length of the queue, the image tokens per batch, and the
            duration of a request.
        metrics: metrics that count the batches.
        tokens_per_image: number of tokens of an image.
    """

    def __init__(
        self,
        limits: Limits,
        metrics: Metrics,
        tokens_per_image: int,
    ) -> None:
        self._tokens_per_image = tokens_per_image
        self._limits = limits
        self._metrics = metrics
        metrics.waiting.set_function(lambda: len(self._jobs))
        self._jobs: list[_Job] = []
        self._thread = _model_thread()
        self._batches: asyncio.Task[None] | None = None
        self._running_cost = 0
        self._tokens_per_second: float | None = None

    async def submit(
        self,
        payload: Any,
        run: Callable[[Sequence[Any]], Sequence[Any]],
        *,
        pairs: int,
        kind: Hashable = None,
    ) -> tuple[Any, Timing]:
        """Queue work for the model, wait for the result, and return (result, times).

        If the caller is cancelled while the work is still in the queue, the work is not
        computed.

        Args:
            payload: what to compute.
            run: function that takes the payloads of several requests and returns their
                results, in order.
            pairs: number of pairs of a text and an image that the model scores in the
                time of this work.
            kind: work of equal kinds may share a batch. `run` must therefore be
                equivalent for all work of one kind. Work of kind None runs alone.

        Raises:
            HTTPException: status 429 if the queue is full, or if the result would come
                after the deadline.
            Exception: the error that `run` raised.
        """
        cost = pairs * self._tokens_per_image
        # Estimate, from the speed of earlier batches, the seconds until this work is
        # finished. The estimate is 0 before the first batch.
        seconds = 0.0
        if self._tokens_per_second is not None:
            seconds = (
                cost + self._running_cost + sum(job.cost for job in self._jobs)
            ) / self._tokens_per_second
        if len(self._jobs) >= self._limits.waiting:
            raise overloaded(
                f"the queue is full with {len(self._jobs)} requests; try again later",
                seconds,
            )
        deadline = self._limits.deadline_seconds
        if self._jobs and seconds > deadline:
            # Without this check, all requests would wait until their deadlines during
            # an overload, and none would be answered.
            raise overloaded(
                f"this request would take about {seconds:.0f} s because other requests"
                f" are waiting, longer than the deadline of {deadline:g} s; try again"
                " later",
                seconds - deadline,
            )
        job = _Job(
            kind,
            cost,
            payload,
            run,
            time.monotonic(),
            asyncio.get_running_loop().create_future(),
        )
        self._jobs.append(job)
        if self._batches is None:
            self._batches = asyncio.create_task(self._run_batches())
        try:
            return await job.answer
        finally:
            if job in self._jobs:
                self._jobs.remove(job)

    async def _run_batches(self) -> None:
        """Run batches until the queue is empty."""
        while self._jobs:
            first = self._jobs[0]
            batch = [self._jobs[0]]
            cost = self._jobs[0].cost
            for job in self._jobs[1:]:
                if (
                    job.kind is not None
                    and job.kind == first.kind
                    and cost + job.cost <= self._limits.batch_tokens
                ):
                    batch.append(job)
                    cost += job.cost
            self._jobs = [job for job in self._jobs if job not in batch]
            self._running_cost = cost
            started = time.monotonic()
            try:
                results = await asyncio.get_running_loop().run_in_executor(
                    self._thread, _run, batch
                )
            except RuntimeError as error:
                # The system allows no further thread. A later batch tries again, in a
                # new pool, because this one has queued the refused batch nevertheless.
                self._thread = _model_thread()
                for job in batch:
                    if not job.answer.done():
                        job.answer.set_exception(error)
                continue
            seconds = time.monotonic() - started
            rate = cost / max(seconds, 1e-6)
            average = self._tokens_per_second
            self._tokens_per_second = (
                rate
                if average is None
                else (1 - _SMOOTHING) * average + _SMOOTHING * rate
            )
            self._metrics.batches.observe(len(batch))
            self._metrics.tokens.inc(cost)
            for job, result in zip(batch, results, strict=True):
                if job.answer.done():
                    # the client has left, or the deadline has passed
                    continue
                if isinstance(result, Exception):
                    job.answer.set_exception(result)
                else:
                    job.answer.set_result(
                        (result, Timing(started - job.arrived, seconds, len(batch)))
                    )
        self._running_cost = 0
        self._batches = None


def _model_thread() -> ThreadPoolExecutor:
    """Return a pool with the one thread that runs the model."""
    return ThreadPoolExecutor(1, thread_name_prefix="model")


def _run(batch: Sequence[_Job]) -> list[Any]:
    """Run the jobs as one batch, and return one result per job. If the batch fails, run
    each job alone. The result of a job that fails alone is its exception.
    """
    try:
        results = list(batch[0].run([job.payload for job in batch]))
        if len(results) != len(batch):
            raise ValueError(f"{len(results)} results for {len(batch)} requests")
    except BaseException as error:
        if isinstance(error, Exception) and len(batch) > 1:
            return [result for job in batch for result in _run([job])]
        if isinstance(error, StopIteration) or not isinstance(error, Exception):
            # A future refuses a StopIteration, and a panic in Rust code is not an
            # Exception. Either would end `_run_batches`, and no later request would be
            # answered.
            return [RuntimeError(f"{type(error).__name__}: {error}") for _ in batch]
        return [error]
    return results
