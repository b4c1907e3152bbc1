"""Changes that need no model: delete rows, set columns, list snapshots, roll back to a
snapshot, and remove old snapshots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.jobs.changing import (
    Edit,
    apply,
    begin,
    notifier,
    rows_passing,
)
from pipelines.metadata import Ignored, source_values
from pipelines.progress.events import (
    OnEvent,
    ShouldStop,
    StatusMessage,
    ignore,
    never,
)
from pipelines.progress.wording import counted
from storage_formats.arguments import as_count, as_list, did_you_mean, optional_count
from storage_formats.arrays import Ints
from storage_formats.atomic import Json
from storage_formats.change import Removal, collect_garbage
from storage_formats.errors import UsageError
from storage_formats.format.manifest import CommittedIndex, Manifest, kept_snapshots
from storage_formats.format.rows import (
    ROW_SCHEMA,
    SOURCE_VALUES,
    VALUE_SCHEMA,
    iter_rows,
    read_index_rows,
)
from storage_formats.format.source_columns import (
    CAPTION_COLUMNS,
    MAX_COLUMNS,
    MAX_ROW_BYTES,
    RESERVED_PREFIX,
    CountedColumns,
    SourceColumn,
    Value,
    as_type,
    metadata_text,
    parsed,
    python_value,
    source_values_text,
    values_of_sources,
)
from storage_formats.format.tombstones import (
    RowIds,
    check_row_ids,
    check_rows_in_use,
    input_hash,
)
from storage_formats.remote.urls import IndexLocation


@dataclass(frozen=True)
class DeleteResult:
    """The result of a deletion.

    Attributes:
        deleted: ids of the rows that the deletion deletes, ascending.
        already_deleted: number of selected rows that were deleted before.
        left: number of rows that remain.
        snapshot: number of the current snapshot.
        dry_run: True for a dry run, which changes nothing. The other attributes then
            say what the deletion would do.
        erased: number of deleted rows whose data is removed; 0 without `erase`.

    Examples:
        >>> from edje_index import delete_rows
        >>> where = "uri like '%/0.jpg' or uri like '%/1.jpg'"
        >>> result = delete_rows("photos.edje", where=where, dry_run=True)
        >>> result.deleted, result.left, result.snapshot
        ((0, 1), 4, 0)
    """

    deleted: tuple[int, ...]
    already_deleted: int
    left: int
    snapshot: int
    dry_run: bool
    erased: int = 0


def delete_rows(
    index: IndexLocation,
    rows: Sequence[int] = (),
    *,
    where: str | None = None,
    erase: bool = False,
    dry_run: bool = False,
    on_event: OnEvent = ignore,
    should_stop: ShouldStop = never,
) -> DeleteResult:
    """Delete rows of an index, as `edje-index delete` does. The other rows keep their
    ids. `edje_index.search.where` describes filters.

    Args:
        index: directory of the index.
        rows: id of a row to delete; repeatable.
        where: filter such as "licence is null". Rows that pass the filter are deleted,
            too.
        erase: also remove the data of all deleted rows from the disk. The duplicates of
            deleted rows are deleted, too. The shards with deleted rows are written
            again, without the data of these rows. All earlier snapshots are removed. A
            second call with the same arguments finishes an interrupted erasure.
        dry_run: show what would be deleted, and change nothing.
        on_event: as in `build_index`.
        should_stop: as in `build_index`.

    Raises:
        UsageError: there is no index at `index`, `where` is invalid, or `rows` and
            `where` are both missing although `erase` is False.
        RowIdError: a row id does not exist.
        JobStopped: `should_stop()` returned True. An erasure keeps what is finished.
        UnfinishedChangeError: another change was stopped.
        EdjeError: another process is changing the index.

    Examples:
        >>> from edje_index import delete_rows
        >>> result = delete_rows("photos.edje", rows=[1, 3])
        >>> result.deleted, result.left, result.snapshot
        ((1, 3), 4, 1)
    """
    if not len(rows) and where is None and not erase:
        raise UsageError(
            "no rows are selected; give row ids or a filter",
            parameter="rows",
        )
    request = {"rows": [*map(int, rows)], "where": where} if erase else None
    with begin(index, "delete", request, dry_run=dry_run) as change:
        opened = change.index
        spec = opened.spec
        selected = np.union1d(
            check_row_ids(rows, spec.rows), rows_passing(opened, where)
        )
        check_rows_in_use(selected, spec)
        if erase:
            gone = np.union1d(selected, opened.deleted.row_ids)
            selected = np.union1d(selected, duplicates_of(opened, gone))
        else:
            warn_of_duplicates(opened, selected, on_event)
        deleted = selected[~opened.deleted.contain(selected)].tolist()
        names = ["uri", "uri_raw", "content_hash"]
        inputs = read_index_rows(opened, deleted, names).to_pylist()
        edit = Edit(
            spec,
            details={"rows": len(deleted)},
            deleted=deleted,
            removed=opened.removed.union(input_hash(**each) for each in inputs),
        )
        if erase and not dry_run:
            from pipelines.jobs.copy import erasure

            edit = erasure(change.layout, opened, edit)
        number = apply(change, edit, on_event, should_stop).manifest.snapshot.number
    if erase and not dry_run:
        # An earlier change that was killed may have left files with the data.
        remove_snapshots(index, keep=1)
    deleted_rows = opened.manifest.snapshot.deleted_rows + len(deleted)
    return DeleteResult(
        deleted=tuple(deleted),
        already_deleted=len(selected) - len(deleted),
        left=opened.manifest.counts.inputs - deleted_rows,
        snapshot=number,
        dry_run=dry_run,
        erased=deleted_rows if erase else 0,
    )


def duplicates_of(index: CommittedIndex, originals: RowIds) -> Ints:
    """Return the ids of the rows that are duplicates of the rows `originals`."""
    found = [np.empty(0, np.int64)]
    if index.manifest.counts.duplicates:
        for table in iter_rows(index, ["row_id", "duplicate_of"]):
            duplicate_of = table["duplicate_of"].fill_null(-1).to_numpy()
            found.append(table["row_id"].to_numpy()[np.isin(duplicate_of, originals)])
    return np.concatenate(found)


def warn_of_duplicates(
    index: CommittedIndex, deleted: RowIds, on_event: OnEvent
) -> None:
    """Report the rows that are left without tokens if the rows `deleted` are
    deleted.
    """
    left = np.setdiff1d(duplicates_of(index, deleted), deleted)
    if len(left):
        text = (
            f"no search finds {counted(len(left), 'duplicate')} of the deleted rows any"
            f" more, first row {left[0]}; update the index, or add the images again"
        )
        on_event(StatusMessage(text, is_warning=True))


@dataclass(frozen=True)
class SnapshotEntry:
    """A snapshot of an index.

    Attributes:
        kind: kind of the change that made the snapshot, for example "build", "append"
            or "delete". "import" is the first snapshot of an index of arrays.
        created: time of the commit in UTC, in ISO 8601; None for a build or an import.
        rows: number of rows, without deleted rows.
        deleted: number of deleted rows.
        precisions: stored precisions.
        change: details of the change by name, for example the number of rows that it
            deleted.
    """

    snapshot: int
    kind: str
    created: str | None
    rows: int
    deleted: int
    precisions: tuple[str, ...]
    change: dict[str, Any]

    @classmethod
    def of(cls, manifest: Manifest) -> SnapshotEntry:
        """Return the entry of the snapshot with `manifest`."""
        snapshot = manifest.snapshot
        change = dict(snapshot.change)
        first = "build" if manifest.settings else "import"
        kind = str(change.pop("kind", first))
        created = change.pop("created", None)
        rows = manifest.counts.inputs - snapshot.deleted_rows
        return cls(
            snapshot.number,
            kind,
            created,
            rows,
            snapshot.deleted_rows,
            manifest.spec.precisions,
            change,
        )


def history(index: IndexLocation) -> list[SnapshotEntry]:
    """Return the snapshots of the index at `index`, a directory or a URL, oldest
    first.
    """
    return [
        SnapshotEntry.of(manifest)
        for manifest in kept_snapshots(CommittedIndex.open(index))
    ]


def roll_back(
    index: IndexLocation,
    snapshot: int,
) -> SnapshotEntry:
    """Check the files of the earlier snapshot `snapshot`, and commit a new snapshot
    with the same contents. Return the entry of the new snapshot.

    Raises:
        UsageError: there is no index at `index`, or `snapshot` does not exist or is the
            current snapshot.
    """
    # Import `check_files` only here. A deletion imports this module, too, and the
    # import of `check_files` would make it take a tenth longer.
    from storage_formats.verify import check_files

    snapshot = as_count(snapshot, "snapshot", 0)
    with begin(index, "rollback") as change:
        if snapshot == change.index.manifest.snapshot.number:
            raise UsageError(
                f"snapshot {snapshot} is the current snapshot; choose an earlier"
                " snapshot",
                parameter="snapshot",
            )
        earlier = CommittedIndex.at(change.layout, snapshot)
        check_files(earlier, only_lengths=False)
        manifest = change.new_snapshot(earlier.manifest, {"to": snapshot})
        change.commit(manifest)
        return SnapshotEntry.of(manifest)


def remove_snapshots(
    index: IndexLocation,
    keep: int | None = None,
    on_event: OnEvent = ignore,
) -> Removal:
    """Remove old snapshots, an unfinished change, and the files that no snapshot needs.

    Args:
        keep: number of snapshots to keep, including the current one. None selects all.
        on_event: receives a message if an unfinished change is discarded.

    Raises:
        UsageError: there is no index at `index`, or `keep` is less than 1.
    """
    keep = optional_count(keep, "keep")
    return collect_garbage(index, keep, notify=notifier(on_event))


NewValues: TypeAlias = dict[int, dict[str, Value | None]]
"""New values by row id and column. None removes a value."""


@dataclass(frozen=True)
class EditResult:
    """The result of an edit.

    Attributes:
        rows: number of rows with a value that changed.
        values: number of values that changed.
        columns: names of the columns with values that changed, sorted.
        snapshot: number of the current snapshot.
        new_columns: names of the columns that the index did not have before, sorted.
    """

    rows: int
    values: int
    columns: tuple[str, ...]
    snapshot: int
    new_columns: tuple[str, ...]


def set_columns(
    index: IndexLocation,
    row_ids: RowIds,
    columns: pa.Table | Mapping[str, Sequence[Any]] | None = None,
    *,
    where: str | None = None,
    unset: Sequence[str] = (),
    similar_names: bool = True,
    on_event: OnEvent = ignore,
    should_stop: ShouldStop = never,
) -> EditResult:
    """Set values of columns, such as captions, in one commit. No image is encoded, and
    no token file changes. `roll_back` undoes the change.

    A column that the index does not have is added. A value stays, also if an update
    finds another value in the sources, until it is set again or unset. A column that
    was renamed has its stored name, such as `source_status`.

    Args:
        index: directory of the index.
        row_ids: ids of k rows.
        columns: a table, or a mapping from column names to sequences, with k values
            per column or one value. One value is set in all rows. The value None
            removes the value of a row.
        where: filter such as "licence is null", see `edje_index.search.where`. The
            values are also set in all rows that pass the filter. With a filter, give
            one value per column.
        unset: names of columns whose values in these rows users have set. The rows get
            the values back that the sources gave last.
        similar_names: False refuses to add a column whose name is similar to that of
            another column, which may be a typing error.

    Raises:
        UsageError: there is no index at `index`, no row or no column is given, a column
            cannot be set or added, a value does not have the type of its column, or the
            number of values is not the number of rows.
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
    columns = {
        name: as_list(each, name, "values") for name, each in (columns or {}).items()
    }
    with begin(index, "edit") as change:
        opened = change.index
        ids = check_row_ids(row_ids, opened.spec.rows)
        types = {column.name: column.type for column in opened.manifest.columns}
        added = () if similar_names else columns.keys() - {*CAPTION_COLUMNS, *types}
        for name in added:
            hint = did_you_mean(name, types) or did_you_mean(name, CAPTION_COLUMNS)
            if hint:
                raise UsageError(
                    f"the index has no column {name}{hint}",
                    parameter="columns",
                    remedy="new-column",
                )
        unset = as_list(unset, "unset", "names")
        if unknown := sorted({*unset} - {*types}):
            hint = did_you_mean(unknown[0], types)
            raise UsageError(
                f"the index has no column {unknown[0]}{hint}", parameter="unset"
            )
        if both := sorted(columns.keys() & {*unset}):
            raise UsageError(
                f"{both[0]} cannot be both set and unset; name each column once",
                parameter="unset",
            )
        if not (columns or unset) or (where is None and not len(ids)):
            raise UsageError(
                "nothing is set; select at least one row, and give at least one value,"
                " or a column to unset",
                parameter="rows",
            )
        counts = {len(values) for values in columns.values()}
        if counts <= {1}:
            ids = np.unique(ids)
        elif where is not None or len(np.unique(ids)) < len(ids):
            raise UsageError(
                "with one value per row, name each row once and give no filter",
                parameter="rows",
            )
        ids = np.append(ids, np.setdiff1d(rows_passing(opened, where), ids))
        values = _checked(ids.tolist(), columns)
        lines, after = edited_values(
            opened, [values], opened.manifest.columns, unset=unset
        )
        for column in after:
            is_set = column.name in columns
            if is_set and types.get(column.name, column.type) != column.type:
                raise UsageError(
                    f"the column {column.name} has the type {types[column.name]}, and a"
                    " new value does not fit; give values of this type",
                    parameter="columns",
                )
        of_values = lines.filter(pc.not_equal(lines["column"], SOURCE_VALUES))
        rows = len(of_values["row_id"].unique())
        changed = sorted({*of_values["column"].to_pylist()})
        details = {"rows": rows, "columns": changed}
        edit = Edit(opened.spec, details, columns=after, values=lines)
        manifest = apply(change, edit, on_event, should_stop).manifest
    if not len(ids):
        on_event(StatusMessage("no row passes the filter; nothing was changed"))
    elif not rows:
        on_event(StatusMessage("the rows have these values; nothing was changed"))
    return EditResult(
        rows,
        len(of_values),
        tuple(changed),
        manifest.snapshot.number,
        tuple(name for name in changed if name not in types),
    )


def _checked(row_ids: list[int], columns: Mapping[str, Sequence[Any]]) -> NewValues:
    """Return the values of `columns`, by row id and column, in the form in which the
    index stores them.

    Raises:
        UsageError: a column or a value cannot be stored.
    """
    for name, values in columns.items():
        if name in ROW_SCHEMA.names or str(name).startswith(RESERVED_PREFIX):
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
    rows: NewValues = {}
    ignored = Ignored()
    for number, row_id in enumerate(row_ids):
        row = {
            name: values[number if len(values) > 1 else 0]
            for name, values in columns.items()
        }
        stored = source_values(row, ignored, renames=False) or {}
        if ignored or len(metadata_text(stored).encode()) > MAX_ROW_BYTES:
            problem = next(iter(ignored), f"more than {MAX_ROW_BYTES:,} bytes")
            raise UsageError(
                f"the values of row {row_id} cannot be stored: {problem.strip('()')}",
                parameter="columns",
            )
        nulls = (name for name, value in row.items() if python_value(value) is None)
        rows[row_id] = {**dict.fromkeys(nulls), **stored}
    return rows


def edited_values(
    index: CommittedIndex,
    parts: Iterable[NewValues],
    columns: Sequence[SourceColumn],
    *,
    from_sources: bool = False,
    unset: Sequence[str] = (),
) -> tuple[pa.Table, tuple[SourceColumn, ...]]:
    """Return the lines of `VALUE_SCHEMA` that set the values in `parts`, and the source
    columns after the change. Values that the index already has get no line.

    Args:
        columns: source columns before the change.
        from_sources: True if sources give the values. Values that users have set then
            stay. False if a user sets the values.
        unset: columns whose values by users are replaced by those of the sources.

    Raises:
        UsageError: there would be too many columns.
    """
    columns_by_name = {column.name: column for column in index.manifest.columns}
    counted = CountedColumns(columns)
    tables = [VALUE_SCHEMA.empty_table()]
    for values in parts:
        names = {name for row in values.values() for name in row}.union(unset)
        stored = sorted(names.intersection(columns_by_name))
        row_ids = sorted(values)
        read = ["row_id", SOURCE_VALUES, *stored]
        lines: list[Json] = []
        for row in read_index_rows(index, row_ids, read).to_pylist():
            row_id = row["row_id"]
            of_sources = values_of_sources(row[SOURCE_VALUES], columns_by_name)
            earlier = dict(of_sources)
            new = dict(values[row_id])
            for name in unset:
                if name in of_sources:
                    new[name] = of_sources.pop(name)
            for name, value in new.items():
                before = row.get(name)
                column = columns_by_name.get(name)
                if from_sources and name in of_sources:
                    value = typed(value, column)
                    of_sources[name] = value and parsed(value)
                    continue
                if not from_sources and name not in unset:
                    of_sources.setdefault(name, before)
                if is_value(before, value, column):
                    continue
                lines.append(value_line(row_id, name, value))
                counted.values[name] -= before is not None
                if value is not None:
                    counted.count(name, value)
            if of_sources != earlier:
                text = source_values_text(of_sources)
                lines.append(value_line(row_id, SOURCE_VALUES, text))
        tables.append(pa.Table.from_pylist(lines, VALUE_SCHEMA))
    after = counted.columns()
    if len(after) > MAX_COLUMNS:
        raise UsageError(
            f"the index would have {len(after)} columns, more than {MAX_COLUMNS}",
            parameter="columns",
        )
    return pa.concat_tables(tables), after


def value_line(row_id: int, column: str, value: Value | None) -> Json:
    """Return a line of `VALUE_SCHEMA`."""
    # `metadata_text` takes only JSON objects. So the value is put into an object, and
    # `{"":` and `}` are cut off the text.
    text = None if value is None else metadata_text({"": value})[4:-1]
    return {"row_id": row_id, "column": column, "value": text}


def typed(value: Value | None, column: SourceColumn | None) -> Value | None:
    """Return `value` converted to the type of its column. If there is no value or no
    column, or if the value does not fit the type, return `value`.
    """
    if value is None or column is None or not column.fits(value):
        return value
    return as_type(value, column.type)


def is_value(
    stored: Any,
    value: Value | None,
    column: SourceColumn | None,
) -> bool:
    """Return True if the index already stores `value`.

    Args:
        stored: value that the index stores; None if it stores none.
        column: source column of `stored`; None if the index does not have the column.
    """
    if stored is None or value is None or column is None:
        return stored is value
    return column.fits(value) and bool(stored == as_type(value, column.type))
