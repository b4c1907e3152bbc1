"""Private files of one attempt, and their way into place (SPEC.md section 11, steps 1 and 2)."""

from __future__ import annotations

import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from storage_formats.atomic import fsync_paths
from storage_formats.format.checksum import crc32c, crc32c_file
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import FileRecord


@dataclass(frozen=True)
class _Staged:
    """A private file, and where it will stand."""

    path: Path
    final: Path
    record: FileRecord


class StagedFiles:
    """The files of an attempt at one shard, in a folder that no other attempt shares."""

    def __init__(self, layout: Layout, shard: int) -> None:
        self._layout = layout
        self._folder = layout.staging / f"{shard:08d}-{uuid.uuid4().hex}"
        self._folder.mkdir(parents=True)
        self._files: list[_Staged] = []

    def path(self, name: str) -> Path:
        """Where to write the private file `name`."""
        return self._folder / name

    def add(self, name: str, final: Path, length: int | None = None, crc: int | None = None) -> None:
        """Take the written file `name`, to stand at `final`; length and CRC-32C are read where they are not given."""
        if length is None or crc is None:
            length, crc = crc32c_file(self.path(name))
        self._files.append(_Staged(self.path(name), final, FileRecord(self._layout.relative(final), length, crc)))

    def add_bytes(self, name: str, final: Path, data: bytes) -> None:
        """Write `data` and take it, to stand at `final`."""
        self.path(name).write_bytes(data)
        self.add(name, final, len(data), crc32c(data))

    def commit(self) -> tuple[FileRecord, ...]:
        """Flush every file, rename it into place, flush the folders; returns what now stands."""
        fsync_paths(file.path for file in self._files)
        for file in self._files:
            file.final.parent.mkdir(parents=True, exist_ok=True)
            file.path.replace(file.final)
        fsync_paths(file.final.parent for file in self._files)
        return tuple(file.record for file in self._files)

    def remove(self) -> None:
        """Remove what was not committed; may be called twice."""
        shutil.rmtree(self._folder, ignore_errors=True)
