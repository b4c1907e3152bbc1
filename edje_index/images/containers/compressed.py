"""Reads byte ranges of the decompressed content of a file. Ascending ranges are read fast."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from edje_index.images.archive_damage import ArchiveDamage
from edje_index.images.containers.turns import Turns
from edje_index.images.ranges import RangedFile

KEPT_BYTES = 16 << 20
"""Decompressed bytes that stay in memory after reading, because threads read ranges slightly out of order."""

MAX_EXPANSION = 100
FREE_EXPANSION = 256 << 20
"""A file may expand to at most `FREE_EXPANSION` bytes + `MAX_EXPANSION` times the compressed bytes read so far."""

_CHUNK = 1 << 20
_XZ_MEMORY = 256 << 20  # xz -9 needs 65 MiB; a damaged header asks for up to 4 GiB


class _Stream(Protocol):
    def read(self, size: int, /) -> bytes: ...


class DecompressedFile:
    """The decompressed content of a file. Thread-safe.

    Threads that wait read in the order of their offsets. Reading backwards by more than `KEPT_BYTES`, and reading after
    an error of the operating system, start again at the beginning of the file.

    Args:
        file: the compressed file. `close` closes this file.
        kind: "gzip", "bzip2", "xz" or "zstd".
    """

    def __init__(self, file: RangedFile, kind: str) -> None:
        self._file = file
        self._kind = kind
        self._turns = Turns()
        self._restart()

    def pread(self, size: int, offset: int) -> bytes:
        """Return the bytes [offset, offset + size) of the content, or fewer if the content ends earlier.

        Raises:
            ArchiveDamage: the file is damaged or truncated, or its content is far larger than the file.
            OSError: the file cannot be read.
        """
        with self._turns.at(offset):
            if offset < self._start or self._is_broken:
                self._restart()
            while self._end < offset + size and not self._ended:
                self._read_next(offset)
            return b"".join(self._parts(size, offset))

    def close(self) -> None:
        """Close the compressed file."""
        self._file.close()

    def _restart(self) -> None:
        self._is_broken = False
        self._compressed = RangedFile(self._file.pread, self._file.length)  # a stream may close its file
        self._chunks: deque[bytes] = deque()
        self._start = self._end = 0
        self._ended = False
        self._damage: ArchiveDamage | None = None
        with _named_damage(0):
            self._stream = _open_stream(self._compressed, self._kind)

    def _read_next(self, needed_from: int) -> None:
        """Read the next chunk. After ArchiveDamage, every later call raises the same error."""
        if self._damage is not None:
            raise self._damage
        try:
            self._read_chunk(needed_from)
        except ArchiveDamage as damage:
            self._damage = damage
            raise
        except BaseException:  # the decompressor may have lost bytes
            self._is_broken = True
            raise

    def _read_chunk(self, needed_from: int) -> None:
        """Read the next chunk. Drop the oldest chunks before `needed_from`, but keep the last `KEPT_BYTES` bytes."""
        with _named_damage(self._end):
            chunk = self._stream.read(_CHUNK)
        self._ended = not chunk
        self._chunks.append(chunk)
        self._end += len(chunk)
        if self._end > FREE_EXPANSION + MAX_EXPANSION * self._compressed.tell():
            raise ArchiveDamage(
                reason="too-expensive",
                detail=f"{self._compressed.tell()} compressed bytes expand to more than {self._end} bytes",
            )
        while self._end - self._start > KEPT_BYTES and self._start + len(self._chunks[0]) <= needed_from:
            self._start += len(self._chunks.popleft())

    def _parts(self, size: int, offset: int) -> Iterator[bytes]:
        start = self._start
        for chunk in self._chunks:
            yield chunk[max(0, offset - start) : max(0, offset + size - start)]
            start += len(chunk)


def _open_stream(file: RangedFile, kind: str) -> _Stream:
    if kind == "gzip":
        return gzip.GzipFile(fileobj=file)
    if kind == "bzip2":
        return bz2.BZ2File(file)
    if kind == "xz":
        return _XzStream(file)
    import pyarrow as pa  # the Python versions before 3.14 have no zstd of their own

    stream: _Stream = pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd")
    return stream


class _XzStream:
    """Decompresses an xz file with bounded memory, which `lzma.LZMAFile` does not offer."""

    def __init__(self, file: RangedFile) -> None:
        self._file = file
        self._decompressor = _xz_decompressor()

    def read(self, size: int, /) -> bytes:
        while True:
            data = b""
            if self._decompressor.eof:
                data = self._next_stream()
                if not data:
                    return b""
                self._decompressor = _xz_decompressor()
            elif self._decompressor.needs_input:
                data = self._file.read(_CHUNK) or b""
                if not data:
                    raise EOFError("the file ends inside the compressed data")
            content = self._decompressor.decompress(data, size)
            if content:
                return content

    def _next_stream(self) -> bytes:
        """Skip zero bytes, and return the first bytes of the next stream. Return b"" at the end of the file."""
        data = self._decompressor.unused_data or self._file.read(_CHUNK)
        while data and not data.lstrip(b"\0"):
            data = self._file.read(_CHUNK)
        return (data or b"").lstrip(b"\0")


def _xz_decompressor() -> lzma.LZMADecompressor:
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, _XZ_MEMORY)


@contextmanager
def _named_damage(position: int) -> Iterator[None]:
    """Turn the errors of all decompressors into ArchiveDamage. Errors of the operating system stay unchanged."""
    try:
        yield
    except EOFError as error:
        raise ArchiveDamage(
            reason="truncated-archive", detail=f"the compressed data end after {position} bytes of content"
        ) from error
    except (zlib.error, lzma.LZMAError, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = "truncated-archive" if "runcated" in str(error) else "damaged-archive"
        raise ArchiveDamage(
            reason=reason, detail=f"the compressed data are damaged after {position} bytes of content: {error}"
        ) from error
