"""Sources that are tables: lists of paths, and Parquet files with images."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pyarrow as pa

from edje_index.inputs.containers import PARQUET, Container
from edje_index.inputs.refs import InputRef, display_path
from edje_index.inputs.tables import STANDARD_INPUT, Table
from pipelines.sources.base import Source, file_name, listed_input, lost_file

NO_IMAGE = "(row without an image)"


@dataclass
class TableSource(Source):
    """The images of a table (see `edje_index.inputs.tables`), in its order. The values
    of an entry are the metadata of its image.

    Relative paths start at the directory of the table, or at the working directory for
    standard input. A missing file becomes an input with the problem "missing". An entry
    without a valid path becomes an input with the problem "bad-list-line" and the uri
    "<table>#<number of the entry>". A row of a Parquet file of images without bytes and
    without a path is ignored and counted.

    Attributes:
        column: the column of images; None selects one, see `Table`.
        images_only: True for a Parquet file in a directory, see `Table`.
    """

    column: str | None = None
    images_only: bool = False
    table: Table = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        name = file_name(self.spec)
        self._directory = os.path.dirname(self.path)
        if self.spec == STANDARD_INPUT:
            self.path = b"-"
            self._directory = os.fsencode(os.getcwd())
        elif name != self.spec:
            self._directory = os.path.dirname(os.fsencode(name))
        self.table = Table(
            os.fsdecode(self.path),
            self.column,
            suffix=os.path.splitext(name)[1].lower(),
            images_only=self.images_only,
        )

    def _iter_inputs(self) -> Iterator[InputRef]:
        table = self.table
        try:
            for entry in table.entries(self.ignored.count):
                uri = f"{display_path(self.path)}#{entry.number}"
                ref: InputRef | None
                if entry.has_bytes:
                    row = entry.number - 1
                    container = Container(PARQUET, table.length, table.column or "")
                    uri = f"{display_path(self.path)}!{table.column}/{row}"
                    ref = InputRef(uri, self.path, container, row)
                elif table.has_bytes and not entry.image:
                    self.ignored.count(NO_IMAGE)
                    continue
                else:
                    ref = listed_input(entry.image, self._directory)
                if ref is None:
                    ref = InputRef(uri, self.path, problem="bad-list-line")
                metadata = self._metadata(ref.uri, {}, entry.values)
                yield replace(ref, metadata=metadata)
        except (OSError, ValueError, EOFError, pa.ArrowException) as error:
            if not (table.has_bytes or self.images_only):
                raise
            yield lost_file(self, error)
