"""Decodes image files to upright 8-bit RGB images.

The EXIF orientation of a photo is applied, so that the image is upright. For an
animation or a multi-page file, only the first frame is decoded.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile, PngImagePlugin

from edje_index.images.decode_limits import (
    BYTES_PER_PIXEL,
    CountedReads,
    TooExpensiveError,
    can_allocate,
    check_cost,
)

REASONS = (
    "bad-list-line",
    "changed-since-plan",
    "corrupt",
    "damaged-archive",
    "empty",
    "extreme-aspect-ratio",
    "missing",
    "non-finite-output",
    "out-of-range",
    "not-a-local-path",
    "not-an-image",
    "timed-out",
    "too-expensive",
    "too-many-bytes",
    "too-many-pixels",
    "truncated",
    "truncated-archive",
    "unreachable",
    "unreadable",
    "unsupported-image",
    "unsupported-member",
    "unsupported-video",
    "worker-died",
)
"""All reasons why an input can have no block. Each reason is a value of the column
`reason` in the rows table.
"""

DEFAULT_MAX_PIXELS = 89_478_485
"""Default limit on the number of pixels of an image. Above this number, Pillow warns
that the file may be a decompression bomb.
"""

MAX_ASPECT_RATIO = 256
"""Largest ratio of the longer side of an image to its shorter side. The limit bounds
the longer side of the resized image, whose shorter side gets the length that the vision
tower needs.
"""

TRUNCATED = "truncated"
"""The reason (`ImageError.reason`) for a file that ends before its last pixel."""

HEAD_BYTES = 32
"""Number of bytes from the start of a file that `image_format` needs."""

_FORMATS = (
    "JPEG",
    "PNG",
    "GIF",
    "TIFF",
    "WEBP",
    "AVIF",
    "HEIF",
    "BMP",
    "PPM",
    "JPEG2000",
    "QOI",
)
# Pillow recognises these formats by their first two bytes, with which a text file can
# begin, too. These patterns compare more bytes.
_LONGER_MAGIC = {
    "BMP": re.compile(rb"BM.{13}\0{3}", re.DOTALL),
    "PPM": re.compile(rb"P[1-6f]\s"),
}
# (first bytes of the file, name in the error message) of formats that are recognised
# but not decoded. JPEG XL is not decoded, because its Pillow plugin is under the GPL
# and decodes all pixels before the number of pixels can be checked.
_NOT_DECODED = (
    (b"\xff\x0a", "JPEG XL (convert the photos to PNG with djxl)"),
    (b"\x00\x00\x00\x0cJXL ", "JPEG XL (convert the photos to PNG with djxl)"),
    (b"\x1a\x45\xdf\xa3", "Matroska or WebM (a video needs a build with frames)"),
    (b"8BPS", "Photoshop (export the photos as JPEG or PNG)"),
)
# Limit in bytes on the texts and the colour profile of a PNG. Pillow's own limit of
# 1 MiB would refuse valid images.
_MAX_PNG_TEXT = 1 << 26
# EXIF orientation -> the operation that turns the image upright
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# (pattern in the message of a decoder's exception, reason). If no pattern matches, the
# reason is "corrupt".
_REASONS_OF_MESSAGES = (
    ("decompression bomb", "too-many-pixels"),
    ("truncat|unexpected end|EOF", TRUNCATED),
    ("unknown pixel mode|unsupported", "unsupported-image"),
)
# True if `Image.fromarrow` may be used, which makes an image in memory that belongs to
# Arrow. Pillow 12 crashes when such an image is converted to an Arrow array again.
_SHARES_MEMORY = int(PIL.__version__.partition(".")[0]) >= 13
# signature of an error handler of libtiff: (module, format, pointer to the arguments)
_TiffHandler = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3)

_WITH_ALPHA = frozenset({"RGBA", "LA", "PA", "RGBa", "La"})
_ToBytes = Callable[[NDArray[Any]], NDArray[np.uint8]]
# Smallest divisor when samples are scaled to bytes: 255 divided by a much smaller
# number would overflow float32.
_SMALLEST_SPAN = 1e-30
# number of pixels that are converted at once, to bound memory
_BAND_PIXELS = 1 << 20
# tags of a TIFF
_TIFF_BITS = 258
_TIFF_PHOTOMETRIC = 262
_TIFF_SIGN = 339
_TIFF_COMPRESSION = 259
_TIFF_PLANES = 284


class _ThisThread(threading.local):
    """Settings of the current thread.

    Attributes:
        loads_truncated: True inside `loading_truncated`.
        is_quiet: True while this package decodes an image. Pillow and libtiff then
            report nothing in this thread.
    """

    loads_truncated = False
    is_quiet = False


_this_thread = _ThisThread()


class ImageError(Exception):
    """An input cannot be encoded. A build gives the row of the input the status
    "failed", with `reason` and `detail`.

    Attributes:
        reason: one of `REASONS`.
        detail: what is wrong with this input, for the user.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


def content_hash(data: bytes) -> str:
    """Return the SHA-256 of `data` as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def image_format(head: bytes) -> str | None:
    """Return Pillow's name for the format of an image file, for example "JPEG"; None if
    this package does not decode the format.

    Args:
        head: the first `HEAD_BYTES` bytes of the file.
    """
    prefix = head.ljust(16, b"\0")[:16]
    for name, (_, accepts) in _pillow_formats().items():
        if accepts(prefix) is True and (
            name not in _LONGER_MAGIC or _LONGER_MAGIC[name].match(head)
        ):
            return name
    return None


def undecoded_format(head: bytes) -> str | None:
    """Return the name of a known image format that this package does not decode;
    None if the format is unknown.
    """
    if head[4:8] == b"ftyp":
        brand = head[8:12].decode("latin-1")
        return (
            f"ISO media of brand {brand!r} (HEIC needs the package pi-heif, and a video"
            " a build with frames)"
        )
    return next((name for magic, name in _NOT_DECODED if head.startswith(magic)), None)


def decode_rgb(
    source: bytes | Image.Image, max_pixels: int = DEFAULT_MAX_PIXELS
) -> Image.Image:
    """Decode the first frame of an image file to an upright RGB image. Thread-safe.

    Args:
        source: the bytes of the file, or a PIL image. The current frame of a PIL image
            is converted by the same rules.
        max_pixels: largest number of pixels of a file. The number is checked before
            memory for the pixels is allocated.

    Raises:
        ImageError: the image cannot be decoded, or has too many pixels.
        MemoryError: there is too little memory.
    """
    name = "image"
    if isinstance(source, bytes):
        name = _format_to_decode(source)
    try:
        with _in_this_thread("is_quiet"):
            rgb = None
            if isinstance(source, bytes):
                image: Image.Image = _pillow_formats()[name][0](
                    CountedReads(source), ""
                )
                check_size(image.size, max_pixels)
                check_cost(image, source, max_pixels)
                rgb = _decode_jpeg(image, source)
            else:
                image = source
            if rgb is None:
                _load(image)
                rgb = to_rgb(image)
            turn = None
            # Damaged metadata must not fail the image.
            with contextlib.suppress(Exception):
                # `getexif` reads the orientation from EXIF, or else from XMP.
                turn = _TRANSPOSE.get(image.getexif().get(ExifTags.Base.Orientation, 1))
            return rgb if turn is None else rgb.transpose(turn)
    except (ImageError, MemoryError):
        raise
    except TooExpensiveError as error:
        raise ImageError("too-expensive", str(error)) from error
    except Exception as error:
        # On damaged input, decoders raise exceptions of many types.
        message = f"{error}" or type(error).__name__
        matching = (
            reason
            for pattern, reason in _REASONS_OF_MESSAGES
            if re.search(pattern, message, re.IGNORECASE)
        )
        raise ImageError(next(matching, "corrupt"), f"{name}: {message}") from error


def _load(image: Image.Image) -> None:
    """Decode the pixels with Pillow."""
    tags: Any = getattr(image, "tag_v2", {})
    is_raw = tags.get(_TIFF_COMPRESSION) == 1 and tags.get(_TIFF_PLANES) == 2
    bits = tags.get(_TIFF_BITS, ())
    if is_raw and len(bits) > 1 and max(bits) > 8:
        # This uncompressed TIFF stores each channel as a plane of its own. Pillow would
        # read each byte of a plane as a sample, although a sample has more bits.
        raise ImageError("unsupported-image", "TIFF: planes of more than 8 bits")
    try:
        image.load()
    except Exception as error:
        # If there is too little memory, some decoders report a damaged file. The
        # file may then be good, so MemoryError is raised instead.
        if can_allocate(BYTES_PER_PIXEL * image.width * image.height):
            raise
        detail = (
            f"not enough memory to decode an image of {image.width} x"
            f" {image.height} pixels"
        )
        raise MemoryError(detail) from error


def _decode_jpeg(image: Image.Image, data: bytes) -> Image.Image | None:
    """Decode an opened JPEG file with simplejpeg. The pixels are the same as Pillow's.

    Pillow holds the interpreter lock (GIL) while it decodes. simplejpeg releases the
    lock, so that several threads of a process can decode at the same time.

    Returns:
        The RGB image. None if Pillow must decode the file. This is so for all formats
        but JPEG, for CMYK, and if the version of Pillow is below 13. It is also so for
        a damaged file, because Pillow reports the damage or decodes the readable part.
    """
    import pyarrow as pa
    import simplejpeg

    if image.format not in ("JPEG", "MPO") or image.mode not in ("RGB", "L"):
        return None
    if not _SHARES_MEMORY:
        return None
    # Pillow keeps 4 bytes per pixel of an RGB image. In some files, libjpeg finds
    # another image size than Pillow, so the shape is compared below.
    pixels = np.empty((image.height, image.width, 4), np.uint8)
    try:
        decoded = simplejpeg.decode_jpeg(data, "RGBX", strict=True, buffer=pixels)
    except ValueError:
        return None
    if decoded.shape != pixels.shape:
        return None
    values = pa.FixedSizeListArray.from_arrays(pa.array(pixels.reshape(-1)), 4)
    return Image.fromarrow(values, "RGB", image.size)


def _format_to_decode(data: bytes) -> str:
    """Return Pillow's name of the format of an image file. Raise ImageError if this
    package does not decode the format.
    """
    if not data:
        raise ImageError("empty", "0 bytes")
    name = image_format(data[:HEAD_BYTES])
    if name is None:
        if (unsupported := undecoded_format(data[:HEAD_BYTES])) is not None:
            raise ImageError(
                "unsupported-image",
                f"the image format {unsupported} is not supported",
            )
        raise ImageError(
            "not-an-image",
            f"the first bytes, {data[:8]!r}, match no image format",
        )
    return name


def declared_pixels(data: bytes) -> int:
    """Return the number of pixels that the header of an image file declares; 0 if
    `decode_rgb` cannot read the header.

    No pixels are decoded. Thread-safe.
    """
    try:
        with _in_this_thread("is_quiet"):
            open_image = _pillow_formats()[_format_to_decode(data)][0]
            image = open_image(CountedReads(data), "")
    except Exception:
        # On damaged input, decoders raise exceptions of many types.
        return 0
    return int(image.width * image.height)


def decode_partial(
    data: bytes, max_pixels: int = DEFAULT_MAX_PIXELS
) -> tuple[Image.Image, str | None]:
    """Decode an image file as `decode_rgb` does, but accept a truncated file, too. The
    pixels that are missing in the file are grey or black.

    Returns:
        (image, truncation). `truncation` describes where the file ends, and is None for
        a complete file.

    Raises:
        ImageError, MemoryError: as in `decode_rgb`. The reason is "truncated" only if
            no part of the truncated file can be decoded.
    """
    try:
        return decode_rgb(data, max_pixels), None
    except ImageError as error:
        if error.reason != TRUNCATED:
            raise
        problem = error
    with loading_truncated():
        try:
            return decode_rgb(data, max_pixels), str(problem)
        except ImageError:
            raise problem from None


def check_size(size: tuple[int, int], max_pixels: int) -> None:
    """Raise ImageError if an image of `size` (width, height) has more than `max_pixels`
    pixels, or if the ratio of its sides is above `MAX_ASPECT_RATIO`.
    """
    width, height = size
    if width * height > max_pixels:
        raise ImageError(
            "too-many-pixels",
            f"{width} x {height} is over the limit of {max_pixels} pixels",
        )
    if max(size) > MAX_ASPECT_RATIO * max(1, min(size)):
        raise ImageError(
            "extreme-aspect-ratio",
            f"{width} x {height} is over the limit of {MAX_ASPECT_RATIO} to 1",
        )


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert a decoded image of any Pillow mode to 8-bit RGB.

    - Transparent images are composited over white, as in the training data of the
      towers (img2dataset).
    - ICC profiles are ignored, as in open_clip.
    - 16-bit samples are reduced to their high byte.
    - 32-bit integers and floats are scaled to bytes. `_from_32_bits` has the rules.
    - CMYK values in a JPEG are inverted, because Adobe programs write them inverted.
    """
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        grey = Image.new("L", image.size)
        top = 0
        to_bytes = (
            _from_16_bits(image)
            if image.mode.startswith("I;16")
            else _from_32_bits(image)
        )
        for band in _bands(image):
            grey.paste(Image.fromarray(to_bytes(band)), (0, top))
            top += len(band)
        return grey.convert("RGB")
    tags: Any = getattr(image, "tag_v2", {})
    # Pillow reads signed 8-bit samples (TIFF sample format 2) as unsigned bytes.
    # `value ^ 128` moves their range from -128..127 to 0..255.
    if image.mode == "L" and 2 in tags.get(_TIFF_SIGN, ()):
        image = image.point([value ^ 128 for value in range(256)])
    if image.mode not in _WITH_ALPHA and "transparency" not in image.info:
        return image if image.mode == "RGB" else image.convert("RGB")
    key = image.info.get("transparency")
    # The transparent colour of a 16-bit PNG has 16-bit values, while Pillow has reduced
    # the pixels to their high bytes. The colour must be reduced, too.
    if isinstance(key, tuple) and max(key) > 255:
        image = image.copy()
        image.info["transparency"] = tuple(value >> 8 for value in key)
    # Pillow can convert premultiplied grey (La) to LA, but not to RGBA
    if image.mode == "La":
        image = image.convert("LA")
    if image.mode != "RGBA":
        image = image.convert("RGBA")
    # The (minimum, maximum) of the alpha channel of an opaque image. In a BMP, an alpha
    # channel of zeros also means opaque: Windows writes its screenshots in this way.
    opaque = [(255, 255)] + [(0, 0)] * (image.format == "BMP")
    if image.getchannel("A").getextrema() in opaque:
        return image.convert("RGB")
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image)
    return white


def _bands(image: Image.Image) -> Iterator[NDArray[Any]]:
    """Yield the samples of a grey image in bands of rows, each [rows, width]."""
    tags: Any = getattr(image, "tag_v2", {})
    # Pillow reads unsigned 32-bit samples (TIFF sample format 1) as signed integers.
    is_unsigned = tags.get(_TIFF_BITS) == (32,) and 1 in tags.get(_TIFF_SIGN, (1,))
    rows = max(1, _BAND_PIXELS // image.width)
    for top in range(0, image.height, rows):
        band = np.asarray(
            image.crop((0, top, image.width, min(top + rows, image.height)))
        )
        yield band.view(np.uint32) if is_unsigned else band


def _from_16_bits(image: Image.Image) -> _ToBytes:
    """Return a function that converts samples of 9 to 16 bits to their 8 high bits.
    Transparent pixels become white.
    """
    tags: Any = getattr(image, "tag_v2", {})
    bits = max(tags.get(_TIFF_BITS, (16,)))
    # The photometric interpretation 0 of a TIFF means that the value 0 is white and the
    # largest value is black.
    white_is_zero = tags.get(_TIFF_PHOTOMETRIC) == 0

    def to_bytes(band: NDArray[Any]) -> NDArray[np.uint8]:
        values = band.astype(np.uint16, copy=False)
        if white_is_zero:
            values = np.uint16((1 << bits) - 1) - values
        grey = np.asarray(values >> (bits - 8), dtype=np.uint8)
        if "transparency" in image.info:
            grey[values == image.info["transparency"]] = 255
        return grey

    return to_bytes


def _from_32_bits(image: Image.Image) -> _ToBytes:
    """Return a function that converts the 32-bit samples of `image` to bytes."""
    # Pillow opens 16-bit PGM files with 32-bit integers. If all integers are between 0
    # and 65535, they are therefore taken as 16-bit samples. In other formats than PGM,
    # they are taken as 8-bit samples if none of them is above 255.
    # Floats between 0 and 1 are fractions of white.
    # All other values are scaled linearly: the maximum becomes white, and the minimum
    # becomes black. If the minimum is above 0, the value 0 becomes black instead.
    low = high = 0.0
    for band in _bands(image):
        finite = band[np.isfinite(band)]
        low = min(low, float(finite.min(initial=0)))
        high = max(high, float(finite.max(initial=0)))
    if image.mode == "I" and low >= 0 and high <= 0xFFFF:
        bits = 8 if image.format == "PPM" or high > 0xFF else 0
        return lambda band: np.asarray(band >> bits, dtype=np.uint8)
    if image.mode == "F" and low == 0.0 and high <= 1.0:
        high = 1.0
    share = np.float32(255 / max(high - low, _SMALLEST_SPAN))

    def stretch(band: NDArray[Any]) -> NDArray[np.uint8]:
        finite = np.nan_to_num(
            band.astype(np.float32), nan=low, posinf=high, neginf=low
        )
        scaled = finite * share - np.float32(low) * share
        return np.asarray(np.rint(scaled.clip(0, 255)), dtype=np.uint8)

    return stretch


@contextlib.contextmanager
def loading_truncated() -> Iterator[None]:
    """Make Pillow load truncated files inside the `with` block. The setting applies to
    the current thread only.
    """
    setting: Any = ImageFile.LOAD_TRUNCATED_IMAGES
    if not isinstance(setting, _PerThread):
        setting = _PerThread(setting)
        ImageFile.LOAD_TRUNCATED_IMAGES = setting
    with _in_this_thread("loads_truncated"):
        yield


@contextlib.contextmanager
def _in_this_thread(name: str) -> Iterator[None]:
    """Set the attribute `name` of `_this_thread` inside the `with` block."""
    setattr(_this_thread, name, True)
    try:
        yield
    finally:
        setattr(_this_thread, name, False)


class _PerThread:
    """A value for Pillow's global setting LOAD_TRUNCATED_IMAGES, whose truth value
    depends on the thread.

    The value is true in a thread that is inside `loading_truncated`. In all other
    threads, its truth value is `otherwise`, the value that it replaces in Pillow.
    """

    def __init__(self, otherwise: bool) -> None:
        self._otherwise = otherwise

    def __bool__(self) -> bool:
        return _this_thread.loads_truncated or self._otherwise


class _Warnings:
    """Takes the place of the module `warnings` in the modules of Pillow, and drops
    warnings in a thread that is quiet. A filter would apply to the whole process.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(warnings, name)

    def warn(self, message: Any, category: Any = None, stacklevel: int = 1) -> None:
        if not _this_thread.is_quiet:
            warnings.warn(message, category, stacklevel + 1)


@functools.cache
def _handle_tiff_errors() -> Any:
    """Drop the errors that libtiff writes to stderr, in threads that are quiet. Return
    the handler, which libtiff does not keep alive.
    """
    set_handler = ctypes.CDLL(sys.modules["PIL._imaging"].__file__).TIFFSetErrorHandler
    set_handler.restype = ctypes.c_void_p
    # None if another library has removed the handler
    earlier = set_handler(None)
    pass_on = _TiffHandler(earlier) if earlier else None

    def handle(*error: Any) -> None:
        if pass_on is not None and not _this_thread.is_quiet:
            pass_on(*error)

    handler = _TiffHandler(handle)
    set_handler(handler)
    return handler


@functools.cache
def _pillow_formats() -> dict[str, Any]:
    """Set up Pillow once per process. Return a dictionary from the name of a format to
    (function that opens a file, function that tests its first bytes).
    """
    Image.init()
    # pi-heif, the plugin for HEIC, is optional. Without it, all other formats are read.
    # pi-heif is used instead of pillow-heif: the wheels of pi-heif contain only
    # decoders, which are under the LGPL. Those of pillow-heif also contain an encoder
    # under the GPL.
    with contextlib.suppress(ImportError):
        import pi_heif

        # In a damaged file, reading the depth images can crash the process.
        pi_heif.register_heif_opener(
            thumbnails=False, depth_images=False, aux_images=False, decode_threads=1
        )
    # Other threads may import modules meanwhile; a copy is made in one step.
    for name, module in sys.modules.copy().items():
        if name.startswith("PIL.") and getattr(module, "warnings", None) is warnings:
            vars(module)["warnings"] = _Warnings()
            logging.getLogger(name).addFilter(lambda _: not _this_thread.is_quiet)
    # A Pillow without libtiff has no such function.
    with contextlib.suppress(AttributeError, OSError):
        _handle_tiff_errors()
    PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY = _MAX_PNG_TEXT
    return {name: Image.OPEN[name] for name in _FORMATS if name in Image.OPEN}
