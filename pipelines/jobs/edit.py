"""Changes of the values of source columns, without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from pipelines.jobs.changing import Edit, apply, begin, rows_passing
from pipelines.metadata import Ignored, python_values, source_values
from pipelines.progress.events import OnEvent, ignore, never
from storage_formats.errors import UsageError
from storage_formats.format.edits import EDIT_SCHEMA
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.rows import ROW_SCHEMA, read_index_rows
from storage_formats.format.source_columns import (
    MAX_COLUMNS,
    MAX_ROW_BYTES,
    CountedColumns,
    SourceColumn,
    Value,
    as_type,
    metadata_text,
)
from storage_formats.format.tombstones import RowIds, check_row_ids

NewValues: TypeAlias = Mapping[int, Mapping[str, Value | None]]
"""New values by row id and column. None removes a value."""


@dataclass(frozen=True)
class EditResult:
    """The result of an edit.

    Attributes:
        rows: number of rows with a value that changed.
        values: number of values that changed.
        columns: names of the columns with values that changed, sorted.
        snapshot: number of the current snapshot.
    """

    rows: int
    values: int
    columns: tuple[str, ...]
    snapshot: int


def set_columns(
    index: str | Path,
    row_ids: RowIds,
    columns: pa.Table | Mapping[str, Sequence[Any]],
    *,
    where: str | None = None,
    on_event: OnEvent = ignore,
) -> EditResult:
    """Set values of columns, such as captions, in one commit. No image is encoded and
    no file of tokens changes. `roll_back` undoes it.

    A column that the index does not have is added. The values stay in a small file of
    their own until `compact_index` writes them to the rows.

    Args:
        index: directory of the index.
        row_ids: ids of k rows.
        columns: k values of each column, a table or a mapping. None removes a value. A
            column with one value sets it in all rows.
        where: filter such as "licence is null", see `edje_index.search.where`. The rows
            that pass it get the values too; each column then has one value.

    Raises:
        UsageError: there is no index at `index`, a column cannot be set, its values
            have another type, or their number is not that of the rows.
        RowIdError: a row does not exist, or was deleted.
        UnfinishedChangeError: another change was stopped.
        EdjeError: another process is changing the index.

    Examples:
        >>> from edje_index import read_rows, set_columns
        >>> set_columns("photos.edje", [0, 3], {"title": ["Sea", "Hill"]}).values
        2
        >>> read_rows("photos.edje", [3], ["title"]).to_pylist()
        [{'title': 'Hill'}]
    """
    if isinstance(columns, pa.Table):
        columns = columns.to_pydict()
    with begin(index, "edit") as change:
        opened = change.index
        ids = check_row_ids(row_ids, opened.manifest.spec.rows)
        if not columns or (where is None and not len(ids)):
            raise UsageError(
                "nothing is set; select at least one row, and give at least one value",
                parameter="rows",
            )
        ids = np.union1d(ids, rows_passing(opened, where))
        values = _checked(ids.tolist(), columns)
        lines, after = edited_values(opened, values, opened.manifest.columns)
        types = {column.name: column.type for column in opened.manifest.columns}
        for column in after:
            if types.get(column.name, column.type) != column.type:
                raise UsageError(
                    f"the column {column.name} has the type {types[column.name]}, and a"
                    " new value does not fit; give values of this type",
                    parameter="columns",
                )
        rows = len(lines["row_id"].unique())
        names = sorted(lines["column"].unique().to_pylist())
        details = {"rows": rows, "columns": names}
        edit = Edit(opened.manifest.spec, details, columns=after, edits=lines)
        manifest = apply(change, edit, on_event, never).manifest
    return EditResult(rows, len(lines), tuple(names), manifest.snapshot.number)


def _checked(row_ids: list[int], columns: Mapping[str, Sequence[Any]]) -> NewValues:
    """Return the values of `columns` by row, as the index stores them."""
    for name, values in columns.items():
        if name in ROW_SCHEMA.names:
            raise UsageError(
                f"the index itself writes the column {name}; set another column",
                parameter="columns",
            )
        if len(values) not in (1, len(row_ids)):
            raise UsageError(
                f"the column {name} has {len(values)} values for {len(row_ids)} rows;"
                " give one value per row, or one for all",
                parameter="columns",
            )
    rows: list[dict[str, Value | None]] = []
    ignored = Ignored()
    for number, row_id in enumerate(row_ids):
        if number and number == max(map(len, columns.values())):
            # one value for all rows
            rows *= len(row_ids)
            break
        row = {
            name: values[number if len(values) > 1 else 0]
            for name, values in columns.items()
        }
        nulls = {name: None for name, value in row.items() if value is None}
        stored = source_values(python_values(row), ignored) or {}
        if ignored or len(metadata_text(stored).encode()) > MAX_ROW_BYTES:
            problem = next(iter(ignored), f"more than {MAX_ROW_BYTES:,} bytes")
            raise UsageError(
                f"the values of row {row_id} cannot be stored: {problem.strip('()')}",
                parameter="columns",
            )
        rows.append({**nulls, **stored})
    return dict(zip(row_ids, rows, strict=True))


def edited_values(
    index: CommittedIndex,
    values: NewValues,
    columns: Sequence[SourceColumn],
) -> tuple[pa.Table, tuple[SourceColumn, ...]]:
    """Return the lines of the edits that set `values`, without those that the index
    has already, and the source columns after the change.

    Args:
        columns: the source columns before.

    Raises:
        UsageError: there would be too many columns.
    """
    known = {column.name: column for column in index.manifest.columns}
    names = sorted({name for row in values.values() for name in row})
    stored = [name for name in names if name in known]
    row_ids = sorted(values)
    # also those of rows whose columns are new
    rows = read_index_rows(index, row_ids, ["row_id", *stored]).to_pylist()
    counted = CountedColumns(columns)
    lines: list[tuple[int, str, str | None]] = []
    for row in rows:
        for name, value in values[row["row_id"]].items():
            before = row.get(name)
            if is_value(before, value, known.get(name)):
                continue
            text = None if value is None else metadata_text({"": value})[4:-1]
            lines.append((row["row_id"], name, text))
            counted.values[name] -= before is not None
            if value is not None:
                counted.count(name, value)
    after = counted.columns()
    if len(after) > MAX_COLUMNS:
        raise UsageError(
            f"the index would have {len(after)} columns, more than {MAX_COLUMNS}",
            parameter="columns",
        )
    parts = zip(*lines, strict=True) if lines else ((), (), ())
    return pa.table(list(map(list, parts)), schema=EDIT_SCHEMA), after


def is_value(
    stored: Any,
    value: Value | None,
    column: SourceColumn | None,
) -> bool:
    """Return True if `stored`, a value of `column`, is what the index stores for
    `value`.
    """
    if stored is None or value is None or column is None:
        return stored is value
    try:
        return bool(stored == as_type(value, column.type))
    except (ValueError, TypeError):
        return False
