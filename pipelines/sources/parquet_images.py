"""A source that is a Parquet file with a column of images, as Hugging Face Datasets and img2dataset write it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from edje_index.images.containers.container import PARQUET, Container
from edje_index.images.containers.parquet_images import image_leaf
from edje_index.images.decode import HEAD_BYTES, image_format, undecoded_format
from edje_index.images.inputs import InputRef, display_path
from edje_index.images.ranges import RangedFile, open_ranged
from pipelines.sources.file_source import FileSource
from pipelines.sources.files import problem_of
from pipelines.sources.list_entries import metadata_columns, to_python
from pipelines.sources.listed import listed_input
from pipelines.sources.metadata import source_values
from storage_formats.errors import UsageError

NO_IMAGE = "(row without an image)"
_ROWS = 256  # rows of metadata in a batch
_ROWS_WITH_IMAGES = 8
_PREFERRED = ("image", "img", "jpg", "jpeg", "png", "webp", "image_bytes", "bytes")


@dataclass
class ParquetImagesSource(FileSource):
    """The images in one column of a Parquet file, with the values of the other columns as metadata.

    The column is binary, or a struct with the fields `bytes` and `path` (Hugging Face). If `bytes` is null, `path`
    names an image file, relative to the directory of the Parquet file. Rows without either are ignored, and counted.

    Attributes:
        column: name of the column.
    """

    column: str
    kind: str = "parquet"

    def iter_inputs(self) -> Iterator[InputRef]:
        import pyarrow as pa

        self.ignored.clear()
        uri = display_path(self.path)
        try:
            with open_ranged(self.path) as file:
                yield from self._rows(file, uri)
        except (OSError, ValueError, EOFError, pa.ArrowException) as error:
            is_damage = not isinstance(error, OSError) or error.errno is None
            yield InputRef(uri, self.path, problem="damaged-archive" if is_damage else problem_of(error))

    def _rows(self, file: RangedFile, uri: str) -> Iterator[InputRef]:
        container = Container(PARQUET, file.length, self.column)
        directory = os.path.dirname(self.path)
        for row, image in enumerate(self._images(file)):
            row_uri = f"{uri}!{self.column}/{row}"
            if image.has_bytes:
                ref = InputRef(row_uri, self.path, offset=row, member=True, container=container)
            elif image.path:
                ref = listed_input(image.path, directory) or InputRef(row_uri, self.path, problem="bad-list-line")
            else:
                self.ignored.count(NO_IMAGE)
                continue
            yield dataclasses.replace(ref, metadata=source_values(image.metadata, self.ignored))

    def _images(self, file: RangedFile) -> Iterator[_Row]:
        """Yield the rows of the file. The image bytes are read only if the column may contain nulls."""
        from storage_formats.format.parquet import iter_batches

        parquet = _open(file)
        leaf = str(image_leaf(parquet.schema_arrow, self.column))
        names = metadata_columns(parquet.schema_arrow, self.column, self.ignored)
        has_nulls = _may_have_nulls(parquet.metadata, leaf)
        leaves = [leaf] if has_nulls else []
        if leaf != self.column and parquet.schema_arrow.field(self.column).type.get_field_index("path") >= 0:
            leaves.append(f"{self.column}.path")
        if not names and not leaves:
            yield from (_Row() for _ in range(parquet.metadata.num_rows))
            return
        rows = _ROWS_WITH_IMAGES if has_nulls else _ROWS
        for batch in iter_batches(parquet, rows, [*names, *leaves]):
            columns = [to_python(batch.column(name)) for name in names]
            images = batch.column(self.column).to_pylist() if leaves else [b""] * len(batch)
            for position, image in enumerate(images):
                yield self._row(image, {name: values[position] for name, values in zip(names, columns, strict=True)})

    def _row(self, image: Any, metadata: dict[str, Any]) -> _Row:
        if not isinstance(image, dict):
            return _Row(image is not None, metadata=metadata)
        path = image.get("path") or ""
        if path:
            metadata.setdefault(f"{self.column}_path", path)
        return _Row("bytes" not in image or image["bytes"] is not None, path, metadata)


@dataclass(frozen=True)
class _Row:
    """One row of the file: whether it holds the bytes of an image, or the path of an image file."""

    has_bytes: bool = True
    path: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)


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
        parquet = _open(file)
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
    if (feature := _hugging_face_type(parquet.schema_arrow, name)) is not None:
        return feature == "Image"
    for batch in iter_batches(parquet, 1, [leaf]):
        value = batch.column(0)[0].as_py()
        data = value["bytes"] if isinstance(value, dict) else value
        if data is not None:
            return bool(image_format(data[:HEAD_BYTES]) or undecoded_format(data[:HEAD_BYTES]))
    return leaf != name  # images in files that the struct names


def _hugging_face_type(schema: Any, name: str) -> str | None:
    """Return the feature type that Hugging Face Datasets recorded for a column, such as "Image" or "Audio"."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return str(features[name]["_type"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return None


def _may_have_nulls(metadata: Any, leaf: str) -> bool:
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        columns = [group.column(index) for index in range(group.num_columns)]
        statistics = next((each.statistics for each in columns if each.path_in_schema == leaf), None)
        if statistics is None or not statistics.has_null_count or statistics.null_count:
            return True
    return False
