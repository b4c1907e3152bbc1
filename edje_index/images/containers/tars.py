"""Lists and reads the members of tar archives, compressed or not."""

from __future__ import annotations

import bz2
import gzip
import lzma
import tarfile
import zlib
from collections.abc import Generator, Iterator
from typing import IO, Protocol, cast

from edje_index.images.containers.members import Member
from edje_index.images.containers.streams import StreamWindow
from edje_index.images.decode import ImageError
from edje_index.images.ranges import RangedFile

MAX_EXPANSION = 100
FREE_EXPANSION = 256 << 20
"""A file may expand to at most `FREE_EXPANSION` bytes + `MAX_EXPANSION` times the compressed bytes read so far."""

_CHUNK = 1 << 20
_XZ_MEMORY = 256 << 20  # xz -9 needs 65 MiB; a damaged header asks for up to 4 GiB
_MAX_HEADER = 1 << 20  # bytes of one header; longer pax records and names are damage
_MAX_SIZE = 1 << 62  # bytes of one member; larger sizes exceed the range of file offsets
_ZEROS = bytes(tarfile.BLOCKSIZE)


class TarArchive:
    """An open tar. Thread-safe. The offset of a member is that of its data in the decompressed archive.

    Args:
        file: the archive. `close` closes this file.
        compression: "gzip", "bzip2", "xz" or "zstd"; None for an uncompressed archive.
    """

    is_stream = True

    def __init__(self, file: RangedFile, compression: str | None = None) -> None:
        self._file = file
        self._compression = compression
        self._window = None if compression is None else StreamWindow([0], self._chunks, lambda chunk: len(chunk or b""))

    def members(self) -> Iterator[Member]:
        """Yield the members except directories, in order. Only headers are read.

        The iterator does not use `tarfile.TarFile`, which ends without an error at a damaged header, reads only the
        first of several concatenated archives, and keeps all members in memory.

        Raises:
            ImageError: the archive is damaged after the last yielded member. The reason is "truncated-archive" if the
                file ends before the end-of-archive marker, and "damaged-archive" if a header is invalid.
            OSError: the file cannot be read.
        """
        start: int | None = 0
        while start is not None:
            end = yield from self._archive_members(start)
            start = self._next_archive(end)

    def read(self, offset: int, size: int, max_bytes: int) -> bytes:
        """Return the data of a member, or fewer bytes if the archive ends earlier.

        Raises:
            ImageError: the archive is damaged, or its content is far larger than the file.
            OSError: the file cannot be read.
        """
        if size > max_bytes:
            raise ImageError(reason="too-many-bytes", detail=f"{size} bytes is over the limit of {max_bytes}")
        return self.pread(size, offset)

    def pread(self, size: int, offset: int) -> bytes:
        """Return the bytes [offset, offset + size) of the decompressed archive. Raises as `read`."""
        if self._window is None:
            return self._file.pread(size, offset)
        chunks = self._window.read(offset, offset + size)
        return b"".join((data or b"")[max(0, offset - at) : max(0, offset + size - at)] for at, data in chunks)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _archive_members(self, start: int) -> Generator[Member, None, int]:
        """Yield the members of the archive that begins at `start`. Return the offset after the last member."""
        file = _HeaderFile(self, start)
        end = start
        try:
            archive = tarfile.TarFile(fileobj=cast(IO[bytes], file), encoding="utf-8", errors="surrogateescape")
            while True:
                file.seek(end)
                info = tarfile.TarInfo.fromtarfile(archive)
                name = info.name.encode("utf-8", "surrogateescape")
                if not 0 <= info.size < _MAX_SIZE or b"\0" in name or archive.offset <= end:
                    raise ImageError("damaged-archive", f"the header at byte {end} has an invalid name or size")
                is_regular = info.isreg() and not info.issparse()
                is_regular &= not any(key.startswith("GNU.sparse.") for key in info.pax_headers)
                if is_regular and self._compression is None and info.offset_data + info.size > self._file.length:
                    raise ImageError("truncated-archive", f"the file ends inside the member at byte {end}")
                if not info.isdir():
                    yield Member(name, info.offset_data, info.size, None if is_regular else "unsupported-member")
                end = archive.offset
        except (tarfile.TarError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            # `tarfile` raises such an error at the end marker too; the caller checks for the marker.
            if file.reached_end:
                raise ImageError("truncated-archive", f"the file ends inside the header at byte {end}") from error
        return end

    def _next_archive(self, end: int) -> int | None:
        """Return the offset of the next concatenated archive; None if there is none."""
        # `tarfile` takes a damaged header for the marker, so this method checks that the bytes at `end` are the marker.
        marker = self.pread(tarfile.BLOCKSIZE, end)
        if len(marker) < tarfile.BLOCKSIZE:
            raise ImageError("truncated-archive", f"the file ends at byte {end + len(marker)} without an end marker")
        if marker != _ZEROS:
            raise ImageError("damaged-archive", f"the header at byte {end} is invalid")
        following = self.pread(tarfile.RECORDSIZE, end + tarfile.BLOCKSIZE)
        zeros = len(following) - len(following.lstrip(b"\0"))
        return None if zeros == len(following) else end + tarfile.BLOCKSIZE * (1 + zeros // tarfile.BLOCKSIZE)

    def _chunks(self, _part: int) -> Iterator[bytes]:
        """Yield the decompressed content. Errors of the operating system stay unchanged."""
        compressed = RangedFile(self._file.pread, self._file.length)  # a stream may close its file
        end = 0
        try:
            stream = _open_stream(compressed, self._compression)
            while chunk := stream.read(_CHUNK):
                end += len(chunk)
                if end > FREE_EXPANSION + MAX_EXPANSION * compressed.tell():
                    detail = f"{compressed.tell()} compressed bytes expand to more than {end} bytes"
                    raise ImageError(reason="too-expensive", detail=detail)
                yield chunk
        except EOFError as error:
            raise ImageError("truncated-archive", f"the compressed data end after {end} bytes of content") from error
        except (zlib.error, lzma.LZMAError, OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            reason = "truncated-archive" if "runcated" in str(error) else "damaged-archive"
            detail = f"the compressed data are damaged after {end} bytes of content: {error}"
            raise ImageError(reason=reason, detail=detail) from error


class _HeaderFile:
    """File object from which `tarfile` reads headers. A damaged header can request a long read: ImageError."""

    name = None
    mode = "rb"

    def __init__(self, archive: TarArchive, position: int) -> None:
        self._archive = archive
        self._position = position
        self.reached_end = False

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> None:
        self._position = position

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _MAX_HEADER:
            raise ImageError("damaged-archive", f"the header at byte {self._position} has the invalid size {size}")
        data = self._archive.pread(size, self._position)
        self.reached_end |= len(data) < size
        self._position += len(data)
        return data


class _Stream(Protocol):
    def read(self, size: int, /) -> bytes: ...


def _open_stream(file: RangedFile, compression: str | None) -> _Stream:
    if compression == "gzip":
        return gzip.GzipFile(fileobj=file)
    if compression == "bzip2":
        return bz2.BZ2File(file)
    if compression == "xz":
        return _XzStream(file)
    import pyarrow as pa  # the Python versions before 3.14 have no zstd of their own

    stream: _Stream = pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd")
    return stream


class _XzStream:
    """Decompresses an xz file with bounded memory, which `lzma.LZMAFile` does not offer."""

    def __init__(self, file: RangedFile) -> None:
        self._file = file
        self._decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, _XZ_MEMORY)

    def read(self, size: int, /) -> bytes:
        while True:
            data = b""
            if self._decompressor.eof:  # zero bytes and further streams may follow
                data = (self._decompressor.unused_data or self._file.read(_CHUNK)).lstrip(b"\0")
                while not data:
                    block = self._file.read(_CHUNK)
                    if not block:
                        return b""
                    data = block.lstrip(b"\0")
                self._decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, _XZ_MEMORY)
            elif self._decompressor.needs_input:
                data = self._file.read(_CHUNK)
                if not data:
                    raise EOFError("the file ends inside the compressed data")
            content = self._decompressor.decompress(data, size)
            if content:
                return content
