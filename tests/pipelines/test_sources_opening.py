"""Opening sources: the kind of each, or one line that says what is accepted."""

import os

import pytest

from pipelines.sources import expand_braces, open_sources
from pipelines.sources.kinds import TableSource, TreeSource
from storage_formats.errors import UsageError


@pytest.fixture
def photos(tmp_path):
    for name in ("photos/a.jpg", "photos/sub/b.jpg", "photos2/c.jpg", "a.tar", "b.tar"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(10240))
    (tmp_path / "list.csv").write_text("path\nphotos/a.jpg\nphotos/a.jpg\n")
    return tmp_path


def refused(*specs, column=None):
    with pytest.raises(UsageError) as caught:
        open_sources([str(spec) for spec in specs], column)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_kinds(photos):
    specs = [
        photos / "photos",
        photos / "a.tar",
        photos / "list.csv",
        photos / "photos2/c.jpg",
    ]
    sources = open_sources([str(spec) for spec in specs])
    assert list(map(type, sources)) == [
        TreeSource,
        TreeSource,
        TableSource,
        TreeSource,
    ]
    assert [source.spec for source in sources] == [str(spec) for spec in specs]


def test_unknown_kinds_are_refused_with_what_is_accepted(photos):
    (photos / "notes.md").write_text("x")
    for name in ("notes.md", "missing", "missing.tar", "missing-{00..03}.tar"):
        assert name.partition("{")[0] in refused(photos / name)
    assert "a directory, an archive (.tar," in refused(photos / "notes.md")
    assert "not a local path" in refused("ftp://host/photos")
    os.mkfifo(photos / "pipe.jpg")
    assert "neither a directory nor a regular file" in refused(photos / "pipe.jpg")


def test_overlaps_are_refused_with_both_names(photos):
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


def test_a_column_needs_a_list(photos):
    assert "is given, but no source is a table with columns" in refused(
        photos / "a.tar", column="path"
    )


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("plain.tar", ["plain.tar"]),
        ("{08..11}.tar", ["08.tar", "09.tar", "10.tar", "11.tar"]),
        ("{10..8}", ["10", "9", "8"]),
        ("{-1..1}", ["-1", "0", "1"]),
        ("{a,b}-{0..1}", ["a-0", "a-1", "b-0", "b-1"]),
        ("{a{1,2}}", ["{a1}", "{a2}"]),
        ("{{1,2}", ["{1", "{2"]),
        ("{a,b}}", ["a}", "b}"]),
        *((literal, [literal]) for literal in ("{a}", "{a", "{}", "{a..c}")),
        ("{,x}", ["", "x"]),
    ],
)
def test_braces(pattern, names):
    assert expand_braces(pattern) == names


@pytest.mark.parametrize(
    "pattern", ["{0..99999999999}", "{0..9999}{0..9999}", "{0..9}" * 7]
)
def test_too_many_names(pattern):
    with pytest.raises(UsageError, match="more than"):
        expand_braces(pattern)


@pytest.mark.parametrize(
    "url",
    [
        "https://user:secret@host/a.tar",
        "s3://secret@bucket/*.jpg",
        "ftp://u:secret@host/a",
    ],
)
def test_urls_with_passwords_are_refused_without_them(url):
    message = refused(url)
    assert "put the credentials into the environment" in message
    assert "secret" not in message


def test_quoted_patterns(tmp_path):
    for name in ("b.jpg", "a.jpg", "sub/c.jpg", "sub/deep/d.jpg", "[x].jpg"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"abc")

    def names(pattern):
        return [
            source.spec.removeprefix(f"{tmp_path}/")
            for source in open_sources([f"{tmp_path}/{pattern}"])
        ]

    assert names("?.jpg") == ["a.jpg", "b.jpg"]
    assert names("sub/**/*.jpg") == ["sub/c.jpg", "sub/deep/d.jpg"]
    assert names("{b,a}*.jpg") == ["b.jpg", "a.jpg"]
    assert names("[x].jpg") == ["[x].jpg"]
    with pytest.raises(UsageError, match=r"no file matches .*\*\.png"):
        names("*.png")
