"""A source that is a zip archive."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass

from edje_index.images.archive_damage import ArchiveDamage
from edje_index.images.containers.container import ZIP, Container
from edje_index.images.containers.zips import ZipArchive, ZipMember
from edje_index.images.decode import HEAD_BYTES
from edje_index.images.inputs import InputRef, display_path
from edje_index.images.ranges import open_ranged
from pipelines.sources.file_source import FileSource
from pipelines.sources.files import problem_of
from pipelines.sources.metadata import MAX_SIDECAR_BYTES, SIDECAR_SUFFIXES, sidecar_values
from pipelines.sources.selection import has_input_suffix, ignored_as


@dataclass
class ZipSource(FileSource):
    """The images in one zip archive, in the order of its list of members.

    NAME.json and NAME.txt hold the metadata of NAME.jpg. Other members are ignored. Links, encrypted members and
    members in an unusual compression become inputs with the problem "unsupported-member". A damaged archive becomes one
    input with the problem "damaged-archive".
    """

    kind: str = "zip"

    def iter_inputs(self) -> Iterator[InputRef]:
        self.ignored.clear()
        uri = display_path(self.path)
        try:
            with open_ranged(self.path) as file:
                yield from self._members(ZipArchive(file), uri, Container(ZIP, file.length))
        except ArchiveDamage as damage:
            yield InputRef(uri, self.path, problem=damage.reason)
        except OSError as error:
            yield InputRef(uri, self.path, problem=problem_of(error))

    def _members(self, archive: ZipArchive, uri: str, container: Container) -> Iterator[InputRef]:
        sidecars = _sidecars(archive, self.clips)
        metadata_names = {member.name for members in sidecars.values() for member in members.values()}
        for member in archive.members():
            if member.name in metadata_names or self._is_ignored(archive, member):
                continue
            member_uri = f"{uri}!{_display(member.name)}"
            ref = InputRef(member_uri, self.path, member.offset, member.size, member=True, problem=member.problem)
            if member.problem is None:
                ref = dataclasses.replace(ref, container=container)
            read = {
                suffix: functools.partial(_read_sidecar, archive, sidecar)
                for suffix, sidecar in sidecars.get(os.path.splitext(member.name)[0], {}).items()
            }
            yield dataclasses.replace(ref, metadata=sidecar_values(read, self.ignored)) if read else ref

    def _is_ignored(self, archive: ZipArchive, member: ZipMember) -> bool:
        parts = [part for part in member.name.split("/") if part not in ("", ".", "..")]
        if not parts:
            self.ignored.count("(not a file)")
            return True
        name = next((part for part in parts if part.startswith(".") or part == "__MACOSX"), parts[-1])
        if name == "__MACOSX":  # where macOS puts the attributes of files
            self.ignored.count("(hidden)")
            return True
        key = ignored_as(os.fsencode(_display(name)), lambda: _head(archive, member), clips=self.clips)
        if key is not None:
            self.ignored.count(key)
        return key is not None


def _sidecars(archive: ZipArchive, clips: bool) -> dict[str, dict[str, ZipMember]]:
    """Return the metadata members: for each input name without suffix, the members by suffix (".json", ".txt")."""
    members = list(archive.members())
    inputs = [member for member in members if has_input_suffix(os.fsencode(member.name), clips)]
    stems = {os.path.splitext(member.name)[0] for member in inputs}
    result: dict[str, dict[str, ZipMember]] = {}
    for member in members:
        stem, suffix = os.path.splitext(member.name)
        if suffix in SIDECAR_SUFFIXES and stem in stems:
            result.setdefault(stem, {}).setdefault(suffix, member)
    return result


def _read_sidecar(archive: ZipArchive, member: ZipMember) -> bytes:
    try:
        return archive.read(member.offset, MAX_SIDECAR_BYTES)
    except ArchiveDamage as damage:
        raise ValueError(damage.detail) from damage


def _head(archive: ZipArchive, member: ZipMember) -> bytes:
    """Return the first bytes of a member; empty if the member is damaged."""
    try:
        return archive.read(member.offset, MAX_SIDECAR_BYTES)[:HEAD_BYTES]
    except ArchiveDamage:
        return b""


def _display(name: str) -> str:
    """Return a name as text that UTF-8 can encode."""
    return name.encode("utf-8", "backslashreplace").decode()
