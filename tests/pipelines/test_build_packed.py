"""Builds and retries of images in archives and Parquet files, and of clips."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from edje_index.inputs.thumbnails import read_thumbnails
from pipelines import append_index, repair_index, update_index
from storage_formats import TokenStore, read_rows, verify_index
from tests.edje_index.clip_cases import KINDS, clip, panned, photo
from tests.pipelines.archives import write_zip
from tests.pipelines.conftest import run_build


@pytest.fixture
def packed(tmp_path, photos):
    """The ten photos in archives and Parquet files. Photo 07 is not an image."""
    folder = tmp_path / "packed"
    folder.mkdir()
    _pack(photos, folder)
    return folder


def _pack(photos, folder):
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
    request = config(sources=(str(packed),), out=tmp_path / "packed.edje")
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
    request = config(sources=(str(packed),), out=tmp_path / "packed.edje")
    run_build(request)
    for path in (request.out / "tokens/bf16").glob("c.*"):
        path.unlink()
    assert repair_index(request.out).left == ()
    assert verify_index(request.out) == []


# Clips

NAMES = ["a.avi", "a.mkv", "a.mp4", "a.webm", "still.png"]


@pytest.fixture
def clips(tmp_path):
    """Six clips, two of them damaged, a photo, a text file, and the metadata of a
    clip.
    """
    folder = tmp_path / "clips"
    folder.mkdir()
    for name in ("mp4", "webm", "mkv", "avi"):
        (folder / f"a.{name}").write_bytes(clip(panned(12), KINDS[name]))
    (folder / "a.json").write_text('{"scene": "a cat"}')
    (folder / "b.mp4").write_bytes(clip(panned(9))[:-200])
    (folder / "c.mov").write_bytes(b"no clip")
    (folder / "d.wmv").write_bytes(b"not listed")
    Image.fromarray(photo()).save(folder / "still.png")
    return folder


@pytest.fixture
def request_clips(config, clips):
    """Makes a request to build `clips`, with changes."""
    settings = {"frames": 3, "max_failed": 1.0, "sources": (str(clips),)}
    return lambda **changes: config(**{**settings, **changes})


def by_name(root):
    return {Path(row["uri"]).name: row for row in read_rows(root).to_pylist()}


def test_one_row_per_clip(request_clips, monkeypatch):
    result = run_build(request_clips())
    assert (result.inputs, result.indexed, result.duplicates) == (7, 5, 0)
    assert result.failed_by_reason == {"not-an-image": 1, "corrupt": 1}
    assert verify_index(request_clips().out) == []
    rows = by_name(request_clips().out)
    assert rows.keys() == {*NAMES, "b.mp4", "c.mov"}
    clip = rows["a.mkv"]
    assert (clip["width"], clip["height"], clip["scene"]) == (96, 64, "a cat")
    # thumbnails have a smaller limit of their own
    monkeypatch.setattr("edje_index.images.clips.MAX_CLIP_PIXELS", 0)
    thumbnails = read_thumbnails(request_clips().out, range(7))
    shown = [each.jpeg is not None for each in thumbnails]
    assert shown == [True] * 4 + [False] * 2 + [True]


def test_clips_in_archives_have_the_tokens_of_files(clips, request_clips, tmp_path):
    run_build(request_clips())
    members = {path.name: path.read_bytes() for path in sorted(clips.iterdir())}
    packed = request_clips(
        sources=(str(write_zip(tmp_path / "b.zip", members)), str(clips / "a.mp4")),
        out=tmp_path / "packed.edje",
    )
    result = run_build(packed)
    assert (result.inputs, result.indexed, result.failed) == (8, 6, 2)
    assert by_name(packed.out)["b.zip!a.mp4"]["scene"] == "a cat"
    _same_blocks(packed.out, request_clips().out, "b.zip!", NAMES)


def test_changes_keep_the_number_of_frames(request_clips, clips, tmp_path):
    whole = request_clips(out=tmp_path / "whole.edje")
    first = tmp_path / "first"
    first.mkdir()
    for name in ("a.mp4", "b.mp4"):
        shutil.copy(clips / name, first)
    index = request_clips(sources=(str(first),), out=tmp_path / "grown.edje")
    run_build(index)
    added = append_index(index.out, clips, engine="inline", max_failed=1.0)
    assert (added.indexed, added.duplicates, added.failed) == (4, 2, 1)
    run_build(whole)
    _same_blocks(index.out, whole.out, "", NAMES)
    (first / "b.mp4").write_bytes(clip(panned(9)))
    retried = update_index(index.out, retry_failed=True, engine="inline")
    # b.mp4 of `clips` is still cut, and c.mov is no clip
    assert (retried.new, retried.failed) == (1, 2)
    (clips / "a.avi").unlink()
    (clips / "c.mov").write_bytes(clip(panned(5), KINDS["mov"]))
    updated = update_index(index.out, engine="inline")
    # b.mp4 of `clips` is still cut
    assert (updated.vanished, updated.failed, updated.changed) == (1, 1, 1)


def _same_blocks(left, right, prefix, names):
    """The rows `prefix + name` of the left index have the tokens of `name` in the
    right one.
    """
    blocks = []
    for root, start in ((left, prefix), (right, "")):
        rows = by_name(root)
        row_ids = [rows[start + name]["row_id"] for name in names]
        blocks.append(TokenStore.open(root).fetch(row_ids))
    np.testing.assert_array_equal(*blocks)
