"""Image files for the decoding tests."""

import io
import struct
import subprocess
import sys
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from edje_index.images.decode import REASONS, ImageError, decode_rgb

LIMIT = 1_000_000


def encoded(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def gradient(width=24, height=16):
    """RGB uint8 [h, w, 3] without any symmetry."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    return np.stack(
        [x * 255 // (width - 1), y * 255 // (height - 1), (3 * x + 5 * y) % 256],
        axis=-1,
    ).astype(np.uint8)


def pixels(data, limit=LIMIT):
    image = decode_rgb(data, limit)
    assert image.mode == "RGB"
    # a PIL image has the pixels of its file
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opened = Image.open(io.BytesIO(data))
    assert decode_rgb(opened).tobytes() == image.tobytes()
    return np.asarray(image)


def reason(data, limit=LIMIT):
    with pytest.raises(ImageError) as caught:
        decode_rgb(data, limit)
    assert caught.value.reason in REASONS
    assert caught.value.detail
    return caught.value.reason


IN_LITTLE_MEMORY = """
import io, resource, sys
from pathlib import Path
from PIL import Image
from edje_index.images.decode import ImageError, decode_rgb
# the plug-ins are loaded before the limit
for kind, mode in (("PNG", "L"), ("JPEG", "L"), ("TIFF", "F")):
    out = io.BytesIO()
    Image.new(mode, (8, 8)).save(out, kind)
    decode_rgb(out.getvalue())
files = [path.read_bytes() for path in sorted(Path(sys.argv[1]).iterdir())]
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
for megabytes in sys.argv[2:]:
    resource.setrlimit(resource.RLIMIT_AS, (used + (int(megabytes) << 20), -1))
    for data in files:
        try:
            print(decode_rgb(data, 89_000_000).size)
        except ImageError as error:
            print(error.reason)
        except MemoryError:
            print("MemoryError")
"""


def in_little_memory(folder, files, *megabytes):
    """Outcomes of decoding each file in a process whose address space may grow by
    each number of megabytes.
    """
    for number, data in enumerate(files):
        (folder / f"{number:02}").write_bytes(data)
    command = [
        sys.executable,
        "-c",
        IN_LITTLE_MEMORY,
        str(folder),
        *map(str, megabytes),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def png_chunk(kind, body):
    return (
        struct.pack(">I", len(body))
        + kind
        + body
        + struct.pack(">I", zlib.crc32(kind + body))
    )


def with_chunk(png, kind, body):
    """`png` with a chunk after its header."""
    return png[:33] + png_chunk(kind, body) + png[33:]


def png(width, height, depth, colour, raw, *chunks):
    header = png_chunk(
        b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    )
    parts = [
        header,
        *chunks,
        png_chunk(b"IDAT", zlib.compress(raw)),
        png_chunk(b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def tiff(width, height, tags, samples):
    """A little-endian, uncompressed, one-strip TIFF; `tags`: tag -> (type, count,
    value).
    """
    tags = {
        256: (4, 1, width),
        257: (4, 1, height),
        259: (3, 1, 1),
        277: (3, 1, 1),
        278: (4, 1, height),
        **tags,
    }
    data_place = 8 + 2 + 12 * (len(tags) + 2) + 4
    tags = {**tags, 273: (4, 1, data_place), 279: (4, 1, len(samples))}
    entries = b"".join(struct.pack("<HHII", tag, *tags[tag]) for tag in sorted(tags))
    return (
        b"II*\0"
        + struct.pack("<IH", 8, len(tags))
        + entries
        + struct.pack("<I", 0)
        + samples
    )
