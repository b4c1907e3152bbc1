"""Frames of clips: compared with those that PyAV decodes one after the other, and
refused with a reason otherwise.
"""

import io
import struct

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from edje_index.images import clips
from edje_index.images.clips import decode_frames, is_clip
from edje_index.images.decode import REASONS, ImageError
from edje_index.inputs.preparation import DecodeSettings, decode_input
from tests.edje_index.clip_cases import KINDS, all_frames, clip, panned, photo
from tests.edje_index.image_cases import encoded, gradient

LIMIT = 1_000_000


def decoded(data, count, limit=LIMIT):
    return [np.asarray(image) for image in decode_frames(data, count, limit)]


def reason(data, limit=LIMIT):
    with pytest.raises(ImageError) as caught:
        decoded(data, 4, limit)
    assert caught.value.reason in REASONS
    assert caught.value.detail
    return caught.value.reason


@pytest.mark.parametrize(
    ("kind", "length"), [("lossless", 1), ("lossless", 20), *((k, 7) for k in KINDS)]
)
def test_frames_are_the_middles_of_equal_parts(kind, length):
    data = clip(panned(length), KINDS[kind])
    expected = all_frames(data)
    assert len(expected) == length
    for count in (1, 2, 3, 8, 25):
        positions = [(2 * part + 1) * length // (2 * count) for part in range(count)]
        for position, frame in zip(positions, decoded(data, count), strict=True):
            np.testing.assert_array_equal(frame, expected[position])


def test_unequal_distances_count_as_time():
    """A frame that is shown for nine tenths of a clip makes up nine tenths of the
    samples.
    """
    images = panned(4)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as output:
        stream = output.add_stream("ffv1", rate=10)
        stream.height, stream.width = images[0].shape[:2]
        stream.pix_fmt = "bgr0"
        for pixels, time in zip(images, [0, 1, 90, 91], strict=True):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = time
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    frames = decoded(buffer.getvalue(), 10)
    np.testing.assert_array_equal(frames[0], frames[6])
    assert sum((frame == images[1]).all() for frame in frames) == 7


def test_few_frames_are_decoded_between_key_frames(monkeypatch):
    data = clip(panned(60), KINDS["lossless"])
    monkeypatch.setattr(clips, "MAX_CLIP_PIXELS", 24 * 96 * 64)
    assert len(decoded(data, 2)) == 2
    assert reason(clip(panned(60), KINDS["mp4"], g="60")) == "too-expensive"
    assert len(decoded(data, 3)) == 3
    # the limit holds for all frames together
    with pytest.raises(ImageError, match="too-expensive"):
        decoded(data, 12)


@pytest.mark.parametrize(
    "matrix",
    [
        (1, 0, 0, 1),
        (-1, 0, 0, 1),
        (-1, 0, 0, -1),
        (1, 0, 0, -1),
        (0, 1, 1, 0),
        (0, -1, 1, 0),
        (0, -1, -1, 0),
        (0, 1, -1, 0),
    ],
)
def test_clips_of_phones_are_turned_upright(matrix):
    a, b, c, d = matrix
    data = clip(panned(4), KINDS["mp4"])
    expected = all_frames(data)[2]
    # The matrix of the track header (ISO/IEC 14496-12, 8.3.2) moves the pixel (x, y) to
    # (ax + cy, bx + dy).
    y, x = np.indices(expected.shape[:2])
    right = a * x + c * y
    down = b * x + d * y
    right -= right.min()
    down -= down.min()
    turned = np.empty((down.max() + 1, right.max() + 1, 3), np.uint8)
    turned[down, right] = expected
    one = 1 << 16
    stored = struct.pack(">9i", one, 0, 0, 0, one, 0, 0, 0, 1 << 30)
    at = data.index(stored, data.index(b"tkhd"))
    changed = struct.pack(
        ">9i", a * one, b * one, 0, c * one, d * one, 0, 0, 0, 1 << 30
    )
    data = data[:at] + changed + data[at + len(changed) :]
    np.testing.assert_array_equal(decoded(data, 1)[0], turned)


def test_a_clip_that_does_not_begin_with_a_key_frame():
    """And whose title holds the names of tables."""
    buffer = io.BytesIO()
    with (
        av.open(io.BytesIO(clip(panned(20)))) as container,
        av.open(buffer, "w", format="mp4") as output,
    ):
        output.metadata["title"] = "trunk of an elephant, truncated"
        stream = output.add_stream_from_template(container.streams.video[0])
        packets = [each for each in container.demux(video=0) if each.size]
        for packet in packets[2:]:
            packet.stream = stream
            output.mux(packet)
    assert b"trunk" in buffer.getvalue()
    assert len(decoded(buffer.getvalue(), 4)) == 4


CLIPS = [clip(panned(12), KINDS[kind]) for kind in ("mp4", "webm", "mkv", "avi")]


@settings(max_examples=40)
@given(st.data(), st.sampled_from(CLIPS))
def test_damaged_bytes_fail_with_a_reason_or_decode(data, sound):
    damaged = bytearray(sound)
    for position in data.draw(
        st.lists(st.integers(0, len(damaged) - 1), min_size=1, max_size=20)
    ):
        damaged[position] = data.draw(st.integers(0, 255))
    try:
        outcome = len(decoded(bytes(damaged), 3))
    except ImageError as error:
        outcome = error.reason
    assert outcome in (3, *REASONS)


def test_bytes_that_are_no_clip():
    assert (
        reason(b"#EXTM3U\n#EXT-X-TARGETDURATION:1\nfile:///etc/passwd\n")
        == "unsupported-video"
    )
    assert reason(b"ffconcat version 1.0\nfile /etc/passwd\n") == "unsupported-video"
    assert not is_clip(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    assert not is_clip(encoded(Image.fromarray(gradient()), "AVIF"))
    assert (
        reason(clip(panned(4), ("matroska", "mpeg2video", "yuv420p")))
        == "unsupported-video"
    )
    assert reason(b"\0\0\0\x08free\0\0\0\x08moov") in ("corrupt", "unsupported-video")


def test_frames_over_the_limit_are_not_decoded(monkeypatch):
    data = clip(panned(4))
    assert len(decoded(data, 2, limit=96 * 64)) == 2
    # decoding would raise another error
    monkeypatch.setattr(clips, "_choose", None)
    assert reason(data, limit=96 * 64 - 1) == "too-many-pixels"


def box(name, *content):
    """A box of ISO/IEC 14496-12."""
    body = b"".join(content)
    return struct.pack(">I4s", 8 + len(body), name) + body


def table(name, *numbers):
    return box(name, struct.pack(f">{1 + len(numbers)}I", 0, *numbers))


@pytest.mark.parametrize(
    "samples",
    [
        table(b"stsz", 1, 100_000_000),
        table(b"stsz", 0, 100_000_000),
        table(b"stz2", 8, 100_000_000),
        table(b"stsc", 1, 1, 1 << 30, 1),
        table(b"stsc", 1 << 30),
        100 * table(b"stsc", 0),
        table(b"trun", 100_000_000),
        # of a version that FFmpeg reads as any other
        box(b"trun", struct.pack(">2I", 2 << 24, 100_000_000)),
        box(b"cmov", box(b"dcom", b"zlib"), box(b"cmvd", bytes(4))),
    ],
)
def test_declared_samples_are_counted_before_a_clip_is_opened(samples, monkeypatch):
    opened = []
    monkeypatch.setattr(av, "open", lambda *args, **options: opened.append(args))
    index = box(
        b"moov", box(b"trak", box(b"mdia", box(b"minf", box(b"stbl", samples))))
    )
    assert (
        reason(
            box(b"ftyp", b"isom", bytes(4)) + index + box(b"mdat", b"stsz" + 8 * b"z")
        )
        == "too-expensive"
    )
    assert not opened


@pytest.mark.parametrize(
    "texts",
    [
        box(b"\xa9nam", b"trunk of an elephant") + table(b"trun", 100_000_000),
        # a size that FFmpeg does not believe
        struct.pack(">I4s", 1 << 20, b"\xa9nam") + table(b"trun", 100_000_000),
        struct.pack(">I4s", 4, b"\xa9nam") + table(b"trun", 100_000_000),
        box(
            b"meta",
            bytes(4),
            box(b"hdlr", bytes(25)),
            box(b"ilst", table(b"trun", 100_000_000)),
        ),
    ],
)
def test_tables_beside_texts_are_counted(texts):
    data = box(b"ftyp", b"isom", bytes(4)) + box(b"moov", box(b"udta", texts))
    assert reason(data + box(b"mdat", bytes(8))) == "too-expensive"


def test_an_image_is_a_clip_of_one_frame():
    def decode(data, frames):
        out = np.zeros((frames or 1, 64, 96, 3), np.uint8)
        settings = DecodeSettings(LIMIT, frames=frames)
        columns = decode_input(
            data, "an input", settings, lambda image, to: np.copyto(to, image), out
        )
        assert columns == {"width": 96, "height": 64, "detail": None}
        return out

    still = encoded(Image.fromarray(photo()), "PNG")
    np.testing.assert_array_equal(decode(still, 3), [photo()] * 3)
    moving = clip(panned(3), KINDS["lossless"])
    np.testing.assert_array_equal(decode(moving, 3), panned(3))
    for kind in ("mp4", "webm"):
        with pytest.raises(ImageError, match=r"unsupported-image: .*video"):
            decode(clip(panned(3), KINDS[kind]), None)
