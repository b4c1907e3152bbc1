"""Snapshots on disk: segments, tombstones, rollback, removal, and what readers of
other kinds see.
"""

from __future__ import annotations

import contextlib
import json
import os
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import zarr

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
from storage_formats.format.checksum import json_checksum
from storage_formats.format.directory import Directory
from storage_formats.format.layout import Layout, Segment
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.tombstones import evenly_spaced_rows, live_rows
from tests.conftest import same_bits, write_random_index

SPEC = IndexSpec(40, 8, (2, 8), 4, precisions=("bf16", "fp8"))


@pytest.fixture
def index(tmp_path):
    root = tmp_path / "index"
    return root, write_random_index(root, SPEC)


def delete(root, rows):
    delete_rows(root, rows)
    return Manifest.load(root)


@pytest.mark.parametrize(
    "segments",
    [
        (Segment(4, 36),),
        (Segment(-8, 48),),
        (Segment(0, 10), Segment(12, 28)),
        (Segment(0, 20), Segment(16, 24)),
        (Segment(0, 8),),
    ],
)
def test_segments_that_do_not_fit_are_refused(segments):
    with pytest.raises(UsageError, match="do not fit 40 rows in shards of 8"):
        IndexSpec(40, 8, (2, 8), 4, segments=segments)


def test_deleted_rows_are_not_returned(index):
    root, blocks = index
    files = {
        path: path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.name != "index.json"
    }
    delete(root, [3, 17, 3])
    delete(root, [4])
    assert {path: path.read_bytes() for path in files} == files
    kept = [row for row in range(SPEC.rows) if row not in (3, 4, 17)]
    for precision in SPEC.precisions:
        with TokenStore.open(root, precision) as store:
            assert len(store) == 40
            assert store.row_ids().tolist() == kept
            for read in (store.fetch, store.fetch_records):
                with pytest.raises(
                    DeletedRowError, match="row 17 and 1 more were deleted"
                ) as caught:
                    read([1, 17, 4, 17])
                assert caught.value.row_ids == (17, 4)
                assert isinstance(caught.value, IndexError)
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
    assert live_rows(CommittedIndex.open(root)).tolist() == [0, *range(2, 40)]
    with TokenStore.open(root, snapshot=2) as store:
        assert same_bits(store.fetch([0, 3]), blocks[[0, 3]])
        with pytest.raises(DeletedRowError):
            store.fetch([2])
    with pytest.raises(UsageError, match="snapshot 4; choose one of: 0, 1, 2, 3"):
        roll_back(root, 4)
    with pytest.raises(UsageError, match="3 is the current snapshot"):
        roll_back(root, 3)
    assert remove_snapshots(root, 2).snapshots == (0, 1)
    assert len(list((root / "manifest").glob("deleted-*"))) == 2
    removal = remove_snapshots(root, 1)
    assert (removal.snapshots, removal.files) == ((2,), 2)
    assert verify_index(root) == []
    assert live_rows(CommittedIndex.open(root)).tolist() == [0, *range(2, 40)]


def test_a_stock_reader_sees_all_rows(index):
    root, blocks = index
    delete(root, [1])
    stored = zarr.open_array(root / "tokens" / "bf16", mode="r")[:]
    np.testing.assert_array_equal(stored, blocks.view(np.uint16))


@pytest.mark.parametrize("harm", ["missing", "flipped", "short", "other count"])
def test_damaged_tombstones_are_one_clear_error(index, harm):
    root, _ = index
    path = root / delete(root, [1, 9]).snapshot.deleted.path
    if harm == "missing":
        path.unlink()
    elif harm == "flipped":
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    elif harm == "short":
        os.truncate(path, 9)
    else:
        value = json.loads((root / "index.json").read_text())
        value["snapshot"]["deleted_rows"] = 3
        (root / "index.json").write_text(
            json.dumps({**value, "crc32c": json_checksum(value)})
        )
    for read in (TokenStore.open, read_rows):
        with pytest.raises(CorruptIndexError, match=path.name):
            read(root)
    assert [problem.code for problem in verify_index(root)][:1] in (
        ["deleted-rows"],
        ["missing-file"],
        ["checksum"],
        ["length"],
    )


@pytest.mark.parametrize(
    "member", ["snapshot", "number", "next_shard", "segments", "deleted", "change"]
)
@pytest.mark.parametrize("value", [-1, 1 << 40, "x", [1], {"path": 1}])
def test_hostile_members_are_one_clear_error(index, member, value):
    root, _ = index
    delete(root, [1])
    members = json.loads((root / "index.json").read_text())
    part = members if member in members else members["snapshot"]
    part[member] = value
    (root / "index.json").write_text(
        json.dumps({**members, "crc32c": json_checksum(members)})
    )
    with contextlib.suppress(CorruptIndexError, UsageError):
        TokenStore.open(root).fetch([0])
