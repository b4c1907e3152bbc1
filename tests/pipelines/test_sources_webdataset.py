"""WebDataset tar archives of all common writers; damage is always reported."""

import os
import tarfile

from hypothesis import given, settings
from hypothesis import strategies as st

from edje_index.images.decode import REASONS
from edje_index.inputs import ranges, tars
from edje_index.inputs.ranges import open_ranged
from edje_index.inputs.refs import read_bytes
from edje_index.inputs.tars import TarArchive
from pipelines.sources import open_sources
from pipelines.sources.kinds import TreeSource, iter_all
from tests.pipelines.archives import write_tar


def special(name, kind, link=""):
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = link
    return info


def scan(path):
    source = TreeSource(str(path))
    return list(source.iter_inputs()), dict(source.ignored)


def read_all(path):
    """(name of the member, its bytes or its problem) of every input."""
    return [
        (ref.uri.partition("!")[2], ref.problem or read_bytes(ref))
        for ref in scan(path)[0]
    ]


def headers(path):
    with open_ranged(bytes(path)) as file:
        return list(TarArchive(file).members())


MEMBERS = [
    ("0001.jpg", b"first"),
    ("0001.txt", b"caption"),
    ("0001.json", b"{}"),
    ("0002.png", b"x" * 512),
]


def test_members_that_are_no_files_fail_or_are_ignored(tmp_path):
    sparse = tarfile.TarInfo("pax.jpg")
    sparse.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.name": "sparse.jpg"}
    members = [
        (special("folder.jpg", tarfile.DIRTYPE), b""),
        (special("pipe.jpg", tarfile.FIFOTYPE), b""),
        (special("hard.jpg", tarfile.LNKTYPE, "a.jpg"), b""),
        (special("soft.jpg", tarfile.SYMTYPE, "a.jpg"), b""),
        (special("soft.txt", tarfile.SYMTYPE, "a.jpg"), b""),
        (sparse, b"abcd"),
        ("./a.jpg", b"one"),
        ("x/._a.jpg", b"fork"),
        (".git/b.jpg", b""),
        ("c", b"\xff\xd8\xff"),
        ("d", b""),
    ]
    path = write_tar(tmp_path / "a.tar", members)
    failed = ("pipe.jpg", "hard.jpg", "soft.jpg", "sparse.jpg")
    assert read_all(path) == [
        *((name, "unsupported-member") for name in failed),
        ("./a.jpg", b"one"),
        ("c", b"\xff\xd8\xff"),
    ]
    ignored = {"(hidden)": 2, "(no suffix)": 1, "(unreadable metadata)": 1}
    assert scan(path)[1] == ignored


def test_a_compressed_tar_is_listed_in_one_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(ranges, "KEPT_BYTES", 1)
    monkeypatch.setattr(tars, "_CHUNK", 1 << 10)
    members = [("0.txt", b"of no image")]
    for number in range(1, 10):
        members += [(f"{number}.json", b'{"caption": "a dog"}')]
        members += [(f"{number}.png", bytes(10_000))]
    path = write_tar(tmp_path / "a.tar.gz", members)
    passes = []
    monkeypatch.setattr(
        tars,
        "_chunks",
        lambda file, decompress, chunks=tars._chunks: (
            passes.append(None) or chunks(file, decompress)
        ),
    )
    refs, _ = scan(path)
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
        ref.uri.partition("!")[2]: (ref.offset + ref.size, read_bytes(ref))
        for ref in scan(whole)[0]
    }
    path = tmp_path / "cut.tar"
    for length in [*range(0, 8 * 512, 100), *range(0, 8 * 512, 512)]:
        path.write_bytes(data[:length])
        kept = [(name, part) for name, (end, part) in ends.items() if end <= length]
        *found, (_, problem) = read_all(path)
        assert (found, problem) == (kept, "truncated-archive")


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
    form = data.draw(st.sampled_from([1, 2]))
    members = [("a.jpg", b"one"), ("é" * 80 + ".jpg", b"two")]
    content = bytearray(write_tar(path, members, form).read_bytes())
    places = st.integers(0, min(len(content), 5000) - 1)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(places)] = data.draw(st.integers(0, 255))
    # with a true checksum, so that later checks are reached
    if data.draw(st.booleans()):
        header = data.draw(st.sampled_from([0, 1024]))
        content[header + 148 : header + 156] = b" " * 8
        total = sum(content[header : header + 512])
        content[header + 148 : header + 155] = b"%06o\0" % total
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
