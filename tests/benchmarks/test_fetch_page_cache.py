from __future__ import annotations

import pytest

from benchmarks.fetch import page_cache
from benchmarks.fetch.counters import Counters
from benchmarks.fetch.page_cache import COLD, WARM, evict, load, resident, resident_by_cachestat, resident_by_mincore

PAGES = 500


@pytest.fixture
def file(index, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(PAGES * page_cache._PAGE))
    return path


def test_what_was_written_is_resident_until_it_is_evicted(file):
    assert resident([file]) >= WARM
    assert evict([file]) <= COLD
    assert resident([file]) <= COLD
    assert load([file]) >= WARM


def test_reads_are_counted_only_when_they_reach_the_disk(file):
    evict([file])
    costs = []
    for _ in range(2):
        before = Counters.now(file)
        load([file])
        costs.append(Counters.now(file).since(before)["read_bytes"])
    assert costs[0] == PAGES * page_cache._PAGE
    assert costs[1] == 0


def test_mincore_and_cachestat_agree(file):
    evict([file])
    with file.open("rb") as opened:
        if resident_by_cachestat(opened.fileno()) is None:
            pytest.skip("this kernel has no cachestat(2)")
        for read in (0, 1 << 16, PAGES * page_cache._PAGE):
            opened.read(read)
            assert resident_by_mincore(opened.fileno()) == resident_by_cachestat(opened.fileno())


def test_an_empty_file_has_no_pages(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    assert resident([tmp_path / "empty"]) == 0
    with (tmp_path / "empty").open("rb") as opened:
        assert resident_by_mincore(opened.fileno()) == 0
