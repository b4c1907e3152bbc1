"""Detects image formats by their first bytes, and reads canvas sizes from headers.

The functions use no imaging library. They run before Pillow opens a file, so Pillow never opens an unknown format or a
canvas that is too large.
"""

from __future__ import annotations

import struct

from edje_index.images.decode_limits import TooExpensiveError

HEAD_BYTES = 32
"""Number of bytes from the start of a file that `image_format` needs."""

_MAGIC = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"II*\x00", "TIFF"),
    (b"MM\x00*", "TIFF"),
    (b"II+\x00", "TIFF"),
    (b"MM\x00+", "TIFF"),
    (b"\xff\x4f\xff\x51", "JPEG2000"),
    (b"\x00\x00\x00\x0cjP  \r\n\x87\n", "JPEG2000"),
    (b"qoif", "QOI"),
)
_AVIF_BRANDS = (b"avif", b"avis")
_BMP_HEADER_BYTES = frozenset({12, 16, 40, 52, 56, 64, 108, 124})
_NETPBM_KINDS = b"123456f"
_GIF_HEADER_BYTES = 1 << 22  # limit of the blocks before the first frame, which are read byte by byte

_NOT_DECODED = (
    (b"\xff\x0a", "JPEG XL"),
    (b"\x00\x00\x00\x0cJXL \r\n\x87\n", "JPEG XL"),
    (b"8BPS", "Photoshop"),
    (b"\x76\x2f\x31\x01", "OpenEXR"),
    (b"\x00\x00\x01\x00", "icon"),
    (b"%!PS", "PostScript"),
    (b"%PDF", "PDF"),
    (b"<svg", "SVG"),
)


def image_format(head: bytes) -> str | None:
    """Return Pillow's name of an image format; None if this package does not decode the format.

    Args:
        head: the first `HEAD_BYTES` bytes of the file.
    """
    for magic, name in _MAGIC:
        if head.startswith(magic):
            return name
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    if head[4:8] == b"ftyp" and head[8:12] in _AVIF_BRANDS:
        return "AVIF"
    if head[:2] == b"BM" and len(head) >= 18 and struct.unpack_from("<I", head, 14)[0] in _BMP_HEADER_BYTES:
        return "BMP"
    if head[:1] == b"P" and head[1:2] in _NETPBM_KINDS and head[1:2] and head[2:3].isspace():
        return "PPM"
    return None


def undecoded_format(head: bytes) -> str | None:
    """Return the name of a known image format that this package does not decode; None if the format is unknown."""
    if head[4:8] == b"ftyp":
        return f"ISO media of brand {head[8:12].decode('latin-1')!r} (HEIC?)"
    return next((name for magic, name in _NOT_DECODED if head.startswith(magic)), None)


def canvas_size(data: bytes, name: str) -> tuple[int, int] | None:
    """Return the (width, height) of the canvas that Pillow allocates when it opens a file of the format `name`.

    Returns None if Pillow allocates no canvas for the format, or if the header is damaged.

    Raises:
        TooExpensiveError: too many bytes precede the first frame of a GIF.
    """
    try:
        if name == "WEBP":
            return _webp_canvas(data)
        if name == "GIF":
            return _gif_canvas(data[:_GIF_HEADER_BYTES])
    except (struct.error, IndexError):
        if name == "GIF" and len(data) > _GIF_HEADER_BYTES:
            raise TooExpensiveError(f"the GIF has no frame in its first {_GIF_HEADER_BYTES} bytes") from None
        return None
    return None


def _webp_canvas(data: bytes) -> tuple[int, int] | None:
    """Return the canvas size of a WebP file (RFC 9649)."""
    # VP8X stores size - 1 in 24 bits, VP8L stores size - 1 in 14 bits, and VP8 stores the size in 14 bits.
    kind = data[12:16]
    if kind == b"VP8X":
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    return None


def _gif_canvas(data: bytes) -> tuple[int, int]:
    """Return the logical screen size of a GIF, enlarged to contain the first frame (GIF89a sections 18 and 20)."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    offset = 13 + ((2 << (flags & 7)) * 3 if flags & 0x80 else 0)
    while data[offset] != 0x2C:
        offset += 1
        if data[offset - 1] == 0x21:
            offset = _end_of_sub_blocks(data, offset + 1)
    left, top, frame_width, frame_height = struct.unpack_from("<HHHH", data, offset + 1)
    return max(width, left + frame_width), max(height, top + frame_height)


def _end_of_sub_blocks(data: bytes, offset: int) -> int:
    """Return the offset of the first byte after the sub-blocks that start at `offset`."""
    # Each sub-block is a length byte followed by that many bytes. A length of 0 ends the chain.
    while data[offset]:
        offset += 1 + data[offset]
    return offset + 1
