"""Reads the entries of a list of paths (a Parquet, CSV, TSV or JSON Lines file) as a stream."""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from edje_index.filesystem import read_json_lines
from edje_index.images.inputs import display_path
from pipelines.sources.metadata import BAD_NAME
from pipelines.sources.selection import Ignored
from storage_formats.errors import UsageError
from storage_formats.format.source_columns import PlainText

Entry: TypeAlias = tuple[int, dict[Any, Any]]
"""The number of an entry and its values by name of the column. The values are empty if the entry cannot be read."""

Row: TypeAlias = tuple[int, list[str] | None]
"""The number of the last line of a row of a table, and the fields of the row."""

BINARY = "(binary column)"
MORE_FIELDS = "(fields without a column)"
_PARQUET_BATCH = 8192


def json_entries(path: bytes) -> Iterator[Entry]:
    """Yield the line number and the object of each line of a JSON Lines file."""
    for line in read_json_lines(path, decode_errors="surrogateescape"):  # file names need not be UTF-8
        yield line.number, line.value if isinstance(line.value, dict) else {}


def csv_rows(path: bytes, delimiter: str = ",") -> Iterator[Row]:
    """Yield (line number, fields) of each row, including the header. The fields of an invalid row are None.

    Every line of a table with tabs is a row, because quotation marks have no special meaning in most of these tables.
    In a table with commas, quoted text can contain line breaks.

    Raises:
        UsageError: quoted text has no end or is too long, so rows after it would be lost.
    """
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        rows = _tab_rows(file) if delimiter == "\t" else _comma_rows(file, display_path(path))
        yield from (row for row in rows if row[1] != [])


def _tab_rows(lines: Iterable[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        try:
            yield number, next(csv.reader([line], delimiter="\t", strict=True))
        except csv.Error:  # quotation marks that quote no field, or a field that is too long
            is_too_long = len(line) > csv.field_size_limit()
            yield number, None if is_too_long else line.rstrip("\r\n").split("\t")


def _comma_rows(file: Iterable[str], name: str) -> Iterator[Row]:
    at_end = False

    def lines() -> Iterator[str]:
        nonlocal at_end
        yield from file
        at_end = True

    rows = csv.reader(lines())
    while True:
        first = rows.line_num + 1
        try:
            row: list[str] | None = next(rows)
        except StopIteration:
            return
        except csv.Error:
            row = None
        if at_end or (row is None and rows.line_num > first):
            raise UsageError(
                f"the quoted text that begins in line {first} of {name} has no end or is too long; correct the "
                "quotation marks of this line",
                parameter="sources",
            )
        yield rows.line_num, row


def csv_entries(path: bytes, ignored: Ignored, delimiter: str = ",") -> Iterator[Entry]:
    """Yield the entries of a CSV or TSV file, without empty fields. If two columns share a name, the first wins."""
    rows = csv_rows(path, delimiter)
    names = next(rows)[1] or []
    for _ in range(len(names) - len(set(names))):
        ignored.count(BAD_NAME)
    for number, row in rows:
        values: dict[Any, Any] = {}
        for name, text in zip(names, row or [], strict=False):
            if text:
                values.setdefault(name, PlainText(text))
        if len(row or []) > len(names):
            ignored.count(MORE_FIELDS)
        yield number, values


def parquet_text_columns(path: bytes) -> list[str]:
    """Return the names of the columns of a Parquet file that can contain paths."""
    import pyarrow as pa

    from storage_formats.format.parquet import open_parquet

    with open_parquet(os.fsdecode(path)) as file:
        schema = file.schema_arrow
    is_text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    types = [(item.name, item.type.value_type if pa.types.is_dictionary(item.type) else item.type) for item in schema]
    return [name for name, value_type in types if any(test(value_type) for test in is_text)]


def parquet_entries(path: bytes, path_column: str, spec: str, ignored: Ignored) -> Iterator[Entry]:
    """Yield the entries of a Parquet file, numbered from 1. Columns with binary values are left out.

    Args:
        path: path of the file.
        path_column: name of the path column. This column may have binary values.
        spec: path of the file as the user wrote it, for error messages.
        ignored: counter for the columns that are left out.

    Raises:
        UsageError: the file is damaged.
    """
    import pyarrow as pa

    from storage_formats.format.parquet import iter_batches, open_parquet

    number = 0
    try:
        with open_parquet(os.fsdecode(path)) as file:
            names = [path_column, *metadata_columns(file.schema_arrow, path_column, ignored)]
            for batch in iter_batches(file, _PARQUET_BATCH, names):
                positions = [batch.schema.get_all_field_indices(name)[0] for name in names]
                columns = [to_python(batch.column(position)) for position in positions]
                for values in zip(*columns, strict=True):
                    number += 1
                    yield number, dict(zip(names, values, strict=True))
    except (OSError, pa.ArrowException) as error:
        raise UsageError(f"the list {spec} is damaged after row {number}: {error}; write the list again") from error


def metadata_columns(schema: Any, input_column: str, ignored: Ignored) -> list[str]:
    """Return the names of the columns with metadata: all columns except `input_column` and unusable columns.

    A column is unusable if it has binary values, or if another column has the same name. `ignored` counts these
    columns.
    """
    copies = Counter(schema.names)
    names: list[str] = []
    for field in schema:
        if field.name == input_column:
            continue
        if copies[field.name] > 1:
            ignored.count(BAD_NAME)
        elif _holds_binary(field.type):
            ignored.count(BINARY)
        else:
            names.append(field.name)
    return names


def _holds_binary(arrow_type: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(arrow_type):
        return _holds_binary(arrow_type.value_type)
    tests = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
    fields = [arrow_type.field(index) for index in range(arrow_type.num_fields)]
    return any(test(arrow_type) for test in tests) or any(_holds_binary(field.type) for field in fields)


def to_python(column: Any) -> Sequence[Any]:
    """Return the values of an Arrow column as Python objects.

    If a text is not UTF-8, all texts become bytes. If a value has no Python object, all values become text.
    """
    import pyarrow as pa

    values: list[Any]
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us", column.type.tz), safe=False)
    try:
        values = column.to_pylist()
    except UnicodeDecodeError:
        values = column.cast(pa.binary()).to_pylist()
    except (ValueError, OverflowError):  # a date after the year 9999, for example
        values = column.cast(pa.string()).to_pylist()
    return values
