"""A request for records, which an engine reads."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage_formats.reading.batch import Batch, Ints, Part
from storage_formats.reading.checksums import StoredRecords
from storage_formats.reading.records import Checksums, checksums_at, prepare_for
from storage_formats.reading.sinks import Sink
from storage_formats.threads import run_chunks


@dataclass(frozen=True)
class ReadRequest:
    """Records to read, and the sink that receives them after they were compared with
    their checksums.

    An engine reads records into a buffer and passes their addresses to `take`. If
    `sink.records` is not None, the engine may instead read record i of the batch
    directly into `sink.records[batch.out_indices[i]]`.

    Attributes:
        always_checks: whether records of a memory map are compared with their
            checksums although this process has compared them before.
    """

    batch: Batch
    sink: Sink
    stored: StoredRecords
    always_checks: bool = False

    # Loading the checksums may read files. It must not delay the first requests for
    # records, so it happens in the first call of `take`.
    @functools.cached_property
    def _expected(self) -> Checksums:
        return self.stored.expected(self.batch)

    def take(
        self,
        sources: Ints,
        part: Part,
        memory: object,
        *,
        threads: int | None = None,
        is_checked: NDArray[np.bool_] | None = None,
        is_in_place: bool = False,
    ) -> None:
        """Compare the records `batch[part]` with their checksums, and write them to the
        sink.

        Args:
            sources: memory address of each record, int64 [k].
            memory: owner of the memory. The helper threads keep it allocated.
            threads: maximum number of threads, see `run_chunks`.
            is_checked: records that need no comparison, bool [k]. None for no record.
            is_in_place: whether the records were read directly into the sink.

        Raises:
            CorruptIndexError: a record does not match its checksum.
        """
        size = self.stored.record_bytes
        out_indices = self.batch.out_indices[part]
        unchecked = np.arange(len(sources))
        if is_checked is not None:
            unchecked = np.flatnonzero(~is_checked)
        if len(unchecked):
            expected = self._expected[part]
        prepare_for(len(sources) * size)

        def work(start: int, stop: int, _memory: object = memory) -> None:
            first, last = np.searchsorted(unchecked, (start, stop))
            records = unchecked[first:last]
            if len(records):
                actual = checksums_at(sources[records], size)
                if (is_damaged := actual != expected[records]).any():
                    damaged = records[is_damaged]
                    raise self.stored.damaged(self.batch[part][damaged])
            if not is_in_place:
                self.sink.write(sources[start:stop], out_indices[start:stop])

        run_chunks(work, len(sources), self.sink.block_bytes, threads)
