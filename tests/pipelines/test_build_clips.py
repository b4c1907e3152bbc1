"""Clips as inputs: one row per clip, the same rules for damaged files, and the
number of frames in the plan.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from edje_index.inputs.thumbnails import read_thumbnails
from pipelines import append_index, update_index
from storage_formats import TokenStore, read_rows, verify_index
from tests.edje_index.clip_cases import KINDS, clip, panned, photo
from tests.pipelines.conftest import run_build


def ignore(event: object) -> None:
    """Take no notice of an event."""


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
    return replace(config(frames=3, max_failed=1.0), sources=(str(clips),))


def by_name(root: Path) -> dict[str, dict[str, Any]]:
    return {Path(row["uri"]).name: row for row in read_rows(root).to_pylist()}


def test_one_row_per_clip(request_clips, monkeypatch):
    result = run_build(request_clips, ignore)
    assert (result.inputs, result.indexed, result.duplicates, result.failed) == (
        7,
        5,
        0,
        2,
    )
    assert result.failed_by_reason == {"not-an-image": 1, "corrupt": 1}
    assert verify_index(request_clips.out) == []
    rows = by_name(request_clips.out)
    assert list(rows) == [
        "a.avi",
        "a.mkv",
        "a.mp4",
        "a.webm",
        "b.mp4",
        "c.mov",
        "still.png",
    ]
    assert (
        rows["a.mkv"]["width"],
        rows["a.mkv"]["height"],
        rows["a.mkv"]["scene"],
    ) == (96, 64, "a cat")
    # thumbnails have a smaller limit of their own
    monkeypatch.setattr("edje_index.images.clips.MAX_CLIP_PIXELS", 0)
    assert [
        image.jpeg is None for image in read_thumbnails(request_clips.out, range(7))
    ] == 4 * [False] + [
        True,
        True,
        False,
    ]


def test_sources_of_all_kinds(clips, request_clips, tmp_path):
    run_build(request_clips, ignore)
    names = sorted(path.name for path in clips.iterdir())
    (tmp_path / "packed").mkdir()
    subprocess.run(
        ["tar", "-C", clips, "-cf", tmp_path / "packed/a.tar", *names], check=True
    )
    subprocess.run(
        ["zip", "-q", tmp_path / "packed/b.zip", *names], check=True, cwd=clips
    )
    (tmp_path / "list.csv").write_text(
        "path\n" + "".join(f"{clips}/{name}\n" for name in names if name[0] == "a")
    )
    sources = (
        str(tmp_path / "packed"),
        str(tmp_path / "list.csv"),
        str(clips / "a.mp4"),
    )
    packed = replace(request_clips, sources=sources, out=tmp_path / "packed.edje")
    result = run_build(packed, ignore)
    # the list names a.json, too
    assert (result.inputs, result.indexed, result.failed) == (20, 15, 5)
    files = TokenStore.open(request_clips.out)
    stored = TokenStore.open(packed.out)
    for start, row_ids in ((0, [0, 1, 2, 3, 6]), (7, [0, 1, 2, 3, 6])):
        np.testing.assert_array_equal(
            stored.fetch([start + row for row in row_ids]), files.fetch(row_ids)
        )
    assert by_name(packed.out)["a.tar!a.mp4"]["scene"] == "a cat"


def test_changes_keep_the_number_of_frames(request_clips, clips, tmp_path):
    whole = replace(request_clips, out=tmp_path / "whole.edje", shard_size=8)
    first = tmp_path / "first"
    first.mkdir()
    for name in ("a.mp4", "b.mp4"):
        shutil.copy(clips / name, first)
    index = replace(whole, sources=(str(first),), out=tmp_path / "grown.edje")
    run_build(index, ignore)
    appended = append_index(index.out, clips, engine="inline", max_failed=1.0)
    assert (
        appended.inputs,
        appended.indexed,
        appended.duplicates,
        appended.failed,
    ) == (7, 4, 2, 1)
    run_build(whole, ignore)
    _same_blocks(
        index.out, whole.out, ["a.avi", "a.mkv", "a.mp4", "a.webm", "still.png"]
    )
    (first / "b.mp4").write_bytes(clip(panned(9)))
    retried = update_index(index.out, retry_failed=True, engine="inline")
    # b.mp4 of `clips` is still cut, and c.mov is no clip
    assert (retried.new, retried.failed) == (1, 2)
    (clips / "a.avi").unlink()
    (clips / "c.mov").write_bytes(clip(panned(5), KINDS["mov"]))
    updated = update_index(index.out, engine="inline", on_event=ignore)
    # b.mp4 of `clips` is still cut
    assert (updated.vanished, updated.failed, updated.changed) == (1, 1, 1)


def _same_blocks(left: Path, right: Path, names: list[str]) -> None:
    blocks = []
    for root in (left, right):
        rows = by_name(root)
        blocks.append(
            TokenStore.open(root).fetch([rows[name]["row_id"] for name in names])
        )
    np.testing.assert_array_equal(*blocks)
