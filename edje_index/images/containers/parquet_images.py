"""Reads images that are stored in a column of a Parquet file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from edje_index.images.containers.streams import StreamWindow
from edje_index.images.decode import ImageError
from edje_index.images.ranges import RangedFile

_BUFFER = 1 << 20  # bytes of a column that are read at once; without it, whole columns of a row group are


class ParquetImages:
    """The images in one column of a Parquet file. Thread-safe. The rows are read in order. See `StreamWindow`.

    Args:
        file: the Parquet file. `close` closes this file.
        column: name of a binary column, or of a struct column with a binary field `bytes`.

    Raises:
        ImageError: the file is damaged, or has no such column.
        OSError: the file cannot be read.
    """

    def __init__(self, file: RangedFile, column: str) -> None:
        from storage_formats.format.parquet import open_parquet

        self._file = file
        try:
            self._parquet = open_parquet(file, buffer_size=_BUFFER)
            leaf = image_leaf(self._parquet.schema_arrow, column)
        except Exception as error:
            raise damage_of(error) from error
        if leaf is None:
            raise ImageError(reason="changed-since-plan", detail=f"the file has no images in a column {column}")
        self._leaf = leaf
        metadata = self._parquet.metadata
        sizes = (metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
        *self._group_starts, self._rows = itertools.accumulate(sizes, initial=0)
        self._window = StreamWindow(self._group_starts, self._images, lambda _: 1)

    def read(self, offset: int, size: int, max_bytes: int) -> bytes:
        """Return the image in the row `offset`, counted from 0.

        Raises:
            ImageError: there is no such row, or the row holds no image, or the file is damaged.
            OSError: the file cannot be read.
        """
        if not 0 <= offset < self._rows:
            raise ImageError(reason="changed-since-plan", detail=f"the file has no row {offset}")
        found = self._window.read(offset, offset + 1)
        if not found:
            raise ImageError(reason="damaged-archive", detail=f"the Parquet file ends before row {offset}")
        image = found[0][1]
        if image is None:
            raise ImageError(reason="changed-since-plan", detail=f"row {offset} has no image any more")
        if len(image) > max_bytes:
            raise ImageError(reason="too-many-bytes", detail=f"{len(image)} bytes is over the limit of {max_bytes}")
        return image

    def close(self) -> None:
        """Close the file."""
        self._parquet.close()
        self._file.close()

    def _images(self, group: int) -> Iterator[bytes | None]:
        from storage_formats.format.parquet import iter_batches

        # One row per batch: repeated values would make larger batches arbitrarily large.
        groups = list(range(group, len(self._group_starts)))
        try:
            for batch in iter_batches(self._parquet, 1, [self._leaf], groups):
                value = batch.column(0)[0].as_py()
                yield value["bytes"] if isinstance(value, dict) else value
        except Exception as error:
            raise damage_of(error) from error


def damage_of(error: Exception) -> Exception:
    """Return the ImageError for an error of pyarrow at a damaged file. Return other errors unchanged."""
    import pyarrow as pa

    is_of_machine = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None)
    if is_of_machine or not isinstance(error, OSError | ValueError | EOFError | pa.ArrowException):
        return error
    return ImageError(reason="damaged-archive", detail=f"the Parquet file is damaged: {error}")


def image_leaf(schema: Any, column: str) -> str | None:
    """Return the path of the Parquet column with the bytes of images; None if `column` cannot hold images.

    Args:
        schema: Arrow schema of the file.
        column: name of a binary column, or of a struct column with a binary field `bytes` (as Hugging Face writes it).
    """
    import pyarrow as pa

    def is_binary(arrow_type: Any) -> bool:
        return bool(pa.types.is_binary(arrow_type) or pa.types.is_large_binary(arrow_type))

    if len(schema.get_all_field_indices(column)) != 1:
        return None
    arrow_type = schema.field(column).type
    if is_binary(arrow_type):
        return column
    if pa.types.is_struct(arrow_type):
        position = arrow_type.get_field_index("bytes")
        if position >= 0 and is_binary(arrow_type.field(position).type):
            return f"{column}.bytes"
    return None
