"""Opens archives and Parquet files of images, and lists several of them at once."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from edje_index.images.containers.container import ARCHIVE_SUFFIXES, COMPRESSIONS, TAR_SUFFIXES, ZIP_MAGIC
from edje_index.images.inputs import InputRef, display_path
from edje_index.images.remote.errors import NoRangesError
from edje_index.images.remote.urls import is_remote
from pipelines.sources.base import Source
from pipelines.sources.file_source import FileSource
from pipelines.sources.files import problem_of, read_head
from pipelines.sources.parquet_images import ParquetImagesSource, find_image_column
from pipelines.sources.specs import file_name
from pipelines.sources.webdataset import WebDatasetSource
from pipelines.sources.zip_archive import ZipSource
from storage_formats.errors import UsageError

ARCHIVE_KINDS = ("archive", "webdataset", "zip", "parquet")
PARQUET_SUFFIX = ".parquet"
_ARCHIVES_AT_ONCE = 8


def is_archive_name(name: str) -> bool:
    """Return True if a file of this name is an archive or a Parquet file."""
    return file_name(name).lower().endswith((*ARCHIVE_SUFFIXES, PARQUET_SUFFIX))


def archive_source(path: str, head: bytes, column: str | None = None, *, clips: bool = False) -> Source | None:
    """Return the source for an archive, or for a Parquet file with a column of images; None for other files.

    Args:
        path: path of the file.
        head: the first bytes of the file.
        column: the only column of a Parquet file to consider; None considers all columns.
        clips: True if the video files in an archive are inputs, too.

    Raises:
        UsageError: a Parquet file has several columns of images, and none of them has a usual name.
        OSError, ValueError, pyarrow.ArrowException: a Parquet file cannot be read.
    """
    name = file_name(path).lower()
    if name.endswith(".zip") or (name.endswith(TAR_SUFFIXES) and head.startswith(ZIP_MAGIC)):
        return ZipSource(path, clips=clips)
    if name.endswith(TAR_SUFFIXES):
        return WebDatasetSource(path, compression_of(head), clips=clips)
    if name.endswith(PARQUET_SUFFIX):
        images = find_image_column(path, column)
        return None if images is None else ParquetImagesSource(path, images)
    return None


@dataclass
class ArchiveFile(FileSource):
    """An archive or Parquet file that is opened when it is listed.

    A Parquet file without images is ignored. A file that cannot be opened becomes one input with a problem.
    `iter_inputs` raises UsageError if a server refuses the file or does not have it, because all images in the file
    would be lost.

    Attributes:
        column: the only column of a Parquet file to consider; None considers all columns.
    """

    column: str | None = None
    kind: str = "archive"

    def iter_inputs(self) -> Iterator[InputRef]:
        import pyarrow as pa

        self.ignored.clear()
        try:
            source = archive_source(self.spec, read_head(self.path), self.column, clips=self.clips)
        except NoRangesError as error:
            raise UsageError(f"cannot read {self.spec}: {error.strerror}", parameter="sources") from error
        except (OSError, ValueError, EOFError, pa.ArrowException) as error:
            is_damage = not isinstance(error, OSError) or error.errno is None
            problem = "damaged-archive" if is_damage else problem_of(error)
            if is_remote(self.path) and problem in ("missing", "unreadable"):
                reason = getattr(error, "strerror", None) or error
                raise UsageError(f"cannot read {self.spec}: {reason}; check the URL", parameter="sources") from error
            yield InputRef(display_path(self.path), self.path, problem=problem)
            return
        if source is None:
            self.ignored.count(display_path(os.path.splitext(self.path)[1].lower()))
            return
        yield from source.iter_inputs()
        self.ignored.add(source.ignored)


def compression_of(head: bytes) -> str | None:
    """Return the compression of a tar archive that begins with `head`; None for an uncompressed archive."""
    return next((name for magic, name in COMPRESSIONS.items() if head.startswith(magic)), None)


def scan_ahead(archives: Sequence[Source]) -> Iterator[InputRef]:
    """Yield the inputs of archives in order. Threads list a few archives ahead."""
    if len(archives) == 1:
        yield from archives[0].iter_inputs()
        return
    pending: deque[Future[list[InputRef]]] = deque()
    with ThreadPoolExecutor(_ARCHIVES_AT_ONCE, "edje-scan") as pool:
        try:
            for archive in archives:
                pending.append(pool.submit(list, archive.iter_inputs()))
                if len(pending) >= _ARCHIVES_AT_ONCE:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
