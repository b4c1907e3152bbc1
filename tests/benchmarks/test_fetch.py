"""What `bench fetch` measures: states of the page cache, calls, runs of a process each, discarded runs and medians."""

from __future__ import annotations

import ctypes
import mmap
import shutil
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import disk
from benchmarks.fetch import bench
from benchmarks.fetch.bench import Workload, draw_calls, measure, plan_sections, summarise
from benchmarks.fetch.subjects import PEERS, SUBJECTS, StoredRecords, installed_version
from pipelines import delete_rows
from storage_formats import TokenStore
from storage_formats.errors import EdjeError
from tests.benchmarks.conftest import SPEC
from tests.conftest import same_bits

COLD = Workload("", False, 100, 100, "cold")
WARM = replace(COLD, pool=10, cache="warm")


def run_here(root, folder, name, workload):
    return measure(SUBJECTS[name](StoredRecords(root, "bf16"), folder), workload, 0)


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
    assert disk.bytes_read() - before == 500 * mmap.PAGESIZE, "reads from the page cache count"


@pytest.mark.parametrize("name", ["edje", "device"])
def test_a_cold_run_reads_the_requested_pages_from_the_disk(index, tmp_path, name):
    run = run_here(index, tmp_path, name, COLD)
    assert run["discarded"] is None
    assert run["resident"] <= disk.COLD
    assert (run["blocks"], run["requested_bytes"], len(run["latencies"])) == (100, 100 * 4096, 1)
    assert run["read_bytes"] >= 100 * 4096
    assert min(run["seconds"], run["cpu_seconds"]) > 0


def test_a_warm_run_reads_nothing_and_fetches_no_deleted_row(index, tmp_path):
    root = shutil.copytree(index, tmp_path / "deleted.edje")
    delete_rows(root, range(100, 200))
    run = run_here(root, tmp_path, "edje", replace(WARM, blocks=200))
    assert (run["discarded"], run["read_bytes"], run["blocks"], len(run["latencies"])) == (None, 0, 200, 20)
    assert run["resident"] >= disk.WARM


def test_a_run_that_cannot_be_made_cold_is_discarded(index, tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_DROP_CACHES", tmp_path / "not permitted")
    libc = ctypes.CDLL(None, use_errno=True)
    file = StoredRecords(index, "bf16").files()[0].open("rb")
    with file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, dtype=np.uint8)
        address, length = ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(view))
        if libc.mlock(address, length):
            pytest.skip("this process may not lock memory")
        try:
            run = run_here(index, tmp_path, "edje", COLD)
        finally:
            libc.munlock(address, length)
            del view
    assert run["discarded"].startswith("not cold: ")
    assert "seconds" not in run


def test_failures_of_peers_are_declared_and_our_own_failure_ends_the_benchmark(index, tmp_path):
    source = StoredRecords(index, "bf16")
    failed = bench._run(source, tmp_path, "np.memmap", COLD)
    assert failed["discarded"].startswith("failed: ended with code 1: FileNotFoundError")
    size = source.spec.rows * source.record_bytes
    (tmp_path / "records.bin").write_bytes(bytes(size))
    assert run_here(index, tmp_path, "np.memmap", COLD)["discarded"] == "failed: 32 of the checked blocks were wrong"
    with pytest.raises(EdjeError, match="the run of edje failed: ended with code 1: ValueError"):
        bench._run(source, tmp_path, "edje", replace(COLD, blocks="many"))


@st.composite
def workloads(draw):
    rows = draw(st.integers(1, 5000))
    blocks = draw(st.integers(1, rows))
    return Workload("", draw(st.booleans()), blocks, draw(st.integers(1, blocks)), "cold"), rows


@given(workloads(), st.integers(0, 99))
def test_no_row_is_requested_twice_and_all_are_in_the_index(drawn, seed):
    workload, rows = drawn
    calls = draw_calls(workload, rows, seed)
    ids = np.concatenate(calls)
    assert len(np.unique(ids)) == len(ids) == workload.blocks
    assert 0 <= ids.min() <= ids.max() < rows
    assert all(len(call) == workload.pool for call in calls[:-1])
    assert not workload.is_contiguous or (np.diff(ids) == 1).all()
    assert all((one == two).all() for one, two in zip(calls, draw_calls(workload, rows, seed), strict=True))


def test_a_plan_never_requests_more_than_half_the_rows():
    for rows in (2, 50, 300, 1_000_000):
        for workload, subjects in plan_sections(rows, 50_000, None, ["np.memmap", "hdf5"]).values():
            assert "edje" in subjects
            assert 1 <= workload.pool <= workload.blocks <= rows / 2


def run(seconds, **changes):
    fixed = {"discarded": None, "blocks": 100, "cpu_seconds": seconds / 2, "latencies": [seconds]}
    return {"seconds": seconds, "read_bytes": 4096, "requested_bytes": 4000, **fixed, **changes}


SERIES = st.lists(st.tuples(st.floats(1e-3, 1e3), st.booleans()), min_size=1, max_size=6).map(
    lambda drawn: [run(seconds, discarded="cold" if bad else None) for seconds, bad in drawn]
)


@given(SERIES, st.floats(0.1, 10))
def test_a_slower_disk_moves_rates_and_no_ratio_and_discarded_runs_count_nowhere(runs, factor):
    other = [{**each, "seconds": 2.0 * each["seconds"]} for each in runs]
    slower = [[{**each, "seconds": each["seconds"] * factor} for each in series] for series in (other, runs)]
    counted = [each for each in runs if not each["discarded"]]
    spoilt = [{**each, "seconds": 1e9, "latencies": [1e9]} if each["discarded"] else each for each in runs]
    result = summarise(runs, 4096, other)
    assert summarise(spoilt, 4096, other) == result
    assert (result["runs"], result["discarded"]) == (len(counted), len(runs) - len(counted))
    if counted:
        low, high = result["gb_per_s_range"]
        assert low <= result["gb_per_s"] <= high
        assert result["gb_per_s"] == pytest.approx(result["blocks_per_s"] * 4096 / 1e9)
        assert result["ratio"] == pytest.approx(0.5)
        assert summarise(slower[1], 4096, slower[0])["ratio"] == pytest.approx(0.5)


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("precision", SPEC.precisions)
@pytest.mark.parametrize("name", SUBJECTS)
def test_every_subject_gives_what_it_says(index, tmp_path, name, precision):
    if name in PEERS and installed_version(name) is None:
        pytest.skip(f"{PEERS[name].package} is not installed")
    source = StoredRecords(index, precision)
    subject = SUBJECTS[name](source, tmp_path)
    if subject.copies:
        PEERS[name].prepare(subject)
        assert sum(path.stat().st_blocks * 512 for path in subject.files()) >= SPEC.rows * source.record_bytes
    subject.open()
    for ids in (np.random.default_rng(0).permutation(SPEC.rows)[:140], np.arange(120, 140), np.array([7])):
        records = subject.fetch(ids, np.ones((len(ids), subject.output_bytes), dtype=np.uint8))
        assert (records == subject.expected(ids)).all()
        if name in PEERS:
            blocks = source.codec.decode(np.ascontiguousarray(records))
            assert same_bits(blocks, TokenStore.open(index, precision).fetch(ids))
    subject.close()
