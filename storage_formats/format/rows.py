"""The rows table: one line an input, in Parquet, one file a shard (SPEC.md section 9)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from storage_formats.errors import CorruptIndexError, UsageError
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import Manifest

INDEXED = "indexed"
DUPLICATE = "duplicate"
FAILED = "failed"

ROW_SCHEMA = pa.schema(
    [
        pa.field("row_id", pa.int64(), nullable=False),
        pa.field("uri", pa.string(), nullable=False),
        pa.field("uri_raw", pa.binary()),
        pa.field("size", pa.int64()),
        pa.field("content_hash", pa.string()),
        pa.field("status", pa.string(), nullable=False),
        pa.field("reason", pa.string()),
        pa.field("detail", pa.string()),
        pa.field("duplicate_of", pa.int64()),
        pa.field("width", pa.int32()),
        pa.field("height", pa.int32()),
        pa.field("read_seconds", pa.float32()),
        pa.field("decode_seconds", pa.float32()),
        pa.field("encode_seconds", pa.float32()),
    ]
)
TIMING_COLUMNS = ("read_seconds", "decode_seconds", "encode_seconds")


@dataclass
class RowRecord:
    """One line of the table; the fields are the columns of `ROW_SCHEMA`."""

    row_id: int
    uri: str
    uri_raw: bytes | None = None
    size: int | None = None
    content_hash: str | None = None
    status: str = INDEXED
    reason: str | None = None
    detail: str | None = None
    duplicate_of: int | None = None
    width: int | None = None
    height: int | None = None
    read_seconds: float = 0.0
    decode_seconds: float = 0.0
    encode_seconds: float = 0.0

    def fail(self, reason: str, detail: str) -> None:
        """Turn the row into a failed one."""
        self.status, self.reason, self.detail = FAILED, reason, detail


def rows_table(records: Sequence[RowRecord]) -> pa.Table:
    """The table of `records`, in their order."""
    columns = [pa.array([getattr(record, field.name) for record in records], field.type) for field in ROW_SCHEMA]
    return pa.Table.from_arrays(columns, schema=ROW_SCHEMA)


def write_rows(path: Path, table: pa.Table) -> None:
    """Write one shard's rows; zstd, so that a million paths stay small."""
    pq.write_table(table, path, compression="zstd")


def read_shard_rows(layout: Layout, shard: int, columns: list[str] | None = None) -> pa.Table:
    """Rows of one shard in row order. CorruptIndexError where the file is gone or is no such table."""
    path = layout.rows_file(shard)
    expected = ROW_SCHEMA if columns is None else pa.schema([ROW_SCHEMA.field(name) for name in columns])
    try:
        return pq.read_table(path, columns=columns, partitioning=None).cast(expected)
    except (OSError, ValueError, pa.ArrowException) as error:  # damaged names and text are ValueErrors
        raise CorruptIndexError(f"cannot read rows of shard {shard} ({path}): {error}") from error


def read_rows(
    root: str | Path, row_ids: Sequence[int] | NDArray[np.integer] | None = None, columns: list[str] | None = None
) -> pa.Table:
    """Rows of an index: those of `row_ids` in that order (duplicates allowed), or all in row order.

    Only the shards that hold one of `row_ids` are read. Raises UsageError for a row id outside the index.
    """
    layout = Layout(Path(root))
    manifest = Manifest.load(root)
    if row_ids is None:
        return pa.concat_tables(read_shard_rows(layout, shard, columns) for shard in range(manifest.spec.shards))
    ids = np.asarray(row_ids, dtype=np.int64)
    if ids.size and (ids.min() < 0 or ids.max() >= manifest.spec.rows):
        raise UsageError(f"row ids must be in 0..{manifest.spec.rows - 1}")
    shard_of = ids // manifest.spec.shard_size
    shards, which = np.unique(shard_of, return_inverse=True)
    if not len(shards):
        return ROW_SCHEMA.empty_table().select(columns or ROW_SCHEMA.names)
    tables = [read_shard_rows(layout, int(shard), columns) for shard in shards]
    starts = np.concatenate([[0], np.cumsum([len(table) for table in tables])])
    places = starts[which] + ids % manifest.spec.shard_size
    return pa.concat_tables(tables).take(pa.array(places))


def failures_by_reason(table: pa.Table) -> dict[str, int]:
    """Count of failed rows for each reason, sorted by reason."""
    reasons = table.filter(pc.equal(table["status"], FAILED))["reason"]
    counted = {str(item["values"]): int(item["counts"]) for item in pc.value_counts(reasons).to_pylist()}
    return dict(sorted(counted.items()))
