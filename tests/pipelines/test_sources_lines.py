"""Lists of lines: text files, standard input and tables with tabs; and patterns that name several sources."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edje_index.images.inputs import InputRef
from pipelines.progress.events import JobStopped
from pipelines.sources import digested, open_source, open_sources
from storage_formats.errors import UsageError


def scan(path: Path) -> list[InputRef]:
    return list(open_source(str(path)).iter_inputs())


def test_lines_name_files(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for name in (b"a.jpg", b"b c.jpg", b"\xff.jpg"):
        (tmp_path / "photos" / os.fsdecode(name)).write_bytes(name)
    path = tmp_path / "list.txt"
    long = b"x" * 70_000
    path.write_bytes(
        b"photos/a.jpg\r\n\n  \nphotos/b c.jpg\nphotos/\xff.jpg\ngone.jpg\n" + long + b"\na\0b\nphotos/a.jpg"
    )
    refs = scan(path)
    assert [ref.problem for ref in refs] == [None, None, None, "missing", "bad-list-line", "bad-list-line", None]
    assert [ref.size for ref in refs[:3]] == [5, 7, 5]
    assert refs[4].uri == f"{path}#7"


def test_a_quotation_mark_in_a_table_with_tabs_hides_no_row(tmp_path: Path) -> None:
    path = tmp_path / "list.tsv"
    path.write_text('path\tcaption\na.jpg\t"hello\nb.jpg\t2" wide\nc.jpg\t"a ""big""\tdog"\r\nd.jpg\t"\n')
    assert [(ref.uri, ref.metadata) for ref in scan(path)] == [
        (f"{tmp_path}/a.jpg", {"caption": '"hello'}),
        (f"{tmp_path}/b.jpg", {"caption": '2" wide'}),
        (f"{tmp_path}/c.jpg", {"caption": 'a "big"\tdog'}),
        (f"{tmp_path}/d.jpg", {"caption": '"'}),
    ]


@pytest.mark.parametrize("rest", ["c.jpg,y\n", "c.jpg," + "y" * 200_000 + '\nd.jpg,"\n'])
def test_quoted_text_without_an_end_hides_no_row(tmp_path: Path, rest: str) -> None:
    path = tmp_path / "list.csv"
    path.write_text('path,caption\na.jpg,"two\nlines"\nb.jpg,"hello\n' + rest)
    with pytest.raises(UsageError, match=r"quoted text that begins in line 4 of .*list.csv has no end or is too long"):
        scan(path)


STDIN = """
from pipelines.sources import open_sources, iter_all
for ref in iter_all(open_sources(["-"])):
    print(ref.uri, ref.problem)
"""


def test_standard_input(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"abc")
    done = subprocess.run(
        [sys.executable, "-c", STDIN], input=b"a.jpg\ngone.jpg\n", capture_output=True, check=True, cwd=tmp_path
    )
    assert done.stdout.decode() == f"{tmp_path}/a.jpg None\n{tmp_path}/gone.jpg missing\n"


def test_standard_input_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"gone.jpg\n")))
    (source,) = open_sources(["-"])
    assert len(list(source.iter_inputs())) == 1
    with pytest.raises(UsageError, match="standard input has been read already"):
        list(source.iter_inputs())


def test_a_terminal_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    parent, child = os.openpty()
    with os.fdopen(child, "r") as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        with pytest.raises(UsageError, match="standard input is a terminal"):
            open_sources(["-"])
    os.close(parent)


def test_quoted_patterns(tmp_path: Path) -> None:
    for name in ("b.jpg", "a.jpg", "sub/c.jpg", "sub/deep/d.jpg", "[x].jpg"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"abc")

    def names(pattern: str) -> list[str]:
        return [source.spec.removeprefix(f"{tmp_path}/") for source in open_sources([f"{tmp_path}/{pattern}"])]

    assert names("?.jpg") == ["a.jpg", "b.jpg"]
    assert names("sub/**/*.jpg") == ["sub/c.jpg", "sub/deep/d.jpg"]
    assert names("{b,a}*.jpg") == ["b.jpg", "a.jpg"]
    assert names("[x].jpg") == ["[x].jpg"]
    with pytest.raises(UsageError, match=r"no file matches .*\*\.png"):
        names("*.png")


def test_a_stop_after_the_last_line_is_not_the_end_of_the_list(tmp_path):
    listing = tmp_path / "list.txt"
    listing.write_text("a.jpg\nb.jpg\n")
    source = open_source(str(listing))
    is_stopped = iter([False, False, True])  # before each of the two lines, and after them
    with pytest.raises(JobStopped, match="stopped while listing the sources"):
        list(digested(source.iter_inputs(), hashlib.sha256(), lambda _: None, lambda: next(is_stopped)))
    assert list(is_stopped) == []
