"""What `bench fetch` measures: states of the page cache, calls and subjects."""

from __future__ import annotations

import mmap
import shutil
from dataclasses import asdict, replace

import numpy as np
import pytest

from benchmarks import disk
from benchmarks.fetch.bench import Workload, measure, run_fio
from benchmarks.fetch.peers import PEERS, SUBJECTS, StoredRecords, installed_version
from pipelines import delete_rows
from storage_formats import TokenStore
from tests.benchmarks.conftest import SPEC
from tests.conftest import same_bits

COLD = Workload(False, 100, 100, "cold")
WARM = replace(COLD, pool=10, cache="warm")


def run_here(root, folder, name, workload):
    return measure(str(root), "bf16", str(folder), name, asdict(workload), 0)


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
def test_fio_reads_as_many_bytes_as_the_workload(index, precision, is_contiguous):
    source = StoredRecords(index, precision)
    run = run_fio(source, replace(COLD, is_contiguous=is_contiguous), 0)
    assert run["discarded"] is None
    # the last contiguous read is long
    assert run["blocks"] == pytest.approx(100, rel=0.4)
    assert (
        run["read_bytes"]
        >= run["requested_bytes"]
        == run["blocks"] * source.record_bytes
    )
    assert run["seconds"] > 0


def test_a_cold_run_reads_the_requested_pages_from_the_disk(index, tmp_path):
    run = run_here(index, tmp_path, "edje", COLD)
    assert run["discarded"] is None
    assert run["resident"] <= disk.COLD
    assert (run["blocks"], run["requested_bytes"], len(run["latencies"])) == (
        100,
        100 * 4096,
        1,
    )
    assert run["read_bytes"] >= 100 * 4096
    assert min(run["seconds"], run["cpu_seconds"]) > 0


def test_a_warm_run_reads_nothing_and_fetches_no_deleted_row(index, tmp_path):
    root = shutil.copytree(index, tmp_path / "deleted.edje")
    delete_rows(root, range(100, 200))
    run = run_here(root, tmp_path, "edje", replace(WARM, blocks=200))
    assert (
        run["discarded"],
        run["read_bytes"],
        run["blocks"],
        len(run["latencies"]),
    ) == (None, 0, 200, 20)
    assert run["resident"] >= disk.WARM


# theirs
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", SPEC.precisions)
@pytest.mark.parametrize("name", SUBJECTS)
def test_every_subject_gives_what_it_says(index, tmp_path, name, precision):
    if name in PEERS and installed_version(name) is None:
        pytest.skip(f"{PEERS[name].package} is not installed")
    source = StoredRecords(index, precision)
    subject = SUBJECTS[name](source, tmp_path)
    if subject.copies:
        PEERS[name].prepare(subject)
        assert (
            sum(path.stat().st_blocks * 512 for path in subject.files())
            >= SPEC.rows * source.record_bytes
        )
    subject.open()
    for ids in (
        np.random.default_rng(0).permutation(SPEC.rows)[:140],
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
