"""Sources that are lists: text with one path per line, tables with a path column,
and caption files in JSON.
"""

from __future__ import annotations

import codecs
import csv
import dataclasses
import itertools
import os
import sys
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

from edje_index.captions.reading import (
    ID_KEY,
    SPLIT_KEY,
    CaptionRecord,
    comma_rows,
    read_records,
)
from edje_index.inputs.json_lines import read_json_lines
from edje_index.inputs.ranges import open_file
from edje_index.inputs.refs import MAX_INPUT_BYTES, InputRef, display_path
from pipelines.metadata import (
    BAD_NAME,
    CAPTIONS,
    UNREADABLE,
    metadata_columns,
    parquet_rows,
)
from pipelines.sources.base import (
    STANDARD_INPUT,
    Source,
    SourceError,
    file_name,
    listed_input,
    unreadable,
)
from storage_formats.errors import UsageError
from storage_formats.format.column_types import BYTES, TEXT, column_kind
from storage_formats.format.parquet import open_parquet
from storage_formats.format.source_columns import PlainText
from storage_formats.remote.files import read_remote
from storage_formats.remote.urls import is_url

TABLE_SUFFIXES = (".parquet", ".csv", ".tsv", ".jsonl", ".ndjson")
LINES_SUFFIX = ".txt"
CAPTION_SUFFIX = ".json"
PATH_COLUMNS = (
    "path",
    "image",
    "image_path",
    "file",
    "file_name",
    "filename",
    "filepath",
    "uri",
    "url",
)
"""Names of path columns. Unless the user names a column, the path column of a table is
the first of these names that the table has.
"""

MORE_FIELDS = "(fields without a column)"
# the key of the path in the values of an entry of a text or caption file
_PATH = "path"
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
# Largest number of bytes of a line of a text file. A longer line is an entry without a
# valid path.
_MAX_LINE = 1 << 16
_PARQUET_BATCH = 8192
# The columns of a JSON Lines file are the names that occur in its first lines. This is
# the number of these lines.
_LINES_WITH_COLUMNS = 1000

_Entry: TypeAlias = tuple[int, dict[Any, Any]]
"""(number of an entry, its values by column name). The values are empty if the entry
cannot be read.
"""

_Row: TypeAlias = tuple[int, list[str] | None]
"""(number of the last line of a table row, fields of the row). The fields are None if
the row is invalid.
"""


@dataclass
class ListSource(Source):
    """The files that a list names, in the order of the list. The values of an entry,
    except the path, are the metadata of its file.

    The suffix of the list determines its format:
    - `.parquet`, `.csv`, `.tsv`, `.jsonl` and `.ndjson`: a table with a path column.
    - `.txt` and standard input: one path per line. Blank lines are skipped.
    - `.json`: a COCO caption file, a Karpathy split, or a list of records. If several
      records name one image, their captions are joined.

    Tables and texts are read as a stream, so memory does not depend on their length.

    Relative paths start at the directory of the list, or at the working directory for
    standard input. A missing file becomes an input with the problem "missing". An entry
    without a valid path becomes an input with the problem "bad-list-line" and the uri
    "<list>#<number of the entry>".

    Attributes:
        column: name of the path column of a table. None selects the first column with a
            name in `PATH_COLUMNS`.

    Raises:
        UsageError: the list cannot be read or has no path column, or standard input is
            a terminal. `iter_inputs` also raises this error if the list is damaged, or
            if standard input has been read already.
    """

    column: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.spec == STANDARD_INPUT:
            if sys.stdin is None or (not sys.stdin.closed and sys.stdin.isatty()):
                raise SourceError(
                    "standard input is a terminal; pipe a list of paths into the"
                    " command"
                )
            self.path = b"-"
            self._directory = os.fsencode(os.getcwd())
            self._suffix = LINES_SUFFIX
            return
        name = file_name(self.spec)
        self._directory = os.path.dirname(self.path)
        self._suffix = os.path.splitext(name)[1].lower()
        self._file: str | bytes = self.path
        try:
            if is_url(self.path):
                self._directory = os.path.dirname(os.fsencode(name))
                with tempfile.NamedTemporaryFile(
                    prefix="edje-list-", suffix=self._suffix, delete=False
                ) as copy:
                    # The file is removed when this object is deleted.
                    weakref.finalize(self, os.unlink, copy.name)
                    copy.write(read_remote(self.spec, MAX_INPUT_BYTES))
                self._file = copy.name
            os.close(open_file(os.fsencode(self._file))[0])
            if self._suffix not in TABLE_SUFFIXES:
                return
            columns = self._columns()
        except (OSError, ValueError, csv.Error) as error:
            name = f"the list {self.spec}"
            raise unreadable(name, error, "the path and the format") from error
        candidates = PATH_COLUMNS if self.column is None else (self.column,)
        self.column = next((name for name in candidates if name in columns), None)
        if self.column is None:
            raise UsageError(
                f"{self.spec} has no column {' or '.join(candidates)} with texts; name"
                " the column with the paths (columns with texts:"
                f" {', '.join(columns) or 'none'})",
                parameter="column",
            )

    def _iter_inputs(self) -> Iterator[InputRef]:
        for number, values in self._entries():
            ref = listed_input(values.pop(self.column or _PATH, None), self._directory)
            if ref is None:
                ref = InputRef(
                    f"{display_path(self.path)}#{number}",
                    self.path,
                    problem="bad-list-line",
                )
            metadata = self._metadata(ref.uri, {}, values)
            yield dataclasses.replace(ref, metadata=metadata)

    def values(self) -> Iterator[dict[Any, Any]]:
        """Yield the values of each entry by column name, including the path. Entries
        that cannot be read are left out, and counted in `ignored`.
        """
        for _, values in self._entries():
            if values:
                yield values
            else:
                self.ignored.count(UNREADABLE)

    def _entries(self) -> Iterator[_Entry]:
        """Yield the entries of the list. Empty fields of CSV and TSV files are left
        out. If two columns share a name, the first wins.
        """
        if self._suffix == LINES_SUFFIX:
            yield from self._lines()
        elif self._suffix == CAPTION_SUFFIX:
            record_of_image: dict[str, CaptionRecord] = {}
            path = Path(os.fsdecode(self._file))
            try:
                for record in read_records(path):
                    first = record_of_image.setdefault(record.image, record)
                    if first is not record:
                        joined = dataclasses.replace(
                            first, captions=(*first.captions, *record.captions)
                        )
                        record_of_image[record.image] = joined
            except UsageError as error:
                raise SourceError(str(error).replace(str(path), self.spec)) from error
            for number, record in enumerate(record_of_image.values(), 1):
                texts = list(record.captions) or None
                yield (
                    number,
                    {
                        _PATH: record.image,
                        CAPTIONS: texts,
                        SPLIT_KEY: record.split,
                        ID_KEY: record.image_id,
                    },
                )
        elif self._suffix == ".parquet":
            # Columns with binary values are not metadata. The path column may be
            # binary.
            position = 0
            column = str(self.column)
            try:
                with open_parquet(os.fsdecode(self._file)) as file:
                    columns = [
                        column,
                        *metadata_columns(file.schema_arrow, column, self.ignored),
                    ]
                    for position, fields in enumerate(
                        parquet_rows(file, columns, _PARQUET_BATCH), 1
                    ):
                        yield position, dict(zip(columns, fields, strict=True))
            except (OSError, pa.ArrowException) as error:
                raise SourceError(
                    f"the list {self.spec} is damaged after row {position}: {error};"
                    " write the list again"
                ) from error
        elif self._suffix in _DELIMITERS:
            rows = self._csv_rows()
            names = next(rows)[1] or []
            if repeated := len(names) - len(set(names)):
                self.ignored.count(BAD_NAME, repeated)
            row: list[str] | None = names
            for number, row in rows:
                values: dict[Any, Any] = {}
                for name, text in zip(names, row or [], strict=False):
                    if text:
                        values.setdefault(name, PlainText(text))
                if len(row or []) > len(names):
                    self.ignored.count(MORE_FIELDS)
                yield number, values
            # If the last row has too few fields, the end of the file may be missing.
            if len(row or names) < len(names):
                self.ignored.count(UNREADABLE)
        else:
            # A file name in the list need not be UTF-8. Bytes that are not UTF-8 become
            # surrogates.
            for number, value, _ in read_json_lines(
                self._file, decode_errors="surrogateescape"
            ):
                yield number, value if isinstance(value, dict) else {}

    def _columns(self) -> list[str]:
        """Return the names of the columns that can contain paths. Raise ValueError if
        the file names no columns.
        """
        if self._suffix in _DELIMITERS:
            for _, row in self._csv_rows():
                # A zero byte means a damaged file or UTF-16. A "<" means the HTML page
                # of a server.
                if row and "\0" not in row[0] and not row[0].startswith("<"):
                    return row
                break
            raise ValueError("the first line does not name columns")
        if self._suffix != ".parquet":
            lines = read_json_lines(self._file, decode_errors="surrogateescape")
            problem = ""
            names: dict[str, Any] = {}
            for number, value, error in itertools.islice(lines, _LINES_WITH_COLUMNS):
                if value and isinstance(value, dict):
                    names |= value
                    continue
                reason = error or "the line is not a JSON object"
                problem = problem or f"line {number} cannot be used: {reason}"
            if names:
                return list(names)
            raise ValueError(problem or "the file has no lines")
        with open_parquet(os.fsdecode(self._file)) as file:
            schema = file.schema_arrow
        return [each.name for each in schema if column_kind(each.type) in (TEXT, BYTES)]

    def _lines(self) -> Iterator[_Entry]:
        """Yield the entries of a text file or of standard input."""
        is_standard_input = self.spec == STANDARD_INPUT
        if is_standard_input and sys.stdin.closed:
            raise SourceError(
                "standard input has been read already, and cannot be read again; write"
                f" the list to a file that ends in {LINES_SUFFIX}, and give its name"
            )
        with sys.stdin.buffer if is_standard_input else open(self._file, "rb") as file:
            for number in itertools.count(1):
                line = file.readline(_MAX_LINE)
                if not line:
                    return
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                is_too_long = len(line) == _MAX_LINE and not line.endswith(b"\n")
                while line and is_too_long and not line.endswith(b"\n"):
                    line = file.readline(_MAX_LINE)
                if is_too_long:
                    yield number, {}
                elif text := line.strip():
                    yield number, {_PATH: os.fsdecode(text)}

    def _csv_rows(self) -> Iterator[_Row]:
        """Yield the rows of a table, including the header.

        In a CSV file, quoted text can contain line breaks. In a TSV file, every line is
        a row, because quotation marks have no special meaning in most TSV files.
        """
        with open(
            self._file, encoding="utf-8-sig", errors="surrogateescape", newline=""
        ) as file:
            if _DELIMITERS[self._suffix] == ",":
                yield from comma_rows(file, self.spec)
                return
            for number, line in enumerate(file, 1):
                try:
                    row: list[str] | None = next(
                        csv.reader([line], delimiter="\t", strict=True)
                    )
                except csv.Error:
                    # Either quotation marks are part of the text, or a field is too
                    # long. A line with too long a field is an invalid row.
                    row = (
                        None
                        if len(line) > csv.field_size_limit()
                        else line.rstrip("\r\n").split("\t")
                    )
                if row != []:
                    yield number, row
