"""Sources that are archives, and the files that a directory packs images in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edje_index.images.decode import HEAD_BYTES, ImageError
from edje_index.inputs.containers import (
    ARCHIVES,
    PARQUET,
    Archive,
    Container,
    container_kind,
    members_with_sidecars,
)
from edje_index.inputs.ranges import open_ranged
from edje_index.inputs.refs import InputRef, display_path
from edje_index.inputs.tars import Member
from pipelines.sources.base import Source, file_name, ignored_as, lost_file
from pipelines.sources.table import TableSource
from storage_formats.threads import ordered_map

_FILES_AT_ONCE = 8


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

    `column` is the name of the column with the images, if the file is a Parquet file
    that has it. None selects the column by its content.
    """
    if container_kind(file_name(spec)) == PARQUET:
        return TableSource(spec, column, images_only=True, clips=clips)
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
