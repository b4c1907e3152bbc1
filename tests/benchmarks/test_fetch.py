"""What `bench fetch` measures: states of the page cache, calls, turns, discarded runs, ratios and targets."""

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
from benchmarks.fetch.bench import Runner, judge, paired_ratio, plan_sections, summarise
from benchmarks.fetch.fio import find_fio, measure_with_fio
from benchmarks.fetch.subjects import Entry, StoredRecords
from benchmarks.fetch.worker import draw_calls
from pipelines import delete_rows
from storage_formats.errors import EdjeError

COLD = Entry("edje", "edje", "random", 100, 100)
PEER = replace(COLD, label="np.memmap", subject="np.memmap")


@pytest.fixture
def said():
    return []


@pytest.fixture
def runner(index, tmp_path, said):
    return Runner(StoredRecords(index, "bf16"), tmp_path / "copies", None, repeats=1, seconds=5.0, say=said.append)


def only(runner, entry):
    (run,) = runner.run("s", [entry])[entry.label]
    return run


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


def test_a_cold_run_reads_the_requested_pages_from_the_disk(runner):
    for entry in (COLD, replace(COLD, label="device", subject="direct reads")):
        run = only(runner, entry)
        assert run["discarded"] is None
        assert run["resident"] <= disk.COLD
        assert (run["blocks"], run["requested_bytes"], len(run["latencies"])) == (100, 100 * 4096, 1)
        assert run["read_bytes"] >= 100 * 4096
        assert min(run["seconds"], run["cpu_seconds"]) > 0


def test_a_warm_run_reads_nothing(runner):
    run = only(runner, replace(COLD, cache="warm", pool=10))
    assert (run["discarded"], run["read_bytes"], len(run["latencies"])) == (None, 0, 10)
    assert run["resident"] >= disk.WARM


def test_only_rows_that_are_not_deleted_are_fetched(runner, index, tmp_path):
    root = shutil.copytree(index, tmp_path / "deleted.edje")
    delete_rows(root, range(100, 200))
    runner.source = StoredRecords(root, "bf16")
    assert len(runner.source.row_ids) == 200
    run = only(runner, replace(COLD, blocks=200, pool=50, cache="warm"))
    assert (run["discarded"], run["blocks"]) == (None, 200)


def test_a_run_that_cannot_be_made_cold_is_discarded_and_declared(runner, said, tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_DROP_CACHES", tmp_path / "not permitted")
    libc = ctypes.CDLL(None, use_errno=True)
    file = runner.source.files()[0].open("rb")
    with file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, dtype=np.uint8)
        address, length = ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(view))
        if libc.mlock(address, length):
            pytest.skip("this process may not lock memory")
        try:
            run = only(runner, COLD)
        finally:
            libc.munlock(address, length)
            del view
    assert run["discarded"].startswith("not cold: ")
    assert "seconds" not in run
    assert sum("DISCARDED, not cold" in line for line in said) == 1


def test_wrong_bytes_and_failures_of_peers_are_declared_and_our_own_failure_ends_the_benchmark(runner):
    assert only(runner, PEER)["discarded"].startswith("failed: ended with code 1: FileNotFoundError")
    runner.prepare("np.memmap")
    copy = runner.copies / "np.memmap/records.bin"
    copy.write_bytes(bytes(copy.stat().st_size))
    assert only(runner, PEER)["discarded"] == "failed: 32 of the checked blocks were wrong"
    with pytest.raises(EdjeError, match=r"the run of edje \(random\) failed: .*engine"):
        only(runner, replace(COLD, engine="steam"))


def test_a_slow_peer_fetches_fewer_blocks_but_enough(runner, said, monkeypatch):
    monkeypatch.setattr(bench, "TRIAL_BLOCKS", 8)
    runner.prepare("np.memmap")
    hasty = replace(runner, seconds=1e-6)
    for enough, seconds, blocks in ((60, 30.0, 60), (60, 1e-6, 8), (8, 30.0, 8)):
        monkeypatch.setattr(bench, "PEER_BLOCKS", enough)
        monkeypatch.setattr(bench, "PEER_SECONDS", seconds)
        entries = hasty.within_time([COLD, PEER], COLD)
        assert [(entry.label, entry.blocks) for entry in entries] == [
            ("edje", 100),
            ("np.memmap", blocks),
            ("edje, as many as np.memmap", blocks),
        ]
    assert hasty.within_time([COLD], COLD) == [COLD]
    assert any("np.memmap is slow, so each run fetches 8 instead of 100 blocks" in line for line in said)


def test_subjects_take_turns(runner, said):
    entries = [replace(COLD, label=label, subject="memcpy", cache="warm") for label in "abc"]
    replace(runner, repeats=2).run("s", entries)
    assert [line.split("  ")[1].split(":")[0] for line in said] == ["a", "b", "c", "b", "c", "a"]


@pytest.mark.parametrize(
    ("pattern", "blocks", "pool"), [("random", 100, 100), ("random", 100, 10), ("contiguous", 256, 256)]
)
def test_fio_reads_as_many_bytes_as_were_requested(runner, pattern, blocks, pool):
    fio = find_fio(runner.source.files()[0])
    if fio is None:
        pytest.skip("fio is not installed")
    run = measure_with_fio(fio[1], runner.source, Entry("device", "fio", pattern, blocks, pool), seed=3)
    assert len(run["latencies"]) == blocks // pool
    assert run["read_bytes"] == run["blocks"] * 4096
    assert blocks * 0.5 <= run["blocks"] <= blocks


@st.composite
def entries(draw):
    rows = draw(st.integers(1, 5000))
    blocks = draw(st.integers(1, rows))
    pattern = draw(st.sampled_from(["random", "contiguous", "listed"]))
    return Entry("w", "edje", pattern, blocks, draw(st.integers(1, blocks))), rows


@given(entries(), st.integers(0, 99))
def test_no_row_is_requested_twice_and_all_are_in_the_index(drawn, seed):
    entry, rows = drawn
    calls = draw_calls(entry, rows, seed)
    ids = np.concatenate(calls)
    assert len(np.unique(ids)) == len(ids)
    assert 0 <= ids.min() <= ids.max() < rows
    assert all(len(call) == entry.pool for call in calls[:-1])
    assert entry.pattern == "listed" or len(ids) == entry.blocks
    assert entry.pattern != "contiguous" or (np.diff(ids) == 1).all()
    assert all((one == two).all() for one, two in zip(calls, draw_calls(entry, rows, seed), strict=True))


def test_repeats_request_other_rows_and_listed_rows_lie_in_few_runs():
    entry = Entry("w", "edje", "random", 1000, 100)
    first, second = (np.concatenate(draw_calls(entry, 100_000, seed)) for seed in (0, 1))
    assert len(np.intersect1d(first, second)) < 100
    listed = draw_calls(replace(entry, pattern="listed"), 100_000, 3)
    assert max((np.diff(np.sort(ids)) > 79).sum() for ids in listed) <= 32


def test_a_plan_never_requests_more_than_half_the_rows_and_labels_are_unique():
    for rows in (2, 50, 300, 1_000_000):
        for has_fio in (False, True):
            sections = plan_sections(
                rows, 50_000, ("cold", "warm"), has_fio, ("auto", "portable"), ("np.memmap", "hdf5")
            )
            for _, planned in sections.values():
                assert len({entry.label for entry in planned}) == len(planned)
                assert {"edje auto", "edje portable"} <= {entry.label for entry in planned}
                assert all(1 <= entry.pool <= entry.blocks <= rows / 2 for entry in planned)


def run(seconds, repeat=0, **changes):
    fixed = {"discarded": None, "blocks": 100, "cpu_seconds": seconds / 2, "latencies": [seconds]}
    return {"repeat": repeat, "seconds": seconds, "read_bytes": 4096, "requested_bytes": 4000, **fixed, **changes}


SERIES = st.lists(st.tuples(st.floats(1e-3, 1e3), st.booleans()), min_size=1, max_size=6).map(
    lambda drawn: [run(s, number, discarded="cold" if bad else None) for number, (s, bad) in enumerate(drawn)]
)


@given(SERIES, st.floats(0.1, 10))
def test_a_slower_disk_moves_rates_and_no_ratio_and_discarded_runs_count_nowhere(runs, factor):
    other = [{**each, "seconds": 2.0 * each["seconds"]} for each in runs]
    slower = [[{**each, "seconds": each["seconds"] * factor} for each in series] for series in (runs, other)]
    counted = [each for each in runs if not each["discarded"]]
    expected = pytest.approx(2.0) if counted else None
    assert paired_ratio(runs, other, bench._rate) == paired_ratio(*slower, bench._rate) == expected
    spoilt = [{**each, "seconds": 1e9, "latencies": [1e9]} if each["discarded"] else each for each in runs]
    result = summarise(runs, 4096)
    assert summarise(spoilt, 4096) == result
    assert (result["runs"], result["discarded"]) == (len(counted), len(runs) - len(counted))
    if counted:
        low, high = result["gb_per_s_range"]
        assert low <= result["gb_per_s"] <= high
        assert result["gb_per_s"] == pytest.approx(result["blocks_per_s"] * 4096 / 1e9)


def test_targets_are_judged_if_their_peer_was_measured():
    def sections(**more):
        cold = {"edje": [run(1.0)], "device": [run(0.8)], "lance": [run(6.0)], "tensorstore": [run(1.5)], **more}
        warm = {"edje": [run(1.0)], "memcpy": [run(0.7)]}
        named = {"cold random": cold, "warm random": warm}
        return {
            name: {"entries": {label: {"runs": runs} for label, runs in each.items()}} for name, each in named.items()
        }

    met = {target["name"]: target["met"] for target in judge("bf16", sections(), "edje")}
    assert met == {
        "cold random, relative to the device": False,
        "cold random, relative to TensorStore": True,
        "CPU per block, relative to TensorStore": False,
        "cold random, relative to Lance": True,
        "warm random, relative to memcpy": True,
        "bytes read, relative to the requested bytes": True,
    }
    targets = {each["name"]: each for each in judge("fp8", sections(**{"edje, as many as lance": [run(3.0)]}), "edje")}
    assert targets["cold random, relative to Lance"]["measured"] == 2
    assert "warm random, relative to memcpy" not in targets
