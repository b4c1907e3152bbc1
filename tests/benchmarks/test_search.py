"""`bench search`: late interaction, the load generator, and the command."""

import json
import shutil
import threading
import time

import numpy as np
import pytest

from benchmarks.harness import READER
from benchmarks.peers import StoredRecords, subject_versions
from benchmarks.search import _open_system, keeps_up, load_values, open_loop, verdict
from tests.conftest import REPO, golden_index
from tests.web_server import web_server

GOLDEN = REPO / "tests" / "golden" / "release_0_1"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reader", subject_versions())
def test_every_system_finds_the_same_hits(tmp_path, reader):
    if subject_versions()[reader][0] is None:
        pytest.skip(f"{reader} is not installed")
    source = StoredRecords(golden_index(), "bf16", 1000)
    count = len(source.row_ids)
    blocks = source.store.fetch(source.row_ids).astype(np.float32)
    search = _open_system(reader, source, tmp_path, count)
    for words in (blocks[3][:2], blocks[1][:3]):
        scores = source.store.max_sim(words, source.row_ids)
        best = source.row_ids[np.argsort(-np.nan_to_num(scores, nan=-np.inf))]
        width = json.loads((golden_index() / "index.json").read_text())["embed_dim"]
        hits = search(words, np.eye(width, dtype=np.float32)[0])
        assert list(hits) == best[: len(hits)].tolist()
        assert len(hits) > 1


@pytest.mark.parametrize(
    ("answered", "p95", "expected"),
    [(100, 200, True), (98, 200, False), (100, 499, True), (100, 600, False)],
)
def test_a_service_keeps_up_if_it_answers_in_time(answered, p95, expected):
    load = {"answered %": answered, "p95 ms": p95}
    assert keeps_up(load, {"p95 ms": 100}) == expected


def test_the_verdict_names_the_last_load_that_the_service_kept_up_with():
    rows = [
        {
            "table": "service, pool 20",
            "subject": READER,
            "ratio": None,
            "values": {"offered/s": rate},
        }
        for rate in (1, 2, 3)
    ]
    (line,) = verdict(rows)
    assert line == "The service, pool 20, keeps up with 2.00 searches per second."


def test_latency_counts_from_the_planned_time():
    """A server that takes one request at a time, 50 ms each: requests planned at
    once wait for each other.
    """
    turn = threading.Lock()

    def answer(method, path, headers, body):
        with turn:
            time.sleep(0.05)
        status = 429 if json.loads(body)["query"] == "b" else 200
        return status, {}, json.dumps({"timing": {"batch": 1}}).encode()

    bodies = [{"query": "a"}, {"query": "b"}]
    with web_server() as server:
        server.service = answer
        exchanges = open_loop(server.url, bodies, [0.0, 0.0, 0.0, 0.0])
    assert [batch for _, batch in exchanges] == [1, None, 1, None]
    assert max(seconds for seconds, _ in exchanges) >= 0.2
    values = load_values(exchanges, 2.0, 2.0)
    assert (values["answered/s"], values["answered %"]) == (1.0, 50)
    assert values["p99 ms"] >= values["p50 ms"] >= 50


def test_an_index_without_embeddings_to_search_is_refused(index, run):
    assert "no nearest-neighbour index" in run.refused("bench", "search", index)


# starts the service and many processes
@pytest.mark.slow
def test_the_command_measures_every_workload(tmp_path, run):
    index = shutil.copytree(golden_index(), tmp_path / "index")
    (tmp_path / "queries.txt").write_text("\n".join(map("{} canoes".format, range(8))))
    options = ["--model", GOLDEN / "model", "--queries", tmp_path / "queries.txt"]
    options += ["--pool", 11, "--seconds", 1]
    report = run.json("bench", "search", index, *options)
    rows = {}
    for row in report["rows"]:
        assert row["problems"] == []
        rows.setdefault(row["table"], []).append(row)
    assert all(row["values"]["pairs/s"] > 0 for row in rows["joint encoder"])
    (query,) = rows["one query"]
    assert query["case"] == "pool 11"
    *kept, _ = rows["service, pool 11"]
    rate = kept[-1]["values"]["offered/s"]
    assert f"keeps up with {rate:.2f}" in report["verdict"][0]
    late = {row["subject"]: row["values"] for row in rows["late interaction, pool 11"]}
    shares = {
        late[name]["own row first %"] for name in (f"{READER} bf16", "FAISS, np.memmap")
    }
    assert len(shares) == 1
