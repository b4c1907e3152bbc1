"""Builds and retries of images in zips, compressed tars and Parquet files."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines import repair_index
from storage_formats import TokenStore, read_rows, verify_index
from tests.pipelines.conftest import run_build


@pytest.fixture
def packed(tmp_path, photos):
    """The ten photos in archives and Parquet files. Photo 07 is not an image."""
    folder = tmp_path / "packed"
    folder.mkdir()
    _pack(photos, folder)
    return folder


def _pack(photos: Path, folder: Path) -> None:
    names = sorted(path.name for path in photos.glob("*.jpg"))
    subprocess.run(
        ["tar", "-C", photos, "-czf", folder / "a.tar.gz", *names], check=True
    )
    subprocess.run(["zip", "-q", folder / "b.zip", *names], check=True, cwd=photos)
    rows = [{"bytes": (photos / name).read_bytes(), "path": name} for name in names]
    pq.write_table(
        pa.table({"image": rows, "label": range(len(rows))}),
        folder / "c.parquet",
        row_group_size=3,
    )


def test_packed_photos_give_the_tokens_of_files(tmp_path, photos, packed, config):
    run_build(config())
    request = replace(config(), sources=(str(packed),), out=tmp_path / "packed.edje")
    result = run_build(request)
    assert (result.inputs, result.indexed, result.failed) == (30, 27, 3)
    assert verify_index(request.out) == []
    files = TokenStore.open(config().out)
    rows = TokenStore.open(request.out)
    ids = [row for row in range(10) if row != 7]
    for start in (0, 10, 20):
        assert (rows.fetch([start + row for row in ids]) == files.fetch(ids)).all()
    table = read_rows(request.out)
    assert table["uri"].to_pylist()[22] == f"{packed}/c.parquet!image/2"
    assert table["label"].to_pylist()[20:] == list(range(10))
    # finished, and the sources are unchanged
    assert run_build(request).rows == 30


def test_damaged_tokens_of_members_are_encoded_again(tmp_path, packed, config):
    request = replace(config(), sources=(str(packed),), out=tmp_path / "packed.edje")
    run_build(request)
    for path in (request.out / "tokens/bf16").glob("c.*"):
        path.unlink()
    assert repair_index(request.out).left == ()
    assert verify_index(request.out) == []
