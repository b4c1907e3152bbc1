from __future__ import annotations

import pytest

from storage_formats.format import committed_files
from storage_formats.format.committed_files import CommittedFiles
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.manifest import CommittedIndex, Manifest
from storage_formats.format.shard_table import read_shard_table
from tests.conftest import write_random_index

SPEC = IndexSpec(rows=90, shard_size=10, block_shape=(1, 2), embed_dim=4)


@pytest.mark.parametrize("kept", [0, 3, 1000])
def test_every_entry_is_that_of_the_shard_table(tmp_path, monkeypatch, kept):
    """However many entries stay in memory."""
    monkeypatch.setattr(committed_files, "_KEPT_ENTRIES", kept)
    write_random_index(tmp_path / "index", SPEC)
    index, layout = CommittedIndex.open(tmp_path / "index"), Layout(tmp_path / "index")
    lines = read_shard_table(layout.root, Manifest.load(layout.root).shard_table)
    table = {file.path: file for _, file in lines}
    rows_files = CommittedFiles(index, layout.rows_file)
    for shards in ([2], [7, 2, 5], [8, 0], range(9), [3, 3]):
        assert rows_files.files(shards) == {shard: table[f"rows/{shard:08d}.parquet"] for shard in shards}


def test_entries_that_are_kept_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(committed_files, "_KEPT_ENTRIES", 3)
    write_random_index(tmp_path / "index", SPEC)
    rows_files = CommittedFiles(CommittedIndex.open(tmp_path / "index"), Layout(tmp_path / "index").rows_file)
    for shard in range(9):
        rows_files.files([shard])
    assert len(rows_files._files) <= 3
