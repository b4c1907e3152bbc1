"""Reads images that are stored in a column of a Parquet file."""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from edje_index.images.archive_damage import ArchiveDamage
from edje_index.images.containers.turns import Turns
from edje_index.images.ranges import RangedFile

KEPT_BYTES = 16 << 20
"""Bytes of images that stay in memory after reading, because threads read rows slightly out of order."""

_NEAR_ROWS = 64
"""A row that is at most this far ahead is read by reading on. Threads read a little out of order."""

_BUFFER = 1 << 20  # bytes of a column that are read at once; without it, whole columns of a row group are


class ParquetImages:
    """The images in one column of a Parquet file. Thread-safe.

    The rows are read in order, and threads that wait read in the order of their rows. Reading backwards by more than
    `KEPT_BYTES`, reading far ahead, and reading after an error of the operating system start at the beginning of the
    row group.

    Args:
        file: the Parquet file. `close` closes this file.
        column: name of a binary column, or of a struct column with a binary field `bytes`.

    Raises:
        ArchiveDamage: the file is damaged, or has no such column.
        OSError: the file cannot be read.
    """

    def __init__(self, file: RangedFile, column: str) -> None:
        from storage_formats.format.parquet import open_parquet

        self._file = file
        self._turns = Turns()
        with _named_damage():
            self._parquet = open_parquet(file, buffer_size=_BUFFER)
            leaf = image_leaf(self._parquet.schema_arrow, column)
        if leaf is None:
            raise ArchiveDamage(reason="changed-since-plan", detail=f"the file has no images in a column {column}")
        self._leaf = leaf
        metadata = self._parquet.metadata
        sizes = (metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
        self._group_starts = list(itertools.accumulate(sizes, initial=0))
        self._damages: dict[int, tuple[int, ArchiveDamage]] = {}  # by row group: the first row that cannot be read
        self._start(0)

    def read(self, row: int, max_bytes: int) -> bytes:
        """Return the image in `row`, counted from 0.

        Raises:
            ArchiveDamage: there is no such row, or the row holds no image, or the file is damaged.
            OSError: the file cannot be read.
        """
        if not 0 <= row < self._group_starts[-1]:
            raise ArchiveDamage(reason="changed-since-plan", detail=f"the file has no row {row}")
        group = bisect.bisect_right(self._group_starts, row) - 1
        with self._turns.at(row):
            is_ahead = row > self._next_row + _NEAR_ROWS and self._group_starts[group] > self._next_row
            if is_ahead or row < self._next_row - len(self._kept) or self._is_broken:
                self._start(group)
            self._read_up_to(row, group)
            image = self._kept[row - self._next_row]
        if image is None:
            raise ArchiveDamage(reason="changed-since-plan", detail=f"row {row} has no image any more")
        if len(image) > max_bytes:
            raise ArchiveDamage(reason="too-many-bytes", detail=f"{len(image)} bytes is over the limit of {max_bytes}")
        return image

    def close(self) -> None:
        """Close the file."""
        self._parquet.close()
        self._file.close()

    def _start(self, group: int) -> None:
        self._next_row = self._group_starts[group]
        self._images = self._iterate(group)
        self._kept: deque[bytes | None] = deque()
        self._kept_bytes = 0
        self._is_broken = False

    def _iterate(self, group: int) -> Iterator[bytes | None]:
        from storage_formats.format.parquet import iter_batches

        # One row per batch: repeated values would make larger batches arbitrarily large.
        groups = list(range(group, len(self._group_starts) - 1))
        for batch in iter_batches(self._parquet, 1, [self._leaf], groups):
            value = batch.column(0)[0].as_py()
            yield value["bytes"] if isinstance(value, dict) else value

    def _read_up_to(self, row: int, group: int) -> None:
        """Read the rows up to `row`, which is in row group `group`. Skip the rest of a damaged row group before it."""
        if group in self._damages and row >= self._damages[group][0]:
            raise self._damages[group][1]
        while self._next_row <= row:
            try:
                self._read_next(row)
            except ArchiveDamage as damage:
                if self._next_row >= self._group_starts[group]:
                    self._damages[group] = self._next_row, damage
                    raise
                self._start(group)

    def _read_next(self, row: int) -> None:
        self._is_broken = True  # until the image has arrived: an iterator ends at its first exception
        with _named_damage():
            image = next(self._images)
        self._is_broken = False
        self._kept.append(image)
        self._kept_bytes += len(image or b"")
        self._next_row += 1
        while self._kept_bytes > KEPT_BYTES and self._next_row - len(self._kept) < row:
            self._kept_bytes -= len(self._kept.popleft() or b"")


def image_leaf(schema: Any, column: str) -> str | None:
    """Return the path of the Parquet column with the bytes of images; None if `column` cannot hold images.

    Args:
        schema: Arrow schema of the file.
        column: name of a binary column, or of a struct column with a binary field `bytes` (as Hugging Face writes it).
    """
    import pyarrow as pa

    if len(schema.get_all_field_indices(column)) != 1:
        return None
    arrow_type = schema.field(column).type
    if _is_binary(arrow_type):
        return column
    if pa.types.is_struct(arrow_type):
        position = arrow_type.get_field_index("bytes")
        if position >= 0 and _is_binary(arrow_type.field(position).type):
            return f"{column}.bytes"
    return None


def _is_binary(arrow_type: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_binary(arrow_type) or pa.types.is_large_binary(arrow_type))


@contextmanager
def _named_damage() -> Iterator[None]:
    """Turn the errors of pyarrow at damaged files into ArchiveDamage. Errors of the operating system stay unchanged."""
    import pyarrow as pa

    try:
        yield
    except (OSError, ValueError, StopIteration, pa.ArrowException) as error:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None):
            raise
        raise ArchiveDamage(reason="damaged-archive", detail=f"the Parquet file is damaged: {error}") from error
