"""The lock of an index: one holder, and no lock file of another process removed."""

from __future__ import annotations

import os

import pytest

from storage_formats.change import locked, remove_build
from storage_formats.errors import EdjeError
from storage_formats.format.layout import Layout


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
        layout.journal.write_text("{}")
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
