"""The import job: writes an index from token blocks and embeddings in .npy files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from edje_index.indexing.faiss_build import build_ann, check_faiss
from pipelines.jobs.resources import check_ann_memory, check_disk
from pipelines.progress.events import (
    JobStopped,
    OnEvent,
    Progress,
    ShouldStop,
    StatusMessage,
    ignore,
    never,
)
from storage_formats.arrays import Array
from storage_formats.atomic import naming
from storage_formats.codecs import BF16
from storage_formats.errors import UsageError
from storage_formats.format.column_types import NUMBER, TEXT, column_kind
from storage_formats.format.layout import SHARD_SIZE, IndexSpec
from storage_formats.format.manifest import Manifest
from storage_formats.format.parquet import iter_batches, open_parquet
from storage_formats.format.rows import ROW_SCHEMA
from storage_formats.writing.index_writer import ROW_COLUMNS, IndexWriter, Rows

_CHUNK_ROWS = 1024


def import_arrays(
    tokens: Path,
    embeddings: Path,
    out: Path,
    rows: Path | None = None,
    *,
    precisions: Sequence[str] = ("bf16",),
    encoder: str = "unknown",
    on_event: OnEvent = ignore,
    should_stop: ShouldStop = never,
) -> Manifest:
    """Write an index of token blocks and embeddings. After an error, the unfinished
    index is removed.

    Args:
        tokens: .npy file of shape [rows, m, d]. The type is float32, float16, or
            bfloat16 saved as uint16 or as raw 16-bit words. m is the number of tokens
            per row, d the width of a token.
        embeddings: .npy file of floating-point numbers of shape [rows, embed_dim].
        rows: Parquet file with the column `uri` and any of the other `ROW_COLUMNS`;
            other columns of numbers, texts, truth values, times or lists of texts
            become source columns. If None, the uri of each row is its row id.
        encoder: name and version of the model that computed the arrays.

    Returns:
        The manifest of the index.

    Raises:
        UsageError: an input file is invalid, the files have different numbers of rows,
            `out` is in use, or the disk is too small.
    """
    check_faiss()
    blocks = open_npy(tokens, 3)
    vectors = open_npy(embeddings, 2)
    if len(blocks) != len(vectors):
        raise UsageError(
            f"{tokens} has {len(blocks)} rows, but {embeddings} has {len(vectors)}"
            " rows; save one row per image in both files"
        )
    _, m, d = blocks.shape
    spec = IndexSpec(
        len(blocks), SHARD_SIZE, (m, d), vectors.shape[1], tuple(precisions)
    )
    parts = _row_parts(rows, spec.rows)
    check_ann_memory(spec, None)
    check_disk(out, spec)
    with IndexWriter.create(
        out,
        block_shape=spec.block_shape,
        embed_dim=spec.embed_dim,
        precisions=spec.precisions,
        shard_size=spec.shard_size,
        encoder=encoder,
    ) as writer:
        for count, table in parts:
            if should_stop():
                raise JobStopped(
                    f"the import stopped before {out} was written; run the import again"
                )
            part = slice(len(writer), len(writer) + count)
            writer.append(blocks[part], vectors[part], table)
            on_event(Progress("importing", len(writer), spec.rows))
        on_event(StatusMessage("building the nearest-neighbour index"))
        return writer.finish(build_ann)


def open_npy(path: Path, dimensions: int) -> Array:
    """Open the array in a .npy file as a memory map. Arrays of 16-bit words are
    returned as bfloat16.

    Raises:
        UsageError: the file is not a complete .npy file of numbers, has another number
            of `dimensions`, or has no rows.
    """
    try:
        with naming(path):
            array: np.memmap[Any, Any] = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError, EOFError) as error:
        # the operating system's, not NumPy's own
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UsageError(
            f"cannot read {path} as a .npy file: {error}; save the array with"
            " numpy.save"
        ) from error
    if (extra := path.stat().st_size - array.offset - array.nbytes) > 0:
        raise UsageError(
            f"{path} has {extra:,} bytes after its array; save one array per file"
        )
    if array.ndim != dimensions:
        raise UsageError(
            f"the array in {path} must have {dimensions} dimensions, but its shape is"
            f" {list(array.shape)}; reshape the array"
        )
    return array.view(BF16) if array.dtype in (np.uint16, np.dtype("V2")) else array


def _row_parts(path: Path | None, rows: int) -> Iterator[tuple[int, Rows | None]]:
    """Yield consecutive parts of the index as (number of rows, rows of the Parquet
    file or None).
    """
    if path is None:
        return (
            (min(_CHUNK_ROWS, rows - start), None)
            for start in range(0, rows, _CHUNK_ROWS)
        )
    try:
        file = open_parquet(path)
    except (OSError, pa.ArrowException) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UsageError(
            f"cannot read {path} as a Parquet file: {error}; write this file again"
        ) from error
    columns = [
        field.name
        for field in file.schema_arrow
        if field.name in ROW_COLUMNS
        or (field.name not in ROW_SCHEMA.names and _is_source_type(field.type))
    ]
    if "uri" not in columns:
        raise UsageError(
            f"{path} has no column 'uri', only {', '.join(file.schema_arrow.names)};"
            " rename the column of URIs to uri"
        )
    if file.metadata.num_rows != rows:
        raise UsageError(
            f"{path} has {file.metadata.num_rows} rows, but the arrays have {rows}"
            " rows; write one row per image"
        )
    batches = iter_batches(file, _CHUNK_ROWS, columns)
    return ((len(batch), batch) for batch in batches)


def _is_source_type(arrow_type: pa.DataType) -> bool:
    """Return True if a source column can hold the values."""
    types = pa.types
    if types.is_list(arrow_type) or types.is_large_list(arrow_type):
        return column_kind(arrow_type.value_type) == TEXT
    is_moment = types.is_timestamp(arrow_type) or types.is_boolean(arrow_type)
    return is_moment or column_kind(arrow_type) in (NUMBER, TEXT)
