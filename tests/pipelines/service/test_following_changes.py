"""A service follows the changes of its index without dropping a request."""

import asyncio
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import pytest
from starlette.exceptions import HTTPException

from edje_index import Client, TokenIndex
from pipelines import delete_rows, quantize_index
from pipelines.service import routes, server
from pipelines.service.state import Threads
from storage_formats import UsageError
from tests.pipelines.service.server import serve


@pytest.fixture
def changing(index, tmp_path):
    shutil.copytree(index, tmp_path / "changing.edje")
    return tmp_path / "changing.edje"


def rows_of(index):
    return sorted(hit.row_id for hit in index.search("a dog", 12, 12))


def test_a_new_snapshot_takes_what_has_changed_and_nothing_else(changing):
    begun = TokenIndex.open(changing)
    # nothing has changed
    assert begun.at_current_snapshot() is begun
    # opened once
    assert begun.with_precision("nvfp4").store is begun.with_precision("nvfp4").store
    delete_rows(changing, [3])
    quantize_index(changing, ["int8"])
    index = begun.at_current_snapshot()
    assert 3 not in rows_of(index)
    assert 3 not in rows_of(index.with_precision("nvfp4"))
    assert index.with_precision("int8").precision == "int8"
    # a request that has begun keeps its state
    assert 3 in rows_of(begun)
    assert index.model is begun.model


def test_a_replaced_index_is_unhealthy_and_other_problems_pass(monkeypatch):
    monkeypatch.setattr(server, "_WATCH_SECONDS", 0)
    problems = [RuntimeError("no thread"), OSError("a"), UsageError("b")]
    seen = []

    async def check():
        state = SimpleNamespace(files=Threads(1, "files"), name="x", problem="")

        def next_snapshot():
            seen.append(state.problem)
            if problems:
                raise problems.pop(0)
            return state.index

        state.index = SimpleNamespace(at_current_snapshot=next_snapshot)
        watch = asyncio.create_task(server.follow_changes(state))
        while len(seen) < 5:
            await asyncio.sleep(0.01)
            assert not watch.done()
        watch.cancel()

    asyncio.run(check())
    assert seen[:5] == ["", "", "", "b", ""]
    with pytest.raises(HTTPException, match="503: b"):
        asyncio.run(routes.health(SimpleNamespace(problem="b")))


@pytest.mark.slow
def test_deleted_rows_leave_the_answers_while_requests_run(changing, tmp_path):
    stop = threading.Event()
    with (
        serve(tmp_path, changing) as service,
        Client(service.url) as client,
        ThreadPoolExecutor(4) as pool,
    ):

        def load():
            statuses = set()
            while not stop.is_set():
                answer = httpx.post(
                    f"{service.url}/search",
                    json={"query": "a dog", "k": 11, "pool": 11},
                    timeout=60,
                )
                statuses.add(answer.status_code)
            return statuses

        loads = [pool.submit(load) for _ in range(4)]
        try:
            assert 3 in [hit.row_id for hit in client.search("a dog", 12)]
            delete_rows(changing, [3])
            while 3 in [hit.row_id for hit in client.search("a dog", 12)]:
                # the service reads the manifest every two seconds
                pass
        finally:
            stop.set()
        assert httpx.get(f"{service.url}/thumbnails/3").status_code == 404
        assert [future.result() for future in loads] == [{200}] * 4
