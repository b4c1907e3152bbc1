"""Comparison of records with the stored checksums (SPEC.md section 8)."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from storage_formats.errors import CorruptIndexError
from storage_formats.format.committed_files import CommittedFiles
from storage_formats.format.file_check import check_content
from storage_formats.format.layout import checksum_file
from storage_formats.reading.batch import Batch
from storage_formats.reading.files import ShardFiles, TokenFiles, read_ranges
from storage_formats.reading.records import Checksums
from storage_formats.threads import fork_safe_lock

# maximum size of the checksums in memory: 4 bytes for each of 16 million rows
_KEPT_BYTES = 64 << 20
# maximum number of checksum files that are open at the same time
_OPEN_FILES = 64
# maximum number of row ids in an error message
_NAMED_ROWS = 5


class BlockChecksums:
    """The stored checksums of one precision. A checksum file is loaded when a read
    needs it. Thread-safe.

    Attributes:
        record_bytes: length of a record in bytes.
    """

    def __init__(self, tokens: TokenFiles) -> None:
        self.record_bytes = tokens.codec.record_bytes
        self._tokens = tokens
        self._index = tokens.index
        name = checksum_file(tokens.codec.name)
        self._committed = CommittedFiles(tokens.index, name)
        self._files = ShardFiles(tokens.index.root, name)
        self._spec = tokens.index.manifest.spec
        self._kept: OrderedDict[int, Checksums] = OrderedDict()
        self._lock = fork_safe_lock()

    def expected(self, batch: Batch) -> Checksums:
        """Return the stored CRC-32C of each record of `batch`, uint32 [n]."""
        shards = [shard for shard, _, _ in batch.shard_spans]
        with self._lock:
            by_shard = {
                shard: self._kept[shard] for shard in shards if shard in self._kept
            }
        missing = [shard for shard in shards if shard not in by_shard]
        if missing:
            by_shard |= self._load(missing)
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

    def close(self) -> None:
        """Free the loaded checksums."""
        with self._lock:
            self._kept.clear()

    def _load(self, shards: list[int]) -> dict[int, Checksums]:
        entries = self._committed.files(shards)
        self._index.fetch(entries.values())
        checksums: dict[int, Checksums] = {}
        for start in range(0, len(shards), _OPEN_FILES):
            files = self._files.acquire(shards[start : start + _OPEN_FILES])
            try:
                requests = []
                for shard, file in files.items():
                    rows = self._spec.shard_rows(shard)
                    if file.size != 4 * len(rows):
                        raise CorruptIndexError(
                            f"the checksum file {file.path} does not have"
                            f" {4 * len(rows)} bytes (4 per row)",
                            row_ids=tuple(rows),
                            remedy="verify",
                        )
                    content = np.empty(file.size, dtype=np.uint8)
                    checksums[shard] = content.view("<u4")
                    requests.append((file, 0, content.data))
                read_ranges(requests)
                for shard, file in files.items():
                    rows = self._spec.shard_rows(shard)
                    content = checksums[shard].view(np.uint8)
                    check_content(file.path, entries[shard], content, row_ids=rows)
            finally:
                self._files.release(files)
                # the contents are in memory, so the files need not stay open
                self._files.close()
        return checksums
