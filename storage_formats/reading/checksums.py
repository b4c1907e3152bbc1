"""The stored records of one precision, and their checksums (SPEC.md section 8)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from storage_formats.codecs import Codec
from storage_formats.errors import CorruptIndexError, cannot_read
from storage_formats.format.checksum import crc32c, read_checksums
from storage_formats.format.committed_files import CommittedFiles
from storage_formats.format.file_check import difference, refuse
from storage_formats.format.layout import checksum_file, token_file
from storage_formats.format.manifest import CommittedIndex
from storage_formats.reading.batch import Batch
from storage_formats.reading.records import Checksums
from storage_formats.threads import run_threads

# maximum size of the checksums in memory: 4 bytes for each of 16 million rows
_KEPT_BYTES = 64 << 20
# number of threads that read checksum files
_THREADS = 16
# maximum number of row ids in an error message
_NAMED_ROWS = 5


class StoredRecords:
    """The stored records of one precision of an index, and their checksums. A checksum
    file is loaded when a read needs it. Thread-safe.

    Attributes:
        record_bytes: length of a record in bytes.
        file: relative path of a token file, with a format field for the shard number.
    """

    def __init__(self, index: CommittedIndex, codec: Codec) -> None:
        self.index = index
        self.codec = codec
        self.record_bytes = codec.record_bytes
        self.file = token_file(codec.name, len(codec.record_shape))
        self._committed = CommittedFiles(index, checksum_file(codec.name))
        self._spec = index.manifest.spec
        self._kept: dict[int, Checksums] = {}

    def location(self, shard: int) -> Path | str:
        """Return the path or the URL of the token file of a shard, for messages."""
        return self.index.place.address(self.index.root / self.file.format(shard))

    def expected(self, batch: Batch) -> Checksums:
        """Return the stored CRC-32C of each record of `batch`, uint32 [n]."""
        shards = [shard for shard, _, _ in batch.shard_spans]
        by_shard = {
            shard: kept
            for shard in shards
            if (kept := self._kept.get(shard)) is not None
        }
        missing = [shard for shard in shards if shard not in by_shard]
        if missing:
            by_shard |= self._load(missing)
            self._kept.update(by_shard)
            limit = max(1, _KEPT_BYTES // (4 * self._spec.shard_size))
            for shard in list(self._kept)[:-limit]:
                self._kept.pop(shard, None)
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
        where = self.location(int(batch.shards[0]))
        return CorruptIndexError(
            f"{subject} damaged: the CRC-32C of the data differs from the stored"
            f" checksum ({where}); restore the damaged files, or build the index again",
            row_ids=tuple(row_ids),
            remedy="verify",
        )

    def close(self) -> None:
        """Free the loaded checksums."""
        self._kept.clear()

    def _load(self, shards: list[int]) -> dict[int, Checksums]:
        entries = self._committed.files(shards)
        self.index.fetch(entries.values())
        layout = self.index.layout
        loaded: dict[int, Checksums] = {}

        def load(shard: int) -> None:
            rows = self._spec.shard_rows(shard)
            path = layout.checksums(self.codec.name, shard)
            try:
                data = read_checksums(layout, self.codec.name, shard, len(rows))
            except OSError as error:
                raise cannot_read(path, error) from error
            refuse(
                path,
                difference(entries[shard], data.nbytes, crc32c(data.tobytes())),
                rows,
            )
            loaded[shard] = data

        run_threads(load, shards, min(_THREADS, len(shards)))
        return loaded
