"""Caption files in every format, sound and damaged."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from edje_index.captions.reading import (
    CaptionedImage,
    read_captions,
)
from storage_formats.errors import UsageError
from tests.caption_files import read_counted

NAMES = ("café 猫.jpg", "b.jpg", "c.jpg")


def lines(path: Path, *values: object) -> Path:
    path.write_text(
        "".join(
            f"{value if isinstance(value, str) else json.dumps(value)}\n"
            for value in values
        ),
        "utf-8",
    )
    return path


def item(
    folder: Path, name: str, *captions: str, split: str | None = None
) -> CaptionedImage:
    return CaptionedImage(str(folder / name), captions, split)


def test_json_lines(tmp_path):
    file = lines(
        tmp_path / "captions.jsonl",
        {"image": NAMES[0], "split": "dev", "captions": ["one", " two \n"]},
        "",
        {"image": NAMES[1], "caption": "three", "image_id": 7},
        {"image": NAMES[0], "split": "dev", "caption": "four"},
    )
    expected = [
        item(tmp_path, NAMES[0], "one", "two", "four", split="dev"),
        item(tmp_path, NAMES[1], "three"),
    ]
    assert read_captions(file) == expected
    assert read_captions(file, split="dev") == expected[:1]


def test_images_may_lie_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "photos").mkdir()
    file = lines(
        tmp_path / "c.jsonl",
        {"image": "x/a.jpg", "caption": "a"},
        {"image": "/abs/b.jpg", "caption": "b"},
    )
    found = read_captions(file, images=tmp_path / "photos")
    assert [each.path for each in found] == [f"{tmp_path}/photos/x/a.jpg", "/abs/b.jpg"]
    monkeypatch.chdir(tmp_path)
    assert read_captions("c.jsonl", images="photos") == found
    assert read_captions("c.jsonl")[0].path == f"{tmp_path}/x/a.jpg"
    assert [each.path for each in read_captions(file, images="/nowhere")] == [
        "/nowhere/x/a.jpg",
        "/abs/b.jpg",
    ]


def test_karpathys_files(tmp_path):
    images = [
        {
            "filename": NAMES[0],
            "imgid": 0,
            "split": "train",
            "sentences": [{"raw": "one"}, {"raw": "two"}],
        },
        {
            "filename": "d.jpg",
            "filepath": "val2014",
            "cocoid": 42,
            "split": "restval",
            "sentences": [{"raw": "three"}],
        },
        {
            "filename": "e.jpg",
            "imgid": 2,
            "split": "test",
            "sentences": [{"raw": "four", "tokens": ["four"]}],
        },
    ]
    file = tmp_path / "dataset_coco.json"
    file.write_text(json.dumps({"images": images, "dataset": "coco"}))
    everything = read_captions(file)
    assert everything == [
        item(tmp_path, NAMES[0], "one", "two", split="train"),
        item(tmp_path, "val2014/d.jpg", "three", split="restval"),
        item(tmp_path, "e.jpg", "four", split="test"),
    ]
    assert read_captions(file, split="train") == everything[:2], (
        "Karpathy's restval is trained on"
    )
    assert read_captions(file, split="test") == everything[2:]


def test_cocos_caption_files(tmp_path):
    file = tmp_path / "captions_val2017.json"
    content = {
        "images": [{"id": 9, "file_name": NAMES[0]}, {"id": 5, "file_name": "b.jpg"}],
        "annotations": [
            {"id": 1, "image_id": 5, "caption": "a cat\n"},
            {"id": 2, "image_id": 9, "caption": "a dog"},
            {"id": 3, "image_id": 5, "caption": "cats"},
        ],
    }
    file.write_text(json.dumps(content))
    assert read_captions(file) == [
        item(tmp_path, NAMES[0], "a dog"),
        item(tmp_path, "b.jpg", "a cat", "cats"),
    ]
    with pytest.raises(UsageError, match="names no splits"):
        read_captions(file, split="val")
    content["annotations"].append({"id": 4, "image_id": 77, "caption": "who?"})
    file.write_text(json.dumps(content))
    with pytest.raises(UsageError, match="77"):
        read_captions(file)


@pytest.mark.parametrize("captions", [["one", "two"], "one"])
def test_parquet(tmp_path, captions):
    key = "captions" if isinstance(captions, list) else "caption"
    table = pa.table(
        {
            "file_name": [*NAMES[:2]],
            key: [captions] * 2,
            "split": ["dev", None],
            "noise": [1, 2],
        }
    )
    pq.write_table(table, tmp_path / "c.parquet")
    texts = captions if isinstance(captions, list) else [captions]
    expected = [
        item(tmp_path, NAMES[0], *texts, split="dev"),
        item(tmp_path, NAMES[1], *texts),
    ]
    assert read_captions(tmp_path / "c.parquet") == expected


def tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def test_webdataset(tmp_path):
    file = tar(
        tmp_path / "shard.tar",
        {
            "00/猫.jpg": b"pixels",
            "00/猫.txt": b"one\n\nt\xe2\x80\xa8w\x0co\n",
            "00/猫.cls": b"3",
            "b.seg.png": b"a mask, no image",
            "c.png": b"pixels",
            "c.json": json.dumps({"caption": "three", "split": "dev"}).encode(),
            "orphan.txt": b"of no image",
        },
    )
    cat, other = (f"{tmp_path}/shard.tar!{name}" for name in ("00/猫.jpg", "c.png"))
    assert read_captions(file) == [
        CaptionedImage(cat, ("one", "t\u2028w\x0co"), None),
        CaptionedImage(other, ("three",), "dev"),
    ]
    data = file.read_bytes()
    for damaged in (
        data[: 3 * 512 + 7],
        data[: 2 * 512] + b"x" * 512 + data[3 * 512 :],
    ):
        file.write_bytes(damaged)
        with pytest.raises(UsageError, match=r"shard\.tar"):
            read_captions(file)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"image": "a.jpg", "caption": "x"', "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"caption": "x"}', "no file name in 'image'"),
        ('{"image": "a.jpg", "captions": {"en": "x"}}', "is not a string"),
        ('{"image": "a.jpg", "captions": ["x", 3]}', "not a string"),
        ('{"image": "a\\u0000.jpg", "caption": "x"}', "no file name in 'image'"),
        ('{"image": "a.jpg", "caption": "x \\ud83d"}', "lone surrogate"),
        (b'{"image": "a.jpg", "caption": "\xff"}', "not UTF-8"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, words):
    data = (
        b'{"image": "ok.jpg", "caption": "fine"}\n\n'
        + (line if isinstance(line, bytes) else line.encode())
        + b"\n"
    )
    (tmp_path / "c.jsonl").write_bytes(data)
    with pytest.raises(UsageError, match=rf"c\.jsonl, line 3: .*{words}"):
        read_captions(tmp_path / "c.jsonl")


def test_blank_captions_are_left_out_and_counted(tmp_path):
    """One in millions does not end a training; an image with others keeps these."""
    lines = [
        {"image": "a.jpg", "captions": ["one", " ", "\u00a0\n"], "split": "train"},
        {"image": "b.jpg", "caption": "", "split": "train"},
        {"image": "c.jpg", "captions": ["two"], "split": "train"},
        {"image": "d.jpg", "captions": ["\t"], "split": "val"},
    ]
    file = tmp_path / "c.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    content = items, blank = read_counted(file)
    assert items == [
        item(tmp_path, "a.jpg", "one", split="train"),
        item(tmp_path, "c.jpg", "two", split="train"),
    ]
    assert blank == 4
    assert read_counted(file, split="train")[1] == 3
    with pytest.warns(
        RuntimeWarning, match=r"c\.jsonl: missing or blank captions are left out: 4"
    ):
        assert read_captions(file) == items
    (tmp_path / "c.json").write_text(json.dumps(lines))
    assert read_counted(tmp_path / "c.json") == content
    annotations = [{"image_id": 1, "caption": text} for text in ("x", "")]
    coco = {"images": [{"id": 1, "file_name": "a.jpg"}], "annotations": annotations}
    (tmp_path / "coco.json").write_text(json.dumps(coco))
    assert read_counted(tmp_path / "coco.json")[1] == 1
    shard = tar(
        tmp_path / "s.tar",
        {"a.jpg": b"", "a.txt": b" \n", "b.jpg": b"", "b.txt": b"\nx\n"},
    )
    items, blank = read_counted(shard)
    assert ([each.captions for each in items], blank) == ([("x",)], 1)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", r"cannot read the list .*c\.json: Expecting"),
        ("{}", "is in no known format"),
        ('{"images": [{"filename": "a"}]}', "in no known format"),
        ('{"images": [{"filename": "a", "sentences": [{}]}]}', "in no known format"),
        (
            '{"images": [{"id": 1, "file_name": "a"}], "annotations": []}',
            "contains no captions",
        ),
        (
            '{"images": [], "annotations": [{"caption": "x"}]}',
            "in no known format .*image_id",
        ),
        ("[]", "contains no captions"),
        ('["a.jpg"]', "line 1 .* not a JSON object"),
    ],
)
def test_a_malformed_json_file(tmp_path, content, words):
    (tmp_path / "c.json").write_text(content)
    with pytest.raises(UsageError, match=words):
        read_captions(tmp_path / "c.json")


@pytest.mark.parametrize(("suffix", "delimiter"), [(".csv", ","), (".tsv", "\t")])
def test_tables_of_text_have_the_columns_of_the_lists_that_build_reads(
    tmp_path, suffix, delimiter
):
    file = tmp_path / f"list{suffix}"
    rows = [
        ("path", "caption", "split"),
        (NAMES[0], "one", "dev"),
        (NAMES[1], "two", ""),
        (NAMES[0], "three", "dev"),
        ("https://example.org/d.jpg", "four", ""),
    ]
    file.write_text("".join(delimiter.join(row) + "\n" for row in rows), "utf-8-sig")
    first, second, third = read_captions(file)
    assert first == item(tmp_path, NAMES[0], "one", "three", split="dev")
    assert (second.captions, third.path) == (("two",), "https://example.org/d.jpg")
    file.write_bytes(b"path,caption\na,\xff\n".replace(b",", delimiter.encode()))
    with pytest.raises(UsageError, match=r"line 2: .* not UTF-8"):
        read_captions(file)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("c.csv", "image,caption\n1.jpg,a dog, running\n", "line 2: the line has 3"),
        ("c.tsv", "image\tcaption\n\n1.jpg\tx\ty\n", "line 3: the line has 3 fields"),
        ("c.csv", 'image,caption\n1.jpg,"a dog\n2.jpg,x\n', "begins in line 2 of"),
        ("c.csv", "image;caption\n1.jpg;x\n", "texts: image;caption"),
        ("c.csv", "Image,Caption\n1.jpg,x\n", "texts: Image, Caption"),
        ("c.csv", "image, caption\n1.jpg,x\n", "contains no captions"),
        ("c.csv", "image,captions\n1.jpg,\"['x']\"\n", "line 2: .* no JSON list"),
    ],
)
def test_tables_that_would_lose_captions_are_refused(tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=words):
        read_captions(tmp_path / name)


def test_columns_of_a_parquet_file_are_named(tmp_path):
    pq.write_table(
        pa.table({"Image": ["1.jpg"], "caption": ["x"]}), tmp_path / "c.parquet"
    )
    with pytest.raises(UsageError, match="texts: Image, caption"):
        read_captions(tmp_path / "c.parquet")


def test_a_table_may_have_columns_without_a_name_and_lists_in_json(tmp_path):
    file = tmp_path / "c.csv"
    file.write_text('image,captions,,\n1.jpg,"[""x"", ""y""]",,\n2.jpg,z,,,\n')
    assert [each.captions for each in read_captions(file)] == [("x", "y"), ("z",)]


@pytest.mark.parametrize(
    ("record", "captions"),
    [
        ({"caption": ["x", "y"]}, ("x", "y")),
        ({"captions": ["x"], "caption": "y"}, ("x",)),
        ({"captions": ["x"], "caption": ["x"]}, ("x",)),
        ({"captions": ["x"], "caption": 5}, ("x",)),
        ({"captions": "[Photo] a dog"}, ("[Photo] a dog",)),
        ({"captions": '["a dog", "a cat"]'}, ("a dog", "a cat")),
    ],
)
def test_lists_texts_and_both(tmp_path, record, captions):
    path = tmp_path / "captions.jsonl"
    path.write_text(json.dumps({"image": "a.jpg", **record}))
    assert [item.captions for item in read_captions(path)] == [captions]
