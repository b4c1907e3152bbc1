"""Collections as phones, NAS and data sets have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pillow_heif
import pytest
from PIL import Image

from edje_index.inputs.thumbnails import read_thumbnails
from edje_index.search.rows import IndexRows
from pipelines import append_index, update_index
from pipelines.sources import Patterns, open_sources
from storage_formats import EdjeError, UsageError, read_rows, verify_index
from storage_formats.format.manifest import CommittedIndex
from tests.pipelines.conftest import run_build, stop_after_one_shard, write_photo

JPEG_XL = b"\xff\x0a" + bytes(100)


def sideways(seed: int) -> Image.Image:
    """A photo of 24 x 32 pixels, red above and blue below, stored on its side."""
    pixels = np.zeros((32, 24, 3), np.uint8)
    pixels[:16, :, 0] = 255
    pixels[16:, :, 2] = 255
    pixels[:, :, 1] = seed
    return Image.fromarray(pixels).rotate(90, expand=True)


def write_phone(folder: Path, heics: int, jpegs: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    for number in range(heics):
        path = folder / f"DCIM/IMG_{number:04d}.HEIC"
        path.parent.mkdir(parents=True, exist_ok=True)
        pillow_heif.from_pillow(sideways(number)).save(path, exif=exif.tobytes())
    for number in range(jpegs):
        path = folder / f"camera/P{number:04d}.JPG"
        path.parent.mkdir(parents=True, exist_ok=True)
        sideways(number).save(path, "JPEG", exif=exif, quality=95)
    # live photos
    for number in range(5):
        (folder / f"DCIM/IMG_{number:04d}.MOV").write_bytes(b"\0\0\0\x14ftypqt  ")
    write_photo(folder / "DCIM/@eaDir/IMG_0001.HEIC/SYNOPHOTO_THUMB_XL.jpg", 1)
    write_photo(folder / "#recycle/old.jpg", 2)
    write_photo(folder / ".thumbnails/1.jpg", 3)
    write_photo(folder / "camera/._P0001.JPG", 4)
    (folder / "camera/Thumbs.db").write_bytes(b"\xd0\xcf\x11\xe0")
    (folder / "DCIM/IMG_9999.HEIC").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0broken")


@pytest.mark.parametrize(
    ("heics", "jpegs"), [(6, 4), pytest.param(100, 20, marks=pytest.mark.slow)]
)
def test_a_folder_of_a_phone_and_a_nas_is_indexed_upright(
    config, tmp_path, heics, jpegs
):
    write_phone(tmp_path / "phone", heics, jpegs)
    request = config(sources=str(tmp_path / "phone"), shard_size=64)
    result = run_build(request)
    assert (result.indexed, result.failed) == (heics + jpegs, 1)
    assert dict(result.ignored) == {
        "(hidden)": 4,
        ".db": 1,
        ".mov": 5,
    }
    rows = read_rows(request.out, columns=["row_id", "status", "width", "height"])
    row_ids = []
    for row in rows.to_pylist():
        if row["status"] == "indexed":
            assert (row["width"], row["height"]) == (24, 32)
            row_ids.append(row["row_id"])
    shown = read_thumbnails(request.out, row_ids)
    assert len(shown) == heics + jpegs
    for thumbnail in shown:
        assert thumbnail.jpeg is not None, thumbnail.problem
    (first,) = read_thumbnails(request.out, row_ids[:1])
    path = tmp_path / "thumbnail.jpg"
    path.write_bytes(first.jpeg or b"")
    with Image.open(path) as image:
        top, bottom = (np.asarray(image)[row].mean(axis=0) for row in (3, -4))
    assert top[0] > 200 > bottom[0]
    assert bottom[2] > 200 > top[2]


def test_formats_that_are_not_decoded_count_as_no_failure(config, photos):
    for number in range(4):
        (photos / f"x{number}.jxl").write_bytes(JPEG_XL)
    (photos / "07.jpg").unlink()
    events: list[Any] = []
    result = run_build(config(max_failed=0), events.append)
    assert (result.failed, result.failed_by_reason) == (4, {"unsupported-image": 4})
    texts = [text for event in events if (text := getattr(event, "text", ""))]
    (line,) = [text for text in texts if "does not decode" in text]
    assert "4 files" in line
    assert "JPEG XL" in line
    assert "djxl" in line
    # other failures count as before
    (photos / "07.jpg").write_bytes(b"no photo")
    with pytest.raises(EdjeError, match="1 of"):
        run_build(config(max_failed=0, out=config().out.with_name("other")))


FILES = ("a.jpg", "b.png", "raw/c.jpg", "raw/deep/d.jpg", "keep/e.jpg", "f [1].jpg")


@pytest.mark.parametrize(
    ("include", "exclude", "used", "unmatched"),
    [
        ([], ["raw/"], {"a.jpg", "b.png", "keep/e.jpg", "f [1].jpg"}, []),
        ([], ["/c.jpg"], {*FILES}, ["/c.jpg"]),
        ([], ["c.jpg"], {*FILES} - {"raw/c.jpg"}, []),
        ([], ["*.jpg", "!e.jpg"], {"b.png", "keep/e.jpg"}, []),
        (["raw/**"], [], {"raw/c.jpg", "raw/deep/d.jpg"}, []),
        (["raw/"], ["deep"], {"raw/c.jpg"}, []),
        (["*.gif"], [], set(), ["*.gif"]),
        ([], ["f \\[1\\].jpg", "*.tiff"], {*FILES} - {"f [1].jpg"}, ["*.tiff"]),
    ],
)
def test_patterns_select_inputs_as_gitignore_does(
    tmp_path, include, exclude, used, unmatched
):
    for name in FILES:
        write_photo(tmp_path / "photos" / name, 1)
    patterns = Patterns(include, exclude)
    (source,) = open_sources([str(tmp_path / "photos")], patterns=patterns)
    refs = [ref.uri for ref in source.iter_inputs()]
    folder = f"{tmp_path}/photos/"
    assert {uri.removeprefix(folder) for uri in refs} == used
    assert list(patterns.unmatched) == unmatched
    assert source.ignored.get("(excluded)", 0) == len(FILES) - len(used)


def test_the_patterns_of_a_build_hold_for_later_changes(config, photos):
    events: list[Any] = []
    request = config(exclude=["0[0-4].jpg", "*.gif"])
    result = run_build(request, events.append)
    assert result.inputs == 5
    texts = [text for event in events if (text := getattr(event, "text", ""))]
    assert "no input matches the pattern '*.gif'" in texts
    assert run_build(request).already_finished
    with pytest.raises(UsageError, match="built with other settings: exclude"):
        run_build(config())
    write_photo(photos / "more/00.jpg", 90)
    write_photo(photos / "more/11.jpg", 91)
    assert append_index(request.out, photos / "more", engine="inline").inputs == 1
    result = update_index(request.out, engine="inline")
    assert (result.inputs, result.vanished) == (6, 0)
    with pytest.raises(UsageError, match="not valid"):
        run_build(config(exclude=["!"], out=request.out.with_name("third")))


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_the_table_of_an_image_folder_gives_columns(config, photos, kind):
    write_photo(photos / "train/0.jpg", 30)
    rows = [
        {"file_name": "00.jpg", "text": "a dog", "stars": 3},
        {"file_name": "train/0.jpg", "text": "a lake", "stars": 4},
        {"file_name": "gone.jpg", "text": "nothing", "stars": 5},
    ]
    lines = [json.dumps(row) for row in rows]
    if kind == "csv":
        lines = ["file_name,text,stars"]
        lines += [",".join(map(str, row.values())) for row in rows]
    (photos / f"metadata.{kind}").write_text("\n".join(lines))
    (photos / "00.txt").write_text("a caption beside")
    events: list[Any] = []
    request = config()
    assert run_build(request, events.append).ignored["(metadata without a file)"] == 1
    table = read_rows(request.out, columns=["uri", "text", "stars", "captions"])
    found = {Path(row.pop("uri")).name: row for row in table.to_pylist()}
    assert found["00.jpg"] == {
        "text": "a dog",
        "stars": 3,
        "captions": ["a caption beside"],
    }
    assert found["0.jpg"] == {"text": "a lake", "stars": 4, "captions": None}
    assert found["01.jpg"]["text"] is None
    texts = [text for event in events if (text := getattr(event, "text", ""))]
    assert "captions are in the column captions and the column text" in texts


@pytest.mark.parametrize("name", ["caption", "text", "words"])
def test_a_build_says_which_column_holds_the_captions(config, photos, name):
    path = photos / "list.jsonl"
    path.write_text(json.dumps({"path": "00.jpg", name: "a dog"}) + "\n")
    events: list[Any] = []
    request = config(sources=str(path))
    run_build(request, events.append)
    text = " ".join(text for event in events if (text := getattr(event, "text", "")))
    described = IndexRows(CommittedIndex.open(request.out)).described(np.array([0]))
    if name == "words":
        assert "no captions" in text
        assert described[0][1] == {}
    else:
        assert f"captions are in the column {name}" in text
        assert described[0][1] == {name: "a dog"}


def test_a_corrected_list_is_read_again(config, photos):
    path = photos / "list.txt"
    path.write_text("".join(f"wrong/{name}.jpg\n" for name in range(6)))
    request = config(sources=str(path))
    with pytest.raises(EdjeError, match=rf"could be indexed.*correct {path}"):
        run_build(request)
    path.write_text("".join(f"0{name}.jpg\n" for name in range(3)))
    assert run_build(config(sources=str(path), dry_run=True)).inputs == 3
    result = run_build(request)
    assert (result.inputs, result.indexed) == (3, 3)
    assert verify_index(request.out) == []


def test_a_list_that_changes_in_mid_build_is_told(config, photos):
    path = photos / "list.txt"
    path.write_text("".join(f"0{name}.jpg\n" for name in range(6)))
    request = config(sources=str(path))
    stop_after_one_shard(run_build, request)
    path.write_text("08.jpg\n")
    events: list[Any] = []
    assert run_build(request, events.append).inputs == 6
    texts = [text for event in events if (text := getattr(event, "text", ""))]
    assert any(f"{path} has changed since" in text for text in texts)
