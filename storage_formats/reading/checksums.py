"""Comparison of records with the stored checksums (SPEC.md section 8)."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from storage_formats.errors import CorruptIndexError, cannot_read
from storage_formats.format.committed_files import CommittedFiles
from storage_formats.format.index_files import open_index_file
from storage_formats.format.shard_table import check_content
from storage_formats.reading.batch import Batch
from storage_formats.reading.files import TokenFiles
from storage_formats.system_calls import advise

# the checksums of 16 million rows
_KEPT_BYTES = 64 << 20
# checksum files that are read at the same time
_OPEN_FILES = 64
_NAMED_ROWS = 5

Checksums = NDArray[np.uint32]


class BlockChecksums:
    """The stored checksums of one precision. A checksum file is loaded when a read
    needs it. Thread-safe.
    """

    def __init__(self, tokens: TokenFiles) -> None:
        self._tokens = tokens
        self._index = tokens.index
        self._committed = CommittedFiles(tokens.index, tokens.checksums)
        self._spec = tokens.index.manifest.spec
        self._kept: OrderedDict[int, Checksums] = OrderedDict()
        self._lock = threading.Lock()

    def expected(self, batch: Batch) -> Checksums:
        """Return the stored CRC-32C of each record of `batch`, uint32 [n]."""
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
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def damaged(self, batch: Batch) -> CorruptIndexError:
        """Return the error for records that do not match their checksums."""
        row_ids = (batch.shards * self._spec.shard_size + batch.positions).tolist()
        named = ", ".join(map(str, row_ids[:_NAMED_ROWS]))
        if len(row_ids) > _NAMED_ROWS:
            named += f" and {len(row_ids) - _NAMED_ROWS} more"
        subject = f"the blocks of rows {named} are"
        if len(row_ids) == 1:
            subject = f"the block of row {named} is"
        where = self._tokens.location(int(batch.shards[0]))
        return CorruptIndexError(
            f"{subject} damaged: the CRC-32C of the data differs from the stored"
            f" checksum ({where}); restore the damaged files, or build the index again",
            row_ids=tuple(row_ids),
            remedy="verify",
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
            path = self._tokens.checksums(shards[0])
            try:
                self._index.fetch(entries.values())
                files = {}
                for shard in shards:
                    path = self._tokens.checksums(shard)
                    files[shard] = opened.enter_context(
                        open_index_file(self._index.root, path)
                    )
                    advise(files[shard].fileno())
                for shard, file in files.items():
                    path = self._tokens.checksums(shard)
                    rows = tuple(self._spec.shard_rows(shard))
                    content = file.read(4 * len(rows) + 1)
                    if len(content) != 4 * len(rows):
                        raise CorruptIndexError(
                            f"the checksum file {path} does not have {4 * len(rows)}"
                            " bytes (4 per row)",
                            row_ids=rows,
                            remedy="verify",
                        )
                    check_content(path, entries[shard], content, row_ids=rows)
                    checksums[shard] = np.frombuffer(content, dtype="<u4")
            except OSError as error:
                raise cannot_read(error.filename or path, error) from error
        return checksums
