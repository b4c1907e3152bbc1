"""Archives of images (tars and zips) as sources, and the listing of several archives at once."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edje_index.images.containers.container import (
    ARCHIVE_SUFFIXES,
    KINDS,
    PARQUET_SUFFIX,
    TAR,
    Container,
    archive_kind,
)
from edje_index.images.containers.members import Archive, Member
from edje_index.images.decode import HEAD_BYTES, ImageError
from edje_index.images.inputs import InputRef, display_path
from edje_index.images.ranges import open_ranged
from pipelines.sources.base import Source, file_name, ignored_as, lost_file, ordered_map
from pipelines.sources.metadata import MAX_SIDECAR_BYTES, SIDECAR_SUFFIXES, sidecar_values
from pipelines.sources.parquet_images import ParquetImagesSource
from storage_formats.format.source_columns import Value

_ARCHIVES_AT_ONCE = 8


def is_archive_name(name: str) -> bool:
    """Return True if a file of this name is an archive or a Parquet file."""
    return file_name(name).lower().endswith((*ARCHIVE_SUFFIXES, PARQUET_SUFFIX))


def archive_source(spec: str, column: str | None = None, *, clips: bool = False) -> Source:
    """Return the source for an archive or a Parquet file of images. The file is opened when it is listed.

    Args:
        spec: path or URL of a file for which `is_archive_name` is true.
        column: the column of a Parquet file that holds the images; None looks for it.
        clips: True if the video files in an archive are inputs, too.
    """
    if file_name(spec).lower().endswith(PARQUET_SUFFIX):
        return ParquetImagesSource(spec, column, clips=clips)
    return ArchiveSource(spec, clips=clips)


@dataclass
class ArchiveSource(Source):
    """The images in one archive, in the order of the archive, with the metadata beside them.

    In a tar, consecutive members form a sample if their paths are equal up to the first dot of the file name
    (WebDataset). The `.json` and `.txt` members of a sample contain the metadata of its images. In a zip, NAME.json and
    NAME.txt contain the metadata of NAME.jpg. Other members that are not images are ignored.

    Members that cannot be read, for example links, become inputs with a problem such as "unsupported-member". If the
    archive is damaged, one input with the problem "truncated-archive", "damaged-archive" or "too-expensive" replaces
    all members after the damage.
    """

    kind = "archive"

    def _iter_inputs(self) -> Iterator[InputRef]:
        name = file_name(self.spec).lower()
        try:
            with open_ranged(self.path, only_headers=name.endswith((".tar", ".zip"))) as file:
                kind = archive_kind(name, file.pread(HEAD_BYTES, 0)) or TAR
                container = None if kind == TAR else Container(kind, file.length)
                archive = KINDS[kind].open(file)
                for sample in _samples(archive):
                    yield from self._inputs(archive, container, sample)
        except (ImageError, OSError, ValueError, EOFError) as error:
            yield lost_file(self, error)

    def _inputs(self, archive: Archive, container: Container | None, sample: list[Member]) -> Iterator[InputRef]:
        """Yield the images of a sample with their metadata. Count all other members as ignored."""
        sidecars: dict[bytes, dict[str, Member]] = {}
        inputs: list[tuple[bytes, Member]] = []
        for member in sample:
            stem, suffix = _split(member, archive)
            is_sidecar = stem and suffix in SIDECAR_SUFFIXES and member.problem is None
            if is_sidecar and suffix not in sidecars.get(stem, {}):
                sidecars.setdefault(stem, {})[suffix] = member
            elif self._is_input(archive, member):
                inputs.append((stem, member))
        for stem in sidecars.keys() - {stem for stem, _ in inputs}:
            for member in sidecars.pop(stem).values():
                self._is_input(archive, member)
        metadata: dict[bytes, dict[str, Value] | None] = {}
        for stem, members in sidecars.items():
            read = {suffix: functools.partial(_read_sidecar, archive, member) for suffix, member in members.items()}
            metadata[stem] = sidecar_values(read, self.ignored)
        for stem, member in inputs:
            ref = InputRef(
                f"{display_path(self.path)}!{display_path(member.name)}",
                self.path,
                member.offset,
                member.size,
                member=True,
                problem=member.problem,
                metadata=metadata.get(stem),
            )
            yield ref if member.problem else dataclasses.replace(ref, container=container)

    def _is_input(self, archive: Archive, member: Member) -> bool:
        """Return True if a member is an input. Otherwise count it as ignored."""
        parts = [part for part in member.name.split(b"/") if part not in (b"", b".", b"..")]
        if not parts:
            self.ignored.count("(not a file)")
            return False
        # macOS puts the attributes of files into a directory of its own
        name = next((part for part in parts if part.startswith(b".") or part == b"__MACOSX"), parts[-1])
        name = b"." if name == b"__MACOSX" else name
        key = ignored_as(name, functools.partial(_read_head, archive, member), clips=self.clips)
        if key is not None:
            self.ignored.count(key)
        return key is None


def _samples(archive: Archive) -> Iterator[list[Member]]:
    """Yield the members of each sample. If the archive is damaged, first yield the members before the damage.

    Raises:
        ImageError: the archive is damaged.
    """
    if not archive.is_stream:
        yield list(archive.members())
        return
    sample: list[Member] = []
    try:
        for member in archive.members():
            if sample and _split(member, archive)[0] != _split(sample[0], archive)[0]:
                yield sample
                sample = []
            sample.append(member)
    except ImageError:
        yield sample
        raise
    yield sample


def _split(member: Member, archive: Archive) -> tuple[bytes, str]:
    """Return the path that an image has in common with its metadata, and the suffix in lower case."""
    folder, slash, base = member.name.rpartition(b"/")
    stem, suffix = os.path.splitext(base)
    if archive.is_stream:
        stem, dot, suffix = base.partition(b".")
        suffix = dot + suffix
    return folder + slash + stem if stem else b"", os.fsdecode(suffix).lower()


def _read_head(archive: Archive, member: Member) -> bytes:
    """Return the first bytes of a member; empty if the member cannot be read or has more than a megabyte."""
    try:
        return archive.read(member.offset, min(HEAD_BYTES, member.size), MAX_SIDECAR_BYTES)[:HEAD_BYTES]
    except ImageError:
        return b""


def _read_sidecar(archive: Archive, member: Member) -> bytes:
    try:
        return archive.read(member.offset, member.size, MAX_SIDECAR_BYTES)
    except ImageError as error:
        raise ValueError(error.detail) from error


def scan_ahead(archives: Sequence[Source]) -> Iterator[InputRef]:
    """Yield the inputs of archives in order. Threads list a few archives ahead."""
    if len(archives) == 1:
        yield from archives[0].iter_inputs()
        return
    listed = ordered_map(lambda archive: list(archive.iter_inputs()), archives, _ARCHIVES_AT_ONCE, _ARCHIVES_AT_ONCE)
    for refs in listed:
        yield from refs
