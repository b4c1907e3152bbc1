"""What `bench fetch` measures: states of the page cache, calls and subjects."""

from __future__ import annotations

import json
import mmap
import os
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import disk
from benchmarks.fetch.bench import (
    FIO,
    PAPER,
    Task,
    Workload,
    command_line,
    measure,
    run_fio,
    summaries,
)
from benchmarks.fetch.peers import (
    PEERS,
    READER,
    SUBJECTS,
    StoredRecords,
    installed_version,
)
from benchmarks.fetch.report import summary_tables, verdict
from pipelines import delete_rows
from storage_formats import TokenStore
from tests.benchmarks.conftest import SPEC
from tests.conftest import REPO, same_bits
from tests.docs import fetch_tables

ROWS = SPEC.rows
RANDOM = Workload(ROWS, blocks=100, pool=100)


def run_here(root, folder, name, workload):
    return measure(str(root), str(folder / "copy"), "bf16", workload, name, 0)


def test_the_page_cache_is_emptied_filled_and_counted(tmp_path, index):
    (tmp_path / "file").write_bytes(bytes(500 * mmap.PAGESIZE))
    (tmp_path / "empty").write_bytes(b"")
    files = [tmp_path / "file", tmp_path / "empty"]
    assert disk.resident(files) >= disk.WARM
    assert disk.evict(files) == disk.resident(files[1:]) == 0
    before = disk.bytes_read()
    assert disk.load(files) == 1
    assert disk.bytes_read() - before == 500 * mmap.PAGESIZE
    disk.load(files)
    assert disk.bytes_read() - before == 500 * mmap.PAGESIZE, (
        "reads from the page cache count"
    )


@pytest.mark.skipif(shutil.which("fio") is None, reason="needs fio")
@pytest.mark.parametrize("is_contiguous", [False, True])
@pytest.mark.parametrize("precision", SPEC.precisions)
def test_fio_reads_as_much_as_the_workload(index, precision, is_contiguous):
    source = StoredRecords(index, precision, ROWS)
    run = run_fio(source, RANDOM._replace(is_contiguous=is_contiguous), 0)
    assert run["discarded"] is None
    if is_contiguous:
        # the last read is long
        assert run["blocks"] == pytest.approx(100, rel=0.4)
        assert run["read_bytes"] == pytest.approx(run["blocks"] * source.record_bytes)
    else:
        # a record takes whole sectors
        assert run["blocks"] == 100
        assert run["read_bytes"] == 100 * 4096
    assert run["seconds"] > 0
    assert 0 < run["latency_ms"][0] <= run["latency_ms"][2]
    size = "--bs=4096" if not is_contiguous else "--bs="
    assert size in run["command"]
    assert "--iodepth=64" in run["command"]


def test_a_cold_run_reads_from_the_disk_and_a_warm_run_does_not(index, tmp_path):
    states = run_here(index, tmp_path, "edje-index", RANDOM._replace(pool=10))
    for run in states.values():
        assert (run["discarded"], run["blocks"]) == (None, 100)
        assert min(run["seconds"], run["cpu_seconds"], *run["latency_ms"]) > 0
    assert states["cold"]["read_bytes"] >= 100 * 4096
    assert states["warm"]["read_bytes"] == 0


def test_no_deleted_row_is_fetched(index, tmp_path):
    root = shutil.copytree(index, tmp_path / "deleted.edje")
    delete_rows(root, range(100, 200))
    states = run_here(
        root, tmp_path, "edje-index", RANDOM._replace(blocks=200, pool=10)
    )
    assert states["warm"]["blocks"] == 200


def test_a_run_is_repeated_by_the_command_line_of_its_row(index, tmp_path):
    task = Task("bf16", RANDOM._replace(rows=200), "np.memmap", 0)
    words = shlex.split(command_line(index.name, task))
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    copy = index.parent / "bf16-np.memmap"
    try:
        done = subprocess.run(
            [sys.executable, *words[1:]],
            cwd=index.parent,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        # of 200 rows only
        assert (copy / "records.bin").stat().st_size == 200 * 4096
    finally:
        shutil.rmtree(copy)
    assert json.loads(done.stdout)["cold"]["blocks"] == 100


def run_of(rate, discarded=None):
    run = {"discarded": discarded}
    if discarded is None:
        run |= {"blocks": 100, "seconds": 100 / rate, "cpu_seconds": 1e-3}
        run |= {"read_bytes": 409_600, "latency_ms": [1.0, 2.0, 3.0]}
    return run


def test_a_row_has_the_median_and_the_ratio_to_runs_of_the_same_turn():
    rates = {READER: (100, 300, 200), "np.memmap": (50, 100, None)}
    runs = {
        Task("bf16", RANDOM, name, repeat): {
            "cold": run_of(rate, None if rate else "not cold")
        }
        for name, of_name in rates.items()
        for repeat, rate in enumerate(of_name)
    }
    reader, peer = summaries(runs, "i", {"bf16": 4096}, {READER: "1", "np.memmap": "2"})
    assert (reader["runs"], reader["blocks_per_s"], reader["ratio"]) == (3, 200, 1)
    assert reader["gb_per_s"] == [0.0008192, 0.0004096, 0.0012288]
    assert (peer["runs"], peer["blocks_per_s"], peer["ratio"]) == (2, 75, 2.5)
    assert (peer["version"], peer["read_per_requested"]) == ("2", 1)
    assert peer["discarded"] == [None, None, "not cold"]


def test_the_verdict_names_who_is_faster_and_the_rate_that_the_disk_feeds():
    rates = {FIO: 80, READER: 100, "np.memmap": 200, "LMDB": 10}
    runs = {
        Task("bf16", workload, name, 0): {"cold": run_of(rate)}
        for workload in (PAPER, RANDOM)
        for name, rate in rates.items()
    }
    runs = {
        task: {state: {**run, "command": ""} for state, run in states.items()}
        for task, states in runs.items()
    }
    versions = dict.fromkeys(rates, "1")
    rows = summaries(runs, "i", {"bf16": 4096}, versions)
    text = "\n".join(verdict(rows))
    assert "(80 reads/s, p50 1.00 ms, p99 3.00 ms)" in text
    assert "edje-index reads at 1.25 of this rate" in text
    assert "this disk feeds 100 pairs/s at bf16" in text
    wins = [line for line in text.splitlines() if line.startswith("Faster")]
    assert len(wins) == 2
    assert "np.memmap, cold, 100 random blocks in one call, by 2.0 (bf16)." in wins[1]
    assert "in 0.59 s. np.memmap takes 250.00 s at bf16 here" in text
    tables = summary_tables(rows)
    assert list(tables) == ["Cold random blocks", "All of bf16"]
    cells = [line.split() for line in tables["Cold random blocks"]]
    assert cells[0] == ["|", "|", "bf16", "|"]
    assert ["|", "np.memmap,", "1", "|", "**0.00", "(0.50)**", "|"] in cells
    assert tables["All of bf16"][0].count(", cold |") == 2


# theirs
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", SPEC.precisions)
@pytest.mark.parametrize("name", SUBJECTS)
def test_every_subject_gives_what_it_says(index, tmp_path, name, precision):
    if installed_version(name) is None:
        pytest.skip(f"{PEERS[name].package} is not installed")
    # the last shard is cut
    source = StoredRecords(index, precision, 290)
    subject = SUBJECTS[name](source, tmp_path)
    if subject.copies:
        PEERS[name].prepare(subject)
        assert (
            sum(path.stat().st_blocks * 512 for path in subject.files())
            >= 290 * source.record_bytes
        )
    subject.open()
    for ids in (
        np.random.default_rng(0).permutation(290)[:140],
        np.arange(120, 140),
        np.array([7]),
    ):
        records = subject.fetch(
            ids, np.ones((len(ids), subject.output_bytes), dtype=np.uint8)
        )
        assert (records == subject.expected(ids)).all()
        if name in PEERS:
            blocks = source.codec.decode(np.ascontiguousarray(records))
            assert same_bits(blocks, TokenStore.open(index, precision).fetch(ids))


def test_the_pages_show_the_newest_report():
    newest = max((REPO / "benchmarks/results").glob("*-fetch.md")).read_text()
    shown = ""
    for name in fetch_tables.PAGES:
        page = (REPO / name).read_text()
        assert fetch_tables.replaced(page, newest) == page, (
            f"{name}: run python -m tests.docs.fetch_tables REPORT"
        )
        shown += page
    for name in fetch_tables.parts(newest):
        assert f"<!-- fetch:{name} -->" in shown
