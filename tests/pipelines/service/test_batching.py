"""The queue of the model: what shares a batch, what is refused, and what is not
computed.
"""

import asyncio
import threading
from unittest.mock import Mock

import pytest
from starlette.exceptions import HTTPException

from pipelines.service.batching import Batcher
from pipelines.service.guard import Limits, Metrics


class Model:
    """Doubles numbers when it may run, and records its batches."""

    def __init__(self, **limits):
        self.batches = []
        self.begun = threading.Event()
        self.may_run = threading.Event()
        self.may_run.set()
        self.batcher = Batcher(Limits(**limits), Metrics(), 1)

    async def of(self, number, kind="a", pairs=1):
        result, timing = await self.batcher.submit(
            number, self._run, pairs=pairs, kind=kind
        )
        assert timing.waited >= 0
        assert timing.batch in map(len, self.batches)
        return result

    def _run(self, numbers):
        self.batches.append(list(numbers))
        self.begun.set()
        assert self.may_run.wait(60)
        if 13 in numbers:
            raise ValueError("unlucky")
        if 99 in numbers:
            raise BaseException("a panic")
        if 77 in numbers:
            return []
        if 55 in numbers:
            raise StopIteration
        return [2 * number for number in numbers]

    async def begin(self, number):
        """Submit a number that the model begins and does not finish."""
        self.may_run.clear()
        self.begun.clear()
        task = asyncio.create_task(self.of(number))
        await asyncio.to_thread(self.begun.wait, 60)
        return task


def together(*answers):
    async def run():
        return await asyncio.gather(*answers, return_exceptions=True)

    return asyncio.run(run())


def test_requests_of_one_kind_share_a_batch_within_the_budget():
    model = Model(batch_tokens=10)
    works = [
        (1, "a", 4),
        (2, "b", 4),
        (3, "a", 4),
        (4, "a", 4),
        (5, None, 1),
        (6, None, 1),
        (7, "b", 99),
    ]
    assert together(*(model.of(*work) for work in works)) == [2, 4, 6, 8, 10, 12, 14]
    # a request over the budget runs alone
    assert model.batches == [
        [1, 3],
        [2],
        [4],
        [5],
        [6],
        [7],
    ]


@pytest.mark.parametrize(
    ("bad", "kind"),
    [(13, ValueError), (99, RuntimeError), (77, ValueError), (55, RuntimeError)],
)
def test_an_error_reaches_its_own_request_and_the_queue_goes_on(bad, kind):
    model = Model()
    first, error, last = together(*(model.of(number) for number in (1, bad, 3)))
    assert isinstance(error, kind)
    assert (first, last) == (2, 6) or bad == 99
    assert together(model.of(4)) == [8]


def test_a_model_thread_that_cannot_start_fails_its_batch_only(monkeypatch):
    model = Model()
    error = RuntimeError("can't start new thread")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=error))
        assert together(model.of(1), model.of(2)) == [error, error]
    assert together(model.of(3)) == [6]
    # the refused batch is not computed later
    assert model.batches == [[3]]


def test_a_full_queue_refuses_and_abandoned_requests_leave_it():
    model = Model(waiting=2)

    async def test():
        first = await model.begin(0)
        waiting = [asyncio.create_task(model.of(number)) for number in (1, 2)]
        await asyncio.sleep(0)
        with pytest.raises(HTTPException) as caught:
            await model.of(3)
        assert caught.value.status_code == 429
        assert int(caught.value.headers["Retry-After"]) >= 1
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
        last = asyncio.create_task(model.of(4))
        await asyncio.sleep(0)
        model.may_run.set()
        assert await asyncio.gather(first, waiting[1], last) == [0, 4, 8]

    asyncio.run(test())
    # the abandoned request was not computed
    assert model.batches == [[0], [2, 4]]


def test_what_cannot_meet_its_deadline_is_refused_at_once():
    model = Model(deadline_seconds=10)

    async def test():
        await model.of(0)
        model.batcher._tokens_per_second = 5.0
        first = await model.begin(1)
        waiting = asyncio.create_task(model.of(2))
        await asyncio.sleep(0)
        with pytest.raises(HTTPException, match="would take about 20 s") as caught:
            await model.of(9, pairs=98)
        assert caught.value.status_code == 429
        model.may_run.set()
        assert await asyncio.gather(first, waiting) == [2, 4]

    asyncio.run(test())
