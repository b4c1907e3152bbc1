"""Copies of an index between directories: what is copied, resumed, and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipelines import JobStopped, copy_index, delete_rows
from storage_formats import CorruptIndexError, IndexSpec, TokenStore, UsageError, verify_index
from storage_formats.extras import MissingExtraError
from tests.conftest import write_random_index

SPEC = IndexSpec(rows=21, shard_size=8, block_shape=(2, 8), embed_dim=4, precisions=("bf16", "fp8"))


@pytest.fixture
def index(tmp_path):
    write_random_index(tmp_path / "photos.edje", SPEC, failed=frozenset({5}))
    delete_rows(tmp_path / "photos.edje", rows=[3])
    return tmp_path / "photos.edje"


def contents(root: Path) -> dict[str, bytes]:
    """The bytes of every file of an index, without earlier snapshots."""
    files = (path for path in root.rglob("*") if path.is_file() and "snapshots" not in path.parts)
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


def test_a_copy_has_the_same_files(index, tmp_path):
    result = copy_index(index, tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(index)
    assert verify_index(tmp_path / "copy") == []
    assert (result.snapshot, result.copied_bytes) == (1, sum(map(len, contents(index).values())) - _size(index))
    assert (index / "rows/00000000.parquet").stat().st_nlink == 1  # erasure overwrites files in place


def _size(index: Path) -> int:
    """Bytes of the files that begin_index writes, and of index.json."""
    return sum(path.stat().st_size for path in (*index.rglob("zarr.json"), index / "index.json"))


def test_an_earlier_snapshot_can_be_copied(index, tmp_path):
    copy_index(index, tmp_path / "copy", snapshot=0)
    assert len(TokenStore.open(tmp_path / "copy").fetch([3])) == 1
    assert verify_index(tmp_path / "copy") == []


def test_a_stopped_copy_is_resumed(index, tmp_path):
    calls = iter(range(100))
    with pytest.raises(JobStopped, match=r"stopped after \d+ of \d+ files"):
        copy_index(index, tmp_path / "copy", should_stop=lambda: next(calls) > 0)
    assert not (tmp_path / "copy").exists()
    whole = copy_index(index, tmp_path / "whole")
    rest = copy_index(index, tmp_path / "copy")
    assert 0 < rest.copied_files < whole.copied_files
    assert contents(tmp_path / "copy") == contents(index)


def test_damage_is_not_copied(index, tmp_path):
    path = index / "tokens/bf16/c.1.0.0"
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(CorruptIndexError, match=r"c\.1\.0\.0 is not the file that was committed"):
        copy_index(index, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_what_cannot_be_copied_is_refused(index, tmp_path, run):
    with pytest.raises(UsageError, match="there is no index"):
        copy_index(tmp_path / "nothing", tmp_path / "copy")
    with pytest.raises(UsageError, match="exists already"):
        copy_index(index, index)
    code, _, err = run("copy", index, "https://example.com/photos.edje")
    assert (code, err.splitlines()[-1]) == (
        2,
        "error: OUT: https://example.com/photos.edje can only be read; write to a URL that begins with s3://, gs:// or az://",
    )
    code, _, err = run("copy", index, tmp_path / "copy", "--snapshot", 9)
    assert code == 2
    assert "--snapshot: " in err


def test_the_command_prints_what_it_copied(index, tmp_path, run):
    code, out, _ = run("copy", index, tmp_path / "copy", "--json")
    assert code == 0
    assert json.loads(out)["snapshot"] == 1
    code, out, _ = run("copy", index, tmp_path / "other")
    assert f"{tmp_path / 'other'}: snapshot 1 in " in out


def test_a_url_without_obstore_names_the_extra(index, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    monkeypatch.setitem(__import__("sys").modules, "obstore.store", None)
    with pytest.raises(MissingExtraError, match=r"edje-index\[remote\]"):
        copy_index(index, "s3://bucket/photos.edje")
