"""Snapshots on disk: segments, tombstones, rollback, removal, and what readers of
other kinds see.
"""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest

from pipelines import delete_rows
from pipelines.jobs.snapshots import remove_snapshots, roll_back
from storage_formats import (
    CorruptIndexError,
    DeletedRowError,
    IndexSpec,
    Manifest,
    RowIdError,
    TokenStore,
    UsageError,
    read_rows,
    verify_index,
)
from storage_formats.format.directory import Directory
from storage_formats.format.layout import Layout, Segment
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.tombstones import evenly_spaced_rows, live_rows
from tests.conftest import all_files, same_bits

SPEC = IndexSpec(40, 8, (2, 8), 4, precisions=("bf16", "fp8"))


def delete(root, rows):
    delete_rows(root, rows)
    return Manifest.load(root)


@pytest.mark.parametrize(
    "segments",
    [[(4, 36)], [(-8, 48)], [(0, 10), (12, 28)], [(0, 20), (16, 24)], [(0, 8)]],
)
def test_segments_that_do_not_fit_are_refused(segments):
    segments = tuple(Segment(*each) for each in segments)
    with pytest.raises(UsageError, match="do not fit 40 rows in shards of 8"):
        IndexSpec(40, 8, (2, 8), 4, segments=segments)


def test_deleted_rows_are_not_returned(index):
    root, blocks = index
    before = all_files(root)
    delete(root, [3, 17, 3])
    delete(root, [4])
    changed = before.items() - all_files(root).items()
    assert {str(path) for path, _ in changed} == {"index.json"}
    kept = [row for row in range(SPEC.rows) if row not in (3, 4, 17)]
    for precision in SPEC.precisions:
        with TokenStore.open(root, precision) as store:
            assert len(store) == 40
            assert store.row_ids().tolist() == kept
            for read in (store.fetch, store.fetch_records):
                with pytest.raises(DeletedRowError, match="17 and 1 more") as caught:
                    read([1, 17, 4, 17])
                assert caught.value.row_ids == (17, 4)
    with TokenStore.open(root) as store:
        assert same_bits(store.fetch(kept), blocks[kept])
    assert read_rows(root)["row_id"].to_pylist() == kept
    with pytest.raises(DeletedRowError, match="row 4 was deleted"):
        read_rows(root, [0, 4])
    assert verify_index(root) == []


@pytest.mark.parametrize("count", [1, 3, 7, 100])
def test_evenly_spaced_rows_leave_deleted_rows_out(index, count):
    root, _ = index
    delete(root, [0, 3, 17, 24, 25, 39])
    opened = CommittedIndex.open(root)
    live = live_rows(opened)
    expected = live[:: max(1, len(live) // count)]
    assert evenly_spaced_rows(opened, count).tolist() == expected.tolist()


def test_the_memory_of_evenly_spaced_rows_does_not_grow_with_the_rows(index):
    manifest = Manifest.load(index[0])
    spec = replace(manifest.spec, rows=20_000_000, shard_size=16_384, segments=())
    large = CommittedIndex(Directory(index[0]), replace(manifest, spec=spec))
    tracemalloc.start()
    try:
        assert 1024 <= len(evenly_spaced_rows(large, 1024)) < 2048
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_deletions_of_rows_that_cannot_be_deleted(index):
    root, _ = index
    delete(root, [5])
    result = delete_rows(root, [5, 6], dry_run=True)
    assert (result.deleted, result.already_deleted) == ((6,), 1)
    with pytest.raises(RowIdError, match="40 is out of range"):
        delete_rows(root, [40])
    assert not Layout(root).journal.exists()


def test_rollback_and_removal(index):
    root, blocks = index
    delete(root, [1])
    delete(root, [2])
    roll_back(root, 1)
    assert Manifest.load(root).snapshot.number == 3
    left = [0, *range(2, 40)]
    assert live_rows(CommittedIndex.open(root)).tolist() == left
    with TokenStore.open(root, snapshot=2) as store:
        assert same_bits(store.fetch([0, 3]), blocks[[0, 3]])
        with pytest.raises(DeletedRowError):
            store.fetch([2])
    for number, message in ((4, "0, 1, 2, 3"), (3, "current")):
        with pytest.raises(UsageError, match=message):
            roll_back(root, number)
    assert remove_snapshots(root, 2).snapshots == (0, 1)
    assert len(list((root / "manifest").glob("deleted-*"))) == 2
    removal = remove_snapshots(root, 1)
    assert (removal.snapshots, removal.files) == ((2,), 2)
    assert verify_index(root) == []
    assert live_rows(CommittedIndex.open(root)).tolist() == left


def test_tombstones_of_another_number_are_one_clear_error(index):
    root, _ = index
    manifest = delete(root, [1, 9])
    snapshot = replace(manifest.snapshot, deleted_rows=3)
    replace(manifest, snapshot=snapshot).write(Directory(root))
    for read in (TokenStore.open, read_rows):
        with pytest.raises(CorruptIndexError, match=r"manifest/deleted-"):
            read(root)
    assert verify_index(root)[0].code == "deleted-rows"
