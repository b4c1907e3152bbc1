"""Writes and reads lists of inputs.

The files in `build/inputs/` list the inputs of a build. Each file lists the inputs of
many consecutive shards, so that the number of files stays small. Each file has row
groups of 1,024 inputs, so that a worker reads only the inputs of its shard.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from edje_index.images.transient import is_transient
from edje_index.inputs.containers import Container
from edje_index.inputs.refs import InputRef
from storage_formats.atomic import naming
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
        pa.field("content_hash", pa.binary(32)),
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
            for table in _tables(refs_of_file, row, _GROUP_ROWS):
                writer.write_table(table)
                row += len(table)
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
            table = pa.concat_tables(
                [
                    INPUT_SCHEMA.empty_table(),
                    *(group.cast(INPUT_SCHEMA) for group in groups),
                ]
            )
        row_ids = table[_ROW_ID]
        table = table.filter(
            pc.and_(pc.greater_equal(row_ids, rows.start), pc.less(row_ids, rows.stop))
        )
        if table[_ROW_ID].to_pylist() != list(rows):
            raise ValueError(
                f"the file does not list the rows {rows.start} to {rows.stop - 1} in"
                " order"
            )
        return _refs(table)
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


def _tables(
    refs: Iterable[InputRef],
    first_row: int,
    rows: int,
) -> Iterator[pa.Table]:
    """Yield tables of at most `rows` inputs. The row ids count up from `first_row`."""
    remaining = iter(refs)
    while batch := list(itertools.islice(remaining, rows)):
        columns: dict[str, Any] = {_ROW_ID: range(first_row, first_row + len(batch))}
        columns |= {
            field.name: [getattr(ref, field.name) for ref in batch]
            for field in dataclasses.fields(InputRef)
        }
        columns["content_hash"] = [
            digits and bytes.fromhex(digits) for digits in columns["content_hash"]
        ]
        columns["metadata"] = [
            values and metadata_text(values) for values in columns["metadata"]
        ]
        columns["container"] = [
            container and str(container) for container in columns["container"]
        ]
        yield pa.table(columns, schema=INPUT_SCHEMA)
        first_row += len(batch)


def _refs(table: pa.Table) -> list[InputRef]:
    columns = {
        name: table[name].to_pylist() for name in table.column_names if name != _ROW_ID
    }
    columns["content_hash"] = [
        digest and digest.hex() for digest in columns["content_hash"]
    ]
    columns["metadata"] = [text and json.loads(text) for text in columns["metadata"]]
    columns["container"] = [
        text and Container.parse(text) for text in columns["container"]
    ]
    return [InputRef(*values) for values in zip(*columns.values(), strict=True)]
