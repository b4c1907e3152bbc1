"""Measures searches: the joint encoder and the stages of a query, late interaction
beside other libraries, and the service under load.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.disk import evict, peak_memory
from benchmarks.harness import (
    READER,
    Report,
    Say,
    Task,
    faster,
    median_seconds,
    run,
    select,
)
from benchmarks.peers import PEERS, StoredRecords, open_subject, subject_versions
from edje_index.indexing.faiss_index import AnnIndex
from edje_index.search.late_interaction_search import LateInteractionSearch, max_sim
from storage_formats.arrays import Floats
from storage_formats.codecs import BF16, finest
from storage_formats.errors import EdjeError, UsageError
from storage_formats.format.manifest import CommittedIndex, Manifest
from storage_formats.reading.embeddings import read_embeddings
from storage_formats.token_store import TokenStore

CAPTION = "a brown dog runs over wet sand towards a red ball near the sea"
"""Caption of 14 common words, one token each. With [CLS], two [SEP] and the 64 tokens
of an image, a pair has 81 tokens.
"""
WORKLOADS = ("rerank", "late", "serve")
"""The workloads, which are the functions with these names."""
# numbers of pairs per forward pass
_BATCHES = (1, 32, 64, 128)
_REPEATS = 5
_HITS = 10
_QUERIES = 200
_QUERY_TOKENS = 8
# number of searches before the timed searches
_WARM_UP = 3
# The service keeps up with a load if it answers at least this percentage of the
# searches, and if p95 is at most this factor times p95 at the lowest load.
_ANSWERED = 99
_SLOWDOWN = 5.0
# lowest offered load in searches per second, and the factor from load to load
_LOWEST = 0.5
_GROWTH = 1.3
# number of connections, which is below the limit of the service (512)
_CONNECTIONS = 400
_METHOD = f"""- Joint encoder: includes tokenisation and copies to the device.
- One query: a search by text, with the milliseconds of the stages of `Hits.stages`.
- Late interaction: FAISS chooses the pool, a library reads the tokens, and MaxSim ranks
  them. A query is the embedding of a random row and {_QUERY_TOKENS} of its tokens. In
  the cold pass, the files were evicted before the first query, but later queries find
  blocks that earlier queries needed. The warm pass follows.
- Own row first: percentage of the queries whose row is the first hit. Systems with the
  same tokens have the same percentage.
- Memory: peak resident memory of the process, with libraries and mapped files.
- kB per row: all files that the system reads.
- Service: `edje-index serve` and a client on the same machine. Searches are sent at the
  times of a Poisson process and do not wait for earlier responses. Latency is measured
  from the planned time. Batch: mean number of searches per batch. The load grows until
  less than 99 % of the searches are answered, or p95 is more than 5 times p95 at the
  lowest load."""


def bench_search(
    index: Path,
    say: Say,
    report_folder: Path | None = None,
    *,
    queries: Sequence[str] = (),
    model: Path | None = None,
    pools: Sequence[int] = (100,),
    seconds: float = 10.0,
    device: str = "auto",
    only: Sequence[str] = (),
) -> Report:
    """Run the benchmark and return the report. Linux only.

    The arguments are options of `edje-index bench search`; `only` contains workloads,
    and `seconds` is the duration of each load of the service.

    Raises:
        UsageError: the index cannot be searched.
    """
    manifest = Manifest.load(index)
    if manifest.ann.get("kind") == "none":
        raise UsageError(
            f"{index} has no nearest-neighbour index, so the index cannot be searched;"
            " choose an index that was built from images"
        )
    index = index.resolve()
    scratch = index.with_name(f".{index.name}.bench-search")
    best = finest(manifest.spec.precisions)
    versions = subject_versions()
    systems = {f"{READER} {name}": (READER, name) for name in manifest.spec.precisions}
    notes = []
    if best == "bf16":
        installed = [name for name in PEERS if versions[name][0]]
        systems |= {f"FAISS, {name}": (name, best) for name in installed}
    else:
        notes.append("other libraries are left out: the index does not store bf16")
    given = [index.name, str(model.resolve()) if model else None]
    tasks = [_task("rerank", "joint encoder", READER, [*given, device, pools])]
    for pool in pools:
        title = f"late interaction, pool {pool}"
        tasks += [
            _task("late", title, name, [index.name, scratch.name, *system, pool])
            for name, system in systems.items()
        ]
        title = f"service, pool {pool}"
        tasks.append(_task("serve", title, READER, [*given, queries, pool, seconds]))
    workloads = set(only or WORKLOADS)
    if not queries:
        workloads -= {"serve"}
        notes.append("the service is left out: give --queries")
    about = {
        "name": "search",
        "title": "Searches",
        "settings": {"plan": manifest.plan},
        "subjects": {READER: versions[READER]}
        | {name: versions[reader] for name, (reader, _) in systems.items()},
        "reference": f"{READER} {best}",
        "notes": notes,
        "method": _METHOD,
    }
    chosen = [task for task in tasks if task.function.split(":")[1] in workloads]
    say("if you interrupt the command, run it again to continue")
    return run(
        about,
        chosen,
        index.parent,
        scratch,
        say,
        verdict=verdict,
        report_folder=report_folder,
    )


def _task(function: str, table: str, subject: str, arguments: list[Any]) -> Task:
    return Task("Search", table, subject, f"benchmarks.search:{function}", arguments)


def verdict(rows: list[Report]) -> Iterator[str]:
    """Yield the loads that the service keeps up with, and the cases in which a library
    is faster than edje-index.
    """
    for table in dict.fromkeys(row["table"] for row in rows):
        loads = [row for row in select(rows, table=table) if row["values"]]
        if table.startswith("service") and len(loads) > 1:
            # The service did not keep up with the last load.
            rate = loads[-2]["values"]["offered/s"]
            yield f"The {table}, keeps up with {rate:.2f} searches per second."
    yield from faster(rows, READER)


def rerank(
    root: str, model: str | None, device: str, pools: Sequence[int]
) -> Iterator[Report]:
    """Score random blocks with the joint encoder, by one thread and by one thread per
    CPU. Then search by text, and yield the milliseconds of each stage.
    """
    import torch

    from edje_index.search.token_index import TokenIndex
    from storage_formats.threads import usable_cpus

    index = TokenIndex.open(root, model, device=device)
    joint = index.model.joint
    # A search uses the number of threads that torch chooses.
    default_threads = torch.get_num_threads()
    for threads, batch in itertools.product(sorted({1, usable_cpus()}), _BATCHES):
        blocks = torch.randn(batch, *index.store.block_shape).bfloat16()
        score = partial(joint.score, [CAPTION] * batch, blocks)
        torch.set_num_threads(threads)
        values = {"pairs/s": batch / median_seconds(score)}
        yield {"case": f"batch {batch}, {threads} threads", "values": values}
    torch.set_num_threads(default_threads)
    for pool in pools:
        runs = [index.search(CAPTION, pool, pool).stages for _ in range(1 + _REPEATS)]
        values = {
            f"{name} ms": 1e3 * statistics.median(stages[name] for stages in runs[1:])
            for name in runs[0]
        }
        values = {"queries/s": 1e3 / sum(values.values())} | values
        yield {"table": "one query", "case": f"pool {pool}", "values": values}


def late(
    root: str, scratch: str, reader: str, precision: str, pool: int
) -> Iterator[Report]:
    """Search with late interaction, first with a cold page cache, then with a warm one.

    A query consists of tokens of a random row and of the embedding of this row.
    """
    index = Path(root)
    source = StoredRecords(index, precision, Manifest.load(index).spec.rows)
    rows = np.random.default_rng(0).permutation(source.row_ids)[: 2 * _QUERIES]
    embeddings = read_embeddings(CommittedIndex.open(index), rows)
    tokens = TokenStore.open(index).fetch(rows)[:, :_QUERY_TOKENS].astype(np.float32)
    # Rows of failed inputs are holes, which have no embedding.
    queries = [
        query
        for query in zip(rows.tolist(), tokens, embeddings, strict=True)
        if not np.isnan(query[2]).any()
    ][:_QUERIES]
    records = open_subject(reader, source, Path(scratch)).files()
    shared = [path for path in index.rglob("*") if "tokens" not in path.parts]
    files = [*records, *(path for path in shared if path.is_file())]
    # Mapped files cannot be evicted, so evict them before the system opens them.
    problem = evict(files)
    search = _open_system(reader, source, Path(scratch), pool)
    for _, words, embedding in queries[:_WARM_UP]:
        search(words, embedding)
    stored = sum(path.stat().st_size for path in files)
    for case in ("cold", "warm"):
        seconds = []
        is_first = []
        for row, words, embedding in queries:
            started = time.perf_counter()
            hits = search(words, embedding)
            seconds.append(time.perf_counter() - started)
            is_first.append(row == hits[0])
        p50, p95 = np.percentile(seconds, [50, 95]) * 1e3
        values = {
            "queries/s": len(seconds) / sum(seconds),
            "p50 ms": p50,
            "p95 ms": p95,
            "own row first %": 100 * float(np.mean(is_first)),
            "memory MiB": peak_memory() / 2**20,
            "kB per row": stored / source.rows / 1e3,
        }
        yield {"case": case, "values": values} | problem
        problem = {}


def _open_system(
    reader: str, source: StoredRecords, scratch: Path, pool: int
) -> Callable[[Floats, Floats], Sequence[int]]:
    """Return a function that searches for token vectors and an embedding, and returns
    the ids of the hits.
    """
    if reader == READER:
        index = LateInteractionSearch.open(source.root, source.precision)
        return lambda words, embedding: [
            hit.row_id
            for hit in index.search(words, _HITS, embedding=embedding, pool=pool)
        ]
    ann = AnnIndex(CommittedIndex.open(source.root))
    subject = open_subject(reader, source, scratch)

    def search(words: Floats, embedding: Floats) -> Sequence[int]:
        candidates = ann.nearest(embedding, pool)[0]
        out = np.empty((len(candidates), subject.output_bytes), dtype=np.uint8)
        records = np.ascontiguousarray(subject.fetch(candidates, out))
        blocks = records.view(BF16).reshape(len(records), *source.store.block_shape)
        best = np.argsort(-max_sim(words, blocks), kind="stable")[:_HITS]
        return [int(row_id) for row_id in candidates[best]]

    return search


def serve(
    root: str, model: str | None, texts: Sequence[str], pool: int, seconds: float
) -> Iterator[Report]:
    """Measure the service under increasing load, until it does not keep up."""
    command = [sys.executable, "-m", "pipelines.cli", "serve", root, "--port", "0"]
    command += ["--model", model] if model else []
    bodies = [{"query": text, "k": _HITS, "pool": max(pool, _HITS)} for text in texts]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            if not url.startswith("http://"):
                raise EdjeError("the service did not start")
            offered = _LOWEST
            loads: list[dict[str, float]] = []
            while not loads or keeps_up(loads[-1], loads[0]):
                draw = random.Random(0)
                gaps = (draw.expovariate(offered) for _ in itertools.count())
                times = itertools.takewhile(
                    lambda at: at < seconds, itertools.accumulate(gaps)
                )
                exchanges = open_loop(url, bodies, [0.0, *times])
                loads.append(load_values(exchanges, offered, seconds))
                memory = peak_memory(process.pid) / 2**20
                yield {
                    "case": f"{offered:.2f}/s",
                    "values": loads[-1] | {"memory MiB": memory},
                }
                offered *= _GROWTH
        finally:
            process.terminate()


def open_loop(
    url: str, bodies: Sequence[Report], times: Sequence[float]
) -> list[tuple[float, int | None]]:
    """Send one search at each of `times`, which are seconds from the start of this
    call.

    Returns:
        In the order of `times`: the seconds from the planned time to the end of the
        response, and the number of searches in its batch. Without an answer, the latter
        is None.
    """
    import httpx

    def send(body: Report, planned: float) -> tuple[float, int | None]:
        time.sleep(max(0.0, start + planned - time.perf_counter()))
        batch = None
        with contextlib.suppress(httpx.HTTPError):
            answer = client.post("/search", json=body)
            if answer.status_code == httpx.codes.OK:
                batch = answer.json()["timing"]["batch"]
        return time.perf_counter() - start - planned, batch

    limits = httpx.Limits(max_connections=_CONNECTIONS)
    with (
        httpx.Client(base_url=url, timeout=120.0, limits=limits) as client,
        ThreadPoolExecutor(_CONNECTIONS) as threads,
    ):
        start = time.perf_counter()
        return [*threads.map(send, itertools.cycle(bodies), times)]


def load_values(
    exchanges: Sequence[tuple[float, int | None]], offered: float, seconds: float
) -> dict[str, float]:
    """Return the rate and share of answered requests in `seconds`, percentiles of their
    latency, and the mean number of searches per batch.
    """
    latencies = [seconds for seconds, batch in exchanges if batch is not None]
    batches = [batch for _, batch in exchanges if batch is not None]
    p50, p95, p99 = np.percentile(latencies or [0.0], [50, 95, 99]) * 1e3
    return {
        "answered/s": len(latencies) / seconds,
        "offered/s": offered,
        "answered %": 100 * len(latencies) / len(exchanges),
        "p50 ms": p50,
        "p95 ms": p95,
        "p99 ms": p99,
        "batch": sum(batches) / max(1, len(batches)),
    }


def keeps_up(load: dict[str, float], lowest: dict[str, float]) -> bool:
    """Return True if nearly all requests of a load are answered, and if its p95 is not
    much higher than that of the lowest load.
    """
    return (
        load["answered %"] >= _ANSWERED
        and load["p95 ms"] <= _SLOWDOWN * lowest["p95 ms"]
    )
