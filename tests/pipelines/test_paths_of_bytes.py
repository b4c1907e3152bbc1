"""Paths that are not UTF-8 stay addresses, from the source to the page."""

import html
import json
import os
import shutil
import tarfile
from pathlib import Path

import pytest

from edje_index.inputs.thumbnails import read_thumbnails
from pipelines.progress.wording import printable
from storage_formats import TokenStore, read_rows, verify_index
from tests.pipelines.archives import with_utf8_flag, write_tar, write_zip
from tests.pipelines.conftest import write_photo

NAME = os.fsdecode(b"caf\xe9")
FOLDER = os.fsdecode(b"\xff")


def archive(photos):
    name = f"{NAME}.tar"
    with tarfile.open(name, "w") as tar:
        tar.add(photos / "00.jpg", os.fsdecode(b"in\xe9/0.jpg"))
    return name


def list_of_paths(photos):
    name = f"{NAME}.txt"
    paths = sorted(Path(NAME).glob("0*.jpg"))[:3]
    Path(name).write_bytes(b"".join(os.fsencode(path) + b"\n" for path in paths))
    return name


def pattern(photos):
    return f"{NAME}/0[0-2].jpg"


def one_file(photos):
    return f"{NAME}/00.jpg"


@pytest.fixture
def index(tmp_path, photos, monkeypatch):
    """The name of an index in a directory with a name that is not UTF-8."""
    (tmp_path / FOLDER).mkdir()
    monkeypatch.chdir(tmp_path / FOLDER)
    shutil.copytree(photos, NAME)
    return f"{NAME}.edje"


@pytest.mark.parametrize("source", [archive, list_of_paths, pattern, one_file])
def test_every_source_is_built_and_updated_there(
    index, photos, tiny_bundle, run, source
):
    inline = ("--engine", "inline")
    model = ("--model", tiny_bundle)
    built = run.json("build", source(photos), "--out", index, *model, *inline)
    updated = run.json("update", index, *inline)
    assert updated["unchanged"] == built["indexed"] > 0


def test_every_command_reads_and_writes_there(index, photos, tiny_bundle, run):
    inline = ("--engine", "inline", "--max-failed", "1")
    for command in (
        ("build", NAME, "--out", index, "--model", tiny_bundle, *inline),
        ("info", index),
        ("update", index, "--engine", "inline"),
        ("append", index, photos / "06.jpg", "--engine", "inline"),
        ("quantize", index, "--to", "fp8"),
        ("search", index, "a dog", "--html", f"{NAME}.html"),
        ("search", index, "--image", f"{NAME}/00.jpg"),
        ("delete", index, "--rows", 0),
        ("copy", index, f"{NAME}2.edje"),
        ("compact", f"{NAME}2.edje", "--out", f"{NAME}4.edje"),
        ("merge", index, f"{NAME}2.edje", "--out", f"{NAME}3.edje"),
        ("gc", index),
        ("history", index),
    ):
        run.json(*command)
    for root in (index, f"{NAME}2.edje", f"{NAME}3.edje"):
        assert not verify_index(root)
        assert len(TokenStore.open(root))
    # people read text, programs the bytes
    uris = read_rows(f"{NAME}3.edje", columns=["uri", "uri_raw"]).to_pylist()
    bytes_of = {row["uri"]: row["uri_raw"] for row in uris}
    assert all(("%FF" in uri) == (raw is not None) for uri, raw in bytes_of.items())
    settings = json.loads(Path(index, "index.json").read_bytes())["settings"]
    assert NAME in settings["sources"][0]


# bytes of the names of members, in encodings that systems write
NAMES = {
    "utf-8": "猫".encode(),
    "cp437": b"\x81\x94",
    "latin-1": b"caf\xe9",
    "shift-jis": "ソ猫".encode("shift-jis"),
    "gb18030": "图片".encode("gb18030"),
    "no encoding": b"\xff\xfe\x80",
}


def write_archive(path, photos, kind):
    """Write a photo and its caption under each of `NAMES`."""
    members = {}
    for name, photo in zip(NAMES.values(), photos, strict=True):
        stem = os.fsdecode(name.rjust(8, b"_"))
        members |= {f"{stem}.jpg": photo, f"{stem}.txt": b"a dog"}
    if not kind.startswith("zip"):
        write_tar(path, members, {"pax": 2, "ustar": 0}[kind])
        return
    # the library writes no other bytes than its own encoding
    blanks = {name: f"{number:012}" for number, name in enumerate(members)}
    write_zip(path, {blanks[name]: data for name, data in members.items()})
    content = path.read_bytes()
    for name, blank in blanks.items():
        content = content.replace(blank.encode(), os.fsencode(name))
    path.write_bytes(with_utf8_flag(content) if kind == "zip with flag" else content)


def test_names_of_members_in_any_encoding_work_everywhere(tmp_path, tiny_bundle, run):
    (tmp_path / "in").mkdir()
    kinds = ["pax", "ustar", "zip", "zip with flag"]
    for number, kind in enumerate(kinds):
        photos = []
        for position in range(len(NAMES)):
            write_photo(tmp_path / "photo.jpg", 10 * number + position)
            photos.append((tmp_path / "photo.jpg").read_bytes())
        name = f"{kind}.{'zip' if 'zip' in kind else 'tar'}"
        write_archive(tmp_path / "in" / name, photos, kind)
    root = tmp_path / "i.edje"
    build = ("build", tmp_path / "in", "--out", root, "--model", tiny_bundle)
    inline = ("--engine", "inline")
    rows = len(kinds) * len(NAMES)
    assert run.json(*build, *inline)["indexed"] == rows
    updated = run.json("update", root, *inline)
    assert (updated["unchanged"], updated["edited"]) == (rows, 0)
    table = read_rows(root, columns=["uri", "captions"])
    assert table["captions"].to_pylist() == [["a dog"]] * rows
    uris = table["uri"].to_pylist()
    assert len({*uris}) == rows
    assert [each.problem for each in read_thumbnails(root, range(rows))] == [""] * rows
    page = tmp_path / "page.html"
    hits = run.json("search", root, "a dog", "-k", rows, "--html", page)["hits"]
    assert {hit["uri"] for hit in hits} == {*uris}
    shown = html.unescape(page.read_text())
    assert all(printable(uri.rpartition("!")[2]) in shown for uri in uris)
    assert shown.count("data:image/jpeg") >= rows
