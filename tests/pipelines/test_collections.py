"""Collections as phones, NAS and data sets have them."""

import io
import json

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


def build_and_listen(request):
    """The result and the messages of a build."""
    events = []
    result = run_build(request, events.append)
    return result, [event.text for event in events if hasattr(event, "text")]


def sideways(seed):
    """A photo of 24 x 32 pixels, red above and blue below, stored on its side."""
    pixels = np.zeros((32, 24, 3), np.uint8)
    pixels[:16, :, 0] = 255
    pixels[16:, :, 2] = 255
    pixels[:, :, 1] = seed
    return Image.fromarray(pixels).rotate(90, expand=True)


def write_phone(folder, heics, jpegs):
    exif = Image.Exif()
    exif[0x0112] = 6
    (folder / "DCIM").mkdir(parents=True)
    (folder / "camera").mkdir()
    for number in range(heics):
        path = folder / f"DCIM/IMG_{number:04d}.HEIC"
        pillow_heif.from_pillow(sideways(number)).save(path, exif=exif.tobytes())
    for number in range(jpegs):
        path = folder / f"camera/P{number:04d}.JPG"
        sideways(number).save(path, "JPEG", exif=exif, quality=95)
    # live photos
    for number in range(5):
        (folder / f"DCIM/IMG_{number:04d}.MOV").write_bytes(b"\0\0\0\x14ftypqt  ")
    for name in (
        "DCIM/@eaDir/IMG_0001.HEIC/SYNOPHOTO_THUMB_XL.jpg",
        "#recycle/old.jpg",
        ".thumbnails/1.jpg",
        "camera/._P0001.JPG",
    ):
        write_photo(folder / name, 1)
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
    rows = read_rows(request.out).to_pylist()
    indexed = [row for row in rows if row["status"] == "indexed"]
    assert {(row["width"], row["height"]) for row in indexed} == {(24, 32)}
    shown = read_thumbnails(request.out, [row["row_id"] for row in indexed])
    for thumbnail in shown:
        with Image.open(io.BytesIO(thumbnail.jpeg)) as image:
            top, bottom = (np.asarray(image)[row].mean(axis=0) for row in (3, -4))
        assert top[0] > 200 > bottom[0]
        assert bottom[2] > 200 > top[2]


def test_formats_that_are_not_decoded_count_as_no_failure(config, photos):
    for number in range(4):
        (photos / f"x{number}.jxl").write_bytes(JPEG_XL)
    (photos / "07.jpg").unlink()
    result, texts = build_and_listen(config(max_failed=0))
    assert (result.failed, result.failed_by_reason) == (4, {"unsupported-image": 4})
    (line,) = [text for text in texts if "does not decode" in text]
    for part in ("4 files", "JPEG XL"):
        assert part in line
    # other failures count as before
    (photos / "07.jpg").write_bytes(b"no photo")
    with pytest.raises(EdjeError, match="1 of"):
        run_build(config(max_failed=0, out=config().out.with_name("other")))


FILES = ("a.jpg", "b.png", "raw/c.jpg", "raw/deep/d.jpg", "keep/e.jpg", "f [1].jpg")


@pytest.mark.parametrize(
    ("include", "exclude", "used", "unmatched"),
    [
        ([], ["/c.jpg"], {*FILES}, ["/c.jpg"]),
        ([], ["*.jpg", "!e.jpg"], {"b.png", "keep/e.jpg"}, []),
        (["raw/**"], [], {"raw/c.jpg", "raw/deep/d.jpg"}, []),
        (["raw/"], ["deep"], {"raw/c.jpg"}, []),
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
    folder = f"{tmp_path}/photos/"
    names = {ref.uri.removeprefix(folder) for ref in source.iter_inputs()}
    assert names == used
    assert list(patterns.unmatched) == unmatched
    assert source.ignored.get("(excluded)", 0) == len(FILES) - len(used)


def test_the_patterns_of_a_build_hold_for_later_changes(config, photos):
    request = config(exclude=["0[0-4].jpg", "*.gif"])
    result, texts = build_and_listen(request)
    assert result.inputs == 5
    assert "no input matches the pattern '*.gif'" in texts
    assert run_build(request).already_finished
    with pytest.raises(UsageError, match="other settings: exclude"):
        run_build(config())
    write_photo(photos / "more/00.jpg", 90)
    write_photo(photos / "more/11.jpg", 91)
    assert append_index(request.out, photos / "more", engine="inline").inputs == 1
    result = update_index(request.out, engine="inline")
    assert (result.inputs, result.vanished) == (6, 0)
    with pytest.raises(UsageError, match="not valid"):
        run_build(config(exclude=["!"], out=request.out.with_name("third")))


@pytest.mark.parametrize("name", ["text", "words"])
def test_a_build_says_which_column_holds_the_captions(config, photos, name):
    path = photos / "list.jsonl"
    path.write_text(json.dumps({"path": "00.jpg", name: "a dog"}) + "\n")
    request = config(sources=str(path))
    _, texts = build_and_listen(request)
    rows = IndexRows(CommittedIndex.open(request.out))
    ((_, described),) = rows.described(np.array([0]))
    is_caption = name == "text"
    assert described == ({name: "a dog"} if is_caption else {})
    said = "captions are in the column text" if is_caption else "no captions"
    assert said in " ".join(texts)


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
    result, texts = build_and_listen(request)
    assert result.inputs == 6
    assert any(f"{path} has changed since" in text for text in texts)
