from __future__ import annotations

import ctypes
import mmap
import shutil
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.fetch import page_cache
from benchmarks.fetch.fio import find_fio, measure_with_fio
from benchmarks.fetch.plan import Entry, Section
from benchmarks.fetch.records import StoredRecords
from benchmarks.fetch.runner import Runner
from benchmarks.fetch.workloads import Workload
from storage_formats.errors import EdjeError
from storage_formats.format.manifest import CommittedIndex
from storage_formats.writing.snapshots import commit_deletion, plan_deletion

COLD = Workload("random", "random", 100, 100)


@pytest.fixture
def said():
    return []


@pytest.fixture
def runner(records, tmp_path, said):
    return Runner(records, tmp_path / "copies", None, repeats=1, seconds=5.0, say=said.append)


def only(runner, entry):
    return runner.run(Section("s", "s", (entry,)))[entry.label]


def test_a_cold_run_reads_the_asked_pages_from_the_disk(runner):
    for run in only(runner, Entry("edje", "edje", COLD)):
        assert run["discarded"] is None
        assert run["resident"] <= page_cache.COLD
        assert run["blocks"] == 100
        assert run["requested_bytes"] == run["page_bytes"] == 100 * 4096
        assert run["read_bytes"] >= 100 * 4096
        assert run["seconds"] > 0
        assert run["cpu_seconds"] > 0
        assert len(run["latencies"]) == 1


def test_a_warm_run_reads_nothing(runner):
    for run in only(runner, Entry("edje", "edje", replace(COLD, cache="warm", pool=10))):
        assert run["discarded"] is None
        assert run["resident"] >= page_cache.WARM
        assert run["read_bytes"] == 0
        assert len(run["latencies"]) == 10


def test_only_rows_that_are_not_deleted_are_fetched(index, tmp_path):
    root = shutil.copytree(index, tmp_path / "deleted.edje")
    opened = CommittedIndex.open(root)
    commit_deletion(opened, plan_deletion(opened, range(100, 200)))
    records = StoredRecords(root, "bf16")
    assert records.rows == 200
    runner = Runner(records, tmp_path / "copies", None, repeats=1, seconds=5.0, say=print)
    (run,) = only(runner, Entry("edje", "edje", Workload("random", "random", 200, 50, cache="warm")))
    assert (run["discarded"], run["blocks"], run["wrong_blocks"]) == (None, 200, 0)


def test_readers_share_the_calls(runner):
    (run,) = only(runner, Entry("edje", "edje", replace(COLD, pool=10, threads=4)))
    assert run["blocks"] == 100
    assert len(run["latencies"]) == 10


def test_a_run_that_cannot_be_made_cold_is_discarded_and_declared(runner, records, said, tmp_path, monkeypatch):
    monkeypatch.setattr(page_cache, "_DROP_CACHES", tmp_path / "not permitted")
    libc = ctypes.CDLL(None, use_errno=True)
    with records.files()[0].open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, dtype=np.uint8)
        if libc.mlock(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(view))):
            pytest.skip("this process may not lock memory")
        try:
            runs = only(runner, Entry("edje", "edje", COLD))
        finally:
            libc.munlock(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(view)))
            del view
    assert all(run["discarded"].startswith("not cold: ") and "seconds" not in run for run in runs)
    assert sum("DISCARDED, not cold" in line for line in said) == 1


def test_wrong_bytes_are_found_and_the_run_is_discarded(runner):
    runner.prepare("np.memmap")
    copy = runner.copies / "np.memmap/records.bin"
    copy.write_bytes(bytes(copy.stat().st_size))
    for run in only(runner, Entry("np.memmap", "np.memmap", COLD)):
        assert run["discarded"] == "failed: 32 of the checked blocks were wrong"


def test_a_failing_peer_is_declared_and_our_own_failure_ends_the_benchmark(runner):
    for run in only(runner, Entry("np.memmap", "np.memmap", COLD)):  # its copy was never made
        assert run["discarded"].startswith("failed: ended with code 1: FileNotFoundError")
    with pytest.raises(EdjeError, match=r"the run of edje \(random\) failed: .*engine"):
        only(runner, Entry("edje", "edje", COLD, {"engine": "steam"}))


def test_a_slow_peer_fetches_fewer_blocks(runner, said, monkeypatch):
    monkeypatch.setattr("benchmarks.fetch.runner._TRIAL_BLOCKS", 8)
    monkeypatch.setattr("benchmarks.fetch.runner.PEER_BLOCKS", 8)
    runner.prepare("np.memmap")
    hasty, ours = replace(runner, seconds=1e-6), Entry("edje", "edje", COLD)
    section = hasty.within_time(Section("s", "s", (ours, Entry("np.memmap", "np.memmap", COLD))), "edje")
    runs = hasty.run(section)
    assert {label: [run["blocks"] for run in found] for label, found in runs.items()} == {
        "edje": [100],
        "np.memmap": [8],
        "edje, as many as np.memmap": [8],
    }
    untouched = Section("s", "s", (ours,))
    assert hasty.within_time(untouched, "edje") == untouched
    assert any("np.memmap is slow, so each run fetches 8 instead of 100 blocks" in line for line in said)


def test_a_peer_fetches_enough_blocks_even_if_it_is_slow(runner, monkeypatch):
    monkeypatch.setattr("benchmarks.fetch.runner._TRIAL_BLOCKS", 8)
    monkeypatch.setattr("benchmarks.fetch.runner.PEER_BLOCKS", 60)
    runner.prepare("np.memmap")
    hasty, peer = replace(runner, seconds=1e-6), Entry("np.memmap", "np.memmap", COLD)
    (fitted,) = hasty.within_time(Section("s", "s", (peer,)), "edje").entries
    assert fitted.workload.blocks == 60
    monkeypatch.setattr("benchmarks.fetch.runner.PEER_SECONDS", 1e-6)
    (fitted,) = hasty.within_time(Section("s", "s", (peer,)), "edje").entries
    assert fitted.workload.blocks == 8


def test_subjects_take_turns(runner, said):
    entries = tuple(Entry(label, "memcpy", replace(COLD, cache="warm")) for label in "abc")
    replace(runner, repeats=2).run(Section("s", "s", entries))
    order = [line.split("  ")[1].split(":")[0] for line in said]
    assert order == ["a", "b", "c", "b", "c", "a"]


@pytest.mark.parametrize(
    ("workload", "depth", "batches"),
    [
        (COLD, 64, 1),
        (replace(COLD, pool=10), 64, 10),
        (replace(COLD, pattern="contiguous", blocks=256, pool=256), 64, 1),
    ],
)
def test_fio_reads_as_many_bytes_as_were_asked(records, workload, depth, batches):
    fio = find_fio(records.files()[0])
    if fio is None:
        pytest.skip("fio is not installed")
    run = measure_with_fio(fio, records, workload, depth, seed=3)
    assert len(run["latencies"]) == batches
    assert run["read_bytes"] == run["blocks"] * 4096
    assert workload.blocks * 0.5 <= run["blocks"] <= workload.blocks
    if workload.pattern == "random":
        assert run["blocks"] == 100


def test_the_probe_takes_the_place_of_fio(runner):
    for run in only(runner, Entry("device", "direct probe", COLD, {"depth": 8, "merge": False})):
        assert run["discarded"] is None
        assert run["read_bytes"] == 100 * 4096
