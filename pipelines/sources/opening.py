"""From what the user wrote to sources: the kind of each, and a refusal of what cannot be served."""

from __future__ import annotations

import itertools
import os
import re
import stat
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from edje_index.images.headers import image_format
from edje_index.images.inputs import InputRef
from pipelines.sources.base import Source
from pipelines.sources.braces import expand_braces
from pipelines.sources.folder import FolderSource, ImageFileSource, read_head
from pipelines.sources.path_list import LIST_SUFFIXES, PathListSource
from pipelines.sources.selection import has_image_suffix
from pipelines.sources.webdataset import WebDatasetSource
from storage_formats.errors import UsageError

ACCEPTED = (
    "a folder, an uncompressed .tar (or a pattern of them such as shards-{0000..0127}.tar), "
    f"a list of paths ({', '.join(LIST_SUFFIXES)}), or an image file"
)
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\xfd7zXZ": "xz",
    b"BZh": "bzip2",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
}
_TARS_AT_ONCE = 8
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def open_sources(specs: Iterable[str], column: str | None = None) -> list[Source]:
    """The sources that `specs` name, in order; a brace pattern gives several.

    Args:
        specs: as `ACCEPTED` says.
        column: column of paths in lists.

    Raises:
        UsageError: a source does not exist, is of no known kind, or names what another one names too; or `column` is
            given and no source is a list.
    """
    sources = [open_source(name, column) for spec in specs for name in _expanded(spec)]
    if column is not None and not any(source.kind == "list" for source in sources):
        raise UsageError(f"--column {column} says where a list has its paths, but no source is a list")
    _refuse_overlaps(sources)
    return sources


def iter_all(sources: Sequence[Source]) -> Iterator[InputRef]:
    """All inputs of all sources: their order is that of the rows.

    Of consecutive tars a few are scanned at once, and their members held: where headers come from a disk, nearly
    all of a scan is waiting for them.
    """
    for are_tars, group in itertools.groupby(sources, lambda source: source.kind == "webdataset"):
        if are_tars:
            yield from _scan_ahead(list(group))
        else:
            for source in group:
                yield from source.iter_inputs()


def _scan_ahead(tars: list[Source]) -> Iterator[InputRef]:
    if len(tars) == 1:
        yield from tars[0].iter_inputs()
        return
    pending: deque[Future[list[InputRef]]] = deque()
    with ThreadPoolExecutor(_TARS_AT_ONCE, "edje-scan") as pool:
        try:
            for tar in tars:
                pending.append(pool.submit(list, tar.iter_inputs()))
                if len(pending) >= _TARS_AT_ONCE:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def open_source(spec: str, column: str | None = None) -> Source:
    """The source that `spec`, one folder or file, names. Raises UsageError where it names none."""
    suffix = os.path.splitext(spec)[1].lower()
    if _SCHEME.match(spec):
        raise UsageError(f"{spec} is not on this machine: sources are local paths; mount or copy it")
    if os.path.isdir(spec):
        if not os.access(spec, os.R_OK | os.X_OK):
            raise UsageError(f"source {spec} cannot be read: you have no permission to list it")
        return FolderSource(spec)
    if suffix in LIST_SUFFIXES and os.path.isfile(spec):
        return PathListSource(spec, column)
    head = _head(spec)
    compression = next((name for magic, name in _COMPRESSED.items() if head.startswith(magic)), None)
    if compression:
        raise UsageError(
            f"{spec} is compressed ({compression}), so nothing in it can be read in place; unpack it first"
        )
    if suffix == ".tar":
        return WebDatasetSource(spec)
    if image_format(head) or has_image_suffix(os.fsencode(spec)):
        return ImageFileSource(spec)
    raise UsageError(f"{spec} is no source of images: give {ACCEPTED}")


def _expanded(spec: str) -> list[str]:
    return [spec] if os.path.exists(spec) else expand_braces(spec)


def _head(spec: str) -> bytes:
    try:
        if not stat.S_ISREG(os.stat(spec).st_mode):
            raise UsageError(f"{spec} is neither a folder nor a regular file: give {ACCEPTED}")
        return read_head(os.fsencode(spec))
    except FileNotFoundError as error:
        raise UsageError(f"source {spec} does not exist") from error
    except OSError as error:
        raise UsageError(f"source {spec} cannot be read: {error.strerror}") from error


def _refuse_overlaps(sources: Sequence[Source]) -> None:
    """UsageError where two sources are one and the same, or one lies in a folder that is a source.

    What lists name is not looked at: the same file may be listed any number of times.
    """
    found: dict[bytes, Source] = {}
    for source in sources:
        other = found.setdefault(os.path.realpath(source.path), source)
        if other is not source:
            raise UsageError(f"sources {other.spec} and {source.spec} are the same: give it once")
    for path, source in found.items():
        above = os.path.dirname(path)
        while source.kind in ("folder", "image") and above != path:
            other_folder = found.get(above)
            if other_folder is not None and other_folder.kind == "folder":
                raise UsageError(f"source {source.spec} lies inside source {other_folder.spec}: leave one out")
            path, above = above, os.path.dirname(above)
