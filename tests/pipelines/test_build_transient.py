"""A build that meets trouble outside its images stops and can be resumed; it does
not lose rows.
"""

from __future__ import annotations

import errno
import os

import pytest

from storage_formats.format.layout import Layout
from tests.pipelines.conftest import INLINE


@pytest.fixture
def build(photos, tiny_bundle, tmp_path):
    """Arguments of a build of `photos` in shards of four."""
    return [
        "build",
        photos,
        "--out",
        tmp_path / "photos.edje",
        "--model",
        tiny_bundle,
        *INLINE,
    ]


def break_reads(monkeypatch, photo, number):
    """Reading `photo` raises an error; other files, and the pauses, work at once."""
    pread = os.pread

    def broken(fd, size, offset):
        if os.path.samestat(os.fstat(fd), photo.stat()):
            raise OSError(number, os.strerror(number))
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", broken)
    monkeypatch.setattr("time.sleep", lambda _: None)


@pytest.mark.parametrize(
    "number", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENOMEM, errno.ETIMEDOUT]
)
def test_a_build_stops_at_lasting_trouble_and_resumes(
    number, run, build, photos, tmp_path, monkeypatch
):
    with monkeypatch.context() as patched:
        break_reads(patched, photos / "05.jpg", number)
        code, _, err = run(*build)
    assert code == 1
    assert f"cannot read {photos / '05.jpg'}: {os.strerror(number)}; " in err
    assert "1 of 3 shards are finished. To resume: " in err
    assert not Layout(tmp_path / "photos.edje").manifest.exists()
    assert run.json(*build)["failed_by_reason"] == {"not-an-image": 1}


def test_photos_that_vanish_after_the_plan(run, build, photos, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        break_reads(patched, photos / "05.jpg", errno.EIO)
        run(*build)
    monkeypatch.setattr("time.sleep", lambda _: None)
    photos.rename(tmp_path / "elsewhere")
    photos.mkdir()
    code, _, err = run(*build)
    assert code == 1
    assert (
        "04.jpg: the directory is gone or empty; check that the file system of the"
        " input is mounted" in err
    )
    photos.rmdir()
    (tmp_path / "elsewhere").rename(photos)
    assert run.json(*build)["failed"] == 1
