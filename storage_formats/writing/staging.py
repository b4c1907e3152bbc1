"""Private files of one attempt to write a shard, and the commit of these files
(SPEC.md section 11, steps 2 to 4).
"""

from __future__ import annotations

import contextlib
import shutil
import uuid
from pathlib import Path

import pyarrow as pa

from storage_formats.atomic import fsync_paths, json_bytes, make_directories, naming
from storage_formats.format.checksum import crc32c, crc32c_file
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.offset import stored_codec
from storage_formats.format.receipts import ShardReceipt
from storage_formats.format.rows import (
    DUPLICATE,
    INDEXED,
    failures_by_reason,
    write_rows,
)
from storage_formats.format.shard_table import FileEntry
from storage_formats.system_calls import promised
from storage_formats.writing.token_shard import TokenShardFile


class StagedFiles:
    """A directory with the private files of one attempt to write a shard.

    The private files of earlier attempts at the shard are removed. An earlier attempt
    therefore cannot commit any more, even if its worker was thought dead and goes on.
    """

    def __init__(self, layout: Layout, shard: int) -> None:
        self._layout = layout
        for earlier in layout.staging.glob(f"{shard:08d}-*"):
            # at once, also if the attempt adds a file now
            removed = layout.staging / f"removed-{uuid.uuid4().hex}"
            with contextlib.suppress(FileNotFoundError):
                earlier.replace(removed)
                shutil.rmtree(removed, ignore_errors=True)
        self._folder = layout.staging / f"{shard:08d}-{uuid.uuid4().hex}"
        self._folder.mkdir(parents=True)
        # private path, final path, entry
        self._files: list[tuple[Path, Path, FileEntry]] = []
        self._shard = shard

    def path(self, name: str) -> Path:
        """Return the path of the private file `name`."""
        return self._folder / name

    def add(
        self, name: str, final: Path, length: int | None = None, crc: int | None = None
    ) -> None:
        """Stage the complete private file `name`, so that `commit` renames the file to
        `final`.

        A length or CRC-32C of None is computed from the file.
        """
        if length is None or crc is None:
            length, crc = crc32c_file(self.path(name))
        self._files.append(
            (
                self.path(name),
                final,
                FileEntry(self._layout.relative(final), length, crc),
            )
        )

    def add_bytes(self, name: str, final: Path, data: bytes) -> None:
        """Write `data` to the private file `name`, and stage the file, see `add`."""
        with naming(self.path(name)):
            self.path(name).write_bytes(data)
        self.add(name, final, len(data), crc32c(data))

    def open_tokens(self, spec: IndexSpec, precision: str) -> TokenShardFile:
        """Create the private token file of the shard for one precision."""
        rows = len(spec.shard_rows(self._shard))
        return TokenShardFile(
            self.path(f"tokens-{precision}"),
            stored_codec(self._layout.root, spec, precision),
            rows,
            spec.shard_size,
        )

    def add_tokens(self, file: TokenShardFile) -> None:
        """Finish a token file, write its checksum file, and stage both files."""
        crc, checksums = file.finish()
        file.close()
        name = file.codec.name
        ndim = len(file.codec.record_shape)
        self.add(
            file.path.name,
            self._layout.token_shard(name, self._shard, ndim),
            file.length,
            crc,
        )
        self.add_bytes(
            f"checksums-{name}",
            self._layout.checksums(name, self._shard),
            checksums.tobytes(),
        )

    def commit(self) -> tuple[FileEntry, ...]:
        """Flush all staged files and rename each file to its final path. Return the
        file entries.
        """
        files = self._files
        self._files = []
        fsync_paths(path for path, _, _ in files)
        for path, final, _ in files:
            make_directories(final.parent)
            with promised("rename", final):
                path.replace(final)
        fsync_paths(final.parent for _, final, _ in files)
        return tuple(entry for _, _, entry in files)

    def commit_rows(
        self,
        rows: pa.Table,
        plan: str,
        seconds: dict[str, float] | None = None,
        encoded_on: str | None = None,
    ) -> ShardReceipt:
        """Write the rows table of the shard, and commit all staged files and the
        receipt. Return the receipt.

        Raises:
            FileNotFoundError: a later attempt at the shard has begun.
        """
        write_rows(self.path("rows"), rows)
        self.add("rows", self._layout.rows_file(self._shard))
        statuses = rows["status"].to_pylist()
        notes = zip(statuses, rows["detail"].to_pylist(), strict=True)
        receipt = ShardReceipt(
            shard=self._shard,
            plan=plan,
            rows=len(rows),
            indexed=statuses.count(INDEXED),
            duplicates=statuses.count(DUPLICATE),
            failed=failures_by_reason(rows),
            files=self.commit(),
            seconds=seconds or {},
            truncated=sum(
                status == INDEXED and detail is not None for status, detail in notes
            ),
            encoded_on=encoded_on,
        )
        self.commit_receipt(receipt)
        return receipt

    def commit_receipt(self, receipt: ShardReceipt) -> None:
        """Write the receipt, which commits the shard.

        Raises:
            FileNotFoundError: a later attempt at the shard has begun.
        """
        final = self._layout.receipt(receipt.shard)
        self.add_bytes("receipt.json", final, json_bytes(receipt.to_json()))
        self.commit()

    def remove(self) -> None:
        """Remove the uncommitted files. May be called repeatedly."""
        shutil.rmtree(self._folder, ignore_errors=True)
