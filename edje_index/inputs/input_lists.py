"""Writes and reads lists of inputs.

The files in `build/inputs/` list the inputs of a build. Each file lists the inputs of
many consecutive shards, so that the number of files stays small. Each file has row
groups of 1,024 inputs, so that a worker reads only the inputs of its shard.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from edje_index.images.transient import is_transient
from edje_index.inputs.containers import Container
from edje_index.inputs.refs import InputRef
from storage_formats.atomic import Json, naming
from storage_formats.errors import CorruptIndexError
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.parquet import ParquetRowGroups
from storage_formats.format.places import Place
from storage_formats.format.source_columns import metadata_text

LIST_ROWS = 1 << 16
"""Number of inputs per file. The number is rounded down to whole shards, but a file has
at least one shard.
"""

_GROUP_ROWS = 1024
_ROW_ID = "row_id"

INPUT_SCHEMA = pa.schema(
    [
        pa.field(_ROW_ID, pa.int64(), nullable=False),
        pa.field("uri", pa.string(), nullable=False),
        pa.field("path", pa.binary(), nullable=False),
        pa.field("container", pa.string()),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("size", pa.int64()),
        pa.field("content_hash", pa.string()),
        pa.field("duplicate_of", pa.int64()),
        pa.field("problem", pa.string()),
        pa.field("metadata", pa.string()),
    ]
)
"""The columns of a list of inputs: the row id, and the fields of `InputRef`."""


def write_input_lists(
    layout: Layout,
    refs: Iterable[InputRef],
    shard_size: int,
    *,
    first_shard: int = 0,
) -> list[Path]:
    """Write `refs` to `build/inputs/`, which must exist. Memory use does not depend on
    the number of inputs.

    Args:
        refs: inputs in row order.
        shard_size: rows per shard.
        first_shard: shard whose first row is the row of the first input in `refs`.

    Returns:
        The paths of the files, in row order.
    """
    paths: list[Path] = []
    row = first_shard * shard_size
    remaining = iter(refs)
    rows_per_file = _rows_per_file(shard_size)
    for first in remaining:
        path = layout.input_list(row // rows_per_file)
        refs_of_file = itertools.chain(
            [first],
            itertools.islice(remaining, rows_per_file - row % rows_per_file - 1),
        )
        with (
            naming(path),
            # PyArrow can open a path only if it is UTF-8, so Python opens the file.
            open(path, "wb") as file,
            pq.ParquetWriter(
                file, INPUT_SCHEMA, compression="zstd", write_page_checksum=True
            ) as writer,
        ):
            while batch := list(itertools.islice(refs_of_file, _GROUP_ROWS)):
                writer.write_table(_table(batch, row))
                row += len(batch)
        paths.append(path)
    return paths


def read_shard_inputs(
    place: Place,
    spec: IndexSpec,
    shard: int,
) -> list[InputRef]:
    """Read the inputs of `shard`, in row order.

    Raises:
        OSError, MemoryError: the file cannot be read now, for example because the disk
            fails.
        CorruptIndexError: the file is missing or damaged, or does not list the rows of
            `shard`.
    """
    path = place.input_list(shard * spec.shard_size // _rows_per_file(spec.shard_size))
    place.get(path)
    rows = spec.shard_rows(shard)
    try:
        with path.open("rb") as file:
            groups = ParquetRowGroups(file, path.stat().st_size, _ROW_ID).read(
                file, rows
            )
            listed = [
                row
                for group in groups
                for row in group.cast(INPUT_SCHEMA).to_pylist()
                if row[_ROW_ID] in rows
            ]
        if [row.pop(_ROW_ID) for row in listed] != list(rows):
            raise ValueError(
                f"the file does not list the rows {rows.start} to {rows.stop - 1} in"
                " order"
            )
        return [_ref(row) for row in listed]
    except (OSError, ValueError, pa.ArrowException) as error:
        if isinstance(error, MemoryError) or (
            isinstance(error, OSError) and is_transient(error)
        ):
            raise
        raise CorruptIndexError(
            f"cannot read the list of inputs {path}: {error}; start the build again"
        ) from error


def _rows_per_file(shard_size: int) -> int:
    return max(1, LIST_ROWS // shard_size) * shard_size


def _table(refs: list[InputRef], first_row: int) -> pa.Table:
    """Return a table of inputs. The row ids count up from `first_row`."""
    rows = [
        {name: getattr(ref, name) for name in INPUT_SCHEMA.names[1:]}
        | {
            _ROW_ID: row_id,
            "container": ref.container and json.dumps(ref.container),
            "metadata": ref.metadata and metadata_text(ref.metadata),
        }
        for row_id, ref in enumerate(refs, first_row)
    ]
    return pa.Table.from_pylist(rows, INPUT_SCHEMA)


def _ref(row: Json) -> InputRef:
    container = row["container"]
    row["container"] = container and Container(*json.loads(container))
    row["metadata"] = row["metadata"] and json.loads(row["metadata"])
    return InputRef(**row)
