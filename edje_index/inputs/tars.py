"""Lists and reads the members of tar archives, compressed or not."""

from __future__ import annotations

import bz2
import functools
import gzip
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any, cast

import pyarrow as pa

from edje_index.images.decode import ImageError
from edje_index.inputs.ranges import RangedFile, StreamWindow, Turns

MAX_EXPANSION = 100
FREE_EXPANSION = 256 << 20
"""A compressed tar may expand to at most `FREE_EXPANSION` bytes + `MAX_EXPANSION` times
the number of compressed bytes read so far.
"""

# number of bytes that are decompressed at once
_CHUNK = 1 << 20
# Limit in bytes on the memory to decompress xz. A file of `xz -9` needs 65 MiB, but a
# damaged header can require up to 4 GiB.
_XZ_MEMORY = 256 << 20
# Largest size of a header in bytes. An archive with a longer pax record or name is
# treated as damaged.
_MAX_HEADER = 1 << 20
# The size of a member in bytes must be below this limit, so that its end is a valid
# file offset.
_MAX_SIZE = 1 << 62
_ZEROS = bytes(tarfile.BLOCKSIZE)


@dataclass(frozen=True, slots=True)
class Member:
    """One file in an archive.

    Attributes:
        offset: position of the member. The class of the archive defines what exactly
            this number means.
        size: number of bytes of the content.
        problem: reason why the member cannot be read; None if it can be read.
    """

    name: bytes
    offset: int
    size: int
    problem: str | None = None


def check_bytes(size: int, max_bytes: int) -> None:
    """Raise ImageError if an input of `size` bytes is over the limit."""
    if size > max_bytes:
        raise ImageError(
            "too-many-bytes",
            f"{size} bytes is over the limit of {max_bytes}",
        )


class TarArchive:
    """An open tar, uncompressed or compressed with gzip, bzip2, xz or zstd.
    Thread-safe.

    The offset of a member is the offset of its data in the decompressed archive.

    Attributes:
        is_compressed: True if a member can be read only by reading everything before
            it.
    """

    def __init__(self, file: RangedFile) -> None:
        self._file = file
        magic = file.pread(6, 0)
        decompress = next(
            (each for start, each in _DECOMPRESSORS.items() if magic.startswith(start)),
            None,
        )
        self.is_compressed = decompress is not None
        self._window = (
            None
            if decompress is None
            # Without a reference to this object, see `ParquetImages`.
            else StreamWindow(functools.partial(_chunks, file, decompress))
        )
        self._turns = Turns()

    def members(self) -> Iterator[Member]:
        """Yield all members but directories, in order. Only headers are read.

        Headers are parsed one by one. The iterator of `tarfile.TarFile` is not used,
        because it ends without an error at a damaged header, reads only the first of
        several concatenated archives, and keeps all members in memory.

        Raises:
            ImageError: the archive is damaged. The members before the damage are
                yielded first. The reason is "truncated-archive" if the file ends before
                the end-of-archive marker, and "damaged-archive" if a header is invalid.
        """
        # the end of the last member, where the next header or the end marker begins
        end = 0
        while True:
            file = RangedFile(self._header_bytes, _MAX_SIZE)
            file.seek(end)
            try:
                archive = tarfile.TarFile(
                    fileobj=cast(IO[bytes], file),
                    encoding="utf-8",
                    errors="surrogateescape",
                )
                while True:
                    file.seek(end)
                    info = tarfile.TarInfo.fromtarfile(archive)
                    name = info.name.encode("utf-8", "surrogateescape")
                    if (
                        not 0 <= info.size < _MAX_SIZE
                        or b"\0" in name
                        or archive.offset <= end
                    ):
                        raise ImageError(
                            "damaged-archive",
                            f"the header at byte {end} has an invalid name or size",
                        )
                    is_regular = info.isreg() and not info.issparse()
                    is_regular &= not any(
                        key.startswith("GNU.sparse.") for key in info.pax_headers
                    )
                    if (
                        is_regular
                        and not self.is_compressed
                        and info.offset_data + info.size > self._file.length
                    ):
                        raise ImageError(
                            "truncated-archive",
                            f"the file ends inside the member at byte {end}",
                        )
                    if not info.isdir():
                        yield Member(
                            name,
                            info.offset_data,
                            info.size,
                            None if is_regular else "unsupported-member",
                        )
                    end = archive.offset
            except (
                tarfile.TarError,
                ValueError,
                LookupError,
                ArithmeticError,
                RecursionError,
            ):
                # `tarfile` raises one of these errors at a damaged header, but also at
                # the end marker. The bytes there tell the two apart.
                pass
            marker = self._header_bytes(tarfile.BLOCKSIZE, end)
            if marker != _ZEROS:
                raise ImageError(
                    "damaged-archive", f"the header at byte {end} is invalid"
                )
            # After the end marker and padding of any length, another archive may
            # follow.
            while marker and not marker.strip(b"\0"):
                end += len(marker)
                marker = self.pread(_CHUNK, end)
            if not marker:
                return
            zeros = len(marker) - len(marker.lstrip(b"\0"))
            end += zeros // tarfile.BLOCKSIZE * tarfile.BLOCKSIZE

    def _header_bytes(self, size: int, offset: int) -> bytes:
        """Return bytes of a header. A damaged header can make `tarfile` request a very
        long read.
        """
        if size > _MAX_HEADER:
            raise ImageError(
                "damaged-archive",
                f"the header at byte {offset} has the invalid size {size}",
            )
        data = self.pread(size, offset)
        if len(data) < size:
            raise ImageError(
                "truncated-archive",
                f"the file ends at byte {offset + len(data)} without an end marker",
            )
        return data

    def read(self, offset: int, size: int) -> bytes:
        """Return the data of a member, given its offset and its size. Return fewer
        bytes if the archive ends earlier.
        """
        return self.pread(size, offset)

    head = read
    """Returns the first bytes of a member, at most `size`."""

    def pread(
        self,
        size: int,
        offset: int,
    ) -> bytes:
        """Return the bytes [offset, offset + size) of the decompressed archive, or
        fewer if the archive ends earlier. Raises ImageError if the compressed data are
        damaged.
        """
        if self._window is None:
            return self._file.pread(size, offset)
        with self._turns.at(offset):
            chunks = self._window.read(offset, offset + size)
        return b"".join(
            (chunk.data or b"")[
                max(0, offset - chunk.start) : max(0, offset + size - chunk.start)
            ]
            for chunk in chunks
        )


def _chunks(file: RangedFile, decompress: _Decompress) -> Iterator[tuple[int, bytes]]:
    """Yield (length, content) of the chunks of the decompressed archive. Errors of
    the operating system stay unchanged.
    """
    # The decompressor may close the file object that it reads. Therefore it gets a
    # file object of its own.
    compressed = RangedFile(file.pread, file.length)
    end = 0
    try:
        for chunk in decompress(compressed):
            end += len(chunk)
            if end > FREE_EXPANSION + MAX_EXPANSION * compressed.tell():
                detail = (
                    f"{compressed.tell()} compressed bytes expand to more than"
                    f" {end} bytes"
                )
                raise ImageError("too-expensive", detail)
            yield len(chunk), chunk
    except EOFError as error:
        raise ImageError(
            "truncated-archive",
            f"the compressed data end after {end} bytes of content",
        ) from error
    except (zlib.error, lzma.LZMAError, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = "truncated-archive" if "runcated" in str(error) else "damaged-archive"
        detail = (
            f"the compressed data are damaged after {end} bytes of content: {error}"
        )
        raise ImageError(reason, detail) from error


def _chunks_of(stream: Any) -> Iterator[bytes]:
    return iter(lambda: stream.read(_CHUNK), b"")


def _streams(decompressors: Callable[[], Any], file: RangedFile) -> Iterator[bytes]:
    """Yield the content of consecutive compressed streams in chunks. Unlike
    `lzma.LZMAFile` and `bz2.BZ2File`, this function does not take a damaged stream
    after the first for the end of the file.
    """
    data = file.read(_CHUNK)
    while data:
        decompressor = decompressors()
        while not decompressor.eof:
            if content := decompressor.decompress(data, _CHUNK):
                yield content
            data = b""
            if decompressor.needs_input and not decompressor.eof:
                data = file.read(_CHUNK)
                if not data:
                    raise EOFError("the file ends inside the compressed data")
        # After the end of a stream, zero bytes and further streams may follow.
        data = decompressor.unused_data.lstrip(b"\0")
        while not data and (following := file.read(_CHUNK)):
            data = following.lstrip(b"\0")


_Decompress = Callable[[RangedFile], Iterator[bytes]]
_DECOMPRESSORS: dict[bytes, _Decompress] = {
    b"\x1f\x8b": lambda file: _chunks_of(gzip.GzipFile(fileobj=file)),
    b"BZh": functools.partial(_streams, bz2.BZ2Decompressor),
    b"\xfd7zXZ": functools.partial(
        _streams, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, _XZ_MEMORY)
    ),
    # The standard library has no zstd before Python 3.14.
    b"\x28\xb5\x2f\xfd": lambda file: _chunks_of(
        pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd")
    ),
}
"""First bytes of a compressed file -> function that yields its content."""
