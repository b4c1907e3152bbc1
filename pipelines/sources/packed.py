"""Sources that pack images: archives, and Parquet files with a column of images."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from edje_index.images.decode import (
    HEAD_BYTES,
    ImageError,
    image_format,
    undecoded_format,
)
from edje_index.inputs.containers import (
    ARCHIVES,
    PARQUET,
    PARQUET_SUFFIX,
    Archive,
    Container,
    container_kind,
    image_leaf,
    members_with_sidecars,
)
from edje_index.inputs.ranges import RangedFile, open_ranged
from edje_index.inputs.refs import InputRef, display_path
from edje_index.inputs.tars import Member
from pipelines.metadata import (
    features_of,
    holds_binary,
    metadata_columns,
    parquet_rows,
)
from pipelines.sources.base import (
    Source,
    file_name,
    ignored_as,
    listed_input,
    lost_file,
)
from storage_formats.errors import UsageError
from storage_formats.format.parquet import iter_batches, open_parquet
from storage_formats.threads import ordered_map

NO_IMAGE = "(row without an image)"
_FILES_AT_ONCE = 8
# Number of rows of a Parquet file that are read at once: `_ROWS_WITH_IMAGES` if the
# bytes of the images are read, too, and `_ROWS` otherwise.
_ROWS = 256
_ROWS_WITH_IMAGES = 8
# largest number of values of a column that are compared with image formats
_ROWS_TO_TRY = 100
# usual names of image columns, the most preferred first
_PREFERRED = ("image", "img", "jpg", "jpeg", "png", "webp", "image_bytes", "bytes")


def is_packed_name(name: str) -> bool:
    """Return True if a file of this name is an archive or a Parquet file."""
    return container_kind(file_name(name)) is not None


def packed_source(
    spec: str,
    column: str | None = None,
    *,
    clips: bool = False,
) -> Source:
    """Return the source for an archive or a Parquet file of images. The file is opened
    when it is listed.

    `column` is the name of the column with the images, if the file is a Parquet file.
    None selects the column by its content.
    """
    if container_kind(file_name(spec)) == PARQUET:
        return ParquetImagesSource(spec, column, clips=clips)
    return ArchiveSource(spec, clips=clips)


@dataclass
class ArchiveSource(Source):
    """The images in one archive, in the order of the archive. Their metadata are read
    from other members of the archive.

    NAME.json and NAME.txt contain the metadata of NAME.jpg, see
    `edje_index.inputs.names.join_sidecars`. Other members that are not images are
    ignored.

    Members that cannot be read, for example links, become inputs with a problem such as
    "unsupported-member". If the archive is damaged, one input with the problem
    "truncated-archive", "damaged-archive" or "too-expensive" replaces all members after
    the damage.
    """

    def _iter_inputs(self) -> Iterator[InputRef]:
        name = file_name(self.spec).lower()
        kind = str(container_kind(name))
        refs: list[InputRef] = []
        try:
            with open_ranged(
                self.path, only_headers=name.endswith((".tar", ".zip"))
            ) as file:
                archive = ARCHIVES[kind][0](file)
                container = Container(kind, file.length)
                for member, contents in members_with_sidecars(archive, self.clips):
                    key = self._ignored_as(archive, member)
                    if key is not None:
                        self.ignored.count(key, 1 + len(contents))
                        continue
                    uri = f"{display_path(self.path)}!{display_path(member.name)}"
                    ref = InputRef(
                        uri,
                        self.path,
                        None if member.problem else container,
                        member.offset,
                        member.size,
                        problem=member.problem,
                        metadata=self._metadata(uri, contents, {}),
                    )
                    refs.append(ref)
        except (ImageError, OSError, ValueError, EOFError) as error:
            # The metadata of all members may be behind the damage.
            self.unread.update(ref.uri for ref in refs)
            refs.append(lost_file(self, error))
        yield from refs

    def _ignored_as(
        self,
        archive: Archive,
        member: Member,
    ) -> str | None:
        """Return the key under which a member is ignored; None if it is an input."""
        # The names in some zips that Windows programs wrote contain backslashes.
        name = member.name.replace(b"\\", b"/")
        parts = [part for part in name.split(b"/") if part not in (b"", b".", b"..")]
        if not parts:
            return "(not a file)"
        # A member inside a hidden directory is counted as hidden. macOS archives
        # contain the attributes of files in a directory `__MACOSX`, which is treated
        # like a hidden directory.
        name = next(
            (part for part in parts if part.startswith(b".") or part == b"__MACOSX"),
            parts[-1],
        )
        name = b"." if name == b"__MACOSX" else name

        def read_start() -> bytes:
            size = min(HEAD_BYTES, member.size)
            with contextlib.suppress(ImageError):
                return archive.head(member.offset, size)
            return b""

        return ignored_as(name, read_start, clips=self.clips)


@dataclass
class ParquetImagesSource(Source):
    """The images in one column of a Parquet file, with the values of the other columns
    as metadata.

    The column is binary, or a struct with the fields `bytes` and `path`, as Hugging
    Face Datasets writes images. If `bytes` is null, `path` names an image file,
    relative to the directory of the Parquet file. A row with neither bytes nor a path
    is ignored and counted.

    Attributes:
        column: name of the column of images. If it is None or the file has no such
            column, the column is selected by its content when the file is listed. A
            file without a column of images is ignored and counted.
    """

    column: str | None = None

    def _iter_inputs(self) -> Iterator[InputRef]:
        try:
            with open_parquet_images(self.path) as (file, parquet):
                column = self.column
                if column not in parquet.schema_arrow.names:
                    column = find_image_column(parquet, self.spec, None)
                leaf = (
                    None if column is None else image_leaf(parquet.schema_arrow, column)
                )
                if column is None or leaf is None:
                    key = PARQUET_SUFFIX
                    if list_column(parquet.schema_arrow):
                        key = "(lists of images)"
                    self.ignored.count(key)
                    return
                container = Container(PARQUET, file.length, column)
                for row, (has_bytes, path, metadata) in enumerate(
                    self._rows(parquet, column, leaf)
                ):
                    uri = f"{display_path(self.path)}!{column}/{row}"
                    if has_bytes:
                        ref = InputRef(uri, self.path, container, row)
                    elif path:
                        listed = listed_input(path, os.path.dirname(self.path))
                        ref = listed or InputRef(
                            uri, self.path, problem="bad-list-line"
                        )
                    else:
                        self.ignored.count(NO_IMAGE)
                        continue
                    yield dataclasses.replace(
                        ref, metadata=self._metadata(ref.uri, {}, metadata)
                    )
        except (OSError, ValueError, EOFError, pa.ArrowException) as error:
            yield lost_file(self, error)

    def _rows(
        self,
        parquet: Any,
        column: str,
        leaf: str,
    ) -> Iterator[tuple[bool, str | None, dict[str, Any]]]:
        """Yield (has_bytes, path, metadata) for each row. `has_bytes` is False if the
        bytes of the image are null, and `path` is the path in the struct.

        The image bytes are read only if the column may contain nulls, according to the
        statistics in the Parquet file.
        """
        names = metadata_columns(parquet.schema_arrow, column, self.ignored)
        index = [
            parquet.schema.column(index).path for index in range(len(parquet.schema))
        ].index(leaf)
        groups = map(parquet.metadata.row_group, range(parquet.metadata.num_row_groups))
        statistics = (group.column(index).statistics for group in groups)
        has_nulls = any(
            each is None or not each.has_null_count or each.null_count
            for each in statistics
        )
        leaves = [leaf] if has_nulls else []
        if (
            leaf != column
            and parquet.schema_arrow.field(column).type.get_field_index("path") >= 0
        ):
            leaves.append(f"{column}.path")
        if not names and not leaves:
            yield from itertools.repeat((True, None, {}), parquet.metadata.num_rows)
            return
        read = [*names, column] if leaves else names
        for values in parquet_rows(
            parquet, read, _ROWS_WITH_IMAGES if has_nulls else _ROWS, [*names, *leaves]
        ):
            metadata = dict(zip(names, values, strict=False))
            # An image whose bytes are not read counts as present.
            image = values[-1] if leaves else b""
            path = image.get("path") if isinstance(image, dict) else None
            if path:
                metadata.setdefault(f"{column}_path", path)
            yield (
                (image.get("bytes", b"") if isinstance(image, dict) else image)
                is not None,
                path,
                metadata,
            )


@contextlib.contextmanager
def open_parquet_images(path: bytes) -> Iterator[tuple[RangedFile, Any]]:
    """Open a Parquet file, and yield (open file, its `pyarrow.parquet.ParquetFile`).
    Raise ValueError if the file declares more rows than its bytes can hold.
    """
    with open_ranged(path) as file:
        parquet = open_parquet(file, buffer_size=1 << 20)
        if parquet.metadata.num_rows > file.length:
            raise ValueError(
                f"the file declares {parquet.metadata.num_rows} rows, but has only"
                f" {file.length} bytes"
            )
        yield file, parquet


def find_image_column(
    parquet: Any,
    path: str,
    column: str | None,
) -> str | None:
    """Return the column of an open Parquet file that holds the bytes of images; None if
    there is none.

    A column holds images if Hugging Face Datasets recorded the type Image for it.
    Without a recorded type, a binary column holds images if one of its first 100 values
    that are not empty begins like an image file. The same rule holds for the binary
    field `bytes` of a struct column. A struct column whose `bytes` are all empty also
    counts as a column of images, because its field `path` can name image files.

    If `column` is given, only this column is examined. If several columns hold images,
    the column with a usual name, such as "image", is returned.

    Raises:
        UsageError: several columns hold images, and none of them has a usual name.
        OSError, ValueError, pyarrow.ArrowException: the file cannot be read.
    """
    with_images = [
        name
        for name in parquet.schema_arrow.names
        if column in (None, name) and _holds_images(parquet, name)
    ]
    preferred = [name for name in _PREFERRED if name in with_images]
    if len(with_images) > 1 and not preferred:
        raise UsageError(
            f"{path} has several columns of images ({', '.join(with_images)}); name the"
            " column to index",
            parameter="column",
        )
    return next(iter([*preferred, *with_images]), None)


def list_column(schema: Any) -> str | None:
    """Return the first column that contains binary values but is not a column of
    images, for example a column of lists of images. None if there is none.
    """
    return next(
        (
            str(field.name)
            for field in schema
            if holds_binary(field.type) and not image_leaf(schema, field.name)
        ),
        None,
    )


def _holds_images(parquet: Any, name: str) -> bool:
    leaf = image_leaf(parquet.schema_arrow, name)
    if leaf is None:
        return False
    if (
        kind := features_of(parquet.schema_arrow).get(name, {}).get("_type")
    ) is not None:
        return bool(kind == "Image")
    others = 0
    for batch in iter_batches(parquet, 1, [leaf]):
        value = batch.column(0)[0].as_py()
        data = value["bytes"] if isinstance(value, dict) else value
        # Several values are examined, because the first may be damaged, for example the
        # error page of a server.
        if data:
            head = data[:HEAD_BYTES]
            if image_format(head) or undecoded_format(head):
                return True
            others += 1
            if others == _ROWS_TO_TRY:
                return False
    # If all values are null or empty, a binary column holds no images. For a struct
    # column, the images are then in the files that its field `path` names.
    return leaf != name and not others


def scan_ahead(sources: Sequence[Source]) -> Iterator[InputRef]:
    """Yield the inputs of packed sources in order. Threads list the next sources ahead
    of the caller.
    """
    if len(sources) == 1:
        yield from sources[0].iter_inputs()
        return
    listed = ordered_map(
        lambda source: list(source.iter_inputs()),
        sources,
        _FILES_AT_ONCE,
        _FILES_AT_ONCE,
    )
    for refs in listed:
        yield from refs
