"""The lock of an index: one holder, and no lock file of another process removed."""

from __future__ import annotations

import os

import pytest

from pipelines import delete_rows
from storage_formats.change import locked
from storage_formats.errors import EdjeError
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.verify import verify_index
from storage_formats.writing.publish import remove_build
from tests.conftest import write_random_index


def test_two_drivers_never_share_an_index(tmp_path):
    root = tmp_path / "index"
    with locked(root):
        with pytest.raises(EdjeError, match=f"process {os.getpid()} on .* is working on"), locked(root):
            pass
        assert root.exists()
    assert not root.exists()
    with locked(root):
        pass


def test_an_ending_job_leaves_the_lock_of_its_successor(tmp_path):
    root = tmp_path / "index"
    root.mkdir()
    first, second = locked(root), locked(root)
    first.__enter__()
    Layout(root).lock.unlink()  # as if the whole directory was removed while the first job ran
    second.__enter__()
    first.__exit__(None, None, None)
    assert Layout(root).lock.exists()
    with pytest.raises(EdjeError, match="is working on"), locked(root):
        pass
    second.__exit__(None, None, None)
    assert not Layout(root).build.exists()


def test_removing_the_build_folder_keeps_the_lock(tmp_path):
    layout = Layout(tmp_path / "index")
    with locked(layout.root):
        layout.staging.mkdir()
        layout.plan.write_text("{}")
        remove_build(layout)
        assert [path.name for path in layout.build.iterdir()] == ["lock"]
    assert not layout.root.exists()


def test_directories_of_a_new_index_survive_a_loss_of_power(tmp_path, monkeypatch):
    flushed = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (flushed.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    with locked(tmp_path / "a/b/index"):
        pass
    assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a/b")} <= set(flushed)


@pytest.mark.parametrize("is_killed", [True, False])
def test_the_temporary_files_of_a_killed_process_are_removed(tmp_path, is_killed):
    layout = Layout(tmp_path)
    tables = [layout.tombstones(1), layout.shard_table(1), layout.row_map(1)]
    written = [*tables, layout.snapshot(0), layout.manifest, layout.embeddings / "zarr.json"]
    temporary = [path.with_name(f".{path.name}.{'0' * 32}") for path in written] + [layout.ann / "index.faiss.partial"]
    layout.build.mkdir()
    if is_killed:
        layout.lock.write_text("1234 on host")
    for path in (*written, *temporary):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    with locked(tmp_path):
        assert [path.exists() for path in temporary] == [not is_killed] * len(temporary)
    assert all(path.exists() for path in written)


@pytest.mark.parametrize("stopped", [False, True])
def test_files_of_a_killed_change_are_removed(tmp_path, stopped):
    layout = Layout(tmp_path / "index")
    write_random_index(layout.root, IndexSpec(8, 4, (2, 8), embed_dim=4))
    strays = [layout.root / "manifest/deleted-00c0ffee.bin", layout.rows_file(7)]
    for path in (*strays, layout.lock):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"left")
    if stopped:
        layout.compaction.write_text("{}")
    delete_rows(layout.root, [1])
    assert [path.exists() for path in strays] == [stopped] * 2
    assert verify_index(layout.root) == []
