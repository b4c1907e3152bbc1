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
from storage_formats.atomic import naming
from storage_formats.errors import CorruptIndexError
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.parquet import ParquetRowGroups
from storage_formats.format.places import Place
from storage_formats.format.source_columns import text_of

LIST_ROWS = 1 << 16
"""Number of inputs per file. The number is rounded down to whole shards, but a file has
at least one shard.
"""

_GROUP_ROWS = 1024
_ROW_ID = "row_id"
_INPUT = "input"

# The row id, and the fields of the `InputRef` as a list in JSON. A path is written as
# text, in which surrogates stand for bytes that are not UTF-8.
_SCHEMA = pa.schema({_ROW_ID: pa.int64(), _INPUT: pa.string()})


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
                file, _SCHEMA, compression="zstd", write_page_checksum=True
            ) as writer,
        ):
            while batch := list(itertools.islice(refs_of_file, _GROUP_ROWS)):
                row_ids = range(row, row + len(batch))
                columns = [row_ids, list(map(_text, batch))]
                writer.write_table(pa.table(columns, schema=_SCHEMA))
                row = row_ids.stop
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
                each
                for group in groups
                for each in group.cast(_SCHEMA).to_pylist()
                if each[_ROW_ID] in rows
            ]
        if [each[_ROW_ID] for each in listed] != list(rows):
            raise ValueError(
                f"the file does not list the rows {rows.start} to {rows.stop - 1} in"
                " order"
            )
        return [_ref(each[_INPUT]) for each in listed]
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


def _text(ref: InputRef) -> str:
    """Return `ref` as text for `_ref`."""
    fields = [*ref.location, ref.duplicate_of, ref.problem, ref.metadata]
    fields[1] = ref.path.decode("utf-8", "surrogateescape")
    return json.dumps(fields, default=text_of)


def _ref(text: str) -> InputRef:
    uri, path, container, *others = json.loads(text)
    return InputRef(
        uri,
        path.encode("utf-8", "surrogateescape"),
        container and Container(*container),
        *others,
    )
