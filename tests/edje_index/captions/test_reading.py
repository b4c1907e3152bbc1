"""Caption files in every format, sound and damaged."""

import io
import json
import tarfile

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


def lines(path, *values):
    path.write_text(
        "".join(
            f"{value if isinstance(value, str) else json.dumps(value)}\n"
            for value in values
        ),
        "utf-8",
    )
    return path


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


def tar(path, members):
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
            "d.jpg": b"pixels",
            "d.txt": b" \n",
            "orphan.txt": b"of no image",
        },
    )
    cat, other = (f"{tmp_path}/shard.tar!{name}" for name in ("00/猫.jpg", "c.png"))
    items = [
        CaptionedImage(cat, ("one", "t\u2028w\x0co"), None),
        CaptionedImage(other, ("three",), "dev"),
    ]
    assert read_counted(file) == (items, 1)
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
    file = lines(
        tmp_path / "c.jsonl",
        {"image": "a.jpg", "captions": ["one", " ", "\u00a0\n"], "split": "train"},
        {"image": "b.jpg", "caption": "", "split": "train"},
        {"image": "d.jpg", "captions": ["\t"], "split": "val"},
    )
    items, blank = read_counted(file)
    assert items == [CaptionedImage(f"{tmp_path}/a.jpg", ("one",), "train")]
    assert blank == 4
    assert read_counted(file, split="train")[1] == 3
    with pytest.warns(
        RuntimeWarning, match=r"c\.jsonl: missing or blank captions are left out: 4"
    ):
        assert read_captions(file) == items


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", r"cannot read .*c\.json: Expecting"),
        ("{}", "is in no known format"),
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


COCO = [{"id": 9, "file_name": NAMES[0]}, {"id": 5, "file_name": "b.jpg"}]
NOTES = [
    {"image_id": image_id, "caption": text}
    for image_id, text in ((5, "a cat\n"), (9, "a dog"), (5, "cats"))
]
OF_COCO = [(NAMES[0], None, "a dog"), ("b.jpg", None, "a cat", "cats")]
KARPATHY = [
    {"filename": NAMES[0], "split": "train", "sentences": [{"raw": "one"}]},
    {
        "filename": "d.jpg",
        "filepath": "val2014",
        "cocoid": 42,
        "split": "restval",
        "sentences": [{"raw": "two", "tokens": ["two"]}, {"raw": "three"}],
    },
    {"filename": "e.jpg", "imgid": 2, "split": "test", "sentences": []},
]
OF_KARPATHY = [
    (NAMES[0], "train", "one"),
    ("val2014/d.jpg", "restval", "two", "three"),
]
LINES = [
    {"image": NAMES[0], "split": "dev", "captions": ["one", " two \n"]},
    {"image": NAMES[1], "caption": "three", "image_id": 7},
    {"image": NAMES[0], "split": "dev", "caption": "four"},
]
PARQUET = [
    {"file_name": NAMES[0], "captions": ["one", "two", "four"], "split": "dev"},
    {"file_name": NAMES[1], "captions": ["three"], "split": None},
]
OF_LINES = [(NAMES[0], "dev", "one", "two", "four"), (NAMES[1], None, "three")]
TABLE = "path,caption,split\na,one,dev\nb,two,\na,three,dev\nhttps://x/d.jpg,four,\n"
OF_TABLE = [("a", "dev", "one", "three"), ("b", None, "two")]
OF_TABLE.append(("https://x/d.jpg", None, "four"))


def coco(images, notes):
    return {"images": images, "annotations": notes}


# (name and content of a file, (image, split, captions) of each item, captions missing)
FILES = [
    ("l.jsonl", LINES, OF_LINES, 0),
    ("l.json", LINES, OF_LINES, 0),
    ("l.parquet", PARQUET, OF_LINES, 0),
    ("l.parquet", [{"path": "a", "caption": "one"}], [("a", None, "one")], 0),
    ("k.json", {"images": KARPATHY}, OF_KARPATHY, 1),
    ("c.json", coco(COCO, NOTES), OF_COCO, 0),
    (
        "c.json",
        coco([{**each, "id": str(each["id"])} for each in COCO], NOTES),
        OF_COCO,
        0,
    ),
    ("c.json", coco(COCO, NOTES[:1]), [("b.jpg", None, "a cat")], 1),
    ("c.json", coco(COCO, [*NOTES, {"image_id": "9", "caption": None}]), OF_COCO, 1),
    ("t.csv", TABLE, OF_TABLE, 0),
    ("t.tsv", TABLE.replace(",", "\t"), OF_TABLE, 0),
    (
        "t.csv",
        'image,captions,,\n1.jpg,"[""x"", ""y""]",,\n2.jpg,z,,,\n',
        [("1.jpg", None, "x", "y"), ("2.jpg", None, "z")],
        0,
    ),
]
# captions in the columns of an image
RECORDS = [
    ({"caption": ["x", "y"]}, ["x", "y"]),
    ({"captions": ["x"], "caption": "y"}, ["x"]),
    ({"captions": ["x"], "caption": 5}, ["x"]),
    ({"captions": "[Photo] a dog"}, ["[Photo] a dog"]),
    ({"captions": '["a dog", "a cat"]'}, ["a dog", "a cat"]),
    ({"caption": float("nan"), "text": "a"}, ["a"]),
    ({"captions": ["b", float("nan")]}, ["b"]),
]
FILES += [
    ("r.jsonl", [{"image": "a", **each}], [("a", None, *captions)], 0)
    for each, captions in RECORDS
]
FILES[-1] = (*FILES[-1][:3], 1)
FILES += [
    (f"m{suffix}", [{"image": "b", **each}, LINES[1]], OF_LINES[1:], 1)
    for each in ({}, {"captions": None}, {"captions": []}, {"text": float("nan")})
    for suffix in (".json", ".jsonl")
]


@pytest.mark.parametrize(("name", "content", "expected", "missing"), FILES)
def test_a_file_gives_captions(tmp_path, name, content, expected, missing):
    path = tmp_path / name
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(content), path)
    elif name.endswith(".jsonl"):
        lines(path, *content)
    elif isinstance(content, str):
        path.write_text(content, "utf-8-sig")
    else:
        path.write_text(json.dumps(content))
    items, blank = read_counted(path)
    assert [
        (each.path.removeprefix(f"{tmp_path}/"), each.split, *each.captions)
        for each in items
    ] == expected
    assert blank == missing
    if expected == OF_KARPATHY:
        # Karpathy's restval is trained on.
        assert read_counted(path, split="train")[0] == items
    if expected == OF_LINES:
        assert read_captions(path, split="dev") == items[:1]


@pytest.mark.parametrize(
    ("images", "notes", "words"),
    [
        ([*COCO, {"id": 5, "file_name": "c.jpg"}], NOTES, "same id 5"),
        ([*COCO, {"id": "5", "file_name": "c.jpg"}], NOTES, "same id 5"),
        (COCO, [{"image_id": "77", "caption": "x"}], "image_id 77"),
        (COCO, [], "contains no captions"),
    ],
)
def test_wrong_ids_are_named(tmp_path, images, notes, words):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(coco(images, notes)))
    with pytest.raises(UsageError, match=words):
        read_captions(path)


def test_splits_and_texts_that_are_not_there(tmp_path):
    path = tmp_path / "c.csv"
    path.write_text("path,caption\na,x\n")
    with pytest.raises(UsageError, match="names no splits"):
        read_captions(path, split="val")
    path.write_bytes(b"path,caption\na,\xff\n")
    with pytest.raises(UsageError, match=r"line 2: .* not UTF-8"):
        read_captions(path)
