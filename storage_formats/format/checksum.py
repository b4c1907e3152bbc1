"""CRC-32C checksums (Castagnoli, RFC 3720 appendix B.4), computed with
google-crc32c.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from storage_formats.atomic import naming
from storage_formats.errors import CorruptIndexError
from storage_formats.format.index_files import open_regular, read_index_file
from storage_formats.format.layout import Layout

_CHUNK_BYTES = 8 << 20


def crc32c(data: bytes | NDArray[np.uint8], seed: int = 0) -> int:
    """Return the CRC-32C of `data`. To continue a checksum, pass the CRC-32C of the
    preceding bytes as `seed`.
    """
    return int(google_crc32c.extend(seed, data))


def crc32c_rows(records: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Return the CRC-32C of each record, uint32 [k].

    Args:
        records: uint8 [k, record_bytes].
    """
    return np.fromiter(
        (google_crc32c.value(row) for row in records), dtype="<u4", count=len(records)
    )


def crc32c_file(path: Path) -> tuple[int, int]:
    """Return (length in bytes, CRC-32C) of the regular file at `path`."""
    with naming(path), os.fdopen(open_regular(path), "rb", buffering=0) as file:
        return os.fstat(file.fileno()).st_size, crc32c_open(file.fileno())


def crc32c_open(fd: int) -> int:
    """Return the CRC-32C of an open file. The position of `fd` does not change."""
    crc = 0
    offset = 0
    while piece := os.pread(fd, _CHUNK_BYTES, offset):
        crc = crc32c(piece, crc)
        offset += len(piece)
    return crc


def read_checksums(
    layout: Layout, precision: str, shard: int, rows: int
) -> NDArray[np.uint32]:
    """Read the checksum file of a shard and precision. Return the CRC-32C of each
    record, uint32 [rows].

    Raises:
        CorruptIndexError: the file does not have 4 bytes per row.
        OSError: the file cannot be read.
    """
    path = layout.checksums(precision, shard)
    data = read_index_file(layout.root, path, max_bytes=4 * rows)
    if len(data) != 4 * rows:
        raise CorruptIndexError(
            f"the checksum file {path} has {len(data)} bytes instead of {4 * rows}",
            remedy="verify",
        )
    return np.frombuffer(data, dtype="<u4")


def to_hex(crc: int) -> str:
    """Return a checksum as eight lower-case hexadecimal digits, as JSON files of the
    index store it.
    """
    return f"{crc:08x}"


def json_checksum(value: dict[str, Any]) -> str:
    """Return the CRC-32C of all members of the JSON object `value` except `crc32c`, in
    hexadecimal (SPEC.md section 4).
    """
    members = {name: member for name, member in value.items() if name != "crc32c"}
    text = json.dumps(
        members, sort_keys=True, ensure_ascii=False, separators=(",", ":")
    )
    return to_hex(crc32c(text.encode(errors="backslashreplace")))


def with_checksum(value: dict[str, Any]) -> dict[str, Any]:
    """Return `value` with the member `crc32c`, its `json_checksum`."""
    return {**value, "crc32c": json_checksum(value)}
