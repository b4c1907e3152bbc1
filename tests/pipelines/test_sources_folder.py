"""Directories: every entry is an input, a counted ignored file, or an input with a
problem, exactly once.
"""

import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edje_index.inputs.refs import read_bytes
from pipelines.sources import open_source
from pipelines.sources.base import Patterns
from pipelines.sources.kinds import TreeSource
from tests.pipelines.archives import write_tar

JPEG = b"\xff\xd8\xff\xe0" + bytes(40)


def put(path, data=JPEG):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def scan(root):
    """(paths below root in order, ignored, problems by path)."""
    source = open_source(str(root))
    refs = list(source.iter_inputs())
    names = [os.path.relpath(ref.uri, root) for ref in refs]
    return (
        names,
        dict(source.ignored),
        {
            name: ref.problem
            for name, ref in zip(names, refs, strict=True)
            if ref.problem
        },
    )


def test_order_is_by_bytes_files_before_folders(tmp_path):
    expected = "Z.jpg b.jpg blob é.jpg %FF%E9.jpg a/10.png a/2.png a/b/c.webp a0/x.gif"
    for name in reversed(expected.split()):
        put(tmp_path / name.replace("%FF%E9", os.fsdecode(b"\xff\xe9")))
    # archives beside images are ignored
    put(tmp_path / "beside.tar", bytes(10240))
    put(tmp_path / "bitmap", b"BM is how this text begins, and it is long enough")
    names, ignored, problems = scan(tmp_path)
    assert names == expected.split()
    assert (ignored, problems) == ({".tar": 1, "(no suffix)": 1}, {})
    (ref,) = (
        each for each in open_source(str(tmp_path)).iter_inputs() if "%FF" in each.uri
    )
    assert (os.path.basename(ref.path), read_bytes(ref)) == (b"\xff\xe9.jpg", JPEG)


def test_pipes_and_sockets_are_counted_and_not_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.jpg")
    os.mkfifo("pipe")
    (tmp_path / "link.jpg").symlink_to("pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket.jpg")
        names, ignored, _ = scan(tmp_path)
    assert (names, ignored) == ([], {"(not a file)": 4})


# (paths of files, and links with their targets; patterns; paths of the inputs, with
# their problems; ignored)
TREES = {
    "no images": (
        "a.JPG a.txt b.txt c.XML .DS_Store ._a.jpg .git/a.jpg noise a.jpg~"
        " a.averyverylongsuffix",
        {},
        "a.JPG",
        dict.fromkeys([".txt", ".xml", "(no suffix)", ".jpg~", "(other)"], 1)
        | {"(hidden)": 3},
    ),
    "loops": (
        "a/a.jpg a/up>.. a/self>self",
        {},
        "a/a.jpg",
        {"(folder seen)": 1, "(broken link)": 1},
    ),
    "a link to a directory": ("z/p.jpg a>z", {}, "z/p.jpg", {"(folder seen)": 1}),
    "an excluded link": ("z/p.jpg a>z", {"exclude": ["/a/"]}, "z/p.jpg", None),
    "links to ignored files": (
        "a/blob.dat a/.hidden.jpg z.jpg>a/blob.dat a/y.jpg>.hidden.jpg",
        {},
        "z.jpg a/y.jpg",
        {".dat": 1, "(hidden)": 1},
    ),
    "links to an image without a suffix": (
        "b/IMG a.jpg>b/IMG b/c.jpg>IMG d.jpg>e/IMG e/IMG",
        {"exclude": ["/e/"]},
        "a.jpg d.jpg",
        {"(link seen)": 2, "(excluded)": 1},
    ),
    "a link to an archive that is ignored": (
        "all/0.jpg all/a.tar packed/b.tar>../all/a.tar",
        {"exclude": ["*.png"]},
        "all/0.jpg packed/b.tar!0.jpg",
        {".tar": 1},
    ),
    "a link into an index": (
        "a.jpg>z/0.jpg z/0.jpg z/index.json z/manifest/0 z/rows/0 z/tokens/0",
        {},
        "a.jpg",
        {"(index)": 1},
    ),
    "a link into an index that is read first": (
        "a/0.jpg a/index.json a/manifest/0 a/rows/0 a/tokens/0 z/0.jpg>../a/0.jpg",
        {},
        "z/0.jpg",
        {"(index)": 1},
    ),
    "files of other programs": (
        "@eaDir/a.jpg/SYNOPHOTO_THUMB_M.jpg #recycle/a.jpg trip/__MACOSX/._a.jpg"
        " trip/Previews.lrdata/1/a.jpg .thumbnails/a.jpg .Trash-1000/files/a.jpg"
        " trip/._a.jpg trip/Thumbs.db trip/eaDir.jpg",
        {},
        "trip/eaDir.jpg",
        {"(hidden)": 7, ".db": 1},
    ),
    "broken links": (
        "a.jpg>b.jpg c.txt>d.txt e.jpg>e.jpg",
        {},
        "a.jpg:missing e.jpg:unreadable",
        {".txt": 1},
    ),
    "an excluded album of links": (
        "all/0.jpg all/1.jpg all/2.jpg abest/x.jpg>../all/2.jpg"
        " zbest/x.jpg>../all/1.jpg",
        {"exclude": ["/abest/"]},
        "all/0.jpg all/1.jpg all/2.jpg",
        {"(excluded)": 1, "(link seen)": 1},
    ),
    "an included album of links": (
        "all/0.jpg all/1.jpg zbest/x.jpg>../all/1.jpg",
        {"include": ["/zbest/"]},
        "zbest/x.jpg",
        {"(excluded)": 2},
    ),
}


@pytest.mark.parametrize("tree", TREES)
def test_a_tree_gives_rows(tmp_path, tree):
    entries, patterns, expected, ignored = TREES[tree]
    for entry in entries.split():
        name, _, target = entry.partition(">")
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if target:
            path.symlink_to(target)
        elif name.endswith(".tar"):
            write_tar(path, {"0.jpg": JPEG})
        else:
            path.write_bytes(b"text" if name.endswith((".txt", "noise")) else JPEG)
    source = open_source(str(tmp_path))
    source.patterns = Patterns(**patterns)
    refs = list(source.iter_inputs())
    rows = [
        os.path.relpath(ref.uri, tmp_path) + (f":{ref.problem}" if ref.problem else "")
        for ref in refs
    ]
    assert rows == expected.split()
    assert ignored is None or source.ignored == ignored


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcd"),
            st.sampled_from("abcd"),
            st.sampled_from(["file", "link"]),
        ),
        max_size=12,
    )
)
def test_every_real_image_is_found_once(tmp_path_factory, made):
    """Every file is used exactly once, whatever links lead to it, and a second pass
    has the same order.
    """
    root = tmp_path_factory.mktemp("tree")
    for folder, name, kind in made:
        (root / folder).mkdir(exist_ok=True)
        path = root / folder / (f"{name}.jpg" if kind == "file" else f"link{name}")
        if not os.path.lexists(path):
            (
                path.write_bytes(JPEG)
                if kind == "file"
                else path.symlink_to(root / name, target_is_directory=True)
            )
    refs = list(TreeSource(str(root), True).iter_inputs())
    real = [os.path.realpath(ref.path) for ref in refs]
    assert sorted(real) == sorted(
        os.fsencode(path) for path in root.rglob("*.jpg") if not path.is_symlink()
    )
    assert list(TreeSource(str(root), True).iter_inputs()) == refs
    # with patterns, a file is used under one of the paths that they select
    source = TreeSource(str(root), True)
    source.patterns = Patterns(exclude=["/a/", "/b/linkc/", "a.jpg"])
    used = [(ref.uri, os.path.realpath(ref.uri)) for ref in source.iter_inputs()]
    selected = {
        os.path.realpath(path)
        for path in paths_below(root, ())
        if source.patterns.select(os.path.relpath(path, root))
    }
    assert sorted(real for _, real in used) == sorted(selected)


def paths_below(folder, parents):
    """Every path to an image, through links that lead to no parent."""
    real = os.path.realpath(folder)
    for path in () if real in parents else folder.iterdir():
        if path.is_dir():
            yield from paths_below(path, (*parents, real))
        elif path.suffix:
            yield path


def test_every_path_to_an_archive_is_tried(tmp_path):
    write_tar(tmp_path / "a.tar", {"store/0.jpg": JPEG})
    put(tmp_path / "b/own/1.jpg")
    for name in ("album", "zoo"):
        (tmp_path / "b" / name).mkdir()
        (tmp_path / "b" / name / "a.tar").symlink_to("../../a.tar")
    source = open_source(str(tmp_path / "b"))
    for patterns, expected in (
        ({}, "album"),
        ({"exclude": ["/album/"]}, "zoo"),
        ({"include": ["*.jpg"]}, "album"),
        ({"include": ["/zoo/", "/own/"]}, "zoo"),
    ):
        source.patterns = Patterns(**patterns)
        uris = {os.path.relpath(ref.uri, source.spec) for ref in source.iter_inputs()}
        assert uris == {f"{expected}/a.tar!store/0.jpg", "own/1.jpg"}


# What cannot be read


def test_a_folder_too_deep_to_open_is_an_input_with_a_problem(tmp_path, monkeypatch):
    """The path is longer than the system allows, so the directories are created one
    by one.
    """
    monkeypatch.chdir(tmp_path)
    for _ in range(20):
        os.mkdir("d" * 250)
        os.chdir("d" * 250)
    Path("a.jpg").write_bytes(JPEG)
    os.chdir(tmp_path)
    put(tmp_path / "a.jpg")
    names, _, problems = scan(tmp_path)
    assert len(names) == 2
    assert names[0] == "a.jpg"
    assert list(problems.values()) == ["unreadable"]
