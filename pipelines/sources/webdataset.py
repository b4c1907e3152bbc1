"""A source that is a WebDataset shard: an uncompressed tar archive, read in place.

Consecutive members form a sample if their paths are equal up to the first dot of the file name. The `.json` and `.txt`
members of a sample contain the metadata of its images.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from edje_index.images.headers import HEAD_BYTES
from edje_index.images.inputs import InputRef, display_path
from edje_index.images.tar_members import Kind, TarDamage, TarMember, iter_members
from pipelines.sources.folder import problem_of
from pipelines.sources.metadata import MAX_SIDECAR_BYTES, SIDECAR_SUFFIXES, sidecar_values
from pipelines.sources.selection import Ignored, ignored_as


@dataclass
class WebDatasetSource:
    """The images in one tar archive, in the order of the archive, with the metadata of their samples.

    Members that are neither images nor metadata of an image are ignored.

    Links and sparse members become inputs with the problem "unsupported-member". If the archive is damaged, one input
    with the problem "truncated-archive" or "damaged-archive" replaces all members after the damage.
    """

    spec: str
    kind: str = "webdataset"
    path: bytes = field(init=False)
    ignored: Ignored = field(init=False, default_factory=Ignored)

    def __post_init__(self) -> None:
        self.path = os.path.abspath(os.fsencode(self.spec))

    def iter_inputs(self) -> Iterator[InputRef]:
        self.ignored.clear()
        uri = display_path(self.path)
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            yield InputRef(uri, self.path, problem=problem_of(error))
            return
        try:
            if sys.platform == "linux":  # only headers are read; read-ahead would fetch the whole archive
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            yield from self._members(fd, uri)
        except TarDamage as damage:
            yield InputRef(uri, self.path, problem=damage.reason)
        except OSError as error:
            yield InputRef(uri, self.path, problem=problem_of(error))
        finally:
            os.close(fd)

    def _members(self, fd: int, uri: str) -> Iterator[InputRef]:
        file_size = os.fstat(fd).st_size
        for sample in _samples(fd):
            cut = [member for member in sample if _ends_after(member, file_size)]
            yield from self._images(fd, uri, [member for member in sample if member not in cut])
            if cut:
                ref = self._input(fd, uri, cut[0])
                yield InputRef(ref.uri if ref else uri, self.path, problem="truncated-archive")
                return

    def _images(self, fd: int, uri: str, sample: list[TarMember]) -> list[InputRef]:
        """Return the images of a sample with their metadata. Count all other members as ignored."""
        metadata: dict[str, TarMember] = {}
        for member in sample:
            if (suffix := _metadata_suffix(member)) is not None:
                metadata.setdefault(suffix, member)
        others = [member for member in sample if member not in metadata.values()]
        refs = [ref for member in others if (ref := self._input(fd, uri, member)) is not None]
        if not refs or not metadata:
            for member in metadata.values():
                self._input(fd, uri, member)
            return refs
        read = {suffix: functools.partial(_read_member, fd, member) for suffix, member in metadata.items()}
        values = sidecar_values(read, self.ignored)
        return [dataclasses.replace(ref, metadata=values) for ref in refs]

    def _input(self, fd: int, uri: str, member: TarMember) -> InputRef | None:
        if member.kind == Kind.DIRECTORY:
            return None
        parts = [part for part in member.name.split(b"/") if part not in (b"", b".", b"..")]
        if member.kind == Kind.OTHER or not parts:
            self.ignored.count("(not a file)")
            return None
        name = next((part for part in parts if part.startswith(b".")), parts[-1])
        ignored = ignored_as(name, lambda: os.pread(fd, min(HEAD_BYTES, member.size), member.offset))
        if ignored is not None:
            self.ignored.count(ignored)
            return None
        member_uri = f"{uri}!{display_path(member.name)}"
        if member.kind != Kind.REGULAR:
            return InputRef(member_uri, self.path, problem="unsupported-member")
        return InputRef(member_uri, self.path, member.offset, member.size, member=True)


def _samples(fd: int) -> Iterator[list[TarMember]]:
    """Yield the members of each sample. If the archive is damaged, raise TarDamage after the last complete members."""
    sample: list[TarMember] = []
    try:
        for member in iter_members(fd):
            if sample and _sample_key(member) != _sample_key(sample[0]):
                yield sample
                sample = []
            sample.append(member)
    except TarDamage:
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


def _ends_after(member: TarMember, file_size: int) -> bool:
    return member.kind == Kind.REGULAR and member.offset + member.size > file_size


def _read_member(fd: int, member: TarMember) -> bytes:
    if member.size > MAX_SIDECAR_BYTES:
        raise ValueError(f"{member.size} bytes of metadata")
    return os.pread(fd, member.size, member.offset)
