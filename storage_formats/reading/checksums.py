"""Comparison of records with the stored checksums (SPEC.md section 8)."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from storage_formats.errors import CorruptIndexError, cannot_read
from storage_formats.format.committed_files import CommittedFiles
from storage_formats.format.index_files import download_missing, open_index_file
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.shard_table import FileEntry, check_content
from storage_formats.reading.base import Batch, Ints, Part

_KEPT_BYTES = 64 << 20  # the checksums of 16 million rows
_OPEN_FILES = 64  # checksum files that are read at the same time
_NAMED_ROWS = 5

Checksums = NDArray[np.uint32]


@dataclass(frozen=True)
class BlockCheck:
    """Compares computed checksums of n records with the stored checksums.

    Attributes:
        expected: uint32 [n], stored checksum of each record.
        row_ids: function that returns the row id of each record, int64 [n].
        path: function that takes a row id and returns the path or URL of the token file with this row.
    """

    expected: Checksums
    row_ids: Callable[[], Ints]
    path: Callable[[int], Path | str]

    def __getitem__(self, part: Part) -> BlockCheck:
        """Return a `BlockCheck` for the records `part`."""
        return BlockCheck(self.expected[part], lambda: self.row_ids()[part], self.path)

    def compare(self, actual: Checksums, start: int, stop: int) -> None:
        """Compare `actual[start:stop]` with `expected[start:stop]`.

        Raises:
            CorruptIndexError: a computed checksum differs from the stored checksum.
        """
        computed, stored = actual[start:stop], self.expected[start:stop]
        if computed.tobytes() != stored.tobytes():  # faster than NumPy's comparison of so few values
            raise self._damaged(tuple(self.row_ids()[start:stop][computed != stored].tolist()))

    def _damaged(self, row_ids: tuple[int, ...]) -> CorruptIndexError:
        named = ", ".join(map(str, row_ids[:_NAMED_ROWS]))
        more = f" and {len(row_ids) - _NAMED_ROWS} more" if len(row_ids) > _NAMED_ROWS else ""
        subject = f"the block of row {named} is" if len(row_ids) == 1 else f"the blocks of rows {named}{more} are"
        return CorruptIndexError(
            f"{subject} damaged: the CRC-32C of the data differs from the stored checksum ({self.path(row_ids[0])}); "
            "run 'edje-index verify' to list the damaged files. Then restore these files, or build the index again",
            row_ids=row_ids,
        )


class BlockChecksums:
    """The stored checksums of one precision. A checksum file is loaded when a read needs it. Thread-safe.

    Args:
        index: the index.
        path: function that takes a shard number and returns the path of the checksum file.
        token_path: function that takes a shard number and returns the path or URL of the token file.
    """

    def __init__(
        self, index: CommittedIndex, path: Callable[[int], Path], token_path: Callable[[int], Path | str]
    ) -> None:
        self._root = index.root
        self._path = path
        self._committed = CommittedFiles(index, path)
        self._token_path = token_path
        self._shard_rows = index.manifest.spec.shard_rows
        self._shard_size = index.manifest.spec.shard_size
        self._kept: OrderedDict[int, Checksums] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, batch: Batch) -> BlockCheck:
        """Return a `BlockCheck` for the records of `batch`.

        Raises:
            CorruptIndexError: a checksum file is missing or has the wrong length.
        """
        by_shard = self._of_shards([shard for shard, _, _ in batch.shard_spans])
        parts = [by_shard[shard][batch.positions[start:stop]] for shard, start, stop in batch.shard_spans]
        return BlockCheck(
            parts[0] if len(parts) == 1 else np.concatenate(parts),
            lambda: batch.shards * self._shard_size + batch.positions,
            lambda row_id: self._token_path(row_id // self._shard_size),
        )

    def file_checksums(self, shards: list[int]) -> dict[int, int]:
        """Return the CRC-32C of the checksum file of each of `shards`. It identifies all blocks of the shard.

        Raises:
            CorruptIndexError: a shard table cannot be read, or does not list one of `shards`.
        """
        return {shard: entry.crc32c for shard, entry in self._committed.files(shards).items()}

    def close(self) -> None:
        """Free the loaded checksums."""
        with self._lock:
            self._kept.clear()

    def _of_shards(self, shards: list[int]) -> dict[int, Checksums]:
        with self._lock:
            by_shard = {shard: self._kept[shard] for shard in shards if shard in self._kept}
        missing = [shard for shard in shards if shard not in by_shard]
        for first in range(0, len(missing), _OPEN_FILES):
            by_shard.update(self._load(missing[first : first + _OPEN_FILES]))
        if missing:
            self._keep(by_shard)
        return by_shard

    def _keep(self, by_shard: dict[int, Checksums]) -> None:
        with self._lock:
            self._kept.update(by_shard)
            while len(self._kept) > max(1, _KEPT_BYTES // (4 * self._shard_size)):
                self._kept.popitem(last=False)

    def _length(self, shard: int) -> int:
        return 4 * len(self._shard_rows(shard))

    def _load(self, shards: list[int]) -> dict[int, Checksums]:
        entries = self._committed.files(shards)
        with contextlib.ExitStack() as opened:
            try:
                download_missing(self._root, map(self._path, shards))
                files = {
                    shard: opened.enter_context(open_index_file(self._root, self._path(shard))) for shard in shards
                }
                if hasattr(os, "posix_fadvise"):  # not on macOS
                    for file in files.values():
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
                contents = {shard: file.read(self._length(shard) + 1) for shard, file in files.items()}
            except OSError as error:
                advice = "run 'edje-index verify'. To read without checks, open the store with verify_reads=False"
                raise cannot_read(error.filename or "the checksum files", error, advice) from error
        return {shard: self._checked(shard, content, entries[shard]) for shard, content in contents.items()}

    def _checked(self, shard: int, content: bytes, entry: FileEntry) -> Checksums:
        rows, path = tuple(self._shard_rows(shard)), self._path(shard)
        if len(content) != 4 * len(rows):
            raise CorruptIndexError(
                f"the checksum file {path} does not have {4 * len(rows)} bytes (4 per row); run 'edje-index "
                "verify'. To read without checks, open the store with verify_reads=False",
                row_ids=rows,
            )
        check_content(path, entry, content, row_ids=rows)
        return np.frombuffer(content, dtype="<u4")
