"""Zips and compressed tars: the images that other tools packed come back byte for
byte; damage is always reported.
"""

import contextlib
import errno
import io
import os
import random
import subprocess
import tarfile
import zipfile
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edje_index.images.decode import REASONS, ImageError
from edje_index.inputs import containers, tars
from edje_index.inputs.ranges import RangedFile, open_ranged
from edje_index.inputs.refs import read_bytes
from edje_index.inputs.tars import TarArchive
from pipelines.sources import open_source
from tests.pipelines.archives import write_zip

PHOTOS = {
    f"{number:03d}.jpg": b"\xff\xd8\xff" + random.Random(number).randbytes(40_000)
    for number in range(12)
}
COMPRESSORS = {
    ".tar.gz": "gzip",
    ".tgz": "gzip",
    ".tar.bz2": "bzip2",
    ".tar.xz": "xz",
    ".tar.zst": "zstd",
}


@pytest.fixture
def folder(tmp_path):
    """Twelve photos in the sub-directory `photos`, with captions beside two of them."""
    (tmp_path / "photos").mkdir()
    for name, data in PHOTOS.items():
        (tmp_path / "photos" / name).write_bytes(data)
    (tmp_path / "photos/003.txt").write_text("a dog\nsome dog\n")
    (tmp_path / "photos/004.json").write_text('{"licence": "cc0", "likes": 7}')
    return tmp_path


def pack(folder, suffix):
    """The photos in a tar that the system's `tar` and compressor wrote."""
    if suffix == ".zip":
        subprocess.run(
            ["zip", "-q", "-r", "-X", "packed.zip", "photos"], cwd=folder, check=True
        )
        return folder / "packed.zip"
    tar = folder / "photos.tar"
    subprocess.run(
        ["tar", "-C", folder, "--sort=name", "-cf", tar, "photos"], check=True
    )
    path = folder / f"packed{suffix}"
    with path.open("wb") as file:
        subprocess.run([COMPRESSORS[suffix], "-c", tar], check=True, stdout=file)
    tar.unlink()
    return path


def contents(refs):
    """The bytes or the problem of every input, by the last part of its name."""
    return {
        ref.uri.rpartition("/")[2]: ref.problem or _bytes_or_reason(ref) for ref in refs
    }


def _bytes_or_reason(ref):
    try:
        return read_bytes(ref)
    except ImageError as error:
        return error.reason


def scan(path):
    return list(open_source(str(path)).iter_inputs())


@pytest.mark.parametrize("suffix", [*COMPRESSORS, ".zip"])
def test_files_of_other_programs(folder, suffix):
    path = pack(folder, suffix)
    refs = sorted(scan(path), key=lambda ref: ref.uri)
    assert contents(refs) == PHOTOS
    assert refs[3].uri == f"{path}!photos/003.jpg"
    assert refs[3].metadata == {"captions": ["a dog", "some dog"]}
    assert refs[4].metadata == {"licence": "cc0", "likes": 7}


@pytest.mark.parametrize("suffix", [".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst"])
def test_a_read_that_fails_loses_no_bytes(folder, monkeypatch, suffix):
    monkeypatch.setattr(tars, "_CHUNK", 30_000)
    path = pack(folder, suffix)
    refs = scan(path)
    data = path.read_bytes()
    failures = [OSError(errno.EIO, "disk"), KeyboardInterrupt()]

    def read_at(size, offset):
        if offset > len(data) // 3 and failures:
            raise failures.pop()
        return data[offset : offset + size]

    file = TarArchive(RangedFile(read_at, len(data)))
    for ref in refs:
        for _ in range(3):
            with contextlib.suppress(OSError, KeyboardInterrupt):
                content = file.pread(ref.size, ref.offset)
                break
        assert content == PHOTOS[ref.uri.rpartition("/")[2]]
    assert failures == []


@pytest.mark.parametrize("suffix", [".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst"])
@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_damaged_compressed_tars_lose_nothing_silently(folder, suffix, damage):
    path = pack(folder, suffix)
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    if damage == "cut":
        del data[middle:]
    else:
        data[middle : middle + 64] = bytes(64)
    path.write_bytes(data)
    found = contents(scan(path))
    reasons = ("truncated-archive", "damaged-archive")
    assert found.pop(path.name) in reasons
    assert found != PHOTOS
    assert all(found[name] in (PHOTOS[name], *reasons) for name in found)


@pytest.mark.parametrize("suffix", [".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst"])
def test_a_damaged_stream_after_the_first_is_not_the_end(folder, suffix):
    path = pack(folder, suffix)
    whole = path.read_bytes()
    count = len(scan(path))
    for name in PHOTOS:
        (folder / "photos" / name).rename(folder / "photos" / f"b{name}")
    second = pack(folder, suffix).read_bytes()
    padding = bytes(0 if suffix == ".tar.zst" else 4)
    path.write_bytes(whole + padding + second)
    assert len(scan(path)) == 2 * count
    path.write_bytes(whole + b"\1\2\3" + second[3:])
    refs = scan(path)
    assert refs[-1].problem in ("damaged-archive", "truncated-archive")
    # Some decompressors raise an error before they return what comes before it.
    assert len(refs) in (1, count + 1)


def test_a_header_that_needs_much_memory_is_damage(folder):
    """The header of an xz file with a dictionary of 4 GiB."""
    path = pack(folder, ".tar.xz")
    data = bytearray(path.read_bytes())
    header = data[12 : 12 + 4 * (data[12] + 1)]
    header[header.index(b"\x21\x01") + 2] = 40
    header[-4:] = zlib.crc32(header[:-4]).to_bytes(4, "little")
    data[12 : 12 + len(header)] = header
    path.write_bytes(data)
    (ref,) = scan(path)
    assert ref.problem == "damaged-archive"


def test_an_archive_that_changed_after_the_plan(folder):
    refs = scan(pack(folder, ".tar.gz"))
    (folder / "photos/000.jpg").write_bytes(b"other")
    pack(folder, ".tar.gz")
    assert set(contents(refs).values()) == {"changed-since-plan"}


def test_a_bomb_in_a_compressed_tar(tmp_path, monkeypatch):
    monkeypatch.setattr(tars, "FREE_EXPANSION", 4 << 20)
    path = tmp_path / "bomb.tar.xz"
    with tarfile.open(path, "w:xz", preset=0) as archive:
        for name in ("a.jpg", "b.jpg"):
            info = tarfile.TarInfo(name)
            info.size = tars.FREE_EXPANSION
            archive.addfile(info, _Zeros())
    assert contents(scan(path))["bomb.tar.xz"] == "too-expensive"


class _Zeros(io.RawIOBase):
    def read(self, size=-1):
        return bytes(size)


def test_members_of_a_zip_that_cannot_be_read(tmp_path):
    path = tmp_path / "odd.zip"
    link = zipfile.ZipInfo("link.jpg")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(path, "w") as archive:
        for name, data, method in (
            (link, b"/etc/passwd", None),
            ("../up.jpg", b"up", None),
            ("lzma.jpg", b"x" * 100, zipfile.ZIP_LZMA),
            ("bzip2.jpg", b"x" * 100, zipfile.ZIP_BZIP2),
            ("bomb.jpg", bytes(2 * containers.FREE_EXPANSION), zipfile.ZIP_DEFLATED),
            ("notes.md", b"", None),
            ("__MACOSX/._a.jpg", b"attributes", None),
            (".hidden/a.jpg", b"hidden", None),
        ):
            archive.writestr(name, data, method)
    source = open_source(str(path))
    assert contents(list(source.iter_inputs())) == {
        "odd.zip!link.jpg": "unsupported-member",
        "up.jpg": b"up",
        "odd.zip!lzma.jpg": "unsupported-member",
        "odd.zip!bzip2.jpg": "unsupported-member",
        "odd.zip!bomb.jpg": "too-expensive",
    }
    assert source.ignored == {".md": 1, "(hidden)": 2}


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_damaged_zips_never_raise(tmp_path_factory, data):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.jpg", b"first" * 50)
        archive.writestr("b.jpg", b"second" * 50)
    content = bytearray(buffer.getvalue())
    offsets = st.integers(0, len(content) - 1)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(offsets)] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(offsets) :]
    path = tmp_path_factory.getbasetemp() / "damaged.zip"
    path.write_bytes(content)
    for value in contents(scan(path)).values():
        assert isinstance(value, bytes) or value in REASONS


def test_a_large_list_of_members_is_refused(tmp_path, monkeypatch):
    members = {f"{number:050d}.jpg": b"x" for number in range(200)}
    path = write_zip(tmp_path / "many.zip", members)
    monkeypatch.setattr("edje_index.inputs.ranges.MAX_READ", 10_000)
    (ref,) = scan(path)
    assert ref.problem == "damaged-archive"


def test_a_damaged_size_takes_no_memory(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    with open_ranged(os.fsencode(tmp_path / "file")) as file:
        assert file.pread(1 << 60, 1) == b"bc"
        assert file.read(1 << 60) == b"abc"
        assert file.read() == b""


def test_a_folder_of_archives_is_read(folder):
    packed = folder / "packed"
    packed.mkdir()
    pack(folder, ".tar.gz").rename(packed / "a.tar.gz")
    pack(folder, ".zip").rename(packed / "b.zip")
    (packed / "again.zip").symlink_to("b.zip")
    (packed / "stats.json").write_text("{}")
    (packed / "damaged.zip").write_bytes(b"PK")
    source = open_source(str(packed))
    refs = list(source.iter_inputs())
    names = [ref.uri.partition("!")[0] for ref in refs if not ref.problem]
    assert names == [f"{packed}/a.tar.gz"] * 12 + [f"{packed}/again.zip"] * 12
    (damaged,) = [ref for ref in refs if ref.problem]
    assert (damaged.uri, damaged.problem) == (
        f"{packed}/damaged.zip",
        "damaged-archive",
    )
    assert source.ignored == {".json": 1, "(link seen)": 1}
