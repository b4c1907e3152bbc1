"""Comparison of records with the stored checksums (SPEC.md section 8)."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from storage_formats.errors import CorruptIndexError, cannot_read
from storage_formats.format.committed_files import CommittedFiles
from storage_formats.format.index_files import open_index_file
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.shard_table import check_content
from storage_formats.reading.batch import Batch, Ints, Part
from storage_formats.system_calls import advise

# the checksums of 16 million rows
_KEPT_BYTES = 64 << 20
# checksum files that are read at the same time
_OPEN_FILES = 64
_NAMED_ROWS = 5

Checksums = NDArray[np.uint32]


@dataclass(frozen=True)
class BlockCheck:
    """Compares computed checksums of n records with the stored checksums.

    Attributes:
        expected: uint32 [n], stored checksum of each record.
        row_ids: int64 [n], row id of each record.
        path: function that takes a row id and returns the path or URL of the token file
            with this row.
    """

    expected: Checksums
    row_ids: Ints
    path: Callable[[int], Path | str]

    def __getitem__(self, part: Part) -> BlockCheck:
        """Return a `BlockCheck` for the records `part`."""
        return BlockCheck(self.expected[part], self.row_ids[part], self.path)

    def compare(self, actual: Checksums, start: int, stop: int) -> None:
        """Compare `actual[start:stop]` with `expected[start:stop]`."""
        computed = actual[start:stop]
        stored = self.expected[start:stop]
        # faster than NumPy's comparison of so few values
        if computed.tobytes() == stored.tobytes():
            return
        row_ids = tuple(self.row_ids[start:stop][computed != stored].tolist())
        named = ", ".join(map(str, row_ids[:_NAMED_ROWS]))
        more = (
            f" and {len(row_ids) - _NAMED_ROWS} more"
            if len(row_ids) > _NAMED_ROWS
            else ""
        )
        subject = (
            f"the block of row {named} is"
            if len(row_ids) == 1
            else f"the blocks of rows {named}{more} are"
        )
        raise CorruptIndexError(
            f"{subject} damaged: the CRC-32C of the data differs from the stored"
            f" checksum ({self.path(row_ids[0])}); run 'edje-index verify' to list the"
            " damaged files. Then restore these files, or build the index again",
            row_ids=row_ids,
        )


class BlockChecksums:
    """The stored checksums of one precision. A checksum file is loaded when a read
    needs it. Thread-safe.

    Args:
        path: function that takes a shard number and returns the path of the checksum
            file.
        token_path: function that takes a shard number and returns the path or URL of
            the token file.
    """

    def __init__(
        self,
        index: CommittedIndex,
        path: Callable[[int], Path],
        token_path: Callable[[int], Path | str],
    ) -> None:
        self._index = index
        self._path = path
        self._committed = CommittedFiles(index, path)
        self.token_path = token_path
        self._spec = index.manifest.spec
        self._kept: OrderedDict[int, Checksums] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, batch: Batch) -> BlockCheck:
        """Return a `BlockCheck` for the records of `batch`."""
        shards = [shard for shard, _, _ in batch.shard_spans]
        with self._lock:
            by_shard = {
                shard: self._kept[shard] for shard in shards if shard in self._kept
            }
        missing = [shard for shard in shards if shard not in by_shard]
        for first in range(0, len(missing), _OPEN_FILES):
            by_shard.update(self._load(missing[first : first + _OPEN_FILES]))
        if missing:
            with self._lock:
                self._kept.update(by_shard)
                while len(self._kept) > max(
                    1, _KEPT_BYTES // (4 * self._spec.shard_size)
                ):
                    self._kept.popitem(last=False)
        parts = [
            by_shard[shard][batch.positions[start:stop]]
            for shard, start, stop in batch.shard_spans
        ]
        return BlockCheck(
            parts[0] if len(parts) == 1 else np.concatenate(parts),
            batch.shards * self._spec.shard_size + batch.positions,
            lambda row_id: self.token_path(row_id // self._spec.shard_size),
        )

    def file_checksums(self, shards: list[int]) -> dict[int, int]:
        """Return the CRC-32C of the checksum file of each of `shards`. It
        identifies all blocks of the shard.
        """
        return {
            shard: entry.crc32c
            for shard, entry in self._committed.files(shards).items()
        }

    def close(self) -> None:
        """Free the loaded checksums."""
        with self._lock:
            self._kept.clear()

    def _load(self, shards: list[int]) -> dict[int, Checksums]:
        entries = self._committed.files(shards)
        checksums = {}
        with contextlib.ExitStack() as opened:
            path = self._path(shards[0])
            try:
                self._index.fetch(entries.values())
                files = {}
                for shard in shards:
                    path = self._path(shard)
                    files[shard] = opened.enter_context(
                        open_index_file(self._index.root, path)
                    )
                    advise(files[shard].fileno())
                for shard, file in files.items():
                    path = self._path(shard)
                    rows = tuple(self._spec.shard_rows(shard))
                    content = file.read(4 * len(rows) + 1)
                    if len(content) != 4 * len(rows):
                        raise CorruptIndexError(
                            f"the checksum file {path} does not have {4 * len(rows)}"
                            " bytes (4 per row); run 'edje-index verify'",
                            row_ids=rows,
                        )
                    check_content(path, entries[shard], content, row_ids=rows)
                    checksums[shard] = np.frombuffer(content, dtype="<u4")
            except OSError as error:
                raise cannot_read(error.filename or path, error) from error
        return checksums
