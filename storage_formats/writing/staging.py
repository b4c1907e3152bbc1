"""Private files of one attempt to write a shard, and the commit of these files (SPEC.md section 11, steps 1 and 2)."""

from __future__ import annotations

import contextlib
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from storage_formats.atomic import fsync_paths, json_bytes, naming
from storage_formats.format.checksum import crc32c, crc32c_file
from storage_formats.format.layout import Layout
from storage_formats.format.receipts import ShardReceipt
from storage_formats.format.shard_table import FileEntry


@dataclass(frozen=True)
class _StagedFile:
    path: Path
    final: Path
    entry: FileEntry


class StagedFiles:
    """A directory with the private files of one attempt to write a shard.

    The private files of earlier attempts at the shard are removed. An earlier attempt therefore cannot commit any more,
    even if its worker was thought dead and goes on.
    """

    def __init__(self, layout: Layout, shard: int) -> None:
        self._layout = layout
        for earlier in layout.staging.glob(f"{shard:08d}-*"):
            removed = layout.staging / f"removed-{uuid.uuid4().hex}"  # at once, also if the attempt adds a file now
            with contextlib.suppress(FileNotFoundError):
                earlier.replace(removed)
                shutil.rmtree(removed, ignore_errors=True)
        self._folder = layout.staging / f"{shard:08d}-{uuid.uuid4().hex}"
        self._folder.mkdir(parents=True)
        self._files: list[_StagedFile] = []

    def path(self, name: str) -> Path:
        """Return the path of the private file `name`."""
        return self._folder / name

    def add(self, name: str, final: Path, length: int | None = None, crc: int | None = None) -> None:
        """Stage the complete private file `name`, so that `commit` renames the file to `final`.

        A length or CRC-32C of None is computed from the file.
        """
        if length is None or crc is None:
            length, crc = crc32c_file(self.path(name))
        self._files.append(_StagedFile(self.path(name), final, FileEntry(self._layout.relative(final), length, crc)))

    def add_bytes(self, name: str, final: Path, data: bytes) -> None:
        """Write `data` to the private file `name`, and stage the file, see `add`."""
        with naming(self.path(name)):
            self.path(name).write_bytes(data)
        self.add(name, final, len(data), crc32c(data))

    def commit(self) -> tuple[FileEntry, ...]:
        """Flush all staged files and rename each file to its final path. Return the file entries."""
        fsync_paths(file.path for file in self._files)
        for file in self._files:
            file.final.parent.mkdir(parents=True, exist_ok=True)
            file.path.replace(file.final)
        fsync_paths(file.final.parent for file in self._files)
        return tuple(file.entry for file in self._files)

    def commit_receipt(self, receipt: ShardReceipt) -> None:
        """Write the receipt, which commits the shard.

        Raises:
            FileNotFoundError: a later attempt at the shard has begun.
        """
        path, final = self.path("receipt.json"), self._layout.receipt(receipt.shard)
        path.write_bytes(json_bytes(receipt.to_json()))
        fsync_paths([path])
        final.parent.mkdir(parents=True, exist_ok=True)
        path.replace(final)
        fsync_paths([final.parent])

    def remove(self) -> None:
        """Remove the uncommitted files. May be called repeatedly."""
        shutil.rmtree(self._folder, ignore_errors=True)
