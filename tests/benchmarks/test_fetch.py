"""What `bench fetch` measures: states of the page cache, calls and subjects."""

import json
import mmap
import shutil

import numpy as np
import pytest

from benchmarks import disk, fetch
from benchmarks.fetch import PAPER, Workload, measure, run_fio, verdict
from benchmarks.harness import DEVICE, READER, RECORDS, summaries
from benchmarks.peers import (
    PEERS,
    SUBJECTS,
    StoredRecords,
    open_subject,
    subject_versions,
)
from pipelines import delete_rows
from storage_formats import TokenStore, codec
from tests.benchmarks.conftest import SPEC
from tests.conftest import REPO, same_bits, write_random_index
from tests.docs import fetch_tables
from tests.storage_formats.reading_cases import ODD

ROWS = SPEC.rows
RANDOM = Workload(ROWS, blocks=100, pool=100)


def run_here(root, folder, name, workload):
    results = measure(str(root), str(folder / "copies"), "bf16", workload, name, 0)
    return {result["case"]: result for result in results}


def test_the_page_cache_is_emptied_filled_and_counted(index):
    files = [index.parent / "file", index.parent / "empty"]
    files[0].write_bytes(bytes(500 * mmap.PAGESIZE))
    files[1].write_bytes(b"")
    assert disk.resident(files) >= disk.WARM
    assert disk.evict(files) == {}
    assert disk.resident(files) == 0
    # The kernel counts the pages of the program that reads the files, too, if they were
    # not in the page cache.
    program = 100 * mmap.PAGESIZE
    before = disk.bytes_read()
    disk.load(files)
    assert disk.resident(files) == 1
    read = disk.bytes_read() - before
    assert 500 * mmap.PAGESIZE <= read < 500 * mmap.PAGESIZE + program
    disk.load(files)
    # reads from the page cache do not count
    assert disk.bytes_read() - before < read + program


@pytest.mark.skipif(shutil.which("fio") is None, reason="needs fio")
@pytest.mark.parametrize("is_contiguous", [False, True])
@pytest.mark.parametrize("precision", SPEC.precisions)
def test_fio_reads_as_much_as_the_workload(index, precision, is_contiguous):
    workload = RANDOM._replace(is_contiguous=is_contiguous)
    (run,) = run_fio(str(index), "", precision, workload, DEVICE, 0)
    record_bytes = TokenStore.open(index, precision).record_bytes
    values = run["values"]
    # a random read takes whole sectors
    expected = 1 if is_contiguous else 4096 / record_bytes
    assert values["read"] == pytest.approx(expected)
    assert values["GB/s"] > 0
    assert 0 < values["p50 ms"] <= values["p99 ms"]
    words = ["--bs="] if is_contiguous else ["--bs=4096", "--numjobs=4", "--iodepth=25"]
    assert all(word in run["command"] for word in words)


def test_a_cold_run_reads_from_the_disk_and_a_warm_run_does_not(index, tmp_path):
    results = run_here(index, tmp_path, "edje-index", RANDOM._replace(pool=10))
    for result in results.values():
        assert "problem" not in result
        values = result["values"]
        assert min(value for key, value in values.items() if key != "read") > 0
    assert results["cold"]["values"]["read"] >= 1
    assert results["warm"]["values"]["read"] == 0


def test_no_deleted_row_is_fetched(index, tmp_path):
    root = shutil.copytree(index, tmp_path / "deleted.edje")
    delete_rows(root, range(100, 200))
    for name in ("edje-index", "np.memmap"):
        results = run_here(root, tmp_path, name, RANDOM._replace(blocks=200, pool=10))
        assert "problem" not in results["warm"]


def test_the_verdict_says_why_a_cold_rate_is_missing(index, tmp_path):
    files = [*(index / "tokens" / "bf16").glob("c.*")]
    maps = [np.memmap(path, np.uint8, mode="r") for path in files]
    # mapped pages that were read cannot be evicted
    assert sum(int(each.sum()) for each in maps)
    task = {"group": "bf16", "table": RANDOM.title, "repeat": 0, "command": ""}
    cold = run_here(index, tmp_path, READER, RANDOM)["cold"]
    results = [task | rates(DEVICE, 80), task | {"subject": READER} | cold]
    _, second, *_ = verdict(summaries(results, READER), 2)
    assert "edje-index was not measured (not cold: 100.0% of the pages" in second


def rates(subject, per_second):
    """A result of reads from a cold page cache."""
    values = {
        "GB/s": per_second * 4096 / 1e9,
        "blocks/s": per_second,
        "p50 ms": 1.0,
        "p99 ms": 3.0,
    }
    return {"case": "cold", "subject": subject, "values": values}


def test_the_verdict_has_queries_and_photos_and_names_who_is_faster():
    speeds = {DEVICE: 80, READER: 100, RECORDS: 400, "np.memmap": 200, "LMDB": 500}
    tables = [PAPER.title, Workload(200_000, 5_000, fetch.QUERY).title]
    results = [
        {"group": "bf16", "table": table, "repeat": 0, "command": ""}
        | rates(subject, speed)
        for table in tables
        for subject, speed in speeds.items()
    ]
    text = "\n".join(verdict(summaries(results, READER), 2))
    assert "(80 reads/s, p50 1.00 ms" in text
    assert "edje-index reads at 1.25 of this rate" in text
    assert "bf16: 100 photos/s in one call" in text
    assert "bf16: 1 queries of 100 photos per second" in text
    assert "one row in 2, and neighbours are read in one request" in text
    wins = [line for line in text.splitlines() if line.startswith("Faster")]
    assert len(wins) == 6
    assert f"edje-index: np.memmap, cold, {PAPER.title}, by 2.0 (bf16)." in wins[0]
    assert f"edje-index records: LMDB, cold, {PAPER.title}, by 1.2 (bf16)." in wins[4]


# theirs
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", SPEC.precisions)
@pytest.mark.parametrize("name", SUBJECTS)
def test_every_subject_gives_what_it_says(index, tmp_path, name, precision):
    if subject_versions()[name][0] is None:
        pytest.skip(f"{PEERS[name].package} is not installed")
    # the last shard is cut
    source = StoredRecords(index, precision, 290)
    subject = open_subject(name, source, tmp_path)
    if subject.copies:
        assert (
            sum(path.stat().st_blocks * 512 for path in subject.files())
            >= 290 * source.record_bytes
        )
    decode = codec(precision, SPEC.block_shape).decode
    for ids in (
        np.random.default_rng(0).permutation(290)[:140],
        np.arange(120, 140),
        np.array([7]),
    ):
        records = subject.fetch(
            ids, np.ones((len(ids), subject.output_bytes), dtype=np.uint8)
        )
        assert (records == subject.expected(ids)).all()
        if name != READER:
            blocks = decode(np.ascontiguousarray(records))
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_everything_on_an_index(index, run, tmp_path):
    code, out, err = run(
        "bench", "fetch", index, "--quick", "--report", tmp_path / "r", "--json"
    )
    assert code == 0, err
    rows = json.loads(out)["rows"]
    assert {row["group"] for row in rows} == {"bf16", "fp8"}
    assert any(" 100 per call" in row["table"] for row in rows)
    measured = {(row["subject"], row["case"]) for row in rows if row["values"]}
    assert {(READER, "cold"), ("np.memmap", "warm"), (RECORDS, "warm")} <= measured
    assert (DEVICE, "cold") in measured or shutil.which("fio") is None
    assert "warning: bf16, fp8: only the first 300 rows are read" in err
    assert list(index.parent.iterdir()) == [index]
    picture, text, data = sorted((tmp_path / "r").iterdir(), reverse=True)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"({picture.name})" in text.read_text()
    assert str(tmp_path) not in data.read_text()


def test_wrong_usage_is_refused_before_anything_is_written(
    run, index, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert "nowhere" in run.refused("bench", "fetch", "nowhere")
    assert "nvfp4" in run.refused("bench", "fetch", index, "--precision", "nvfp4")
    assert list(tmp_path.iterdir()) == []


def test_an_index_without_rows_is_refused(run, tmp_path):
    root = tmp_path / "index"
    write_random_index(root, ODD)
    run.ok("delete", root, "--where", "row_id >= 0")
    assert "has no blocks to fetch" in run.refused("bench", "fetch", root, "--quick")
    assert list(tmp_path.iterdir()) == [root]
