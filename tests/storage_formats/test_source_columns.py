"""Source columns keep every value, in types that do not depend on the order of the
rows. Stock readers agree.
"""

from __future__ import annotations

import datetime
import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_formats import (
    UsageError,
    read_rows,
)
from storage_formats.format.json_values import read_json, write_json
from storage_formats.format.layout import IndexSpec
from storage_formats.format.parquet import read_table
from storage_formats.format.places import Directory
from storage_formats.format.rows import (
    SOURCE_VALUES,
    RowEntry,
    read_staged_rows,
    rows_table,
    with_source_values,
)
from storage_formats.format.source_columns import (
    MAX_COLUMNS,
    PlainText,
    SourceColumn,
    as_type,
    check_columns,
    kind_of,
)
from storage_formats.writing.shard_writer import ShardWriter
from tests.conftest import finish_index, problems_and_counts

SPEC = IndexSpec(6, 4, (2, 4), 3)
INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
TIMES = st.datetimes(timezones=st.just(datetime.UTC))
VALUES = st.one_of(
    st.booleans(),
    st.integers(-9, 9),
    INT64,
    st.floats(),
    TEXT,
    TIMES,
    st.lists(TEXT, max_size=3),
)
PLAIN = st.one_of(
    INT64.map(str),
    st.floats().map(str),
    st.integers().map(str),
    st.booleans().map(str),
    TEXT,
)


def column_of(values: list, name: str = "v") -> SourceColumn:
    present = [value for value in values if value is not None]
    return SourceColumn(
        name, tuple(sorted({kind_of(value) for value in present})), len(present)
    )


def original_text(value: object) -> str:
    """The value as its source wrote it, made without the code under test."""
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    return value if isinstance(value, str) else json.dumps(value)


@given(st.lists(VALUES, min_size=1, max_size=6))
def test_every_value_survives_the_type_of_its_column(values):
    column_type = column_of(values).type
    for value in values:
        stored = as_type(value, column_type)
        if column_type == "list<string>" and not isinstance(value, list):
            (stored,) = stored
        if isinstance(stored, str):
            assert stored == original_text(value)
        else:
            assert stored == value or (math.isnan(stored) and math.isnan(value))
    assert column_of(values[::-1]).type == column_type


@given(st.lists(PLAIN, min_size=1, max_size=4))
def test_untyped_text_is_a_number_only_if_nothing_is_lost(texts):
    values = [PlainText(text) for text in texts]
    column_type = column_of(values).type
    for text in values:
        stored = as_type(text, column_type)
        if isinstance(stored, str):
            assert stored == text
        elif isinstance(stored, bool):
            assert str(stored).lower() == text.lower()
        elif isinstance(stored, int):
            assert str(stored) == text
        else:
            assert stored == float(text)
            assert math.isfinite(stored)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("007", "text"),
        ("-0", "text"),
        ("1e999", "text"),
        ("9" * 30, "text"),
        ("1.50", "float"),
        ("12", "int"),
        (str(2**53 + 1), "big-int"),
        ("TRUE", "bool"),
        ("nan", "text"),
        ("1_0", "text"),
    ],
)
def test_kinds_of_untyped_text(text, kind):
    assert kind_of(PlainText(text)) == kind


def write_index(root: Path, rows: list[dict]) -> list[SourceColumn]:
    names = sorted({name for row in rows for name in row})
    columns = [column_of([row.get(name) for row in rows], name) for name in names]
    receipts = []
    for shard in range(SPEC.shards):
        row_ids = SPEC.shard_rows(shard)
        with ShardWriter(Directory(root), SPEC, shard) as writer:
            entries = [RowEntry(row, f"{row}.jpg") for row in row_ids]
            for entry in entries:
                entry.fail("missing", "gone")
            table = with_source_values(
                rows_table(entries), columns, [rows[row] for row in row_ids]
            )
            receipts.append(writer.commit(table, "plan", {}))
    finish_index(root, SPEC, receipts, columns)
    return columns


ROWS = [
    {"captions": ["a dog", "ein Hund"], "rating": 3, "licence": "cc0", "safe": True},
    {
        "captions": "one",
        "rating": 4.5,
        "taken": datetime.datetime(2024, 5, 6, 7, 8, 9, 10, tzinfo=datetime.UTC),
    },
    {},
    {"id": 2**60, "safe": False, "exif.make": "Leica"},
    {"captions": []},
    {"licence": "", "id": 1},
]


def test_stock_readers_and_this_one_agree(tmp_path):
    write_index(tmp_path / "i", ROWS)
    # all files together: every shard has the same types
    stock = pq.read_table(tmp_path / "i" / "rows")
    assert {
        field.name: str(field.type).replace("element: ", "").replace("item: ", "")
        for field in stock.schema
    }.items() >= {
        "captions": "list<string>",
        "rating": "double",
        "licence": "string",
        "safe": "bool",
        "id": "int64",
        "exif.make": "string",
        "taken": "timestamp[us, tz=UTC]",
    }.items()
    expected = [
        {"captions": ["one"] if row.get("captions") == "one" else row.get("captions")}
        for row in ROWS
    ]
    assert stock.select(["captions"]).to_pylist() == expected
    assert stock["rating"].to_pylist() == [3.0, 4.5, None, None, None, None]
    assert stock["id"].to_pylist() == [None, None, None, 2**60, None, 1]
    assert stock["taken"][1].as_py() == ROWS[1]["taken"]
    ours = read_rows(tmp_path / "i")
    assert ours.to_pylist() == stock.drop_columns([SOURCE_VALUES]).to_pylist()
    assert read_rows(tmp_path / "i", [5, 3], ["exif.make", "row_id"]).to_pylist() == [
        {"exif.make": None, "row_id": 5},
        {"exif.make": "Leica", "row_id": 3},
    ]
    assert read_rows(tmp_path / "i", [], ["captions"]).num_rows == 0
    assert problems_and_counts(tmp_path / "i") == []


def test_an_unknown_column_is_refused_with_the_names(tmp_path):
    write_index(tmp_path / "i", ROWS)
    for row_ids in (None, [], [1]):
        with pytest.raises(
            UsageError,
            match=r"licence2 \(did you mean licence\?\); .*, taken, row_id",
        ):
            read_rows(tmp_path / "i", row_ids, ["licence2"])


def test_columns_of_an_earlier_segment_are_widened_or_null(tmp_path):
    path = Directory(tmp_path).staged_rows(0)
    path.parent.mkdir(parents=True)
    values = {"n": 7, "b": True, "t": "x", "when": ROWS[1]["taken"]}
    written = [column_of([value], name) for name, value in values.items()]
    rows = rows_table([RowEntry(0, "a"), RowEntry(1, "b")])
    pq.write_table(with_source_values(rows, written, [values, {}]), path)
    wider = [
        SourceColumn("n", ("float", "int"), 1),
        SourceColumn("b", ("bool", "int"), 1),
        SourceColumn("t", ("text", "texts"), 1),
        SourceColumn("when", ("text", "timestamp"), 1),
        SourceColumn("new", ("bool",), 0),
    ]
    names = [each.name for each in wider]
    table = read_staged_rows(Directory(tmp_path), 0, names, source_columns=wider)
    taken = values["when"].isoformat()
    expected = {"n": 7.0, "b": "true", "t": ["x"], "when": taken, "new": None}
    assert table.to_pylist() == [expected, dict.fromkeys(names)]
    assert table.schema.types[:2] == [pa.float64(), pa.string()]


def test_a_long_text_that_lists_repeat_is_refused(tmp_path):
    long = pa.DictionaryArray.from_arrays(
        pa.array([0] * 100, pa.int32()), ["x" * 1_000_000]
    )
    lists = pa.ListArray.from_arrays(pa.array([0, 100], pa.int32()), long)
    pq.write_table(pa.table({"v": lists}), tmp_path / "bomb.parquet")
    with pytest.raises(ValueError, match="the texts would take"):
        read_table((tmp_path / "bomb.parquet").read_bytes())


GOOD = {"name": "a", "kinds": ["int"], "values": 1}


@pytest.mark.parametrize(
    "entries",
    [
        [{**GOOD, "kinds": []}],
        [{**GOOD, "kinds": ["decimal"]}],
        [GOOD, GOOD],
        [{**GOOD, "name": "a\n"}],
        [{**GOOD, "values": -1}],
        [{"name": "a"}],
        [3],
        [{**GOOD, "name": str(number)} for number in range(MAX_COLUMNS + 1)],
    ],
)
def test_a_manifest_with_invalid_columns_is_refused(entries):
    with pytest.raises((ValueError, KeyError, TypeError)):
        check_columns(read_json(tuple[SourceColumn, ...], entries))
    (good,) = read_json(tuple[SourceColumn, ...], [GOOD])
    assert write_json(good) == GOOD
