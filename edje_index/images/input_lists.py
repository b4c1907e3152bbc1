"""Writes and reads the lists of inputs of a build: the files in `build/inputs/`.

A file lists the inputs of many consecutive shards, so that the number of files stays small. It has row groups of 1,024
inputs, so that a worker reads only the inputs of its shard.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edje_index.images.containers.container import Container
from edje_index.images.inputs import InputRef, metadata_text
from edje_index.images.transient import is_transient
from storage_formats.atomic import naming
from storage_formats.errors import CorruptIndexError
from storage_formats.format.layout import IndexSpec, Layout

if TYPE_CHECKING:
    import pyarrow as pa

LIST_ROWS = 1 << 16
"""Number of inputs per file, rounded down to whole shards. A file has at least one shard."""

_GROUP_ROWS = 1024
_ROW_ID = "row_id"


def write_input_lists(layout: Layout, refs: Iterable[InputRef], shard_size: int, *, first_shard: int = 0) -> list[Path]:
    """Write `refs` to `build/inputs/`, which must exist. Memory use does not depend on the number of inputs.

    Args:
        layout: paths of the index.
        refs: inputs in row order.
        shard_size: number of inputs per shard.
        first_shard: number of the first shard.

    Returns:
        The paths of the files, in row order.

    Raises:
        OSError: a file cannot be written.
    """
    paths: list[Path] = []
    row, remaining, rows_per_file = first_shard * shard_size, iter(refs), _rows_per_file(shard_size)
    for first in remaining:
        paths.append(layout.input_list(row // rows_per_file))
        others = itertools.islice(remaining, rows_per_file - row % rows_per_file - 1)
        row = _write(paths[-1], itertools.chain([first], others), row)
    return paths


def read_shard_inputs(layout: Layout, spec: IndexSpec, shard: int) -> list[InputRef]:
    """Read the inputs of `shard`, in row order.

    Raises:
        CorruptIndexError: the file is missing, damaged or not a list of inputs, or lacks inputs of the shard.
        OSError, MemoryError: the file cannot be read now, for example because the disk fails.
    """
    import pyarrow as pa

    path, rows = layout.input_list(shard * spec.shard_size // _rows_per_file(spec.shard_size)), spec.shard_rows(shard)
    try:
        columns = _read_columns(path, rows)
        columns["metadata"] = [text and json.loads(text) for text in columns["metadata"]]
        columns["container"] = [text and Container.parse(text) for text in columns["container"]]
    except (OSError, ValueError, pa.ArrowException) as error:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and is_transient(error)):
            raise
        raise CorruptIndexError(f"cannot read the list of inputs {path}: {error}; start the build again") from error
    columns["content_hash"] = [digest and digest.hex() for digest in columns["content_hash"]]
    return [InputRef(*values) for values in zip(*columns.values(), strict=True)]


def input_schema() -> pa.Schema:
    """Return the columns of a list of inputs: the row id, and the fields of `InputRef`."""
    import pyarrow as pa

    return pa.schema(
        [
            pa.field(_ROW_ID, pa.int64(), nullable=False),
            pa.field("uri", pa.string(), nullable=False),
            pa.field("path", pa.binary(), nullable=False),
            pa.field("offset", pa.int64(), nullable=False),
            pa.field("size", pa.int64()),
            pa.field("member", pa.bool_(), nullable=False),
            pa.field("content_hash", pa.binary(32)),
            pa.field("duplicate_of", pa.int64()),
            pa.field("problem", pa.string()),
            pa.field("metadata", pa.string()),
            pa.field("container", pa.string()),
        ]
    )


def _rows_per_file(shard_size: int) -> int:
    return max(1, LIST_ROWS // shard_size) * shard_size


def _write(path: Path, refs: Iterator[InputRef], first_row: int) -> int:
    """Write `refs` to one file. Return the row id after the last input."""
    import pyarrow.parquet as pq

    row = first_row
    with naming(path), pq.ParquetWriter(path, input_schema(), compression="zstd") as writer:
        while group := list(itertools.islice(refs, _GROUP_ROWS)):
            writer.write_table(_table(group, row))
            row += len(group)
    return row


def _table(refs: list[InputRef], first_row: int) -> pa.Table:
    import pyarrow as pa

    columns: dict[str, Any] = {_ROW_ID: range(first_row, first_row + len(refs))}
    columns |= {field.name: [getattr(ref, field.name) for ref in refs] for field in fields(InputRef)}
    columns["content_hash"] = [digits and bytes.fromhex(digits) for digits in columns["content_hash"]]
    columns["metadata"] = [values and metadata_text(values) for values in columns["metadata"]]
    columns["container"] = [container and str(container) for container in columns["container"]]
    return pa.table(columns, schema=input_schema())


def _read_columns(path: Path, rows: range) -> dict[str, list[Any]]:
    """Return the columns of the row ids `rows`, without the row ids.

    Raises:
        OSError, ValueError, pyarrow.ArrowException: the file cannot be read, or does not list all of `rows` in order.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    from storage_formats.format.parquet import ParquetRowGroups

    with path.open("rb") as file:
        groups = ParquetRowGroups(file, path.stat().st_size, _ROW_ID).read(file, rows)
        table = pa.concat_tables([input_schema().empty_table(), *(group.cast(input_schema()) for group in groups)])
    row_ids = table[_ROW_ID]
    table = table.filter(pc.and_(pc.greater_equal(row_ids, rows.start), pc.less(row_ids, rows.stop)))
    columns = {name: table[name].to_pylist() for name in table.column_names}
    if columns.pop(_ROW_ID) != list(rows):
        raise ValueError(f"the file does not list the rows {rows.start} to {rows.stop - 1} in order")
    return columns
