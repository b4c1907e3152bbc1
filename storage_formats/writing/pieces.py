"""Pieces of an unfinished shard. A worker saves a piece every minute, so that an interrupted build can resume.

Each piece is a Parquet file in `build/pieces/<shard>/`. The file contains columns of the rows table, the bfloat16
blocks and the embeddings. Its name contains the positions [start, stop) of the rows. A CRC-32C follows the Parquet
data.
"""

from __future__ import annotations

import io
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from storage_formats.atomic import write_bytes_atomic
from storage_formats.codecs import Blocks
from storage_formats.errors import CorruptIndexError
from storage_formats.format.checksum import crc32c
from storage_formats.format.index_files import read_index_file
from storage_formats.format.layout import CRC_BYTES, IndexSpec, Layout
from storage_formats.format.parquet import read_table
from storage_formats.format.rows import ROW_SCHEMA, RowEntry, rows_table

PIECE_SECONDS = 60.0
"""Seconds between two saved pieces. A killed worker loses at most the work of this time and one batch."""

_MAX_BYTES = 256 << 20  # maximum length of unsaved blocks, which are in memory


@dataclass(frozen=True)
class Piece:
    """Finished rows of a shard.

    Attributes:
        start: position in the shard of the first row.
        entries: one entry of the rows table per row, including rows without a block.
        positions: int64 [k], positions in the shard of the k rows with a block.
        tokens: ml_dtypes.bfloat16 [k, m, d], blocks of these rows.
        embeddings: float32 [k, embed_dim], embeddings of these rows.
    """

    start: int
    entries: Sequence[RowEntry]
    positions: NDArray[np.int64]
    tokens: Blocks
    embeddings: NDArray[np.float32]

    @property
    def stop(self) -> int:
        """Position in the shard after the last row."""
        return self.start + len(self.entries)


class ShardPieces:
    """The stored pieces of one shard. Only one worker at a time may use them.

    Args:
        layout: layout of the index.
        spec: shape of the index.
        shard: shard number.
        plan: fingerprint of the build plan. Pieces of another plan are treated as damaged.
    """

    def __init__(self, layout: Layout, spec: IndexSpec, shard: int, plan: str) -> None:
        self._layout, self._spec, self._shard, self._plan = layout, spec, shard, plan
        self._pending: list[Piece] = []
        self._saved_at = time.monotonic()

    def read(self, start: int = 0) -> Iterator[Piece]:
        """Yield the stored pieces from `start` to the first gap or damaged piece. Remove all later pieces."""
        rows, stop = len(self._spec.shard_rows(self._shard)), start
        files = _piece_files(self._layout, self._shard)
        paths = {_positions_of(path)[0]: path for path in files}
        while path := paths.get(stop):
            piece = self._read(path)
            if piece is None or not stop < piece.stop <= rows:
                break
            yield piece
            stop = piece.stop
        for path in files:
            if _positions_of(path)[1] > stop:
                path.unlink(missing_ok=True)

    def files(self) -> list[Path]:
        """Return the files of the pieces that `read` yields. Remove all later pieces."""
        for _ in self.read():
            pass
        return _piece_files(self._layout, self._shard)

    def add(self, piece: Piece) -> None:
        """Add the next finished rows. About once a minute, save all unsaved rows."""
        # Rows that take much memory are saved earlier.
        self._pending.append(piece)
        due = time.monotonic() - self._saved_at >= PIECE_SECONDS
        if due or sum(piece.tokens.nbytes for piece in self._pending) > _MAX_BYTES:
            self.save()

    def save(self) -> None:
        """Write all unsaved rows to disk as one piece. The piece survives a power failure."""
        self._saved_at = time.monotonic()
        if not self._pending:
            return
        start, stop = self._pending[0].start, self._pending[-1].stop
        table = pa.concat_tables([self._table(piece) for piece in self._pending])
        buffer = io.BytesIO()
        pq.write_table(table, buffer, compression="none", use_dictionary=False, write_statistics=False)
        data = buffer.getvalue()
        path = self._layout.pieces(self._shard) / f"{start:08d}-{stop:08d}"
        write_bytes_atomic(path, data + self._checksum(data))
        self._pending.clear()

    def remove(self) -> None:
        """Remove all stored pieces of the shard."""
        shutil.rmtree(self._layout.pieces(self._shard), ignore_errors=True)

    def _checksum(self, data: bytes) -> bytes:
        return crc32c(data, crc32c(self._plan.encode())).to_bytes(CRC_BYTES, "little")

    def _table(self, piece: Piece) -> pa.Table:
        columns = rows_table(piece.entries)
        for name, values in (("tokens", piece.tokens), ("embedding", piece.embeddings)):
            records: list[bytes | None] = [None] * len(piece.entries)
            for position, value in zip(piece.positions, values, strict=True):
                records[position - piece.start] = value.tobytes()
            columns = columns.append_column(name, pa.array(records, pa.binary()))
        return columns

    def _read(self, path: Path) -> Piece | None:
        """Load the piece at `path`. Return None if the piece is damaged or belongs to another plan."""
        start, stop = _positions_of(path)
        try:
            content = read_index_file(self._layout.root, path)
            data, checksum = content[:-CRC_BYTES], content[-CRC_BYTES:]
            if checksum != self._checksum(data):
                return None
            table = read_table(data)
            if len(table) != stop - start:
                return None
            entries = [RowEntry(**row) for row in table.select(ROW_SCHEMA.names).to_pylist()]
            has_block = np.array(table["tokens"].is_valid())
            tokens = b"".join(table["tokens"].drop_null().to_pylist())
            embeddings = b"".join(table["embedding"].drop_null().to_pylist())
            count = int(has_block.sum())
            return Piece(
                start,
                entries,
                start + np.flatnonzero(has_block),
                np.frombuffer(tokens, ml_dtypes.bfloat16).reshape(count, *self._spec.block_shape),
                np.frombuffer(embeddings, "<f4").reshape(count, self._spec.embed_dim),
            )
        except (OSError, CorruptIndexError, ValueError, TypeError, KeyError, pa.ArrowException):
            return None


def rows_in_pieces(*layouts: Layout) -> dict[int, int]:
    """Return the number of rows in stored pieces from position 0 to the first gap, by shard.

    The pieces of each layout begin where those of the layout before end. Their contents are not checked.
    """
    rows: Counter[int] = Counter()
    for layout in layouts:
        folder = layout.pieces(0).parent
        for shard in (int(path.name) for path in folder.glob("[0-9]*") if path.name.isdecimal()):
            stops = dict(map(_positions_of, _piece_files(layout, shard)))
            while (stop := stops.pop(rows[shard], 0)) > rows[shard]:
                rows[shard] = stop
    return dict(rows)


def _piece_files(layout: Layout, shard: int) -> list[Path]:
    return sorted(layout.pieces(shard).glob("[0-9]*-[0-9]*"))


def _positions_of(path: Path) -> tuple[int, int]:
    start, _, stop = path.name.partition("-")
    return int(start), int(stop)
