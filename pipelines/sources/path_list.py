"""A source that is a list of paths. One column contains image paths; the other columns are metadata of the images."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass

from edje_index.images.inputs import InputRef, display_path
from pipelines.sources.file_source import FileSource
from pipelines.sources.list_entries import (
    Entry,
    csv_entries,
    csv_rows,
    json_entries,
    parquet_entries,
    parquet_text_columns,
)
from pipelines.sources.listed import listed_input
from pipelines.sources.local_file import LocalFile
from pipelines.sources.metadata import source_values
from pipelines.sources.specs import absolute_path, file_name
from storage_formats.errors import UsageError

LIST_SUFFIXES = (".parquet", ".csv", ".tsv", ".jsonl", ".ndjson")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
PATH_COLUMNS = ("path", "image", "image_path", "file", "file_name", "filename", "filepath", "uri", "url")
"""Names of path columns. Unless the user names a column, the first of these names in the list is the path column."""

_LINES_WITH_COLUMNS = 1000  # lines of JSON Lines in which an object with column names is looked for


@dataclass
class PathListSource(FileSource):
    """The files that a list names in its path column, in the order of the list. The other columns are metadata.

    Relative paths are relative to the directory of the list. A missing file becomes an input with the problem
    "missing". An entry without a valid path becomes an input with the problem "bad-list-line" and the uri
    "<list>#<number of the entry>".

    Raises:
        UsageError: the list cannot be read or has no path column. `iter_inputs` also raises this error if a Parquet
            file is damaged.
    """

    column: str | None = None
    kind: str = "list"

    def __post_init__(self) -> None:
        self.path = absolute_path(self.spec)
        self._suffix = os.path.splitext(file_name(self.spec))[1].lower()
        try:
            self._file = LocalFile(self.path)
            self.column = self._choose(self._columns())
        except (OSError, ValueError, csv.Error) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(
                f"cannot read the list {self.spec}: {reason}; check the path and the format", parameter="sources"
            ) from error

    def iter_inputs(self) -> Iterator[InputRef]:
        directory = os.path.dirname(os.fsencode(file_name(os.fsdecode(self.path))))
        uri = display_path(self.path)
        self.ignored.clear()
        for number, values in self._entries():
            ref = listed_input(values.pop(self.column, None), directory)
            ref = ref or InputRef(f"{uri}#{number}", self.path, problem="bad-list-line")
            yield dataclasses.replace(ref, metadata=source_values(values, self.ignored))

    def _choose(self, columns: list[str]) -> str:
        candidates = PATH_COLUMNS if self.column is None else (self.column,)
        for name in candidates:
            if name in columns:
                return name
        raise UsageError(
            f"{self.spec} has no column {' or '.join(candidates)} with texts; name the column with the paths "
            f"(columns with texts: {', '.join(columns) or 'none'})",
            parameter="column",
        )

    def _columns(self) -> list[str]:
        if self._suffix == ".parquet":
            return parquet_text_columns(self._file.path)
        if self._suffix in _DELIMITERS:
            return next((row for _, row in csv_rows(self._file.path, _DELIMITERS[self._suffix])), None) or []
        objects = (values for _, values in itertools.islice(json_entries(self._file.path), _LINES_WITH_COLUMNS))
        return list(next(filter(None, objects), {}))

    def _entries(self) -> Iterator[Entry]:
        if self._suffix == ".parquet":
            return parquet_entries(self._file.path, str(self.column), self.spec, self.ignored)
        if self._suffix in _DELIMITERS:
            return csv_entries(self._file.path, self.ignored, _DELIMITERS[self._suffix])
        return json_entries(self._file.path)
