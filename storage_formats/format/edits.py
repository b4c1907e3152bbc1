"""Edits: values of source columns that replace those in the files of `rows/`, and
inputs that were deleted and must not be added again by an update (SPEC.md section
12.5).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage_formats.arrays import Ints
from storage_formats.format.file_check import FileEntry, committed_content
from storage_formats.format.layout import EDITS_FILE, IndexSpec
from storage_formats.format.parquet import read_table, table_bytes
from storage_formats.format.shard_table import write_named_file

if TYPE_CHECKING:
    from storage_formats.format.place import Place

EDIT_SCHEMA = pa.schema(
    [
        pa.field("row_id", pa.int64()),
        pa.field("column", pa.string(), nullable=False),
        pa.field("value", pa.string()),
    ]
)
GIVEN = "\0"
"""Prefix of the column name in a line that records a value from the sources. If a user
sets a value, such a line keeps the last value that the sources had for it.
"""

# approximate length in bytes of a Parquet file with few lines, which is mostly metadata
_OVERHEAD = 1000
# `changed` keeps the last line of each row and column, and its value may be null. By
# default, the aggregation "last" would skip nulls.
_LAST = pc.ScalarAggregateOptions(skip_nulls=False)


@dataclass(frozen=True)
class Edits:
    """The edits of a snapshot.

    Attributes:
        shard_size: rows per shard of the index.
        lines: table with the columns of `EDIT_SCHEMA`. A line with a row id sets the
            value of a column in this row to `value`, which is JSON text. If `value` is
            null, the row has no value in this column. If a user set the value, a second
            line with the column name `GIVEN` + name records the last value from the
            sources. Lines with a row id come first, sorted by row id. Each line without
            a row id stands for a deleted input. Its `column` is the `input_hash` of the
            input.
    """

    shard_size: int
    lines: pa.Table = field(default_factory=EDIT_SCHEMA.empty_table)

    @functools.cached_property
    def _row_ids(self) -> Ints:
        row_ids: Ints = self.lines["row_id"].drop_null().to_numpy()
        return row_ids

    @property
    def _is_given(self) -> pa.ChunkedArray:
        """Which lines record a last value from the sources, bool [lines]."""
        return pc.starts_with(self.lines["column"], GIVEN)

    def user_values(self, row_ids: Sequence[int]) -> set[tuple[int, str]]:
        """Return (row id, column) of each value that a user set in one of the rows
        `row_ids`.
        """
        of_rows = pc.is_in(self.lines["row_id"], pa.array(row_ids, pa.int64()))
        lines = self.lines.filter(pc.and_(of_rows, self._is_given)).to_pylist()
        return {(line["row_id"], line["column"].removeprefix(GIVEN)) for line in lines}

    def of_sources(self) -> Edits:
        """Return these edits as if users had set no values: each value that a user set
        is replaced by the last value from the sources.
        """
        lines = self.lines.filter(self._is_given)
        names = pc.utf8_slice_codeunits(lines["column"], len(GIVEN))
        return self.changed(lines.set_column(1, EDIT_SCHEMA.field(1), names))

    def moved(self, new_ids: Callable[[Ints], Ints]) -> pa.Table:
        """Return the lines that an index still needs after its rows were copied to new
        row ids. The new rows files contain the edited values, so only the lines with
        the last values from the sources and with the deleted inputs are returned.

        Args:
            new_ids: takes row ids, int64 [k], and returns the new row ids, int64 [k].
                The new row id is -1 if the row was not copied.
        """
        lines = self.lines.filter(self._is_given)
        row_ids = new_ids(lines["row_id"].to_numpy())
        lines = lines.set_column(0, EDIT_SCHEMA.field(0), pa.array(row_ids))
        others = self.lines.slice(len(self._row_ids))
        return pa.concat_tables([lines.filter(pa.array(row_ids >= 0)), others])

    def of_rows(self, first: int, count: int) -> dict[str, dict[int, str | None]]:
        """Return the edited values of the `count` rows from row id `first` on, as a
        mapping from column name to a mapping from position (row id - `first`) to value.
        A value is JSON text; None means that the value was removed.
        """
        start, stop = np.searchsorted(self._row_ids, [first, first + count]).tolist()
        values: dict[str, dict[int, str | None]] = {}
        for line in self.lines.slice(start, stop - start).to_pylist():
            of_column = values.setdefault(line["column"], {})
            of_column[line["row_id"] - first] = line["value"]
        return values

    @functools.cached_property
    def removed(self) -> frozenset[str]:
        """The `input_hash` of each input that must stay deleted."""
        names = self.lines["column"].slice(len(self._row_ids))
        return frozenset(names.to_pylist())

    def changed(
        self,
        new: pa.Table,
        restored: Collection[str] = (),
        erased: Ints | None = None,
    ) -> Edits:
        """Return these edits together with the lines `new`, which replace earlier lines
        of the same row and column.

        Args:
            new: table with the columns of `EDIT_SCHEMA`.
            restored: hashes of deleted inputs that may be added again. Their lines are
                left out.
            erased: int64 [k], ids of rows whose lines are left out.
        """
        lines = pa.concat_tables([self.lines, new])
        if restored:
            of_row = lines["row_id"].is_valid()
            is_restored = pc.is_in(lines["column"], pa.array([*restored], pa.string()))
            lines = lines.filter(pc.or_(of_row, pc.invert(is_restored)))
        if erased is not None:
            is_erased = pc.is_in(lines["row_id"], pa.array(erased, pa.int64()))
            lines = lines.filter(pc.invert(is_erased))
        # Of several lines for the same row and column, the last one counts. Without
        # threads, grouping keeps the order of the lines.
        last = lines.group_by(["row_id", "column"], use_threads=False).aggregate(
            [("value", "last", _LAST)]
        )
        ordered = last.sort_by([("row_id", "ascending"), ("column", "ascending")])
        ordered = ordered.select(["row_id", "column", "value_last"])
        ordered = ordered.rename_columns(EDIT_SCHEMA.names).cast(EDIT_SCHEMA)
        return Edits(self.shard_size, ordered)

    def write(
        self, place: Place, spec: IndexSpec, earlier: Sequence[FileEntry] = ()
    ) -> tuple[FileEntry, ...]:
        """Write these edits to a new file, which readers apply after the files
        `earlier`. Return the entries of all files.

        The lines of small files at the end of `earlier` are written to the new file
        too, which replaces these files. The number of files therefore stays small. Each
        line is rewritten only a few times, because it moves to larger and larger files.
        """
        if not len(self.lines):
            return tuple(earlier)
        place.fetch(earlier[-1:])
        if earlier and earlier[-1].bytes <= _OVERHEAD + 2 * self.lines.nbytes:
            joined = read_edits(place.root, spec, earlier[-1:]).changed(self.lines)
            return joined.write(place, spec, earlier[:-1])
        data = table_bytes(self.lines)
        return (*earlier, write_named_file(place, EDITS_FILE, data))


def read_edits(root: Path, spec: IndexSpec, entries: Iterable[FileEntry]) -> Edits:
    """Read the edits of a snapshot of the index at `root`. Lines of later files replace
    lines of earlier files with the same row and column.

    Raises:
        CorruptIndexError: a file is missing or damaged.
    """
    edits = Edits(spec.shard_size)
    for entry in entries:
        with committed_content(root, entry, "file of edits") as data:
            lines = read_table(data, EDIT_SCHEMA.names).cast(EDIT_SCHEMA)
            row_ids = lines["row_id"].drop_null().to_numpy()
            in_order = (np.diff(row_ids) >= 0).all()
            if lines["row_id"].slice(0, len(row_ids)).null_count or not in_order:
                raise ValueError("its row ids do not ascend")
            if len(row_ids) and not 0 <= row_ids[0] <= row_ids[-1] < spec.rows:
                raise ValueError("its row ids are outside the index")
        part = Edits(spec.shard_size, lines)
        edits = edits.changed(lines) if len(edits.lines) else part
    return edits


def input_hash(uri: str, uri_raw: bytes | None, content_hash: str | None) -> str:
    """Return a hash of the name and the content of an input. Edits store this hash for
    each deleted input.

    Args:
        uri, uri_raw, content_hash: values of the input in these columns of the rows
            table (SPEC.md section 9).
    """
    content = (content_hash or "").encode()
    text = b"\0".join((uri.encode(), uri_raw or b"", content))
    return hashlib.blake2b(text, digest_size=16).hexdigest()
