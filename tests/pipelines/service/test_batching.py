"""The queue of the model: what shares a batch, what is refused, and what happens at the end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence

import pytest

from pipelines.service.batching import Batcher, Work
from pipelines.service.errors import ServiceError
from pipelines.service.settings import Limits


class Model:
    """Doubles numbers, slowly, and records its batches."""

    def __init__(self, seconds: float = 0.05) -> None:
        self.batches: list[list[int]] = []
        self.may_run = threading.Event()
        self.may_run.set()
        self._seconds = seconds

    def work(self, number: int, kind: str = "a", cost: int = 1) -> Work:
        return Work(kind, cost, number, self.run)

    def run(self, numbers: Sequence[int]) -> list[int]:
        self.batches.append(list(numbers))
        time.sleep(self._seconds)
        assert self.may_run.wait(60)
        if 13 in numbers:
            raise ValueError("unlucky")
        return [2 * number for number in numbers]


def run_together(limits: Limits, works: Sequence[Work]) -> list[object]:
    """Results or errors of works that are submitted at the same time."""

    async def run() -> list[object]:
        batcher = Batcher(limits)
        await batcher.start()
        try:
            answers = await asyncio.gather(*map(batcher.submit, works), return_exceptions=True)
        finally:
            await batcher.stop()
        return [answer if isinstance(answer, BaseException) else answer[0] for answer in answers]

    return asyncio.run(run())


def test_waiting_requests_of_one_kind_share_a_batch():
    model = Model()
    assert run_together(Limits(), [model.work(number) for number in range(5)]) == [0, 2, 4, 6, 8]
    assert model.batches == [[0, 1, 2, 3, 4]]


def test_kinds_do_not_mix_and_the_first_kind_is_first():
    model = Model()
    works = [model.work(1), model.work(2, "b"), model.work(3), model.work(4, "b")]
    assert run_together(Limits(), works) == [2, 4, 6, 8]
    assert model.batches == [[1, 3], [2, 4]]


def test_a_batch_stays_within_the_budget():
    model = Model()
    run_together(Limits(batch_tokens=10), [model.work(number, cost=4) for number in range(5)])
    assert model.batches == [[0, 1], [2, 3], [4]]
    run_together(Limits(batch_tokens=10), [model.work(7, cost=99)])
    assert model.batches[-1] == [7], "a request over the budget runs alone"


def test_an_error_reaches_only_its_own_request():
    model = Model()
    answers = run_together(Limits(), [model.work(number) for number in (1, 13, 3)])
    assert (answers[0], answers[2]) == (2, 6)
    assert isinstance(answers[1], ValueError)


def test_a_full_queue_refuses_with_the_time_to_wait():
    model = Model(0.2)

    async def run() -> list[object]:
        batcher = Batcher(Limits(waiting=2))
        await batcher.start()
        first = asyncio.create_task(batcher.submit(model.work(0)))
        await asyncio.sleep(0.05)  # it runs
        rest = [asyncio.create_task(batcher.submit(model.work(number))) for number in range(1, 5)]
        answers = await asyncio.gather(first, *rest, return_exceptions=True)
        await batcher.stop()
        return list(answers)

    answers = asyncio.run(run())
    refused = [answer for answer in answers if isinstance(answer, ServiceError)]
    assert [error.status for error in refused] == [429, 429]
    assert int(refused[0].headers["Retry-After"]) >= 1
    assert model.batches == [[0], [1, 2]]


def test_what_cannot_meet_its_deadline_is_refused_at_once():
    model = Model(0.2)

    async def run() -> tuple[float, ServiceError]:
        batcher = Batcher(Limits(deadline_seconds=10, batch_tokens=1))
        await batcher.start()
        await batcher.submit(model.work(0))  # five per second from now on
        model.may_run.clear()
        waiting = [asyncio.create_task(batcher.submit(model.work(number))) for number in range(1, 5)]
        await asyncio.sleep(0.05)
        started = time.monotonic()
        with pytest.raises(ServiceError) as caught:
            await batcher.submit(model.work(9, cost=100))
        refused_after = time.monotonic() - started
        model.may_run.set()
        assert [value for value, _ in await asyncio.gather(*waiting)] == [2, 4, 6, 8]
        await batcher.stop()
        return refused_after, caught.value

    refused_after, error = asyncio.run(run())
    assert (error.status, refused_after < 5) == (429, True)


def test_a_late_answer_is_an_error_at_the_deadline():
    model = Model(0.5)
    started = time.monotonic()
    answers = run_together(Limits(deadline_seconds=0.1), [model.work(1), model.work(2, "b")])
    assert [answer.status for answer in answers] == [504, 504]
    assert time.monotonic() - started < 5
    assert model.batches == [[1]], "what is late already is not computed"


def test_a_stop_delivers_what_runs_and_refuses_what_waits():
    model = Model(0.3)

    async def run() -> list[object]:
        batcher = Batcher(Limits(batch_tokens=1))
        await batcher.start()
        tasks = [asyncio.create_task(batcher.submit(model.work(number))) for number in (1, 2)]
        await asyncio.sleep(0.1)
        await batcher.stop()
        return list(await asyncio.gather(*tasks, return_exceptions=True))

    first, second = asyncio.run(run())
    assert first[0] == 2
    assert second.status == 503


def test_a_client_that_leaves_costs_no_batch():
    model = Model(0.2)

    async def run() -> None:
        batcher = Batcher(Limits(batch_tokens=1))
        await batcher.start()
        tasks = [asyncio.create_task(batcher.submit(model.work(number))) for number in (1, 2, 3)]
        await asyncio.sleep(0.05)
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await batcher.stop()

    asyncio.run(run())
    assert model.batches == [[1], [3]]
