"""Collections as people have them: every name, every order, every column type."""

import json
import os
import unicodedata
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from edje_index.images.decode import _FORMATS, decode_rgb
from edje_index.inputs.column_types import BYTES, TEXT, column_kind
from edje_index.inputs.names import IMAGE_SUFFIXES, join_sidecars
from edje_index.inputs.refs import read_bytes
from pipelines.progress.events import ignore, never
from pipelines.sources import Listing, open_sources
from pipelines.sources.base import listed_input
from tests.caption_files import read_counted
from tests.edje_index.image_cases import tiff
from tests.pipelines.archives import with_utf8_flag, write_tar, write_zip

JPEG = b"\xff\xd8\xff"


def scan(path):
    sources = open_sources([str(path)])
    listing = Listing(sources, ignore, never)
    return list(listing), listing.ignored


def captions_of(path):
    """The captions of each image, by its name in the directory or archive."""
    refs, _ = scan(path)
    assert {ref.problem for ref in refs} <= {None}
    return {
        ref.uri.removeprefix(f"{path}").lstrip("!/"): (ref.metadata or {}).get(
            "captions"
        )
        for ref in refs
    }


STEMS = ["a", "a.left", "2024.05.06", "2024.05.07", "2024", "x/a", "x/b.c"]
FILES = [
    f"{stem}{suffix}"
    for stem in STEMS
    for suffix in (".jpg", ".PNG", ".txt", ".TXT", ".json")
]


@settings(max_examples=40, deadline=None)
@given(names=st.lists(st.sampled_from(FILES), unique=True, min_size=1))
def test_folders_tars_and_zips_give_the_same_captions(tmp_path_factory, names):
    """In whatever order an archive has its members."""
    # a directory may have files whose suffixes differ by case only; which one is
    # read is the order of the names
    assume(len({name.lower() for name in names}) == len(names))
    tmp_path = tmp_path_factory.mktemp("odd")
    members = {}
    for name in names:
        members[name] = JPEG if name[-4:] in (".jpg", ".PNG") else name.encode()
        if name.endswith(".json"):
            members[name] = json.dumps({"captions": [name]}).encode()
        (tmp_path / "d" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "d" / name).write_bytes(members[name])
    in_folder = captions_of(tmp_path / "d")
    assert captions_of(write_tar(tmp_path / "a.tar", members)) == in_folder
    assert captions_of(write_tar(tmp_path / "a.tgz", members)) == in_folder
    assert captions_of(write_zip(tmp_path / "a.zip", members)) == in_folder
    captioned = {name for name, texts in in_folder.items() if texts}
    if captioned:
        items, _ = read_counted(tmp_path / "a.tar")
        start = f"{tmp_path}/a.tar!"
        assert {item.path.removeprefix(start) for item in items} == captioned


def test_the_parts_of_a_sample_share_metadata_unless_one_has_its_name():
    names = [b"s/a.left.jpg", b"s/a.right.jpg", b"s/a.txt", b"b.jpg", b"b.seg.png"]
    names += [b"b.json", b".a.jpg", b".a.txt", b"c.txt", b"c"]
    joined, used = join_sidecars(names, clips=False)
    assert used == {b"s/a.txt", b"b.json", b"c.txt"}
    assert joined == {
        b"s/a.left.jpg": {".txt": b"s/a.txt"},
        b"s/a.right.jpg": {".txt": b"s/a.txt"},
        b"b.jpg": {".json": b"b.json"},
        b"c": {".txt": b"c.txt"},
    }


def test_members_are_accounted_for(tmp_path):
    members = {"0.jpg": JPEG, "lost.txt": b"", "note.cls": b"", "0.txt": b"one"}
    members |= {"._0.jpg": b"", "__MACOSX/0.jpg": b"", "__MACOSX/0.txt": b"fork"}
    for path in (
        write_tar(tmp_path / "a.tar", members),
        write_zip(tmp_path / "a.zip", members),
    ):
        refs, ignored = scan(path)
        assert [ref.metadata for ref in refs] == [{"captions": ["one"]}]
        assert len(refs) + sum(ignored.values()) + 1 == len(members), ignored


@pytest.mark.parametrize("blocks", [0, 1, 20, 2047, 2048, 5000])
def test_an_archive_behind_padding_of_any_length_is_read(tmp_path, blocks):
    first = write_tar(tmp_path / "1.tar", {"a.jpg": JPEG}).read_bytes()
    second = write_tar(tmp_path / "2.tar", {"b.jpg": JPEG, "b.txt": b"b"}).read_bytes()
    path = tmp_path / "t.tar"
    path.write_bytes(first + bytes(512 * blocks) + second)
    assert captions_of(path) == {"a.jpg": None, "b.jpg": ["b"]}
    path.write_bytes(first + bytes(512 * blocks) + b"x" * 512)
    assert [ref.problem for ref in scan(path)[0]] == [None, "damaged-archive"]


@pytest.mark.parametrize("comment", [0, 19, 600])
def test_a_zip_without_members_is_no_damage(tmp_path, comment):
    with zipfile.ZipFile(tmp_path / "e.zip", "w") as archive:
        archive.comment = b"x" * comment
    assert scan(tmp_path / "e.zip") == ([], {})
    (tmp_path / "e.zip").write_bytes(b"PK")
    assert [ref.problem for ref in scan(tmp_path / "e.zip")[0]] == ["damaged-archive"]


@pytest.mark.parametrize(
    ("stored", "flag", "name"),
    [
        ("café".encode(), False, "café"),
        ("café".encode(), True, "café"),
        (unicodedata.normalize("NFD", "é").encode(), False, "e\u0301"),
        ("猫の写真".encode(), False, "猫の写真"),
        ("🐈".encode(), False, "🐈"),
        # Windows: code page 437
        (b"caf\x82", False, "café"),
        (b"\x81\x94", False, "üö"),
    ],
)
def test_names_in_a_zip_of_any_system(tmp_path, stored, flag, name):
    blank = "x" * len(stored)
    write_zip(tmp_path / "z.zip", {f"{blank}.jpg": JPEG, f"{blank}.txt": b"caption"})
    data = (tmp_path / "z.zip").read_bytes().replace(blank.encode(), stored)
    if flag:
        data = with_utf8_flag(data)
    (tmp_path / "z.zip").write_bytes(data)
    (ref,), ignored = scan(tmp_path / "z.zip")
    assert (ref.uri, ref.metadata) == (
        f"{tmp_path}/z.zip!{name}.jpg",
        {"captions": ["caption"]},
    )
    assert ignored == {}
    assert read_bytes(ref) == JPEG


def test_every_suffix_is_an_image_wherever_it_lies(tmp_path):
    Image.init()
    known = {suffix for suffix, name in Image.EXTENSION.items() if name in _FORMATS}
    known |= {".heic", ".heif", ".jxl"}
    assert {os.fsencode(suffix) for suffix in known} <= IMAGE_SUFFIXES
    suffixes = [suffix.decode() for suffix in IMAGE_SUFFIXES]
    suffixes += [suffix.upper() for suffix in suffixes]
    members = {f"{number}{suffix}": JPEG for number, suffix in enumerate(suffixes)}
    members |= {f"{number}.txt": b"text" for number in range(len(suffixes))}
    path = write_tar(tmp_path / "a.tar", members)
    items, blank = read_counted(path)
    assert (len(items), blank) == (len(suffixes), 0)
    read = {item.path.removeprefix(f"{path}!"): list(item.captions) for item in items}
    assert read == captions_of(path)


TEXT_TYPES = [
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.dictionary(pa.int32(), pa.string()),
    pa.dictionary(pa.int8(), pa.large_string()),
]
BYTE_TYPES = [pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(3)]
BYTE_TYPES.append(pa.dictionary(pa.int32(), pa.binary()))


def test_every_layout_has_the_kind_of_its_values():
    for each in [*TEXT_TYPES, pa.run_end_encoded(pa.int32(), pa.string()), pa.json_()]:
        assert column_kind(each) == TEXT, each
    for each in [*BYTE_TYPES, pa.run_end_encoded(pa.int16(), pa.binary()), pa.uuid()]:
        assert column_kind(each) == BYTES, each
    for each in (pa.bool_(), pa.list_(pa.string()), pa.date32(), pa.null()):
        assert column_kind(each) is None, each


@pytest.mark.parametrize("arrow_type", BYTE_TYPES, ids=str)
def test_images_in_any_layout(tmp_path, arrow_type):
    images = pa.array([JPEG, JPEG]).cast(arrow_type)
    other = pa.array([b"abc", b"def"]).cast(arrow_type)
    captions = pa.array([["one"], ["two", "three"]])
    table = pa.table({"image": images, "thumb": other, "captions": captions})
    pq.write_table(table, tmp_path / "images.parquet")
    refs, ignored = scan(tmp_path / "images.parquet")
    assert [read_bytes(ref) for ref in refs] == [JPEG, JPEG]
    assert [ref.metadata for ref in refs] == [
        {"captions": texts} for texts in captions.to_pylist()
    ]
    assert ignored == {"(binary column)": 1}


@pytest.mark.parametrize(
    ("value", "expected", "counted"),
    [
        ("NaN", None, 1),
        ("-Infinity", None, 1),
        ('["a", NaN]', ["a"], 1),
        ('["a", null]', ["a"], 0),
        ('{"a": {"b": [1, NaN]}}', '{"a": {"b": [1, null]}}', 1),
        ("1e999", None, 1),
        ("1.5", 1.5, 0),
    ],
)
def test_numbers_that_are_not_finite_are_missing(tmp_path, value, expected, counted):
    (tmp_path / "0.jpg").write_bytes(JPEG)
    (tmp_path / "0.json").write_text(f'{{"caption": {value}}}')
    (tmp_path / "list.jsonl").write_text(f'{{"path": "0.jpg", "caption": {value}}}')
    for source in (tmp_path, tmp_path / "list.jsonl"):
        refs, ignored = scan(source)
        assert refs[0].metadata == (expected and {"caption": expected})
        assert ignored.get("(number not finite)", 0) == counted


@pytest.mark.parametrize(
    "name", ["l.csv", "l.tsv", "l.jsonl", "l.parquet", "d.parquet"]
)
def test_texts_that_are_not_unicode_are_left_out_and_counted(tmp_path, name):
    path = tmp_path / name
    lines = {
        "l.csv": b"path,captions\n0,caf\xe9\n1,dogs\n",
        "l.tsv": b"path\tcaptions\n0\tcaf\xe9\n1\tdogs\n",
        "l.jsonl": b'{"path": "0", "captions": "caf\xe9"}\n'
        b'{"path": "1", "captions": "dogs"}\n',
    }
    if name in lines:
        path.write_bytes(lines[name])
    else:
        buffers = pa.array([b"caf\xe9", b"dogs"]).buffers()
        column = pa.Array.from_buffers(pa.string(), 2, buffers)
        if name == "d.parquet":
            column = column.dictionary_encode()
        pq.write_table(pa.table({"path": ["0", "1"], "captions": column}), path)
    refs, ignored = scan(path)
    assert [ref.metadata for ref in refs] == [None, {"captions": "dogs"}]
    assert ignored == {"(unreadable metadata)": 1}


@pytest.mark.parametrize(
    ("url", "is_input"),
    [
        ("http://h/a b.jpg", True),
        ("http://h/a.jpg ", True),
        ("http://h/é.jpg", True),
        ("http://h/a|b?c=d e#f", True),
        ("http://h/a\u3000b.jpg", True),
        ("s3://bucket/a b.jpg", True),
        ("http://h h/a.jpg", False),
        ("http://h/a\nb.jpg", False),
        ("http://h/\x00.jpg", False),
        ("http://h/\ud800.jpg", False),
        ("http://user:secret@h/a.jpg", False),
    ],
)
def test_web_addresses(url, is_input):
    ref = listed_input(url, b"/")
    assert (ref.uri if ref else None) == (url.strip() if is_input else None)


@pytest.mark.parametrize("name", ["café.jpg", "한.jpg"])
@pytest.mark.parametrize("forms", [("NFC", "NFD"), ("NFD", "NFC")])
def test_both_unicode_forms_of_a_name(tmp_path, name, forms):
    stored, other = (tmp_path / unicodedata.normalize(form, name) for form in forms)
    stored.write_bytes(b"stored")
    # the name of the disk is the address
    ref = listed_input(other.name, os.fsencode(tmp_path))
    assert (ref.problem, ref.path) == (None, os.fsencode(stored))
    # the exact form wins
    other.write_bytes(b"other")
    assert read_bytes(listed_input(other.name, os.fsencode(tmp_path))) == b"other"


@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i2", "u4", "i4", "f4"])
@pytest.mark.parametrize("low", [0, 1 / 2])
def test_brighter_samples_give_brighter_pixels(dtype, low):
    """In every TIFF of one channel, over a whole or a half of the range of its type."""
    kind = np.dtype(dtype)
    if kind.kind == "f":
        bottom, top = -1.0, 1.0
    else:
        bottom, top = np.iinfo(kind).min, np.iinfo(kind).max
    ramp = np.linspace(bottom + low * (float(top) - bottom), float(top), 200)
    if kind.kind != "f":
        ramp = np.minimum(ramp, float(np.nextafter(top, 0)))
    samples = np.tile(ramp, (4, 1)).astype(kind.newbyteorder("<"))
    sign = {"u": 1, "i": 2, "f": 3}[kind.kind]
    tags = {258: (3, 1, 8 * kind.itemsize), 262: (3, 1, 1), 339: (3, 1, sign)}
    image = decode_rgb(tiff(200, 4, tags, samples.tobytes()))
    grey = np.asarray(image)[0, :, 0]
    steps = np.diff(grey.astype(int))
    assert (steps >= 0).all()
    # signed samples of 16 bits without a negative one come out dark
    if (dtype, low) != ("i2", 1 / 2):
        assert grey[-1] > 250
        assert grey[-1] - grey[0] > 100
