"""A list of image paths: one column of a Parquet, CSV or JSON Lines file, read as a stream."""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
import urllib.parse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from edje_index.images.inputs import InputRef, display_path
from pipelines.sources.folder import file_input
from pipelines.sources.selection import Ignored
from storage_formats.errors import UsageError

LIST_SUFFIXES = (".parquet", ".csv", ".jsonl", ".ndjson")
PATH_COLUMNS = ("path", "image", "image_path", "file", "file_name", "filename", "filepath", "uri", "url")
"""Columns that are taken for the paths where none is named, in this order."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_PARQUET_BATCH = 8192


@dataclass
class PathListSource:
    """The files that a list names, in its order; a path that is listed twice is two inputs.

    Relative paths begin at the list's folder. A line without a usable path is an input that failed as "bad-list-line",
    its uri "<list>#<number>" (of the line in JSON Lines and CSV, of the row in Parquet, from 1);
    empty lines are passed over. A path that does not exist is an input that failed as "missing".

    Raises:
        UsageError: on creation: the list cannot be read, or has no column of paths. In a pass over Parquet:
            the file is damaged.
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
            raise UsageError(f"cannot read the list {self.spec}: {error}") from error

    def iter_inputs(self) -> Iterator[InputRef]:
        folder = os.path.dirname(self.path)
        uri = display_path(self.path)
        for number, value in self._values():
            ref = _listed(value, folder)
            yield ref or InputRef(f"{uri}#{number}", self.path, problem="bad-list-line")

    def _choose(self, columns: list[str]) -> str:
        wanted = PATH_COLUMNS if self.column is None else (self.column,)
        for name in wanted:
            if name in columns:
                return name
        found = ", ".join(columns) or "none"
        raise UsageError(f"{self.spec}: no column {' or '.join(wanted)}; name one with --column (columns: {found})")

    def _columns(self) -> list[str]:
        if self._suffix == ".parquet":
            return _parquet_columns(self.path)
        if self._suffix == ".csv":
            return next((row for _, row in _csv_rows(self.path)), None) or []
        objects = (_json_object(line) for _, line in _lines(self.path))
        return list(next((value for value in itertools.islice(objects, 1000) if value), {}))

    def _values(self) -> Iterator[tuple[int, Any]]:
        """(number, path) of each line; None for a line that has none."""
        name = str(self.column)
        if self._suffix == ".parquet":
            yield from _parquet_values(self.path, name, self.spec)
        elif self._suffix == ".csv":
            rows = _csv_rows(self.path)
            place = (next(rows)[1] or []).index(name)
            yield from ((number, row[place] if row and place < len(row) else None) for number, row in rows)
        else:
            yield from ((number, (_json_object(line) or {}).get(name)) for number, line in _lines(self.path))


def _listed(value: Any, folder: bytes) -> InputRef | None:
    """The input that a listed value names; None where it is no path."""
    if isinstance(value, str):
        scheme = _SCHEME.match(value)
        if scheme and scheme[1].lower() != "file":
            return InputRef(display_path(os.fsencode(value)), os.fsencode(value), problem="not-a-local-path")
        try:
            value = urllib.parse.unquote_to_bytes(value[scheme.end() :]) if scheme else os.fsencode(value)
        except UnicodeEncodeError:  # half of a surrogate pair, from a JSON escape
            return None
    if not isinstance(value, bytes) or not value or b"\0" in value:
        return None
    return file_input(os.path.join(folder, value))


def _lines(path: bytes) -> Iterator[tuple[int, bytes]]:
    """Numbered lines that are not blank."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip(b" \t\r\n\xef\xbb\xbf"):
                yield number, line


def _json_object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line.decode("utf-8-sig", "surrogateescape"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _csv_rows(path: bytes) -> Iterator[tuple[int, list[str] | None]]:
    """(line number, fields) of each row, the header first; None for a row that is no CSV."""
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
    import pyarrow.parquet as pq

    schema = pq.read_schema(os.fsdecode(path))
    textual = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    kinds = [(item.name, item.type.value_type if pa.types.is_dictionary(item.type) else item.type) for item in schema]
    return [name for name, kind in kinds if any(test(kind) for test in textual)]


def _parquet_values(path: bytes, column: str, spec: str) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(os.fsdecode(path)) as file:
            for batch in file.iter_batches(_PARQUET_BATCH, columns=[column]):
                for value in _plain(batch.column(0)):
                    number += 1
                    yield number, value
    except (OSError, pa.ArrowException) as error:
        raise UsageError(f"the list {spec} is damaged after row {number}: {error}; write it anew") from error


def _plain(column: Any) -> Iterable[Any]:
    """Values of an Arrow column; text that is not UTF-8 as its bytes."""
    import pyarrow as pa

    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        values = column.cast(pa.binary()).to_pylist()
    return values
