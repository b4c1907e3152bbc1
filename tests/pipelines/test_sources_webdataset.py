"""WebDataset tar archives of all common writers; damage is always reported."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edje_index.images.decode import REASONS
from edje_index.inputs import ranges, tars
from edje_index.inputs.containers import ZipArchive
from edje_index.inputs.ranges import open_ranged
from edje_index.inputs.refs import InputRef, read_bytes
from edje_index.inputs.tars import TarArchive
from pipelines.sources import open_sources
from pipelines.sources.kinds import TreeSource, iter_all

Member = tuple[str, bytes]


def write_tar(
    path: Path, members: list[Member], form: int = tarfile.PAX_FORMAT
) -> Path:
    with tarfile.open(path, "w", format=form) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def scan(path: Path) -> tuple[list[InputRef], dict[str, int]]:
    source = TreeSource(str(path))
    return list(source.iter_inputs()), dict(source.ignored)


def read_all(path: Path) -> list[tuple[str, bytes | str]]:
    """(name of the member, its bytes or its problem) of every input."""
    return [
        (ref.uri.partition("!")[2], ref.problem or read_bytes(ref))
        for ref in scan(path)[0]
    ]


def headers(path: Path) -> list[tars.Member]:
    with open_ranged(bytes(path)) as file:
        return list(TarArchive(file).members())


MEMBERS = [
    ("0001.jpg", b"first"),
    ("0001.txt", b"caption"),
    ("0001.json", b"{}"),
    ("0002.png", b"x" * 512),
]


@pytest.mark.parametrize(
    "form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
)
def test_image_members_are_inputs(tmp_path, form):
    path = write_tar(tmp_path / "a.tar", MEMBERS, form)
    refs, ignored = scan(path)
    assert [ref.uri for ref in refs] == [f"{path}!0001.jpg", f"{path}!0002.png"]
    assert [read_bytes(ref) for ref in refs] == [b"first", b"x" * 512]
    assert refs[0].metadata == {"captions": ["caption"]}
    assert refs[1].metadata is None
    assert ignored == {}


def test_folders_hidden_files_and_files_without_suffix(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        folder = tarfile.TarInfo("folder.jpg")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        pipe = tarfile.TarInfo("pipe.jpg")
        pipe.type = tarfile.FIFOTYPE
        archive.addfile(pipe)
        for name, data in [
            ("./a.jpg", b"one"),
            ("x/._a.jpg", b"fork"),
            (".git/b.jpg", b""),
            ("c", b"\xff\xd8\xff"),
            ("d", b""),
        ]:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    assert read_all(path) == [
        ("pipe.jpg", "unsupported-member"),
        ("./a.jpg", b"one"),
        ("c", b"\xff\xd8\xff"),
    ]
    assert scan(path)[1] == {"(hidden)": 2, "(no suffix)": 1}


def test_links_and_sparse_members_fail_with_a_reason(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for name, kind in [
            ("hard.jpg", tarfile.LNKTYPE),
            ("soft.jpg", tarfile.SYMTYPE),
            ("soft.txt", tarfile.SYMTYPE),
        ]:
            info = tarfile.TarInfo(name)
            info.type = kind
            info.linkname = "a.jpg"
            archive.addfile(info)
        sparse = tarfile.TarInfo("pax.jpg")
        sparse.size = 4
        sparse.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.name": "sparse.jpg"}
        archive.addfile(sparse, io.BytesIO(b"abcd"))
        after = tarfile.TarInfo("after.jpg")
        after.size = 3
        archive.addfile(after, io.BytesIO(b"end"))
    failed = [
        (name, "unsupported-member") for name in ("hard.jpg", "soft.jpg", "sparse.jpg")
    ]
    assert read_all(path) == [*failed, ("after.jpg", b"end")]


@pytest.mark.parametrize("name", ["a.tar", "a.zip"])
def test_metadata_files_are_read_as_they_pass(tmp_path, name, monkeypatch):
    contents = {"1.json": b"{}", "1.jpg": b"", "2.txt": b"of no image", "3.jpg": b""}
    contents |= {"4.txt": b"of no image", "3.txt": b"a dog", "5.jpg": b"", "5.txt": b""}
    path = tmp_path / name
    if name == "a.zip":
        with zipfile.ZipFile(path, "w") as archive:
            for member, data in contents.items():
                archive.writestr(member, data)
    else:
        write_tar(path, list(contents.items()))
    sizes: list[int] = []
    for kind in (TarArchive, ZipArchive):
        monkeypatch.setattr(
            kind,
            "read",
            lambda self, offset, size, read=kind.read: (
                sizes.append(size) or read(self, offset, size)
            ),
        )
    refs, _ = scan(path)
    assert [ref.metadata for ref in refs] == [None, {"captions": ["a dog"]}, None]
    # "3.txt" is read once more, because it is not in the sample of its image
    texts = ["3.txt", *(each for each in contents if not each.endswith(".jpg"))]
    assert sorted(sizes) == sorted(len(contents[each]) for each in texts)


def test_a_compressed_tar_is_listed_in_one_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(ranges, "KEPT_BYTES", 1)
    monkeypatch.setattr(tars, "_CHUNK", 1 << 10)
    members = [("0.txt", b"of no image")]
    for number in range(1, 10):
        members += [(f"{number}.json", b'{"caption": "a dog"}')]
        members += [(f"{number}.png", bytes(10_000))]
    path = write_tar(tmp_path / "a.tar", members)
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(path.read_bytes()))
    passes: list[None] = []
    monkeypatch.setattr(
        TarArchive,
        "_chunks",
        lambda self, decompress, chunks=TarArchive._chunks: (
            passes.append(None) or chunks(self, decompress)
        ),
    )
    refs, _ = scan(tmp_path / "a.tar.gz")
    assert [ref.metadata for ref in refs] == [{"caption": "a dog"}] * 9
    assert len(passes) == 1


def test_scanning_reads_only_headers(tmp_path):
    """A terabyte of holes is scanned at once."""
    path = tmp_path / "a.tar"
    with open(path, "wb") as file:
        for number in range(1024):
            info = tarfile.TarInfo(f"{number}.jpg")
            info.size = 1 << 30
            file.write(info.tobuf(tarfile.GNU_FORMAT))
            file.seek(info.size, os.SEEK_CUR)
        file.write(bytes(10240))
    refs, _ = scan(path)
    assert [ref.offset for ref in refs] == [
        512 + number * (512 + (1 << 30)) for number in range(1024)
    ]


# Damage


def test_truncated_anywhere(tmp_path):
    """Whole members stay inputs; the missing rest is exactly one failed input."""
    whole = write_tar(tmp_path / "whole.tar", MEMBERS, tarfile.GNU_FORMAT)
    data = whole.read_bytes()
    ends = {
        ref.uri.partition("!")[2]: ref.offset + ref.size
        for ref in scan(whole)[0]
        if ref.size is not None
    }
    path = tmp_path / "cut.tar"
    for length in [*range(0, 8 * 512, 100), *range(0, 8 * 512, 512)]:
        path.write_bytes(data[:length])
        found = read_all(path)
        kept = [(name, value) for name, value in found if isinstance(value, bytes)]
        assert [name for name, _ in kept] == [
            name for name, end in ends.items() if end <= length
        ]
        assert [value for _, value in found if isinstance(value, str)] == [
            "truncated-archive"
        ]


def test_damaged_header_in_the_middle(tmp_path):
    """`tarfile` alone ends here without an error."""
    path = write_tar(
        tmp_path / "a.tar",
        [("a.jpg", b"one"), ("b.jpg", b"two"), ("c.jpg", b"three")],
        tarfile.GNU_FORMAT,
    )
    data = bytearray(path.read_bytes())
    data[1024 + 10] ^= 0xFF
    path.write_bytes(data)
    assert [(ref.uri, ref.problem) for ref in scan(path)[0]] == [
        (f"{path}!a.jpg", None),
        (str(path), "damaged-archive"),
    ]


NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1, max_size=150
)


@given(
    st.lists(st.tuples(NAMES, st.binary(max_size=1500)), max_size=6),
    st.sampled_from([0, 1, 2]),
)
def test_every_member_lies_where_it_was_written(tmp_path_factory, members, form):
    path = tmp_path_factory.getbasetemp() / "written.tar"
    try:
        write_tar(path, members, form)
    except ValueError:
        # ustar cannot hold the name
        return
    content = path.read_bytes()
    regular = [member for member in headers(path) if member.problem is None]
    assert [
        (member.name.decode(), content[member.offset :][: member.size])
        for member in regular
    ] == members


@given(st.data())
@settings(max_examples=120)
def test_any_damage_ends_with_a_reason(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "damaged.tar"
    form = data.draw(st.sampled_from([0, 1, 2]))
    content = bytearray(
        write_tar(
            path,
            [("a.jpg", b"one"), ("é" * 80 + ".jpg", b"two")],
            2 if form == 0 else form,
        ).read_bytes()
    )
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, min(len(content), 5000) - 1))] = data.draw(
            st.integers(0, 255)
        )
    # with a true checksum, so that later checks are reached
    if data.draw(st.booleans()):
        header = data.draw(st.sampled_from([0, 1024]))
        content[header + 148 : header + 156] = b" " * 8
        content[header + 148 : header + 155] = b"%06o\0" % sum(
            content[header : header + 512]
        )
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    refs, _ = scan(path)
    assert all(ref.problem is None or ref.problem in REASONS for ref in refs)
    assert len(refs) <= 20


# Many tars


def test_shards_keep_their_order(tmp_path):
    """More archives than are read at once."""
    for number in range(30):
        write_tar(
            tmp_path / f"{number:03d}.tar",
            [(f"{number}-{member}.jpg", b"x") for member in range(number % 4)],
        )
    sources = open_sources([str(tmp_path / "{000..029}.tar")])
    names = [ref.uri.partition("!")[2] for ref in iter_all(sources)]
    assert names == [
        f"{number}-{member}.jpg" for number in range(30) for member in range(number % 4)
    ]
