"""Copies records, and computes their checksums, at memory addresses."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from storage_formats.format.checksum import crc32c
from storage_formats.reading.batch import Ints

Checksums: TypeAlias = NDArray[np.uint32]

# The same values as in `reading.loops`. They are not imported from there, because that
# module imports Numba.
NO_COPY, COPY, COPY_NONTEMPORAL = range(3)
# A read of at least this number of bytes uses the compiled loop even if Numba must be
# imported first, which takes half a second.
_COMPILED_FROM = 32 << 20
# After this process has checked this number of bytes without Numba, the compiled loop
# is always used. By then, about as much time has been lost as the import of Numba
# takes.
_COMPILED_AFTER = 4 << 30
# size of a line of the processor's cache
_LINE_BYTES = 64
_plainly_checked_bytes = 0


def copy_records(
    sources: Ints, targets: Ints, size: int, *, bypass: bool, sums: bool
) -> Checksums:
    """Copy the `size` bytes at each address of `sources` [k] to the address in
    `targets` [k], on the calling thread.

    Args:
        bypass: whether the stores bypass the processor's cache if the records are
            aligned to cache lines.
        sums: whether to return the CRC-32C of each record, uint32 [k].
    """
    checksums = np.empty(len(sources) if sums else 0, dtype=np.uint32)
    copies = COPY
    if bypass and not size % _LINE_BYTES and not (targets % _LINE_BYTES).any():
        copies = COPY_NONTEMPORAL
    # the compiled loop can only copy whole lines
    loop = _plain_loop if size % _LINE_BYTES else _loop()
    loop(sources, targets, size, checksums, copies, 0, len(sources))
    return checksums


def checksums_at(sources: Ints, size: int) -> Checksums:
    """Return the CRC-32C of the `size` bytes at each address in `sources` [k],
    uint32 [k], computed on the calling thread.
    """
    checksums = np.empty(len(sources), dtype=np.uint32)
    _loop()(sources, sources, size, checksums, NO_COPY, 0, len(sources))
    return checksums


def prepare_for(size: int) -> None:
    """Import Numba if records with `size` bytes in total are to be read and this is
    worth the time of the import.
    """
    if size >= _COMPILED_FROM:
        _compiled_loop()


def _loop() -> Callable[..., None]:
    """Return `reading.loops.copy_records` if Numba is already imported, or if this
    process has checked many bytes without Numba. Otherwise return `_plain_loop`.
    """
    compiled = "numba" in sys.modules or _plainly_checked_bytes > _COMPILED_AFTER
    return _compiled_loop() if compiled else _plain_loop


@functools.cache
def _compiled_loop() -> Callable[..., None]:
    try:
        from storage_formats.reading import loops
    except ImportError:
        return _plain_loop
    return loops.copy_records if loops.has_crc_instruction() else _plain_loop


def _plain_loop(
    sources: Ints,
    targets: Ints,
    size: int,
    checksums: Checksums,
    copies: int,
    start: int,
    stop: int,
) -> None:
    """Do the work of `reading.loops.copy_records` without Numba."""
    global _plainly_checked_bytes
    # `crc32c` gets the record as a ctypes array, because creating a NumPy array would
    # take as long as computing the checksum.
    record_type: Any = ctypes.c_char * size
    for index in range(start, stop):
        source = int(sources[index])
        if copies != NO_COPY:
            ctypes.memmove(int(targets[index]), source, size)
        if len(checksums):
            checksums[index] = crc32c(record_type.from_address(source))
    _plainly_checked_bytes += (stop - start) * size
