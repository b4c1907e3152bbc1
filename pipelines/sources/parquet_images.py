"""A source that is a Parquet file with a column of images, as Hugging Face Datasets and img2dataset write it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from edje_index.images.containers.container import PARQUET, PARQUET_SUFFIX, Container
from edje_index.images.containers.parquet_images import image_leaf
from edje_index.images.decode import HEAD_BYTES, image_format, undecoded_format
from edje_index.images.inputs import InputRef, display_path
from edje_index.images.ranges import RangedFile, open_ranged
from pipelines.sources.base import Source, listed_input, lost_file
from pipelines.sources.metadata import metadata_columns, source_values, to_python
from storage_formats.errors import UsageError

NO_IMAGE = "(row without an image)"
_ROWS = 256  # rows of metadata in a batch
_ROWS_WITH_IMAGES = 8
_PREFERRED = ("image", "img", "jpg", "jpeg", "png", "webp", "image_bytes", "bytes")


@dataclass
class ParquetImagesSource(Source):
    """The images in one column of a Parquet file, with the values of the other columns as metadata.

    The column is binary, or a struct with the fields `bytes` and `path` (Hugging Face). If `bytes` is null, `path`
    names an image file, relative to the directory of the Parquet file. Rows without either are ignored, and counted.

    Attributes:
        column: name of the column; None looks for it when the file is listed. A file without images is then ignored.
    """

    column: str | None = None
    kind = PARQUET

    def _iter_inputs(self) -> Iterator[InputRef]:
        import pyarrow as pa

        try:
            with open_ranged(self.path) as file:
                parquet = _open(file)
                column = self.column or _find_column(parquet, self.spec, None)
                if column is None or image_leaf(parquet.schema_arrow, column) is None:
                    self.ignored.count(PARQUET_SUFFIX)
                    return
                container = Container(PARQUET, file.length, column)
                for row, (image, metadata) in enumerate(self._rows(parquet, column)):
                    ref = self._input(row, image, container)
                    if ref is None:
                        self.ignored.count(NO_IMAGE)
                    else:
                        yield dataclasses.replace(ref, metadata=source_values(metadata, self.ignored))
        except (OSError, ValueError, EOFError, pa.ArrowException) as error:
            yield lost_file(self, error)

    def _input(self, row: int, image: Any, container: Container) -> InputRef | None:
        uri = f"{display_path(self.path)}!{container.column}/{row}"
        path = image.get("path") if isinstance(image, dict) else None
        if image is None or (isinstance(image, dict) and image.get("bytes", b"") is None):
            if not path:
                return None
            directory = os.path.dirname(self.path)
            return listed_input(path, directory) or InputRef(uri, self.path, problem="bad-list-line")
        return InputRef(uri, self.path, offset=row, member=True, container=container)

    def _rows(self, parquet: Any, column: str) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yield (image, metadata) of each row. The image bytes are read only if the column may contain nulls."""
        from storage_formats.format.parquet import iter_batches

        leaf = str(image_leaf(parquet.schema_arrow, column))
        names = metadata_columns(parquet.schema_arrow, column, self.ignored)
        has_nulls = _may_have_nulls(parquet.metadata, leaf)
        leaves = [leaf] if has_nulls else []
        if leaf != column and parquet.schema_arrow.field(column).type.get_field_index("path") >= 0:
            leaves.append(f"{column}.path")
        if not names and not leaves:
            yield from ((b"", {}) for _ in range(parquet.metadata.num_rows))
            return
        rows = _ROWS_WITH_IMAGES if has_nulls else _ROWS
        for batch in iter_batches(parquet, rows, [*names, *leaves]):
            columns = [to_python(batch.column(name)) for name in names]
            images = batch.column(column).to_pylist() if leaves else [b""] * len(batch)
            for position, image in enumerate(images):
                metadata = {name: values[position] for name, values in zip(names, columns, strict=True)}
                if isinstance(image, dict) and image.get("path"):
                    metadata.setdefault(f"{column}_path", image["path"])
                yield image, metadata


def find_image_column(path: str, column: str | None) -> str | None:
    """Return the column of a Parquet file that holds the bytes of images; None if there is none.

    A column holds images if Hugging Face Datasets recorded the type Image for it. Without a recorded type, a binary
    column holds images if its first value begins like an image file. The same is true of a struct column with a binary
    field `bytes`.

    Args:
        path: path of the file.
        column: the only column to consider. None considers all columns. If several columns hold images, the column
            with a usual name is returned.

    Raises:
        UsageError: several columns hold images, and none of them has a usual name.
        OSError, ValueError, pyarrow.ArrowException: the file cannot be read.
    """
    with open_ranged(os.fsencode(path)) as file:
        return _find_column(_open(file), path, column)


def _find_column(parquet: Any, path: str, column: str | None) -> str | None:
    names = parquet.schema_arrow.names if column is None else [column]
    with_images = [name for name in names if _holds_images(parquet, name)]
    preferred = [name for name in _PREFERRED if name in with_images]
    if len(with_images) > 1 and not preferred:
        raise UsageError(
            f"{path} has several columns of images ({', '.join(with_images)}); name the column to index",
            parameter="column",
        )
    return next(iter([*preferred, *with_images]), None)


def _open(file: RangedFile) -> Any:
    """Open a Parquet file. Raise ValueError if it declares more rows than its bytes can hold."""
    from storage_formats.format.parquet import open_parquet

    parquet = open_parquet(file, buffer_size=1 << 20)
    if parquet.metadata.num_rows > file.length:
        raise ValueError(f"the file declares {parquet.metadata.num_rows} rows, but has only {file.length} bytes")
    return parquet


def _holds_images(parquet: Any, name: str) -> bool:
    from storage_formats.format.parquet import iter_batches

    leaf = image_leaf(parquet.schema_arrow, name)
    if leaf is None:
        return False
    try:  # the feature type that Hugging Face Datasets recorded for the column, such as "Image" or "Audio"
        features = json.loads((parquet.schema_arrow.metadata or {})[b"huggingface"])["info"]["features"]
        return str(features[name]["_type"]) == "Image"
    except (KeyError, TypeError, ValueError, RecursionError):
        pass
    for batch in iter_batches(parquet, 1, [leaf]):
        value = batch.column(0)[0].as_py()
        data = value["bytes"] if isinstance(value, dict) else value
        if data is not None:
            return bool(image_format(data[:HEAD_BYTES]) or undecoded_format(data[:HEAD_BYTES]))
    return leaf != name  # images in files that the struct names


def _may_have_nulls(metadata: Any, leaf: str) -> bool:
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        columns = [group.column(index) for index in range(group.num_columns)]
        statistics = next((each.statistics for each in columns if each.path_in_schema == leaf), None)
        if statistics is None or not statistics.has_null_count or statistics.null_count:
            return True
    return False
