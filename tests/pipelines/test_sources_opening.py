"""Opening sources: the kind of each, or one line that says what is accepted."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.sources import open_source, open_sources
from pipelines.sources.base import ImageFileSource
from pipelines.sources.folder import FolderSource
from pipelines.sources.lists import ListSource
from pipelines.sources.opening import expand_braces
from pipelines.sources.packed import ArchiveSource
from storage_formats.errors import UsageError


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name in ("photos/a.jpg", "photos/sub/b.jpg", "photos2/c.jpg", "a.tar", "b.tar"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(10240))
    (tmp_path / "list.csv").write_text("path\nphotos/a.jpg\nphotos/a.jpg\n")
    return tmp_path


def refused(*specs: object, column: str | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        open_sources([str(spec) for spec in specs], column)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_kinds(photos: Path) -> None:
    specs = [photos / "photos", photos / "a.tar", photos / "list.csv", photos / "photos2/c.jpg"]
    sources = open_sources([str(spec) for spec in specs])
    assert list(map(type, sources)) == [FolderSource, ArchiveSource, ListSource, ImageFileSource]
    assert [source.spec for source in sources] == [str(spec) for spec in specs]


def test_unknown_kinds_are_refused_with_what_is_accepted(photos: Path) -> None:
    (photos / "notes.md").write_text("x")
    for name in ("notes.md", "missing", "missing.tar", "missing.csv", "missing-{00..03}.tar"):
        assert name.partition("{")[0] in refused(photos / name)
    assert "a directory, an archive (.tar," in refused(photos / "notes.md")
    assert "not a local path" in refused("ftp://host/photos")
    os.mkfifo(photos / "pipe.jpg")
    assert "neither a directory nor a regular file" in refused(photos / "pipe.jpg")


def test_images_are_known_by_suffix_or_content(photos: Path) -> None:
    (photos / "photo").write_bytes(b"\x89PNG\r\n\x1a\n")
    for name in ("photo", "photos/a.jpg"):
        assert isinstance(open_source(str(photos / name)), ImageFileSource)


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "zipped.tar"])
def test_compressed_archives_are_opened(photos: Path, name: str) -> None:
    (photos / name).write_bytes(gzip.compress(bytes(10240)))
    assert list(open_source(str(photos / name)).iter_inputs()) == []


def test_overlaps_are_refused_with_both_names(photos: Path) -> None:
    (photos / "link").symlink_to("photos")
    for one, two in [
        ("photos", "photos"),
        ("photos", "photos/"),
        ("photos", "photos/sub"),
        ("photos/sub", "photos"),
        ("photos", "link"),
        ("link/sub", "photos"),
        ("photos", "photos/a.jpg"),
        ("photos", "photos/sub/b.jpg"),
        ("a.tar", "a.tar"),
        (".", "a.tar"),
        ("{a,b}.tar", "b.tar"),
        ("list.csv", "list.csv"),
    ]:
        message = refused(photos / one, f"{photos}/{two}")
        assert two in message
        assert one.removeprefix("{a,").removesuffix("}.tar") in message


def test_neighbours_do_not_overlap(photos: Path) -> None:
    specs = ["photos", "photos2", "a.tar", "b.tar", "list.csv"]
    assert len(open_sources([str(photos / spec) for spec in specs])) == 5
    (photos / "photos/b.tar").write_bytes(bytes(10240))
    specs = [str(photos / "photos"), str(photos / "photos/b.tar")]
    assert len(open_sources(specs)) == 2  # a folder does not read a tar beside images


def test_a_column_needs_a_list(photos: Path) -> None:
    assert "is given, but no source is a table with columns" in refused(photos / "photos", column="path")


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("plain.tar", ["plain.tar"]),
        ("{0..2}", ["0", "1", "2"]),
        ("{08..11}.tar", ["08.tar", "09.tar", "10.tar", "11.tar"]),
        ("{2..0}", ["2", "1", "0"]),
        ("{-1..1}", ["-1", "0", "1"]),
        ("{a,b}-{0..1}", ["a-0", "a-1", "b-0", "b-1"]),
        ("{a{1,2}}", ["{a1}", "{a2}"]),
        ("{{1,2}", ["{1", "{2"]),
        ("{a,b}}", ["a}", "b}"]),
        ("{a}", ["{a}"]),
        ("{a", ["{a"]),
        ("{}", ["{}"]),
        ("{a..c}", ["{a..c}"]),
        ("{,x}", ["", "x"]),
    ],
)
def test_braces(pattern: str, names: list[str]) -> None:
    assert expand_braces(pattern) == names


@pytest.mark.parametrize("pattern", ["{0..99999999999}", "{0..9999}{0..9999}", "{0..9}" * 7])
def test_too_many_names(pattern: str) -> None:
    with pytest.raises(UsageError, match="more than"):
        expand_braces(pattern)


@given(st.text("ab{},.019-", max_size=14))
def test_braces_always_end(pattern: str) -> None:
    try:
        names = expand_braces(pattern)
    except UsageError:
        return
    assert names
    if "{" not in pattern:
        assert names == [pattern]


def test_archives_beside_each_other_need_one_listing(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tars = [photos / f"shards/{number}.tar" for number in range(4)]
    (photos / "shards").mkdir()
    for tar in (*tars, photos / "shards/beside.jpg"):
        tar.write_bytes(bytes(10240))
    listed, listdir = [], os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: listed.append(path) or listdir(path))
    open_sources([str(photos), *map(str, tars)])  # the directory with an image does not read its archives
    assert listed == [bytes(photos / "shards")]


@pytest.mark.parametrize("url", ["https://user:secret@host/a.tar", "s3://secret@bucket/*.jpg", "ftp://u:secret@host/a"])
def test_urls_with_passwords_are_refused_without_them(url: str) -> None:
    message = refused(url)
    assert "put the credentials into the environment" in message
    assert "secret" not in message
