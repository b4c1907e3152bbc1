"""Lists of paths: every line is an input or a failed input; none is lost."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edje_index.images.inputs import InputRef, read_bytes
from pipelines.sources import open_source
from storage_formats.errors import UsageError


def scan(path: Path, column: str | None = None) -> list[InputRef]:
    return list(open_source(str(path), column).iter_inputs())


def write_list(path: Path, values: list[str], column: str = "path") -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"id": range(len(values)), column: values}), path)
    elif path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",").writerows(
                [["id", column], *enumerate(values)]
            )
    else:
        lines = [json.dumps({"id": number, column: value}) for number, value in enumerate(values)]
        path.write_text("\n".join(lines) + "\n")
    return path


SUFFIXES = pytest.mark.parametrize("suffix", [".parquet", ".csv", ".tsv", ".jsonl", ".ndjson"])


@SUFFIXES
@pytest.mark.parametrize(
    "column", ["path", "image", "image_path", "file", "file_name", "filename", "filepath", "uri", "url"]
)
def test_usual_columns_are_found(tmp_path: Path, suffix: str, column: str) -> None:
    assert len(scan(write_list(tmp_path / f"list{suffix}", ["a.jpg"], column))) == 1


@SUFFIXES
def test_other_columns_are_named(tmp_path: Path, suffix: str) -> None:
    path = write_list(tmp_path / f"list{suffix}", ["a.jpg"], "photo")
    with pytest.raises(UsageError, match=r"name the column with the paths .*photo"):
        open_source(str(path))
    assert scan(path, "photo")[0].uri == f"{tmp_path}/a.jpg"
    with pytest.raises(UsageError, match="no column nonesuch"):
        open_source(str(path), "nonesuch")


def test_bad_json_lines_are_inputs_that_failed(tmp_path: Path) -> None:
    path = tmp_path / "list.jsonl"
    (tmp_path / "a.jpg").touch()
    good = b'{"path": "a.jpg"}'
    bad = [
        b"{", b"[1]", b'"a.jpg"', b"{}", b'{"path": null}', b'{"path": 3}', b'{"path": ""}', b'{"path": "a\\u0000b"}',
        b'{"path": "\\ud800"}', b"[" * 100_000, b'{"path": ["a.jpg"]}', b"\xff",
    ]  # fmt: skip
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join([good, b"", *bad, b"  ", good]))
    refs = scan(path)
    assert [ref.problem for ref in refs] == [None, *["bad-list-line"] * len(bad), None]
    assert refs[1].uri == f"{path}#3"
    assert refs[-2].uri == f"{path}#{len(bad) + 2}"


def test_json_names_that_are_not_utf8(tmp_path: Path) -> None:
    raw = os.fsencode(tmp_path) + b"/\xff.jpg"
    Path(os.fsdecode(raw)).write_bytes(b"abc")
    path = tmp_path / "list.jsonl"
    path.write_bytes(b'{"path": "\xff.jpg"}\n{"path": "\\udcff.jpg"}\n')
    assert [read_bytes(ref) for ref in scan(path)] == [b"abc", b"abc"]


def test_parquet_nulls_and_kinds_of_text(tmp_path: Path) -> None:
    kinds = [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())]
    for number, kind in enumerate(kinds):
        path = tmp_path / f"{number}.parquet"
        pq.write_table(pa.table({"path": pa.array(["a.jpg", None, "é.jpg"]).cast(kind)}), path)
        refs = scan(path)
        assert [ref.problem for ref in refs] == ["missing", "bad-list-line", "missing"]
        assert refs[1].uri == f"{path}#2"
        assert refs[2].uri == f"{tmp_path}/é.jpg"


def test_damaged_parquet(tmp_path: Path) -> None:
    path = write_list(tmp_path / "list.parquet", [f"{number}.jpg" for number in range(1000)])
    data = bytearray(path.read_bytes())
    path.write_bytes(data[:-30])
    with pytest.raises(UsageError, match=r"cannot read .*footer"):
        open_source(str(path))
    data[4 : data.index(b"PAR1", 4) - 2000] = b""
    path.write_bytes(data)
    with pytest.raises(UsageError, match="damaged after row"):
        scan(path)


def test_a_long_list_is_a_stream(tmp_path: Path) -> None:
    for suffix in (".parquet", ".csv", ".jsonl"):
        path = write_list(tmp_path / f"list{suffix}", [f"{number}.jpg" for number in range(20_000)])
        refs = open_source(str(path)).iter_inputs()
        assert next(refs).uri == f"{tmp_path}/0.jpg"
        assert sum(1 for _ in refs) == 19_999


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=30).filter(
    lambda s: "://" not in s
)


@given(st.lists(TEXT, min_size=1, max_size=6))
def test_the_three_formats_agree(tmp_path_factory: pytest.TempPathFactory, values: list[str]) -> None:
    folder = tmp_path_factory.getbasetemp() / "agree"
    folder.mkdir(exist_ok=True)
    found = [
        [ref.path for ref in scan(write_list(folder / f"list{s}", values))] for s in (".parquet", ".csv", ".jsonl")
    ]
    assert (
        found[0] == found[1] == found[2] == [os.path.join(os.fsencode(folder), os.fsencode(value)) for value in values]
    )
