"""Paths that are not UTF-8 stay addresses, from the source to the page."""

from __future__ import annotations

import html
import io
import json
import os
import re
import shutil
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from edje_index.inputs.thumbnails import read_thumbnails
from pipelines.progress.wording import printable
from storage_formats import TokenStore, read_rows, verify_index
from tests.pipelines.conftest import write_photo

NAME = os.fsdecode(b"caf\xe9")
FOLDER = os.fsdecode(b"\xff")


def folder(photos: Path) -> str:
    return NAME


def archive(photos: Path) -> str:
    name = f"{NAME}.tar"
    with tarfile.open(name, "w") as tar:
        for path in sorted(photos.glob("*.jpg"))[:3]:
            tar.add(path, os.fsdecode(b"in\xe9/") + path.name)
    return name


def list_of_paths(photos: Path) -> str:
    name = f"{NAME}.txt"
    paths = sorted(Path(NAME).glob("0*.jpg"))[:3]
    Path(name).write_bytes(b"".join(os.fsencode(path) + b"\n" for path in paths))
    return name


def pattern(photos: Path) -> str:
    return f"{NAME}/0[0-2].jpg"


def one_file(photos: Path) -> str:
    return f"{NAME}/00.jpg"


@pytest.mark.parametrize("source", [folder, archive, list_of_paths, pattern, one_file])
def test_every_command_reads_and_writes_there(
    tmp_path,
    photos,
    tiny_bundle,
    monkeypatch,
    run,
    source,
):
    (tmp_path / FOLDER).mkdir()
    monkeypatch.chdir(tmp_path / FOLDER)
    shutil.copytree(photos, NAME)
    index = f"{NAME}.edje"
    inline = ("--engine", "inline", "--max-failed", "1")
    built: tuple[Any, ...] = ("build", source(photos), "--out", index)
    for command in (
        (*built, "--model", tiny_bundle, *inline),
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


def write_archive(path: Path, photos: list[bytes], kind: str) -> None:
    """Write a photo and its caption under each of `NAMES`."""
    blanks = ["x" * 7 + f"{number}" for number in range(len(NAMES))]
    stored = [name.rjust(8, b"_") for name in NAMES.values()]
    members = [
        (f"{blank}{suffix}", data)
        for blank, photo in zip(blanks, photos, strict=True)
        for suffix, data in ((".jpg", photo), (".txt", b"a dog"))
    ]
    if kind.startswith("zip"):
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in members:
                archive.writestr(name, data)
        content = path.read_bytes()
        for blank, name in zip(blanks, stored, strict=True):
            content = content.replace(blank.encode(), name)
        if kind == "zip with flag":
            for header in (rb"(PK\x03\x04...).", rb"(PK\x01\x02.....)."):
                content = re.sub(header, b"\\1\x08", content, flags=re.DOTALL)
        path.write_bytes(content)
        return
    text = dict(zip(blanks, stored, strict=True))
    formats = {"pax": 2, "gnu": 1, "ustar": 0}
    with tarfile.open(path, "w", format=formats[kind]) as archive:
        for name, data in members:
            info = tarfile.TarInfo(os.fsdecode(text[name[:8]]) + name[8:])
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def test_names_of_members_in_any_encoding_work_everywhere(
    tmp_path,
    tiny_bundle,
    run,
):
    (tmp_path / "in").mkdir()
    kinds = ["pax", "gnu", "ustar", "zip", "zip with flag"]
    for number, kind in enumerate(kinds):
        photos = []
        for position in range(len(NAMES)):
            write_photo(tmp_path / "photo.jpg", 10 * number + position)
            photos.append((tmp_path / "photo.jpg").read_bytes())
        name = f"{kind}.{'zip' if 'zip' in kind else 'tar'}"
        write_archive(tmp_path / "in" / name, photos, kind)
    root = tmp_path / "i.edje"
    inline = ("--engine", "inline", "--json")
    built = run(
        "build", tmp_path / "in", "--out", root, "--model", tiny_bundle, *inline
    )
    rows = len(kinds) * len(NAMES)
    assert json.loads(built[1])["indexed"] == rows, built
    updated = json.loads(run("update", root, *inline)[1])
    assert [updated[key] for key in ("unchanged", "new", "changed", "edited")] == [
        rows,
        0,
        0,
        0,
    ]
    table = read_rows(root, columns=["uri", "captions"])
    assert table["captions"].to_pylist() == [["a dog"]] * rows
    uris = table["uri"].to_pylist()
    assert len({*uris}) == rows
    assert [each.problem for each in read_thumbnails(root, range(rows))] == [""] * rows
    # export
    pq.write_table(table, tmp_path / "rows.parquet")
    csv.write_csv(table.select(["uri"]), tmp_path / "rows.csv")
    assert csv.read_csv(tmp_path / "rows.csv")["uri"].to_pylist() == uris
    page = tmp_path / "page.html"
    out = run.ok("search", root, "a dog", "-k", rows, "--json", "--html", page)
    assert sorted(hit["uri"] for hit in json.loads(out)["hits"]) == sorted(uris)
    shown = html.unescape(page.read_text())
    assert all(printable(uri.rpartition("!")[2]) in shown for uri in uris)
    assert shown.count("data:image/jpeg") >= rows
