"""A source that is a WebDataset shard: a tar archive. An uncompressed archive is read in place.

Consecutive members form a sample if their paths are equal up to the first dot of the file name. The `.json` and `.txt`
members of a sample contain the metadata of its images.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from edje_index.images.archive_damage import ArchiveDamage
from edje_index.images.containers.compressed import DecompressedFile
from edje_index.images.containers.container import Container
from edje_index.images.decode import HEAD_BYTES
from edje_index.images.inputs import InputRef, display_path
from edje_index.images.ranges import ReadAt, open_ranged
from edje_index.images.remote.urls import is_remote
from edje_index.images.tar_members import Kind, TarMember, iter_members
from pipelines.sources.file_source import FileSource
from pipelines.sources.files import problem_of
from pipelines.sources.metadata import MAX_SIDECAR_BYTES, SIDECAR_SUFFIXES, sidecar_values
from pipelines.sources.selection import ignored_as


@dataclass
class WebDatasetSource(FileSource):
    """The images in one tar archive, in the order of the archive, with the metadata of their samples.

    Members that are neither images nor metadata of an image are ignored.

    Links and sparse members become inputs with the problem "unsupported-member". If the archive is damaged, one input
    with the problem "truncated-archive", "damaged-archive" or "too-expensive" replaces all members after the damage.

    Attributes:
        compression: "gzip", "bzip2", "xz" or "zstd"; None if the archive is not compressed.
    """

    compression: str | None = None
    kind: str = "webdataset"

    def iter_inputs(self) -> Iterator[InputRef]:
        self.ignored.clear()
        uri = display_path(self.path)
        try:
            with _opened(self.path, self.compression) as archive:
                yield from self._members(archive, uri)
        except ArchiveDamage as damage:
            yield InputRef(uri, self.path, problem=damage.reason)
        except EOFError:  # a file on a server became shorter
            yield InputRef(uri, self.path, problem="damaged-archive")
        except OSError as error:
            yield InputRef(uri, self.path, problem=problem_of(error))

    def _members(self, archive: _Archive, uri: str) -> Iterator[InputRef]:
        for sample in _samples(archive.read_at):
            cut = [member for member in sample if _ends_after(member, archive.length)]
            yield from self._images(archive, uri, [member for member in sample if member not in cut])
            if cut:
                ref = self._input(archive, uri, cut[0])
                yield InputRef(ref.uri if ref else uri, self.path, problem="truncated-archive")
                return

    def _images(self, archive: _Archive, uri: str, sample: list[TarMember]) -> list[InputRef]:
        """Return the images of a sample with their metadata. Count all other members as ignored."""
        metadata: dict[str, TarMember] = {}
        for member in sample:
            if (suffix := _metadata_suffix(member)) is not None:
                metadata.setdefault(suffix, member)
        others = [member for member in sample if member not in metadata.values()]
        refs = [ref for member in others if (ref := self._input(archive, uri, member)) is not None]
        if not refs or not metadata:
            for member in metadata.values():
                self._input(archive, uri, member)
            return refs
        read = {suffix: functools.partial(_read_member, archive.read_at, member) for suffix, member in metadata.items()}
        values = sidecar_values(read, self.ignored)
        return [dataclasses.replace(ref, metadata=values) for ref in refs]

    def _input(self, archive: _Archive, uri: str, member: TarMember) -> InputRef | None:
        if member.kind == Kind.DIRECTORY:
            return None
        parts = [part for part in member.name.split(b"/") if part not in (b"", b".", b"..")]
        if member.kind == Kind.OTHER or not parts:
            self.ignored.count("(not a file)")
            return None
        name = next((part for part in parts if part.startswith(b".")), parts[-1])
        ignored = ignored_as(
            name, lambda: archive.read_at(min(HEAD_BYTES, member.size), member.offset), clips=self.clips
        )
        if ignored is not None:
            self.ignored.count(ignored)
            return None
        member_uri = f"{uri}!{display_path(member.name)}"
        if member.kind != Kind.REGULAR:
            return InputRef(member_uri, self.path, problem="unsupported-member")
        return InputRef(member_uri, self.path, member.offset, member.size, member=True, container=archive.container)


@dataclass(frozen=True)
class _Archive:
    """An open archive.

    Attributes:
        read_at: function that reads a byte range of the decompressed archive.
        length: number of bytes of the archive; None if it is unknown, because the archive is compressed.
        container: description of a compressed archive; None for an uncompressed archive.
    """

    read_at: ReadAt
    length: int | None
    container: Container | None = None


@contextmanager
def _opened(path: bytes, compression: str | None) -> Iterator[_Archive]:
    if compression is not None or is_remote(path):
        with open_ranged(path) as file:
            if compression is None:
                yield _Archive(file.pread, file.length)
            else:
                decompressed = DecompressedFile(file, compression)
                yield _Archive(decompressed.pread, None, Container(compression, file.length))
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if sys.platform == "linux":  # only headers are read; read-ahead would fetch the whole archive
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        yield _Archive(functools.partial(os.pread, fd), os.fstat(fd).st_size)
    finally:
        os.close(fd)


def _samples(read_at: ReadAt) -> Iterator[list[TarMember]]:
    """Yield the members of each sample. If the archive is damaged, first yield the members before the damage.

    Raises:
        ArchiveDamage: the archive is damaged.
    """
    sample: list[TarMember] = []
    try:
        for member in iter_members(read_at):
            if sample and _sample_key(member) != _sample_key(sample[0]):
                yield sample
                sample = []
            sample.append(member)
    except ArchiveDamage:
        yield sample
        raise
    yield sample


def _sample_key(member: TarMember) -> bytes:
    folder, slash, base = member.name.rpartition(b"/")
    return folder + slash + base.partition(b".")[0]


def _metadata_suffix(member: TarMember) -> str | None:
    """Return ".json" or ".txt" if the member contains the metadata of its sample, otherwise None."""
    stem, dot, suffix = member.name.rpartition(b"/")[2].partition(b".")
    name = os.fsdecode(dot + suffix).lower()
    return name if stem and name in SIDECAR_SUFFIXES and member.kind == Kind.REGULAR else None


def _ends_after(member: TarMember, length: int | None) -> bool:
    return length is not None and member.kind == Kind.REGULAR and member.offset + member.size > length


def _read_member(read_at: ReadAt, member: TarMember) -> bytes:
    if member.size > MAX_SIDECAR_BYTES:
        raise ValueError(f"{member.size} bytes of metadata")
    return read_at(member.size, member.offset)
