"""Inputs: read as planned or refused with a reason."""

import dataclasses
import errno
import io
import os
import random
import signal
import socket
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from edje_index.images import transient
from edje_index.images.decode import REASONS, ImageError
from edje_index.images.transient import TransientInputError, retry
from edje_index.inputs import containers, ranges, tars
from edje_index.inputs import refs as inputs
from edje_index.inputs.containers import Container, read_packed
from edje_index.inputs.refs import InputRef, read_bytes


def reason(ref):
    with pytest.raises(ImageError) as caught:
        read_bytes(ref)
    assert caught.value.reason in REASONS
    return caught.value.reason


def ref_of(path, **values):
    return dataclasses.replace(InputRef(str(path), os.fsencode(path)), **values)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(b"0123456789")
    return path


def test_unreadable(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert reason(ref_of(loop)) == "unreadable"
    assert reason(ref_of(tmp_path)) == "unreadable"
    assert reason(ref_of(tmp_path / ("n" * 300))) == "unreadable"
    assert reason(InputRef("nul", b"a\0b")) == "unreadable"


def test_pipes_devices_and_sockets_do_not_block(tmp_path, monkeypatch):
    # the path of a socket must be short
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.jpg")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket.jpg")
        # ends the run if the open blocks
        signal.alarm(5)
        try:
            for name in ("pipe.jpg", "socket.jpg", "/dev/zero"):
                assert reason(InputRef(name, os.fsencode(name))) == "unreadable"
        finally:
            signal.alarm(0)


def test_empty_changed_or_too_large(file):
    assert (
        reason(ref_of(file, container=Container("tar", 10), offset=3, size=0))
        == "empty"
    )
    assert reason(ref_of(file, size=9)) == "changed-since-plan"
    assert reason(ref_of(file, size=11)) == "changed-since-plan"
    assert (
        reason(ref_of(file, container=Container("tar", 12), offset=8, size=4))
        == "changed-since-plan"
    )
    assert (
        reason(ref_of(file, container=Container("tar", 10), offset=8, size=4))
        == "truncated-archive"
    )
    # sparse
    os.truncate(file, inputs.MAX_INPUT_BYTES + 1)
    assert reason(ref_of(file)) == "too-many-bytes"


def test_an_error_of_one_archive_leaves_the_others_open(tmp_path, monkeypatch):
    paths = [tmp_path / "a.tar", tmp_path / "b.tar"]
    for path in paths:
        path.write_bytes(b"bytes")
    pread = os.pread
    opened = []
    open_fd = os.open
    monkeypatch.setattr(os, "open", lambda *a: opened.append(a[0]) or open_fd(*a))

    def broken(fd, size, offset):
        raise OSError(errno.EIO, "disk")

    def read(path):
        container = Container("tar", 5)
        return read_packed(os.fsencode(path), container, 0, size=5, max_bytes=5)

    assert [read(path) for path in paths] == [b"bytes"] * 2
    opened.clear()
    monkeypatch.setattr(os, "pread", broken)
    with pytest.raises(OSError, match="disk"):
        read(paths[0])
    monkeypatch.setattr(os, "pread", pread)
    assert [read(path) for path in paths] == [b"bytes"] * 2
    assert opened == [os.fsencode(paths[0])]


@pytest.mark.parametrize(("kind", "streams"), [("tar", 1), ("parquet", 4)])
def test_threads_that_read_in_order_share_a_stream(
    tmp_path, monkeypatch, kind, streams
):
    size = 20_000
    images = [random.Random(number).randbytes(size) for number in range(80)]
    # the images of 16 threads, and four more
    monkeypatch.setattr(ranges, "KEPT_BYTES", 20 * size)
    monkeypatch.setattr(tars, "_CHUNK", size // 2)
    begun = []

    class SlowWindow(ranges.StreamWindow):
        """Counts how often a stream begins. While it reads, other threads wait."""

        def _restart(self):
            begun.append(self)
            super()._restart()

        def read(self, first, stop):
            time.sleep(0.002)
            return super().read(first, stop)

    for module in (containers, tars):
        monkeypatch.setattr(module, "StreamWindow", SlowWindow)
    path = tmp_path / f"packed.{kind}"
    if kind == "tar":
        member = tarfile.TarInfo("photo.jpg")
        member.size = size
        with tarfile.open(path, "w:gz") as archive:
            for image in images:
                archive.addfile(member, io.BytesIO(image))
        with tarfile.open(path) as archive:
            offsets = [each.offset_data for each in archive]
    else:
        pq.write_table(pa.table({"image": images}), path, row_group_size=20)
        offsets = range(len(images))
    with ranges.open_ranged(bytes(path)) as file, ThreadPoolExecutor(16) as threads:
        if kind == "tar":
            opened = tars.TarArchive(file)
        else:
            opened = containers.ParquetImages(file, "image")
        read = threads.map(lambda offset: opened.read(offset, size), offsets)
        assert list(read) == images
    assert len(begun) == streams


ERRORS = ("EIO", "ESTALE", "EMFILE", "ENFILE", "ENOMEM", "ETIMEDOUT")
CONTENT = b"0123456789"


@pytest.fixture
def pauses(monkeypatch):
    """The pauses that were made; none takes time."""
    made = []
    monkeypatch.setattr("time.sleep", made.append)
    return made


@pytest.fixture
def ref(tmp_path):
    path = tmp_path / "photos" / "a.jpg"
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    (path.parent / "b.jpg").write_bytes(CONTENT)
    return InputRef(str(path), os.fsencode(path), size=len(CONTENT))


def failing(call, error, times):
    """`call`, but the first `times` calls raise `error`."""
    left = iter(range(times))

    def wrapper(*arguments, **options):
        if next(left, None) is not None:
            raise error
        return call(*arguments, **options)

    return wrapper


@pytest.mark.parametrize("call", ["open", "fstat", "pread"])
@pytest.mark.parametrize("name", ERRORS)
def test_passing_trouble_is_waited_for(name, call, ref, pauses, monkeypatch):
    error = OSError(getattr(errno, name), os.strerror(getattr(errno, name)))
    monkeypatch.setattr(os, call, failing(getattr(os, call), error, times=2))
    assert read_bytes(ref) == CONTENT
    assert pauses == list(transient.PAUSES[:2])


def test_a_read_that_ends_early_is_repeated(ref, pauses, monkeypatch):
    pread = os.pread
    left = iter([b"0123", b""])
    monkeypatch.setattr(
        os, "pread", lambda *arguments: next(left, None) or pread(*arguments)
    )
    assert read_bytes(ref) == CONTENT
    monkeypatch.setattr(os, "pread", lambda *arguments: b"")
    with pytest.raises(TransientInputError, match="ended 10 bytes before the end"):
        read_bytes(ref)
    assert pauses == list(transient.PAUSES)


def test_memory_is_waited_for(pauses):
    assert retry(failing(lambda: 7, MemoryError(), times=3), "a.jpg", 1) == 7
    assert pauses == list(transient.PAUSES)
    with pytest.raises(
        TransientInputError, match=r"cannot decode a.jpg: too little memory"
    ):
        retry(failing(lambda: 7, MemoryError(), times=100), "a.jpg", 1 << 60)
    # more memory than any sound image needs is free
    with pytest.raises(ImageError, match="too-expensive"):
        retry(failing(lambda: 7, MemoryError(), times=100), "a.jpg", 1)
