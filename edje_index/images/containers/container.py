"""Describes how zips, compressed tars and Parquet files pack their inputs."""

from __future__ import annotations

import re
from dataclasses import dataclass

COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\xfd7zXZ": "xz", b"BZh": "bzip2", b"\x28\xb5\x2f\xfd": "zstd"}
"""Compressions of tar archives, by the first bytes of the file."""

ZIP, PARQUET = "zip", "parquet"
ZIP_MAGIC, PARQUET_MAGIC = b"PK\x03\x04", b"PAR1"

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tzst")
ARCHIVE_SUFFIXES = (*TAR_SUFFIXES, ".zip")

_MEMBER_MARK = re.compile(f"(?:{'|'.join(map(re.escape, (*ARCHIVE_SUFFIXES, '.parquet')))})(?=!)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Container:
    """How a file packs an input.

    Attributes:
        kind: "gzip", "bzip2", "xz" or "zstd" for a compressed tar, "zip" or "parquet".
        length: number of bytes of the file when the plan was made.
        column: name of the column of a Parquet file that holds the images.
    """

    kind: str
    length: int
    column: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.length} {self.column}"

    @classmethod
    def parse(cls, text: str) -> Container:
        """Convert the text that `str(container)` returned back to the container.

        Raises:
            ValueError: `text` describes no container.
        """
        kind, length, column = text.split(" ", 2)
        return cls(kind, int(length), column)


def split_uri(uri: str) -> tuple[str, str] | None:
    """Split the uri "<archive or Parquet file>!<name>" at the "!". Return None for any other uri."""
    mark = _MEMBER_MARK.search(uri)
    return None if mark is None else (uri[: mark.end()], uri[mark.end() + 1 :])
