"""Video clips for tests, made from photos."""

import functools
import io
from pathlib import Path

import av
import numpy as np
import skimage
from PIL import Image

PHOTO = Path(skimage.__file__).parent / "data" / "chelsea.png"
LOSSLESS = ("matroska", "ffv1", "bgr0")
KINDS = {
    "mp4": ("mp4", "libx264", "yuv420p"),
    "mov": ("mov", "mjpeg", "yuvj420p"),
    "webm": ("webm", "libvpx-vp9", "yuv420p"),
    "mkv": ("matroska", "libx264rgb", "rgb24"),
    "avi": ("avi", "mpeg4", "yuv420p"),
    "lossless": LOSSLESS,
}


@functools.cache
def photo(width=96, height=64):
    """A photo, uint8 [height, width, 3]."""
    return np.asarray(Image.open(PHOTO).convert("RGB").resize((width, height)))


def panned(frames, width=96, height=64):
    """Frames in which a photo moves to the right."""
    return [
        np.roll(photo(width, height), 4 * number, axis=1) for number in range(frames)
    ]


def clip(frames, kind=KINDS["mp4"], **options):
    """Encode `frames` at 10 frames per second with a key frame every 6 frames.
    `kind` is (container, codec, pixels).
    """
    container, codec, pixel_format = kind
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream = output.add_stream(codec, rate=10, options={"g": "6", **options})
        stream.pix_fmt = pixel_format
        for number, pixels in enumerate(frames):
            if number == 0:
                stream.height, stream.width = pixels.shape[:2]
            output.mux(
                stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24"))
            )
        output.mux(stream.encode(None))
    return buffer.getvalue()


def all_frames(data):
    """All frames of a clip, decoded one after the other by PyAV alone."""
    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
