"""A source that is a WebDataset shard: an uncompressed tar archive, read in place."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from edje_index.images.headers import HEAD_BYTES
from edje_index.images.inputs import InputRef, display_path
from edje_index.images.tar_members import Kind, TarDamage, TarMember, iter_members
from pipelines.sources.folder import problem_of
from pipelines.sources.selection import Ignored, ignored_as


@dataclass
class WebDatasetSource:
    """The images in one tar archive, in the order of the archive. Other members are ignored.

    Links and sparse members become inputs with the problem "unsupported-member". The members after damage are replaced
    by one input with the problem "truncated-archive" or "damaged-archive".
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
        for member in iter_members(fd):
            ref = self._input(fd, uri, member)
            if member.offset + member.size > file_size and member.kind == Kind.REGULAR:
                yield InputRef(ref.uri if ref else uri, self.path, problem="truncated-archive")
                return
            if ref is not None:
                yield ref

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
