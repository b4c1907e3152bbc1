"""The load generator, the knee, and the command."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from benchmarks.serve import Exchange, knee, open_loop, summary
from pipelines.cli import main
from tests.conftest import REPO

GOLDEN = REPO / "tests" / "golden" / "release_0_1"
# The bundle of release 0.1 names a hubness correction.
pytestmark = pytest.mark.filterwarnings("ignore:.*hubness correction:RuntimeWarning")
BODIES = [{"query": "a"}, {"query": "b"}]


def load(offered: float, p95: float | None, share: float = 1.0) -> dict:
    return {"offered_per_s": offered, "p95_ms": p95, "answered_share": share}


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ([load(1, 100), load(2, 200), load(3, 600), load(4, 90)], 2),
        ([load(1, 100), load(2, 200, 0.98)], 1),
        ([load(1, 100), load(2, None, 0.0)], 1),
        ([load(1, None, 0.0)], 0),
        ([load(1, 100), load(2, 499)], 2),
    ],
)
def test_the_knee_is_before_the_first_load_that_is_not_kept_up_with(loads, expected):
    assert knee(loads) == expected


def test_latency_counts_from_the_planned_time():
    """A server that takes one request at a time, 50 ms each: requests planned at
    once wait for each other.
    """

    async def run() -> list[Exchange]:
        turn = asyncio.Lock()

        async def answer(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(
                head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
            )
            query = json.loads(await reader.readexactly(length))["query"]
            async with turn:
                await asyncio.sleep(0.05)
            timing = {"batch": 1, "stages_ms": {"total": 50.0}}
            body = json.dumps({"hits": [], "timing": timing, "query": query}).encode()
            status = b"429 Too Many Requests" if query == "b" else b"200 OK"
            writer.write(
                b"HTTP/1.1 %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
                % (status, len(body))
                + body
            )
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            return await open_loop(
                f"http://127.0.0.1:{port}", BODIES, [0.0, 0.0, 0.0, 0.0]
            )

    exchanges = asyncio.run(run())
    assert [each.status for each in exchanges] == ["200", "429", "200", "429"]
    assert max(each.seconds for each in exchanges) >= 0.2
    told = summary(exchanges, 2.0)
    assert (told["answered_per_s"], told["answered_share"]) == (1.0, 0.5)
    assert told["stages_ms"] == {"total": 50.0}
    assert told["p99_ms"] >= told["p50_ms"] >= 50


# starts the service
@pytest.mark.slow
def test_the_command_measures_every_load(tmp_path, capsys):
    (tmp_path / "queries.txt").write_text(
        "\n".join(f"{number} red canoes" for number in range(8))
    )
    command = [
        "bench",
        "serve",
        GOLDEN / "index",
        "--model",
        GOLDEN / "model",
        "--queries",
        tmp_path / "queries.txt",
    ]
    command += [
        "--pool",
        "11",
        "--seconds",
        "1",
        "--report",
        tmp_path / "out",
    ]
    assert main([*map(str, command), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (workload,) = report["workloads"]
    *kept, last = workload["loads"]
    assert all(load["statuses"].keys() == {"200"} for load in kept)
    assert kept[-1]["offered_per_s"] == workload["knee_per_s"]
    assert last["offered_per_s"] > workload["knee_per_s"]
    assert workload["knee_per_s"] > 0
    assert report["memory_peak"] >= report["memory_at_start"] > 0
    (text,) = (tmp_path / "out").glob("*.md")
    knee = f"{workload['knee_per_s']:.2f}"
    assert re.search(rf"^\| {re.escape(knee)} +\|", text.read_text(), re.MULTILINE)
