"""Lists of inputs in all formats: every entry is an input or a failed input; none
is lost.
"""

import csv
import io
import json
import os
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from edje_index.inputs.refs import read_bytes
from edje_index.inputs.tables import NAME_COLUMNS
from pipelines.sources import open_source, open_sources
from storage_formats.errors import UsageError

SUFFIXES = pytest.mark.parametrize(
    "suffix", [".parquet", ".csv", ".tsv", ".jsonl", ".ndjson"]
)


def scan(path, column=None):
    return list(open_source(str(path), column).iter_inputs())


def write_list(path, values, column="path"):
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"id": range(len(values)), column: values}), path)
    elif path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writerows([["id", column], *enumerate(values)])
    else:
        lines = [
            json.dumps({"id": number, column: value})
            for number, value in enumerate(values)
        ]
        path.write_text("\n".join(lines) + "\n")
    return path


@SUFFIXES
def test_the_path_column(tmp_path, suffix):
    for column in NAME_COLUMNS:
        assert len(scan(write_list(tmp_path / f"list{suffix}", ["a.jpg"], column))) == 1
    path = write_list(tmp_path / f"list{suffix}", ["a.jpg"], "photo")
    with pytest.raises(UsageError, match=r"name the column with the paths .*photo"):
        open_source(str(path))
    assert scan(path, "photo")[0].uri == f"{tmp_path}/a.jpg"
    with pytest.raises(UsageError, match="no column nonesuch"):
        open_source(str(path), "nonesuch")


def test_bad_json_lines_are_inputs_that_failed(tmp_path):
    path = tmp_path / "list.jsonl"
    (tmp_path / os.fsdecode(b"\xff.jpg")).touch()
    # names that are not UTF-8
    good = [b'{"path": "\xff.jpg"}', b'{"path": "\\udcff.jpg"}']
    bad = [
        b"{",
        b"[1]",
        b'"a.jpg"',
        b"{}",
        b'{"path": null}',
        b'{"path": 3}',
        b'{"path": ""}',
        b'{"path": "a\\u0000b"}',
        b'{"path": "\\ud800"}',
        b"[" * 100_000,
        b"\xff",
    ]
    lines = [good[0], b"", *bad, b"  ", good[1]]
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines))
    refs = scan(path)
    assert [ref.problem for ref in refs] == [None, *["bad-list-line"] * len(bad), None]
    assert refs[1].uri == f"{path}#3"
    assert refs[-2].uri == f"{path}#{len(bad) + 2}"


def test_parquet_nulls_and_kinds_of_text(tmp_path):
    for number, kind in enumerate([pa.string(), pa.binary()]):
        path = tmp_path / f"{number}.parquet"
        pq.write_table(
            pa.table({"path": pa.array(["a.jpg", None, "é.jpg"]).cast(kind)}), path
        )
        refs = scan(path)
        assert [ref.problem for ref in refs] == ["missing", "bad-list-line", "missing"]
        assert (refs[1].uri, refs[2].uri) == (f"{path}#2", f"{tmp_path}/é.jpg")


def test_damaged_parquet(tmp_path):
    path = write_list(
        tmp_path / "list.parquet", [f"{number}.jpg" for number in range(1000)]
    )
    data = bytearray(path.read_bytes())
    path.write_bytes(data[:-30])
    with pytest.raises(UsageError, match=r"cannot read .*footer"):
        open_source(str(path))
    data[4 : data.index(b"PAR1", 4) - 2000] = b""
    path.write_bytes(data)
    with pytest.raises(UsageError, match=r"cannot read .*list\.parquet"):
        scan(path)


def test_a_quotation_mark_in_a_table_with_tabs_hides_no_row(tmp_path):
    path = tmp_path / "list.tsv"
    path.write_text(
        'path\tcaption\na.jpg\t"hello\nb.jpg\t2" wide\nc.jpg\t"a'
        ' ""big""\tdog"\r\nd.jpg\t"\n'
    )
    captions = [ref.metadata["caption"] for ref in scan(path)]
    assert captions == ['"hello', '2" wide', 'a "big"\tdog', '"']


@pytest.mark.parametrize(
    "rest", ["c.jpg,y\n", "c.jpg," + "y" * 200_000 + '\nd.jpg,"\n']
)
def test_quoted_text_without_an_end_hides_no_row(tmp_path, rest):
    path = tmp_path / "list.csv"
    path.write_text('path,caption\na.jpg,"two\nlines"\nb.jpg,"hello\n' + rest)
    with pytest.raises(UsageError, match=r"line 4 of .*list.csv has no end"):
        scan(path)


def test_lines_name_files(tmp_path, monkeypatch):
    for name in (b"a.jpg", b"b c.jpg", b"\xff.jpg"):
        (tmp_path / os.fsdecode(name)).write_bytes(name)
    path = tmp_path / "list.txt"
    path.write_bytes(
        b"\xef\xbb\xbfa.jpg\r\n\n  \nb c.jpg\n\xff.jpg\ngone.jpg\n"
        + b"x" * 70_000
        + b"\na\0b\na.jpg"
    )
    refs = scan(path)
    problems = ["missing", "unreadable", "bad-list-line"]
    assert [ref.problem for ref in refs] == [None, None, None, *problems, None]
    assert [read_bytes(ref) for ref in refs[:3]] == [b"a.jpg", b"b c.jpg", b"\xff.jpg"]
    assert refs[5].uri == f"{path}#8"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
    (source,) = open_sources(["-"])
    paths = [ref.path for ref in source.iter_inputs()]
    assert paths[:4] == [ref.path for ref in refs[:4]]
    with pytest.raises(UsageError, match="standard input has been read already"):
        list(source.iter_inputs())


def test_caption_files(tmp_path):
    path = tmp_path / "captions.json"

    def captions_in(content):
        path.write_text(json.dumps(content))
        return scan(path)

    (tmp_path / "a.jpg").write_bytes(b"photo")
    images = [{"id": 7, "file_name": "a.jpg"}, {"id": 8, "file_name": "gone.jpg"}]
    annotations = [
        {"image_id": number, "caption": text}
        for number, text in [(8, "two"), (7, "one"), (8, "2")]
    ]
    first, second = captions_in({"images": images, "annotations": annotations})
    assert (first.uri, first.problem) == (f"{tmp_path}/a.jpg", None)
    assert (second.uri, second.problem) == (f"{tmp_path}/gone.jpg", "missing")
    assert first.metadata == {"captions": ["one"], "image_id": "7"}
    assert second.metadata == {"captions": ["two", "2"], "image_id": "8"}
    (ref,) = captions_in([{"image": "a.jpg", "caption": text} for text in "ab"])
    assert ref.metadata == {"caption": ["a", "b"]}
    for image in ("https://host/a\tb.jpg", "a\0b.jpg", None):
        (ref,) = captions_in([{"image": image, "caption": "x"}])
        assert (ref.uri, ref.problem) == (f"{path}#1", "bad-list-line")
    for unusable in ({"a": 1}, [{"caption": "x"}]):
        with pytest.raises(UsageError, match=r"captions\.json"):
            captions_in(unusable)


def test_consecutive_lines_of_one_image_give_all_its_captions(tmp_path):
    path = tmp_path / "list.csv"
    path.write_text(
        "image,caption,n,split\na,one,1,dev\na,two,2,dev\na,one,3,dev\na,three,4,test\n"
        "b,four,5,dev\n"
    )
    found = [(ref.metadata["caption"], ref.metadata["n"]) for ref in scan(path)]
    assert found == [(["one", "two"], "1"), ("three", "4"), ("four", "5")]


def test_the_first_line_may_lack_the_path(tmp_path):
    path = tmp_path / "list.jsonl"
    path.write_text('{"caption": "no photo"}\n{"path": "0.jpg", "caption": "one"}\n')
    (tmp_path / "0.jpg").write_bytes(b"0")
    assert [ref.problem for ref in scan(path)] == ["bad-list-line", None]
    assert [ref.problem for ref in scan(path, "path")] == ["bad-list-line", None]
