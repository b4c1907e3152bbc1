"""Decodes frames of video clips to upright 8-bit RGB images.

The caller gives the number of frames. The clip is divided into this number of parts of
equal duration, and the middle frame of each part is decoded with PyAV. The wheels of
PyAV contain FFmpeg, so no library of the operating system affects the result.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from edje_index.images.decode import DEFAULT_MAX_PIXELS, ImageError, check_size
from edje_index.images.decode_limits import (
    MAX_STREAMS,
    CountedReads,
    TooExpensiveError,
    check_samples,
)
from storage_formats.extras import name_missing_extra

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

MAX_FRAME_PIXELS = 8192 * 4608
"""Largest number of pixels of a frame, which allows 8K video. The limit bounds memory,
because a decoder keeps up to 17 frames in memory.
"""

MAX_CLIP_FRAMES = 1_000_000
"""Largest number of frames of a clip: nine hours at 30 frames per second."""

MAX_CLIP_PIXELS = 1 << 33
"""Largest total number of pixels of the frames that are decoded for a clip. These are
more frames than the yielded ones: to decode one frame, all frames since the last key
frame before it must be decoded, too.
"""

MAX_KEY_FRAME_PIXELS = 1 << 28
"""Largest total number of pixels of the frames that are decoded to get one key frame.
The limit allows several frames, because a decoder can return other frames before the
key frame.
"""

BYTES_PER_PIXEL = 110
"""Bytes of memory per pixel of a frame that are enough to decode any clip."""

CODECS = frozenset({"av1", "ffv1", "h264", "hevc", "mjpeg", "mpeg4", "vp8", "vp9"})
"""Names of the video codecs that are decoded. Other codecs are rejected, because FFmpeg
has hundreds of decoders that few people test.
"""

# names of the FFmpeg demuxers that open the supported containers
_MOV = "mov"
_MATROSKA = "matroska"
_AVI = "avi"
# names of the first box of a QuickTime file that does not begin with `ftyp`
_QUICKTIME_BOXES = (b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")
# brands of the ISO media files that contain images, and no clips
_STILL_BRANDS = (
    b"avif",
    b"avis",
    b"heic",
    b"heix",
    b"heim",
    b"heis",
    b"hevc",
    b"hevx",
    b"mif1",
    b"msf1",
    b"mif2",
)
# FFmpeg's names of the decoders of `CODECS`
_DECODERS = (*sorted(CODECS), "libdav1d", "libvpx", "libvpx-vp9")
# The limit that FFmpeg gets for the pixels of a frame is higher than `max_pixels` by
# this number, because decoders round the sides of a frame up before they check it.
_PADDING_PIXELS = 1 << 20
# Signs of the elements a, b, c and d of the display matrix (ISO/IEC 14496-12) -> the
# operation that turns a frame upright
_TURNS = {
    (-1, 0, 0, 1): Image.Transpose.FLIP_LEFT_RIGHT,
    (-1, 0, 0, -1): Image.Transpose.ROTATE_180,
    (1, 0, 0, -1): Image.Transpose.FLIP_TOP_BOTTOM,
    (0, 1, 1, 0): Image.Transpose.TRANSPOSE,
    (0, -1, 1, 0): Image.Transpose.ROTATE_90,
    (0, -1, -1, 0): Image.Transpose.TRANSVERSE,
    (0, 1, -1, 0): Image.Transpose.ROTATE_270,
}


def clip_format(head: bytes) -> str | None:
    """Return FFmpeg's name of the demuxer for a video file; None if the container is
    not supported.

    FFmpeg gets this name. If FFmpeg had to guess the format, it would also open
    playlists, which name other files.

    Args:
        head: the first 12 bytes of the file, or more.
    """
    if head.startswith(b"\x1a\x45\xdf\xa3"):
        return _MATROSKA
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        return _AVI
    if head[4:8] == b"ftyp":
        return None if head[8:12] in _STILL_BRANDS else _MOV
    return _MOV if head[4:8] in _QUICKTIME_BOXES else None


def is_clip(data: bytes) -> bool:
    """Return True if the file begins like a supported video container."""
    return clip_format(data[:12]) is not None


def key_frame(data: bytes) -> Image.Image:
    """Return the last key frame in the first half of a clip, as an upright RGB image.
    Without such a key frame, return the first frame. Only a few frames are decoded.
    """
    (image,) = decode_frames(data, None, DEFAULT_MAX_PIXELS)
    return image


def decode_frames(
    data: bytes, count: int | None, max_pixels: int
) -> Iterator[Image.Image]:
    """Yield `count` frames of a clip in order, as upright RGB images. Frames of a short
    clip are repeated.

    Args:
        count: number of frames; None yields only the frame that `key_frame` returns.
        max_pixels: largest number of pixels of a frame, checked before memory for the
            pixels is allocated.

    Raises:
        ImageError: the clip cannot be decoded or is too large.
        MemoryError: there is too little memory.
    """
    with name_missing_extra("video"):
        import av
        from av.stream import Disposition
    name = clip_format(data[:12])
    if name is None:
        raise ImageError(
            "unsupported-video",
            f"the first bytes, {data[:12]!r}, match no video format",
        )
    max_pixels = min(max_pixels, MAX_FRAME_PIXELS)
    # `av.open` decodes some frames to probe the file, and gets these options for it.
    # One thread per clip is enough, because several clips are decoded in parallel.
    codec_options = {
        "threads": "1",
        "max_pixels": str(max_pixels + _PADDING_PIXELS),
        "codec_whitelist": ",".join(_DECODERS),
    }
    try:
        if name == _MOV:
            check_samples(data)
        options = {**codec_options, "max_streams": str(MAX_STREAMS)}
        with av.open(
            CountedReads(data), "r", format=name, options=options
        ) as container:
            videos = container.streams.video
            stream = next(
                (
                    each
                    for each in videos
                    if not each.disposition & Disposition.attached_pic
                ),
                None,
            )
            if stream is None:
                raise ImageError("unsupported-video", "the file has no video stream")
            codec = (
                None
                if stream.codec_context is None
                else stream.codec_context.codec.canonical_name
            )
            if codec not in CODECS:
                detail = (
                    f"the video codec {codec} is not supported; the supported codecs"
                    f" are {', '.join(sorted(CODECS))}"
                )
                raise ImageError("unsupported-video", detail)
            context = stream.codec_context
            check_size((context.width, context.height), max_pixels)
            context.options = codec_options
            limit = MAX_KEY_FRAME_PIXELS if count is None else MAX_CLIP_PIXELS
            for frame in _choose(container, stream, count, limit):
                # The size of the frames can change within a stream.
                check_size((frame.width, frame.height), max_pixels)
                image = Image.fromarray(frame.to_ndarray(format="rgb24", threads=1))
                turn = _turn(frame)
                yield image if turn is None else image.transpose(turn)
    except (ImageError, MemoryError, GeneratorExit):
        raise
    except TooExpensiveError as error:
        raise ImageError("too-expensive", str(error)) from error
    except Exception as error:
        # On damaged input, PyAV raises exceptions of many types.
        raise ImageError("corrupt", f"{name}: {error}") from error


def _choose(
    container: InputContainer, stream: VideoStream, count: int | None, max_pixels: int
) -> Iterator[VideoFrame]:
    """Divide a clip into `count` parts of equal duration, and yield the middle frame of
    each part. If `count` is None, yield only the frame that `key_frame` returns.

    Frames that are not needed are skipped by a seek to a later key frame. `max_pixels`
    limits the total number of decoded pixels. All times are in the time base of the
    stream.
    """
    # the presentation times of all frames
    shown: list[int] = []
    # presentation time of a key frame -> the time with which PyAV seeks to the frame
    seek_to: dict[int, int] = {}
    # No frame needs to be decoded here, because the packets contain the times.
    for number, packet in enumerate(container.demux(stream)):
        if number > MAX_CLIP_FRAMES:
            raise TooExpensiveError(f"the clip has more than {MAX_CLIP_FRAMES} frames")
        time = packet.dts if packet.pts is None else packet.pts
        if time is None or not packet.size or packet.is_discard:
            continue
        shown.append(time)
        if packet.is_keyframe:
            seek_to.setdefault(time, time if packet.dts is None else packet.dts)
    if not shown:
        raise ImageError("corrupt", "the video stream has no frames")
    shown.sort()
    keys = sorted(seek_to)
    # `length` is the time between the starts of the first and the last of n frames. The
    # duration of the last frame is unknown. If it is the mean duration of the other
    # frames, the duration of the clip is length * n / (n - 1). The middle of part p is
    # after the fraction (2 * p + 1) / (2 * parts) of this duration.
    first = shown[0]
    length = shown[-1] - shown[0]
    parts = count or 1
    steps = 2 * parts * max(1, len(shown) - 1)
    times = [
        first + (2 * position + 1) * length * len(shown) // steps
        for position in range(parts)
    ]
    if count is None:
        times = [time for time in keys if time <= times[0]][-1:] or [first]
    pixels_left = max_pixels

    def key_before(time: int) -> int:
        """Return the index in `keys` of the last key frame at or before `time`; -1 if
        there is none.
        """
        return bisect.bisect_right(keys, time) - 1

    def decode_from(time: int) -> Iterator[VideoFrame]:
        """Yield the decoded frames in order, beginning with the last key frame at or
        before `time`. Frames without a time are left out.
        """
        nonlocal pixels_left
        key = key_before(time)
        # A clip may begin with other frames than a key frame. For a time in such a
        # beginning, decoding starts with the first key frame.
        start = seek_to[keys[key]] if key >= 0 else min(keys, default=first)
        container.seek(start, stream=stream, backward=True)
        for frame in container.decode(stream):
            pixels_left -= frame.width * frame.height
            if pixels_left < 0:
                raise TooExpensiveError(
                    f"the frames need more than {max_pixels} pixels to be decoded"
                )
            if frame.pts is not None or frame.dts is not None:
                yield frame

    frames = decode_from(times[0])
    current = next(frames, None)
    following = next(frames, None)
    for time in times:
        # A seek saves work only if there is a key frame between `following` and `time`.
        if following is not None and key_before(time) > key_before(_time_of(following)):
            frames = decode_from(time)
            current = following
            following = next(frames, None)
        while following is not None and _time_of(following) <= time:
            current = following
            following = next(frames, None)
        if current is None:
            raise ImageError("corrupt", "no frame can be decoded")
        yield current


def _turn(frame: VideoFrame) -> Image.Transpose | None:
    """Return the operation that turns a frame upright; None if none is needed."""
    matrix: Any = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return None
    signs = np.sign(np.frombuffer(matrix, np.int32)[[0, 1, 3, 4]])
    return _TURNS.get(tuple(signs.tolist()))


def _time_of(frame: VideoFrame) -> Any:
    return frame.dts if frame.pts is None else frame.pts
