"""Copies records, and computes their checksums, at memory addresses, on the calling
thread.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs import Records
from storage_formats.format.checksum import crc32c
from storage_formats.reading.batch import Ints
from storage_formats.reading.memory import ADDRESS_SPACE, offset_of

Checksums: TypeAlias = NDArray[np.uint32]

# A read of at least this number of bytes uses the compiled loops even if Numba must be
# imported first, which takes half a second.
_COMPILED_FROM = 32 << 20
# After this process has copied or checked this number of bytes without Numba, the
# compiled loops are always used. By then, about as much time has been lost as the
# import of Numba takes.
_COMPILED_AFTER = 4 << 30
# size of a line of the processor's cache
_LINE_BYTES = 64
_plain_bytes = 0


def copy_records(
    sources: Ints, records: Records, out_indices: Ints, *, bypasses: bool
) -> None:
    """Copy the record at each address of `sources` [k] to `records` [n, record_bytes],
    at the index in `out_indices` [k].

    Args:
        bypasses: whether the stores bypass the processor's cache if the records are
            aligned to cache lines.
    """
    size = records.shape[1]
    # the compiled loop can only copy whole lines
    if not size % _LINE_BYTES and (loops := _loops(size * len(sources))):
        targets = records.ctypes.data + out_indices * size
        bypasses = bypasses and not (targets % _LINE_BYTES).any()
        loops.copy_records(sources, targets, size, bypasses)
        return
    starts = offset_of(sources).tolist()
    copied = [ADDRESS_SPACE[start : start + size] for start in starts]
    start, stop = out_indices[[0, -1]] + (0, 1)
    # one call for neighbours takes a tenth less time
    if np.array_equal(out_indices, np.arange(start, stop)):
        np.concatenate(copied, out=records[start:stop].reshape(-1))
        return
    for index, record in zip(out_indices.tolist(), copied, strict=True):
        records[index] = record


def checksums_at(sources: Ints, size: int) -> Checksums:
    """Return the CRC-32C of the `size` bytes at each address in `sources` [k],
    uint32 [k].
    """
    checksums = np.empty(len(sources), dtype=np.uint32)
    if loops := _loops(size * len(sources)):
        loops.checksum_records(sources, size, checksums)
        return checksums
    # `crc32c` gets the record as a ctypes array, because creating a NumPy array would
    # take as long as computing the checksum.
    record_type: Any = ctypes.c_char * size
    for index, source in enumerate(sources.tolist()):
        checksums[index] = crc32c(record_type.from_address(source))
    return checksums


def prepare_for(size: int) -> None:
    """Import Numba if records with `size` bytes in total are to be read and this is
    worth the time of the import.
    """
    if size >= _COMPILED_FROM:
        _compiled_loops()


def _loops(size: int) -> Any:
    """Return the module `reading.loops` if Numba is already imported, or if this
    process has processed many bytes without Numba. Otherwise return None. `size` is the
    number of bytes to process.
    """
    global _plain_bytes
    if "numba" in sys.modules or _plain_bytes > _COMPILED_AFTER:
        return _compiled_loops()
    _plain_bytes += size
    return None


@functools.cache
def _compiled_loops() -> Any:
    try:
        from storage_formats.reading import loops
    except ImportError:
        return None
    return loops if loops.has_crc_instruction() else None
