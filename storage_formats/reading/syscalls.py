"""Linux system calls for which Python has no function."""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from pathlib import Path
from typing import Any

from storage_formats.format.layout import PAGE_BYTES

_AT_FDCWD = -100
_STATX_DIOALIGN = 0x2000
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2


def system_call(number: int, *arguments: int) -> int:
    """Make a system call without the GIL, and return the result. Raise OSError if the call fails."""
    result = _syscall()(number, *(ctypes.c_long(argument) for argument in arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(result)


def punch_hole(fd: int, offset: int, length: int) -> bool:
    """Free the disk blocks of a byte range. Reads of the range return zeros. Return False if this is not supported."""
    fallocate = getattr(ctypes.CDLL(None), "fallocate", None)
    if fallocate is None:
        return False
    mode = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE
    return not fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(length))


def sector_bytes(path: Path) -> int:
    """Return the alignment in bytes that direct reads of the file at `path` need."""
    status = ctypes.create_string_buffer(256)
    statx = getattr(ctypes.CDLL(None), "statx", None)  # glibc 2.28
    if statx is None or statx(_AT_FDCWD, os.fsencode(path), 0, _STATX_DIOALIGN, status):
        return PAGE_BYTES
    alignments: tuple[int, int] = struct.unpack_from("=II", status, 0x98)  # of memory, of offsets; 0 if unknown
    return max(alignments) if min(alignments) else PAGE_BYTES


@functools.cache
def _syscall() -> Any:
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    function.argtypes = [ctypes.c_long]
    return function
