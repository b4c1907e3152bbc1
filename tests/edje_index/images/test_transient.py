"""Trouble that passes is waited for; trouble that stays is no property of the image."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from edje_index.images import transient
from edje_index.images.decode import ImageError
from edje_index.images.inputs import InputRef, read_bytes
from edje_index.images.transient import TransientInputError, retry
from tests.edje_index.image_cases import encoded

ERRORS = ("EIO", "ESTALE", "EMFILE", "ENFILE", "ENOMEM", "ETIMEDOUT")
CONTENT = b"0123456789"


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made; none takes time."""
    made: list[float] = []
    monkeypatch.setattr("time.sleep", made.append)
    return made


@pytest.fixture
def ref(tmp_path: Path) -> InputRef:
    path = tmp_path / "photos" / "a.jpg"
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    (path.parent / "b.jpg").write_bytes(CONTENT)
    return InputRef(str(path), os.fsencode(path), size=len(CONTENT))


def failing(call: Callable, error: Exception, times: int) -> Callable:
    """`call`, but the first `times` calls raise `error`."""
    left = iter(range(times))

    def wrapper(*arguments: object, **options: object) -> object:
        if next(left, None) is not None:
            raise error
        return call(*arguments, **options)

    return wrapper


@pytest.mark.parametrize("call", ["open", "fstat", "pread"])
@pytest.mark.parametrize("name", ERRORS)
def test_passing_trouble_is_waited_for(
    name: str, call: str, ref: InputRef, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = OSError(getattr(errno, name), os.strerror(getattr(errno, name)))
    monkeypatch.setattr(os, call, failing(getattr(os, call), error, times=2))
    assert read_bytes(ref) == CONTENT
    assert pauses == list(transient.PAUSES[:2])


@pytest.mark.parametrize("name", ERRORS)
def test_lasting_trouble_is_not_the_inputs_fault(
    name: str, ref: InputRef, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    message = os.strerror(getattr(errno, name))
    monkeypatch.setattr(os, "pread", failing(os.pread, OSError(getattr(errno, name), message), times=100))
    with pytest.raises(TransientInputError, match=message) as caught:
        read_bytes(ref)
    assert ref.uri in str(caught.value)
    assert pauses == list(transient.PAUSES)


def test_a_read_that_ends_early_is_repeated(
    ref: InputRef, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    pread, left = os.pread, iter([b"0123", b""])
    monkeypatch.setattr(os, "pread", lambda *arguments: next(left, None) or pread(*arguments))
    assert read_bytes(ref) == CONTENT
    monkeypatch.setattr(os, "pread", lambda *arguments: b"")
    with pytest.raises(TransientInputError, match="ended 10 bytes before the end"):
        read_bytes(ref)
    assert pauses == list(transient.PAUSES)


@pytest.mark.parametrize("left_over", ["nothing", "empty folder"])
def test_a_source_that_vanishes(left_over: str, ref: InputRef, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(ref.uri).parent
    folder.rename(folder.with_name("elsewhere"))
    if left_over == "empty folder":  # a mount point without its file system
        folder.mkdir()
    monkeypatch.setattr("time.sleep", lambda _: None)
    with pytest.raises(TransientInputError, match="gone or empty; check that the file system of the input is mounted"):
        read_bytes(ref)
    if left_over == "empty folder":
        folder.rmdir()
    monkeypatch.setattr("time.sleep", lambda _: folder.with_name("elsewhere").rename(folder))
    assert read_bytes(ref) == CONTENT


def test_memory_is_waited_for(pauses: list[float]) -> None:
    assert retry(failing(lambda: 7, MemoryError(), times=3), "a.jpg", 1) == 7
    assert pauses == list(transient.PAUSES)
    with pytest.raises(TransientInputError, match=r"cannot decode a.jpg: too little memory"):
        retry(failing(lambda: 7, MemoryError(), times=100), "a.jpg", 1 << 60)
    with pytest.raises(ImageError, match="too-expensive"):  # more memory than any sound image needs is free
        retry(failing(lambda: 7, MemoryError(), times=100), "a.jpg", 1)


def test_good_photos_in_too_little_memory(tmp_path: Path) -> None:
    """24 megapixels in a process whose address space may grow by 4 to 256 MB; libjpeg calls it a broken stream."""
    (tmp_path / "photo.jpg").write_bytes(encoded(Image.new("RGB", (6000, 4000)), "JPEG", progressive=True))
    program = """
import io, resource, sys
from pathlib import Path
from PIL import Image
from edje_index.images.decode import decode_rgb
out = io.BytesIO(); Image.new("L", (8, 8)).save(out, "JPEG"); decode_rgb(out.getvalue())
data = Path(sys.argv[1]).read_bytes()
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
outcomes = set()
for megabytes in (4, 96, 256):
    resource.setrlimit(resource.RLIMIT_AS, (used + (megabytes << 20), -1))
    try:
        outcomes.add(str(decode_rgb(data).size))
    except MemoryError:
        outcomes.add("MemoryError")
print(sorted(outcomes))
"""
    command = [sys.executable, "-c", program, str(tmp_path / "photo.jpg")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (run.stdout, run.stderr) == ("['(6000, 4000)', 'MemoryError']\n", "")
