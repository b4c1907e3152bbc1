"""Defines `InputRef`, which locates one input of a build. Reads and decodes inputs.

An input is decoded to frames: an image to one frame, a clip to the number of frames in
the settings.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from PIL.Image import Image

from edje_index.images import clips
from edje_index.images.containers import Container, read_packed
from edje_index.images.decode import (
    DEFAULT_MAX_PIXELS,
    ImageError,
    decode_partial,
    decode_rgb,
)
from edje_index.images.decode_limits import BYTES_PER_PIXEL
from edje_index.images.ranges import open_file, read_range
from edje_index.images.remote import read_remote
from edje_index.images.transient import retry
from edje_index.images.urls import (
    ChangedFileError,
    UnreachableError,
    is_remote,
    scheme_of,
)
from storage_formats.format.object_store import WEB_SCHEMES
from storage_formats.format.source_columns import Value, text_of

MAX_INPUT_BYTES = 1 << 30
"""Largest number of bytes of an input. Larger inputs are rejected, to bound the
memory of a reader.
"""

FAIL = "fail"
LOAD = "load"
"""What to do with a truncated image: report it as failed, or load the readable part."""

Pixels = TypeVar("Pixels")


@dataclass(frozen=True, slots=True)
class InputRef:
    """One input of a build: where its bytes are, and how to read them.

    Attributes:
        uri: readable name in the rows table: an absolute path or URL,
            "<archive>!<member>" or "<Parquet file>!<column>/<row>". Bytes that are not
            UTF-8 are written as %XX.
        path: path or URL of the file that contains the input, as bytes (`os.fsencode`).
            Any file name works.
        container: how the file packs the input; None if the input is the whole file.
        offset: position of the input in its container: for an archive as its class
            says, for a Parquet file the row, counted from 0.
        size: number of bytes of the input when the build was planned; None if unknown.
        content_hash: SHA-256 of the input, 64 hex digits; None if the plan did not hash
            the input.
        duplicate_of: row id of the first input with the same bytes; None if the input
            is not a duplicate.
        problem: reason why the input cannot be encoded, one of
            `edje_index.images.decode.REASONS`. None if planning found no problem.
        metadata: values of the source columns by name; None if the input has no such
            values.
    """

    uri: str
    path: bytes
    container: Container | None = None
    offset: int = 0
    size: int | None = None
    content_hash: str | None = None
    duplicate_of: int | None = None
    problem: str | None = None
    metadata: Mapping[str, Value] | None = field(default=None, hash=False)

    @property
    def uri_raw(self) -> bytes | None:
        """The field `path`, if `path` is not UTF-8; otherwise None."""
        try:
            self.path.decode()
        except UnicodeDecodeError:
            return self.path
        return None


def rows_digest(refs: Iterable[InputRef]) -> str:
    """Return the SHA-256 of everything that determines the rows of `refs` except
    their metadata, in hexadecimal.
    """
    digest = hashlib.sha256()
    for ref in refs:
        where = (
            ref.uri,
            ref.path,
            ref.container and str(ref.container),
            ref.offset,
            ref.size,
        )
        digest.update(
            repr((*where, ref.content_hash, ref.duplicate_of, ref.problem)).encode()
            + b"\n"
        )
    return digest.hexdigest()


def metadata_text(metadata: Mapping[str, Value]) -> str:
    """Return `metadata` as JSON with sorted keys. Timestamps are written in ISO
    8601.
    """
    return json.dumps(
        metadata,
        ensure_ascii=False,
        sort_keys=True,
        separators=(",", ":"),
        default=text_of,
    )


def display_path(path: bytes) -> str:
    """Return `path` as text. Bytes that are not UTF-8 are written as %XX."""
    try:
        return path.decode()
    except UnicodeDecodeError:
        text = path.decode("utf-8", "surrogateescape")
        return "".join(
            f"%{ord(c) - 0xDC00:02X}" if "\udc80" <= c <= "\udcff" else c for c in text
        )


def read_bytes(ref: InputRef) -> bytes:
    """Read all bytes of an input. Temporary storage errors are retried for some
    seconds.

    Raises:
        ImageError: the input cannot be read. The reason is `ref.problem`, if planning
            found a problem. Otherwise it is for example "missing", "empty" or
            "changed-since-plan".
    """
    if ref.problem is not None:
        raise ImageError(reason=ref.problem, detail="found while planning")
    is_url = is_remote(ref.path)

    def read() -> bytes:
        try:
            if ref.container is not None:
                return read_packed(
                    ref.path,
                    ref.container,
                    ref.offset,
                    size=ref.size,
                    max_bytes=MAX_INPUT_BYTES,
                )
            if is_url:
                return read_remote(os.fsdecode(ref.path), MAX_INPUT_BYTES)
            fd, length = open_file(ref.path)
            with open(fd, "rb", buffering=0):
                if length > MAX_INPUT_BYTES:
                    raise OSError(
                        errno.EFBIG,
                        f"{length} bytes is over the limit of {MAX_INPUT_BYTES}",
                    )
                data = read_range(fd, length, 0)
            if len(data) != length:
                raise OSError(
                    errno.EIO,
                    f"a read ended {length - len(data)} bytes before the end of the"
                    " file",
                )
            return data
        except FileNotFoundError as error:
            # the file was there
            if not is_url and (ref.size is not None or ref.container is not None):
                try:
                    with os.scandir(os.path.dirname(ref.path)) as entries:
                        # for example after an unmount
                        is_vanished = next(entries, None) is None
                except OSError as problem:
                    is_vanished = not isinstance(problem, NotADirectoryError)
                if is_vanished:
                    raise OSError(
                        errno.ESTALE, "the directory is gone or empty"
                    ) from error
            raise
        except UnreachableError as error:
            # A list can name many web servers, and some may no longer exist. Other
            # servers are asked again.
            if (
                ref.container is not None
                or scheme_of(os.fsdecode(ref.path)) not in WEB_SCHEMES
            ):
                raise
            raise ImageError(
                reason="unreachable", detail=f"{error.strerror}"
            ) from error

    try:
        data = retry(read, ref.uri, MAX_INPUT_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ImageError(reason="missing", detail=f"{error.strerror}") from error
    except (ChangedFileError, EOFError) as error:
        raise ImageError(reason="changed-since-plan", detail=str(error)) from error
    except (OSError, ValueError) as error:
        # ValueError: a NUL in the path
        reason = (
            "too-many-bytes"
            if isinstance(error, OSError) and error.errno == errno.EFBIG
            else "unreadable"
        )
        raise ImageError(
            reason=reason, detail=getattr(error, "strerror", None) or str(error)
        ) from error
    if ref.size not in (None, len(data)):
        detail = (
            f"the size is {len(data)} bytes, but was {ref.size} when the plan was made"
        )
        raise ImageError(reason="changed-since-plan", detail=detail)
    if not data:
        raise ImageError(reason="empty", detail="0 bytes")
    return data


@dataclass(frozen=True)
class DecodeSettings:
    """Settings of decoding that change its result.

    Attributes:
        max_pixels: limit on the pixels of an image. Larger images fail with the reason
            "too-many-pixels".
        truncated: what to do with a truncated image. `FAIL`: the image fails. `LOAD`:
            the readable part is loaded.
        frames: number of frames per input, to decode images and clips. The frame of an
            image is repeated. None decodes only images, to one frame each, and rejects
            clips.
    """

    max_pixels: int = DEFAULT_MAX_PIXELS
    truncated: str = FAIL
    frames: int | None = None

    def inputs_per_batch(self, batch_size: int) -> int:
        """Return the inputs per forward pass of `batch_size` frames. A longer input
        gets a pass of its own.
        """
        return max(1, batch_size // (self.frames or 1))


def decode_input(
    data: bytes, uri: str, settings: DecodeSettings, convert: Callable[[Image], Pixels]
) -> tuple[tuple[int, int], list[Pixels], str | None]:
    """Decode the bytes of the input `uri`, and apply `convert` to each RGB frame.

    A build and online training share this function, so that they treat bad images
    alike.

    Returns:
        The size (width, height) of the upright image, or of the first frame of a clip;
        the converted frames; and a description of what is missing in a truncated image,
        otherwise None.

    Raises:
        ImageError: the input cannot be decoded or converted.
        TransientInputError: there is too little memory at this moment.
    """
    if settings.frames is not None and clips.is_clip(data):

        def decode_clip() -> list[tuple[tuple[int, int], Pixels]]:
            frames = clips.decode_frames(
                data, settings.frames or 1, settings.max_pixels
            )
            return [(frame.size, convert(frame)) for frame in frames]

        enough_bytes = clips.BYTES_PER_PIXEL * min(
            settings.max_pixels, clips.MAX_FRAME_PIXELS
        )
        sizes, frames = zip(*retry(decode_clip, uri, enough_bytes), strict=True)
        return sizes[0], list(frames), None

    def decode_image() -> tuple[tuple[int, int], list[Pixels], str | None]:
        if settings.truncated == LOAD:
            image, truncation = decode_partial(data, settings.max_pixels)
        else:
            image = decode_rgb(data, settings.max_pixels)
            truncation = None
        return image.size, [convert(image)] * (settings.frames or 1), truncation

    return retry(decode_image, uri, BYTES_PER_PIXEL * settings.max_pixels)
