"""Sources that are lists: text with one path per line, tables with a path column, and caption files in JSON."""

from __future__ import annotations

import codecs
import csv
import dataclasses
import itertools
import os
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from edje_index.captions.formats import ID_KEY, SPLIT_KEY, CaptionRecord, read_records
from edje_index.filesystem import read_json_lines
from edje_index.images.inputs import InputRef, display_path
from pipelines.sources.base import STANDARD_INPUT, LocalFile, Source, absolute_path, file_name, listed_input
from pipelines.sources.metadata import BAD_NAME, CAPTIONS, metadata_columns, source_values, to_python
from storage_formats.errors import UsageError
from storage_formats.format.source_columns import PlainText

LINES_SUFFIX, CAPTION_SUFFIX = ".txt", ".json"
LIST_SUFFIXES = (".parquet", ".csv", ".tsv", ".jsonl", ".ndjson")
PATH_COLUMNS = ("path", "image", "image_path", "file", "file_name", "filename", "filepath", "uri", "url")
"""Names of path columns. Unless the user names a column, the first of these names in the list is the path column."""

MORE_FIELDS = "(fields without a column)"
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_MAX_LINE = 1 << 16
_PARQUET_BATCH = 8192
_LINES_WITH_COLUMNS = 1000  # lines of JSON Lines in which an object with column names is looked for
_streams_read: weakref.WeakSet[BinaryIO] = weakref.WeakSet()

_Entry: TypeAlias = tuple[int, dict[Any, Any]]
"""The number of an entry and its values by name of the column. The values are empty if the entry cannot be read."""

_Row: TypeAlias = tuple[int, list[str] | None]
"""The number of the last line of a row of a table, and the fields of the row; None for an invalid row."""


@dataclass
class LinesSource(Source):
    """The files that the lines of a text file or of standard input name, in order. Blank lines are skipped.

    Relative paths start at the directory of the list, or at the working directory for standard input. A line that is no
    path gives an input with the problem "bad-list-line".

    Raises:
        UsageError: standard input is a terminal. `iter_inputs` also raises this error if standard input has been read
            already.
    """

    kind = "lines"

    def __post_init__(self) -> None:
        self._is_standard_input = self.spec == STANDARD_INPUT
        self.path = b"-" if self._is_standard_input else absolute_path(self.spec)
        self._directory = os.fsencode(os.getcwd()) if self._is_standard_input else _directory_of(self.path)
        self._file = LocalFile(self.path)
        if self._is_standard_input and (sys.stdin is None or sys.stdin.isatty()):
            raise UsageError("standard input is a terminal; pipe a list of paths into the command", parameter="sources")

    def _iter_inputs(self) -> Iterator[InputRef]:
        if self._is_standard_input:
            if sys.stdin.buffer in _streams_read:
                raise UsageError(
                    "standard input has been read already, and cannot be read again; write the list to a file that "
                    f"ends in {LINES_SUFFIX}, and give its name",
                    parameter="sources",
                )
            _streams_read.add(sys.stdin.buffer)
        with nullcontext(sys.stdin.buffer) if self._is_standard_input else open(self._file.path, "rb") as file:
            for number, line in enumerate(_lines(file), 1):
                text = None if line is None else os.fsdecode(line.strip())
                if text != "":
                    yield _entry_input(self, number, text, self._directory)


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Yield the lines of a file; None for a line that is too long."""
    at_start = True
    while line := file.readline(_MAX_LINE):
        if at_start:
            line, at_start = line.removeprefix(codecs.BOM_UTF8), False
        if line.endswith(b"\n") or len(line) < _MAX_LINE:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(_MAX_LINE)
        yield None


@dataclass
class CaptionFileSource(Source):
    """The images of a caption file, in file order, with their captions, splits and identifiers as metadata.

    The file is a COCO caption file, a Karpathy split, or a list of records. Relative paths start at the directory of
    the file. If several records name one image, their captions are joined. A record without a usable path gives an
    input with the problem "bad-list-line".

    Raises:
        UsageError: `iter_inputs` cannot read the file, or a record is malformed.
    """

    kind = "captions"

    def _iter_inputs(self) -> Iterator[InputRef]:
        record_of_image: dict[str, CaptionRecord] = {}
        for record in read_records(Path(os.fsdecode(self.path))):
            first = record_of_image.setdefault(record.image, record)
            if first is not record:
                joined = dataclasses.replace(first, captions=(*first.captions, *record.captions))
                record_of_image[record.image] = joined
        for number, record in enumerate(record_of_image.values(), 1):
            ref = _entry_input(self, number, record.image, os.path.dirname(self.path))
            values = {CAPTIONS: list(record.captions) or None, SPLIT_KEY: record.split, ID_KEY: record.image_id}
            yield dataclasses.replace(ref, metadata=source_values(values, self.ignored))


@dataclass
class PathListSource(Source):
    """The files that a table names in its path column, in the order of the table. The other columns are metadata.

    The table is a Parquet, CSV, TSV or JSON Lines file, which is read as a stream. Relative paths are relative to its
    directory. A missing file becomes an input with the problem "missing". An entry without a valid path becomes an
    input with the problem "bad-list-line" and the uri "<list>#<number of the entry>".

    Raises:
        UsageError: the list cannot be read or has no path column. `iter_inputs` also raises this error if a Parquet
            file is damaged.
    """

    column: str | None = None
    kind = "list"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._suffix = os.path.splitext(file_name(self.spec))[1].lower()
        try:
            self._file = LocalFile(self.path)
            columns = self._columns()
        except (OSError, ValueError, csv.Error) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(
                f"cannot read the list {self.spec}: {reason}; check the path and the format", parameter="sources"
            ) from error
        candidates = PATH_COLUMNS if self.column is None else (self.column,)
        self.column = next((name for name in candidates if name in columns), None)
        if self.column is None:
            raise UsageError(
                f"{self.spec} has no column {' or '.join(candidates)} with texts; name the column with the paths "
                f"(columns with texts: {', '.join(columns) or 'none'})",
                parameter="column",
            )

    def _iter_inputs(self) -> Iterator[InputRef]:
        directory = _directory_of(self.path)
        for number, values in self._entries():
            ref = _entry_input(self, number, values.pop(self.column, None), directory)
            yield dataclasses.replace(ref, metadata=source_values(values, self.ignored))

    def _columns(self) -> list[str]:
        if self._suffix in _DELIMITERS:
            return next((row for _, row in _csv_rows(self._file.path, _DELIMITERS[self._suffix])), None) or []
        if self._suffix != ".parquet":
            objects = (values for _, values in itertools.islice(_json_entries(self._file.path), _LINES_WITH_COLUMNS))
            return list(next(filter(None, objects), {}))
        import pyarrow as pa

        from storage_formats.format.parquet import open_parquet

        with open_parquet(os.fsdecode(self._file.path)) as file:
            schema = file.schema_arrow
        is_text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
        types = [
            (each.name, each.type.value_type if pa.types.is_dictionary(each.type) else each.type) for each in schema
        ]
        return [name for name, value_type in types if any(test(value_type) for test in is_text)]

    def _entries(self) -> Iterator[_Entry]:
        if self._suffix == ".parquet":
            return self._parquet_entries()
        if self._suffix in _DELIMITERS:
            return self._csv_entries()
        return _json_entries(self._file.path)

    def _csv_entries(self) -> Iterator[_Entry]:
        """Yield the entries without empty fields. If two columns share a name, the first wins."""
        rows = _csv_rows(self._file.path, _DELIMITERS[self._suffix])
        names = next(rows)[1] or []
        if repeated := len(names) - len(set(names)):
            self.ignored.count(BAD_NAME, repeated)
        for number, row in rows:
            values: dict[Any, Any] = {}
            for name, text in zip(names, row or [], strict=False):
                if text:
                    values.setdefault(name, PlainText(text))
            if len(row or []) > len(names):
                self.ignored.count(MORE_FIELDS)
            yield number, values

    def _parquet_entries(self) -> Iterator[_Entry]:
        """Yield the entries, numbered from 1. Columns with binary values are left out, except the path column."""
        import pyarrow as pa

        from storage_formats.format.parquet import iter_batches, open_parquet

        number = 0
        try:
            with open_parquet(os.fsdecode(self._file.path)) as file:
                column = str(self.column)
                names = [column, *metadata_columns(file.schema_arrow, column, self.ignored)]
                for batch in iter_batches(file, _PARQUET_BATCH, names):
                    positions = [batch.schema.get_all_field_indices(name)[0] for name in names]
                    columns = [to_python(batch.column(position)) for position in positions]
                    for values in zip(*columns, strict=True):
                        number += 1
                        yield number, dict(zip(names, values, strict=True))
        except (OSError, pa.ArrowException) as error:
            raise UsageError(
                f"the list {self.spec} is damaged after row {number}: {error}; write the list again",
                parameter="sources",
            ) from error


def _entry_input(source: Source, number: int, value: Any, directory: bytes) -> InputRef:
    """Return the input that the entry `number` of a list names."""
    ref = listed_input(value, directory)
    return ref or InputRef(f"{display_path(source.path)}#{number}", source.path, problem="bad-list-line")


def _directory_of(path: bytes) -> bytes:
    return os.path.dirname(os.fsencode(file_name(os.fsdecode(path))))


def _json_entries(path: bytes) -> Iterator[_Entry]:
    for line in read_json_lines(path, decode_errors="surrogateescape"):  # file names need not be UTF-8
        yield line.number, line.value if isinstance(line.value, dict) else {}


def _csv_rows(path: bytes, delimiter: str) -> Iterator[_Row]:
    """Yield the rows of a table, including the header.

    Every line of a table with tabs is a row, because quotation marks have no special meaning in most of these tables.
    In a table with commas, quoted text can contain line breaks.

    Raises:
        UsageError: quoted text has no end or is too long, so rows after it would be lost.
    """
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        rows = _tab_rows(file) if delimiter == "\t" else _comma_rows(file, display_path(path))
        yield from (row for row in rows if row[1] != [])


def _tab_rows(lines: Iterable[str]) -> Iterator[_Row]:
    for number, line in enumerate(lines, 1):
        try:
            yield number, next(csv.reader([line], delimiter="\t", strict=True))
        except csv.Error:  # quotation marks that quote no field, or a field that is too long
            is_too_long = len(line) > csv.field_size_limit()
            yield number, None if is_too_long else line.rstrip("\r\n").split("\t")


def _comma_rows(file: Iterable[str], name: str) -> Iterator[_Row]:
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
