"""The array of the caller, which receives checked records, either unchanged or decoded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs import Codec, Records
from storage_formats.codecs.bf16 import BF16Codec
from storage_formats.reading.batch import Batch, Ints, Part
from storage_formats.reading.checksums import BlockCheck
from storage_formats.reading.memory import Bytes, copy_checked, memory_check
from storage_formats.threads import run_chunks


class Destination:
    """Receives the records of a batch, compares their checksums, and decodes them.

    An engine reads records into memory of its own and passes the memory to `take`. If `records` is not None, it may
    read them into `records` instead, record i of the batch into `records[batch.out_indices[i]]`, and then call `check`.

    Args:
        batch: the records to read.
        out: array for the blocks, bfloat16 [k, m, d], or for the records, uint8 [k, record_bytes].
        codec: codec of the records.
        find_check: function that returns the stored checksums of a batch. It may read files, so it is called after the
            first records have arrived.
    """

    def __init__(
        self, batch: Batch, out: NDArray[Any], codec: Codec, find_check: Callable[[Batch], BlockCheck]
    ) -> None:
        self.batch = batch
        self.records: Records | None = None
        if out.dtype == np.uint8 or codec.name == BF16Codec.name:
            self.records = out.view(np.uint8).reshape(len(out), codec.record_bytes)
        self._out = out
        self._codec = codec
        self._find_check = find_check

    @functools.cached_property
    def _check(self) -> BlockCheck:
        return self._find_check(self.batch)

    def take(self, memory: Bytes, offsets: Ints, part: Part, threads: int | None = None) -> None:
        """Check and write the records `batch[part]`. The k records start at the byte offsets `offsets` [k] of `memory`.

        Raises:
            CorruptIndexError: a checksum differs from the stored checksum.
        """
        check, size = self._check[part], self._codec.record_bytes
        if self.records is None:
            in_memory = memory_check(memory.ctypes.data + offsets, size, check)
            self._codec.scatter(memory, offsets, self._out, self.batch.out_indices[part], threads, in_memory)
        else:
            copy_checked(memory.ctypes.data + offsets, self._addresses(part), size, check, threads, (memory, self))

    def check(self, part: Part, threads: int | None = None) -> None:
        """Check the records `batch[part]`, which the engine has read into `records`. Raises the errors of `take`."""
        addresses, size = self._addresses(part), self._codec.record_bytes
        run_chunks(memory_check(addresses, size, self._check[part]), len(addresses), size, threads)

    def _addresses(self, part: Part) -> Ints:
        assert self.records is not None
        addresses: Ints = self.records.ctypes.data + self.batch.out_indices[part] * self._codec.record_bytes
        return addresses
