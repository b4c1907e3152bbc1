"""Thumbnails: real photos become small JPEGs, and everything else becomes a reason."""

import base64
import hashlib
import io
import os
import tarfile

import numpy as np
import pytest
from PIL import Image

from edje_index.inputs.thumbnails import MAX_PHOTO_BYTES, read_thumbnails
from storage_formats.format.layout import IndexSpec
from storage_formats.format.places import Directory
from storage_formats.format.rows import RowEntry, rows_table
from storage_formats.writing.shard_writer import ShardWriter
from tests.conftest import finish_index


def jpeg(colour):
    out = io.BytesIO()
    Image.new("RGB", (600, 300), colour).save(out, "JPEG")
    return out.getvalue()


def entry(row_id, uri, data, **fields):
    found = {"size": len(data), "content_hash": hashlib.sha256(data).hexdigest()}
    return RowEntry(row_id, uri, **{**found, **fields})


def write_index(root, entries):
    """An index whose rows table holds `entries`."""
    spec = IndexSpec(len(entries), len(entries), (4, 8), 6)
    kept = np.array([entry.row_id for entry in entries if entry.status == "indexed"])
    with ShardWriter(Directory(root), spec, 0) as writer:
        blocks = np.ones((len(kept), 4, 8), np.float32)
        embeddings = np.ones((len(kept), 6), np.float32)
        writer.put(kept, blocks.astype("bfloat16"), embeddings)
        receipt = writer.commit(rows_table(entries), "plan", {"write": 0.0})
    finish_index(root, spec, [receipt])
    return root


def only(root, entry):
    """The thumbnail of an index of one row."""
    return read_thumbnails(write_index(root, [entry]), [0])[0]


def colour_of(data):
    pixels = np.asarray(Image.open(io.BytesIO(data)))
    return tuple(pixels.mean(axis=(0, 1)).round(-1))


def test_a_member_of_an_archive_is_found(tmp_path):
    blue = jpeg((0, 0, 200))
    green = jpeg((0, 200, 0))
    tars = {
        "photos.tar": ({}, {"a/blue.jpg": blue, "a/green.jpg": green}),
        "old.tar": ({"encoding": "latin-1"}, {"caf\xe9.jpg": blue}),
    }
    for name, (options, members) in tars.items():
        with tarfile.open(
            tmp_path / name, "w", format=tarfile.GNU_FORMAT, **options
        ) as archive:
            for member, data in members.items():
                info = tarfile.TarInfo(member)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))

    def thumbnail(folder, member, data):
        return only(tmp_path / folder, entry(0, f"{tmp_path}/{member}", data))

    found = thumbnail("found", "photos.tar!a/green.jpg", green)
    assert Image.open(io.BytesIO(found.jpeg)).size == (256, 128)
    assert colour_of(found.jpeg) == (0, 200, 0)
    assert base64.b64decode(found.data_uri.partition(",")[2]) == found.jpeg
    old = thumbnail("old", "old.tar!caf%E9.jpg", blue)
    assert colour_of(old.jpeg) == (0, 0, 200)
    absent = thumbnail("absent", "photos.tar!a/red.jpg", green)
    assert absent.jpeg is None
    assert absent.problem == "missing: the file has no such member: a/red.jpg"
    os.truncate(tmp_path / "photos.tar", 1000)
    cut = thumbnail("cut", "photos.tar!a/green.jpg", green)
    assert (cut.jpeg, cut.problem.partition(":")[0]) == (None, "truncated-archive")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"uri": "/nowhere/a.jpg"}, "missing: no such file"),
        ({"uri": "relative.jpg"}, "not-a-local-path"),
        ({"uri": "/etc"}, "missing"),
        ({"uri": "/dev/zero"}, "missing"),
        ({"uri": "/a\0b.jpg"}, "missing"),
        ({"content_hash": None}, "no hash"),
        # an index of a stranger may name a private photo
        ({"content_hash": "0" * 64}, "changed"),
        ({"size": MAX_PHOTO_BYTES + 1}, "too-many-bytes"),
        ({"size": 5}, "changed-since-plan"),
        ({"status": "failed", "reason": "truncated"}, "failed: truncated"),
        ({"status": "duplicate", "duplicate_of": 0}, "duplicate"),
    ],
)
def test_what_cannot_be_shown_has_a_reason(tmp_path, fields, problem, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = jpeg((0, 200, 0))
    for name in ("a.jpg", "relative.jpg"):
        (tmp_path / name).write_bytes(data)
    first = entry(0, str(tmp_path / "a.jpg"), data)
    second = entry(1, **{"uri": str(tmp_path / "a.jpg"), "data": data, **fields})
    thumbnails = read_thumbnails(
        write_index(tmp_path / "index", [first, second]), [0, 1]
    )
    assert thumbnails[0].jpeg is not None
    assert thumbnails[1].jpeg is None
    assert problem in thumbnails[1].problem
