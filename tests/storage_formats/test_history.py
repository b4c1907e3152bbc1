"""The history of an index is bounded, and what a change costs does not grow with it."""

from __future__ import annotations

import pytest

from pipelines import delete_rows, quantize_index
from pipelines.jobs.snapshots import history, remove_snapshots
from storage_formats import verify_index
from storage_formats.format.layout import IndexSpec, Layout
from tests.conftest import all_files, write_random_index

LEAST_SNAPSHOTS = 4
MOST_SNAPSHOTS = 8


@pytest.fixture
def index(tmp_path, monkeypatch):
    monkeypatch.setattr("storage_formats.change.LEAST_SNAPSHOTS", LEAST_SNAPSHOTS)
    monkeypatch.setattr("storage_formats.change.MOST_SNAPSHOTS", MOST_SNAPSHOTS)
    write_random_index(tmp_path, IndexSpec(40, 8, (2, 8), 4))
    return tmp_path


def test_the_oldest_snapshots_and_their_files_go_by_themselves(index):
    layout = Layout(index)
    for row in range(MOST_SNAPSHOTS - 1):
        delete_rows(index, rows=[row])
    assert len(history(index)) == MOST_SNAPSHOTS
    delete_rows(index, rows=[20])
    numbers = [entry.snapshot for entry in history(index)]
    assert numbers == [*range(MOST_SNAPSHOTS + 1 - LEAST_SNAPSHOTS, MOST_SNAPSHOTS + 1)]
    assert len(list((index / "snapshots").iterdir())) == LEAST_SNAPSHOTS - 1
    assert len(list((index / "manifest").glob("deleted-*"))) == LEAST_SNAPSHOTS
    assert verify_index(index) == []
    # the files of a dropped precision stay while an earlier snapshot names them
    quantize_index(index, ["fp8"], drop=["bf16"])
    for row in range(MOST_SNAPSHOTS):
        assert layout.token_shard("bf16", 0).exists()
        delete_rows(index, rows=[21 + row])
        if len(history(index)) == LEAST_SNAPSHOTS:
            break
    assert not layout.token_shard("bf16", 0).exists()
    assert verify_index(index) == []
    before = all_files(index)
    assert remove_snapshots(index, None).files == 0
    assert all_files(index) == before


def test_a_change_that_changes_nothing_reads_no_earlier_snapshot(index, monkeypatch):
    for row in (1, 2):
        delete_rows(index, rows=[row])
    before = all_files(index)
    monkeypatch.setattr("storage_formats.change.remove_what_is_not_kept", None)
    assert delete_rows(index, rows=[1]).snapshot == 2
    assert all_files(index) == before
