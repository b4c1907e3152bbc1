"""A source that reads image paths from one column of a Parquet, CSV or JSON Lines file."""

from __future__ import annotations

import csv
import itertools
import os
import re
import urllib.parse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from edje_index.filesystem import read_json_lines
from edje_index.images.inputs import InputRef, display_path
from pipelines.sources.folder import file_input
from pipelines.sources.selection import Ignored
from storage_formats.errors import UsageError

LIST_SUFFIXES = (".parquet", ".csv", ".jsonl", ".ndjson")
PATH_COLUMNS = ("path", "image", "image_path", "file", "file_name", "filename", "filepath", "uri", "url")
"""Names of path columns. Unless the user names a column, the first of these names in the list is the path column."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_PARQUET_BATCH = 8192
_LINES_WITH_COLUMNS = 1000  # lines of JSON Lines in which an object with column names is looked for


@dataclass
class PathListSource:
    """The files that a list of paths names, in the order of the list.

    Relative paths start at the directory of the list. A missing file gives an input with the problem "missing". An
    entry without a usable path gives an input with the problem "bad-list-line" and the uri "<list>#<number>", where the
    number counts lines or Parquet rows from 1.

    Raises:
        UsageError: the list cannot be read or has no path column. `iter_inputs` also raises this error if a Parquet
            file is damaged.
    """

    spec: str
    column: str | None = None
    kind: str = "list"
    path: bytes = field(init=False)
    ignored: Ignored = field(init=False, default_factory=Ignored)

    def __post_init__(self) -> None:
        self.path = os.path.abspath(os.fsencode(self.spec))
        self._suffix = os.path.splitext(self.spec)[1].lower()
        try:
            self.column = self._choose(self._columns())
        except (OSError, ValueError, csv.Error) as error:
            raise UsageError(f"cannot read the list {self.spec}: {error}", parameter="sources") from error

    def iter_inputs(self) -> Iterator[InputRef]:
        directory = os.path.dirname(self.path)
        uri = display_path(self.path)
        for number, value in self._values():
            ref = _listed_input(value, directory)
            yield ref or InputRef(f"{uri}#{number}", self.path, problem="bad-list-line")

    def _choose(self, columns: list[str]) -> str:
        candidates = PATH_COLUMNS if self.column is None else (self.column,)
        for name in candidates:
            if name in columns:
                return name
        raise UsageError(
            f"{self.spec} has no column {' or '.join(candidates)}; name the column with the paths "
            f"(columns: {', '.join(columns) or 'none'})",
            parameter="column",
        )

    def _columns(self) -> list[str]:
        if self._suffix == ".parquet":
            return _parquet_columns(self.path)
        if self._suffix == ".csv":
            return next((row for _, row in _csv_rows(self.path)), None) or []
        objects = (value for _, value in itertools.islice(_json_objects(self.path), _LINES_WITH_COLUMNS))
        return list(next(filter(None, objects), {}))

    def _values(self) -> Iterator[tuple[int, Any]]:
        """Yield the number and the path of each entry. The path is None if the entry has no path."""
        name = str(self.column)
        if self._suffix == ".parquet":
            yield from _parquet_values(self.path, name, self.spec)
        elif self._suffix == ".csv":
            rows = _csv_rows(self.path)
            column = (next(rows)[1] or []).index(name)
            yield from ((number, row[column] if row and column < len(row) else None) for number, row in rows)
        else:
            yield from ((number, value.get(name)) for number, value in _json_objects(self.path))


def _listed_input(value: Any, directory: bytes) -> InputRef | None:
    """Return the input that a list entry names; None if the value is not a path."""
    if isinstance(value, str):
        scheme = _SCHEME.match(value)
        if scheme and scheme[1].lower() != "file":
            return InputRef(display_path(os.fsencode(value)), os.fsencode(value), problem="not-a-local-path")
        try:
            value = urllib.parse.unquote_to_bytes(value[scheme.end() :]) if scheme else os.fsencode(value)
        except UnicodeEncodeError:  # a lone surrogate, from a JSON escape
            return None
    if not isinstance(value, bytes) or not value or b"\0" in value:
        return None
    return file_input(os.path.join(directory, value))


def _json_objects(path: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number and the object of each line; an empty object for an invalid line."""
    for line in read_json_lines(path, decode_errors="surrogateescape"):  # file names need not be UTF-8
        yield line.number, line.value if isinstance(line.value, dict) else {}


def _csv_rows(path: bytes) -> Iterator[tuple[int, list[str] | None]]:
    """Yield the line number and the fields of each row, starting with the header; None for invalid rows."""
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        rows = csv.reader(file)
        while True:
            try:
                row: list[str] | None = next(rows)
            except StopIteration:
                return
            except csv.Error:
                row = None
            if row != []:
                yield rows.line_num, row


def _parquet_columns(path: bytes) -> list[str]:
    import pyarrow as pa

    from storage_formats.format.parquet import open_parquet

    with open_parquet(os.fsdecode(path)) as file:
        schema = file.schema_arrow
    is_text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    types = [(item.name, item.type.value_type if pa.types.is_dictionary(item.type) else item.type) for item in schema]
    return [name for name, value_type in types if any(test(value_type) for test in is_text)]


def _parquet_values(path: bytes, column: str, spec: str) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa

    from storage_formats.format.parquet import iter_batches, open_parquet

    number = 0
    try:
        with open_parquet(os.fsdecode(path)) as file:
            for batch in iter_batches(file, _PARQUET_BATCH, [column]):
                for value in _to_python(batch.column(0)):
                    number += 1
                    yield number, value
    except (OSError, pa.ArrowException) as error:
        raise UsageError(f"the list {spec} is damaged after row {number}: {error}; write the list again") from error


def _to_python(column: Any) -> Iterable[Any]:
    """Return the values of an Arrow column. If a text is not UTF-8, all texts become bytes."""
    import pyarrow as pa

    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        values = column.cast(pa.binary()).to_pylist()
    return values
