"""Dynamic batching: requests that arrive while the model is busy are put into the next batch.

One thread runs the model. A batch contains the first request of the queue and later requests of the same kind, up to a
maximum number of image tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from pipelines.service.errors import ServiceError, overloaded
from pipelines.service.settings import Limits

_SMOOTHING = 0.3  # weight of the newest batch in the estimated rate


@dataclass(frozen=True)
class Work:
    """An item of work for the model, made from one request.

    Attributes:
        kind: kind of the item; items of the same kind can be in one batch.
        cost: number of image tokens that the model reads for this item.
        payload: arguments of the item.
        run: function that takes the payloads of several items of this kind and returns their results, in order.
    """

    kind: Hashable
    cost: int
    payload: Any
    run: Callable[[Sequence[Any]], Sequence[Any]]


@dataclass(frozen=True)
class Timing:
    """The times of a request.

    Attributes:
        waited: seconds that the request spent in the queue.
        computed: seconds that the model took for the batch.
        batch: number of requests in the batch.
    """

    waited: float
    computed: float
    batch: int


@dataclass
class _Job:
    work: Work
    arrived: float
    expires: float
    answer: asyncio.Future[tuple[Any, Timing]] = field(repr=False)


class Batcher:
    """Runs the work of requests on one thread, in batches of items of the same kind.

    Args:
        limits: limits on the length of the queue, the image tokens per batch, and the duration of a request.
        on_batch: called after each batch with the number of requests and the number of image tokens in the batch.
    """

    def __init__(self, limits: Limits, on_batch: Callable[[int, int], None] = lambda requests, tokens: None) -> None:
        self._limits = limits
        self._on_batch = on_batch
        self._jobs: deque[_Job] = deque()
        self._arrival = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._task: asyncio.Task[None] | None = None
        self._current: asyncio.Task[None] | None = None
        self._running_cost = 0
        self._tokens_per_second: float | None = None

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._jobs)

    async def start(self) -> None:
        """Start to run batches. Call this in the event loop of the service."""
        self._task = asyncio.create_task(self._run_batches())

    async def stop(self) -> None:
        """End the waiting requests with HTTP status 503, and wait for the running batch."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        while self._jobs:
            self._fail(self._jobs.popleft(), ServiceError(503, "the service is stopping; try again later"))
        if self._current is not None:
            await self._current
        self._thread.shutdown()

    async def submit(self, work: Work) -> tuple[Any, Timing]:
        """Queue `work`, wait for the model, and return (result, times).

        Raises:
            ServiceError: status 429 if the queue is full or the request would take too long, 504 if the request took
                too long, 503 if the service is stopping.
            Exception: the error that `work.run` raised.
        """
        self._check_queue(work)
        now = time.monotonic()
        job = _Job(work, now, now + self._limits.deadline_seconds, asyncio.get_running_loop().create_future())
        self._jobs.append(job)
        self._arrival.set()
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + self._limits.deadline_seconds):
                return await job.answer
        except TimeoutError:
            raise _too_late(self._limits) from None
        finally:
            job.answer.cancel()  # also if the client has left; `_next_batch` skips cancelled jobs

    def _check_queue(self, work: Work) -> None:
        seconds = self._estimated_seconds(work)
        if len(self._jobs) >= self._limits.waiting:
            raise overloaded(f"the queue is full with {len(self._jobs)} requests; try again later", seconds)
        if self._jobs and seconds > self._limits.deadline_seconds:
            raise overloaded(
                f"this request would take about {seconds:.0f} s because other requests are waiting, longer than the "
                f"deadline of {self._limits.deadline_seconds:g} s; try again later",
                seconds - self._limits.deadline_seconds,
            )

    def _estimated_seconds(self, work: Work) -> float:
        """Estimate the seconds until `work` is finished; 0 before the first batch."""
        if self._tokens_per_second is None:
            return 0.0
        cost = work.cost + self._running_cost + sum(job.work.cost for job in self._jobs)
        return cost / self._tokens_per_second

    async def _run_batches(self) -> None:
        while True:
            await self._arrival.wait()
            batch = self._next_batch()
            if not batch:
                self._arrival.clear()
                continue
            self._current = asyncio.create_task(self._run_batch(batch))
            await asyncio.shield(self._current)  # the thread cannot be interrupted: `stop` waits for it

    def _next_batch(self) -> list[_Job]:
        """Take the next batch from the queue."""
        # The batch is the first job that is neither cancelled nor late, and later jobs of the same kind within the
        # budget. Late jobs fail with status 504.
        batch: list[_Job] = []
        rest: deque[_Job] = deque()
        cost, now = 0, time.monotonic()
        for job in self._jobs:
            if job.answer.done() or job.expires <= now:
                self._fail(job, _too_late(self._limits))
            elif batch and (job.work.kind != batch[0].work.kind or cost + job.work.cost > self._limits.batch_tokens):
                rest.append(job)
            else:
                batch.append(job)
                cost += job.work.cost
        self._jobs = rest
        return batch

    async def _run_batch(self, batch: list[_Job]) -> None:
        cost = sum(job.work.cost for job in batch)
        self._running_cost = cost
        started = time.monotonic()
        try:
            results = await asyncio.get_running_loop().run_in_executor(self._thread, _run, [job.work for job in batch])
        finally:
            self._running_cost = 0
        seconds = time.monotonic() - started
        self._learn_rate(cost, seconds)
        self._on_batch(len(batch), cost)
        for job, result in zip(batch, results, strict=True):
            timing = Timing(started - job.arrived, seconds, len(batch))
            if isinstance(result, Exception):
                self._fail(job, result)
            elif not job.answer.done():
                job.answer.set_result((result, timing))

    def _learn_rate(self, cost: int, seconds: float) -> None:
        rate = cost / max(seconds, 1e-6)
        known = self._tokens_per_second
        self._tokens_per_second = rate if known is None else (1 - _SMOOTHING) * known + _SMOOTHING * rate

    @staticmethod
    def _fail(job: _Job, error: Exception) -> None:
        if not job.answer.done():
            job.answer.set_exception(error)


def _run(works: Sequence[Work]) -> list[Any]:
    """Run the items as one batch. If the batch fails, run each item alone."""
    try:
        return list(works[0].run([work.payload for work in works]))
    except Exception as error:
        return [error] if len(works) == 1 else [result for work in works for result in _run([work])]


def _too_late(limits: Limits) -> ServiceError:
    return ServiceError(
        504, f"no response within the deadline of {limits.deadline_seconds:g} s; send less or try again later"
    )
