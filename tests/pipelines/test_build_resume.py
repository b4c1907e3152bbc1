"""Builds that stop at trouble outside their images and resume, also over damage."""

import errno
import json
import os
from pathlib import Path

import pytest

from edje_index.indexing import faiss_index, shard_encoding
from edje_index.indexing.image_encoder import ImageEncoder
from edje_index.indexing.kept_batches import kept_rows
from pipelines.progress.events import JobStopped, PlanReady
from storage_formats import verify_index
from storage_formats.errors import UsageError
from storage_formats.format.journal import read_journal
from storage_formats.format.layout import Layout
from storage_formats.format.places import Directory
from storage_formats.format.rows import read_rows
from tests.pipelines.conftest import INLINE, run_build, stop_after_one_shard
from tests.storage_formats.reading_cases import flip


def finished_before(config):
    """Resume the build; returns how many shards were finished before."""
    events = []
    run_build(config, events.append)
    assert verify_index(config.out) == []
    return next(
        event.finished_shards for event in events if isinstance(event, PlanReady)
    )


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_list_of_inputs_that_was_damaged_or_lost_is_one_clear_error(config, is_lost):
    stop_after_one_shard(run_build, config())
    path = Directory(config().out).input_list(0)
    flip(path, 40)
    if is_lost:
        path.unlink()
    with pytest.raises(JobStopped, match=r"the list of inputs .*0\.parquet"):
        run_build(config())


@pytest.mark.parametrize("damage", ["indexed", "crc32c"])
def test_a_shard_with_a_damaged_receipt_is_encoded_again(config, damage):
    stop_after_one_shard(run_build, config())
    path = Layout(config().out).receipt(0)
    receipt = json.loads(path.read_text())
    if damage == "indexed":
        receipt["indexed"] = 3
        receipt["duplicates"] = 1
    else:
        receipt["files"][0]["crc32c"] = "00000000"
    path.write_text(json.dumps(receipt))
    assert finished_before(config()) == 0


def test_a_stop_inside_a_slow_shard_keeps_its_batches(config, monkeypatch):
    monkeypatch.setattr(shard_encoding, "_LONG_SECONDS", 0.0)
    encoded = []
    encode = ImageEncoder.encode

    def counted(self, images):
        encoded.append(len(images))
        return encode(self, images)

    monkeypatch.setattr(ImageEncoder, "encode", counted)
    request = config(shard_size=16)
    with pytest.raises(
        JobStopped, match=r"stopped; [1-9] of \d+ rows are kept, 0 of 1"
    ):
        run_build(request, should_stop=lambda: bool(encoded))
    layout = Directory(request.out)
    kept = kept_rows(layout)
    assert 0 < kept < read_journal(Directory(request.out)).plan["spec"]["rows"]
    # A build with other settings does not discard them.
    with pytest.raises(UsageError, match="other settings"):
        run_build(config(shard_size=16, exclude=["*.png"]))
    assert kept_rows(layout) == kept
    encoded.clear()
    result = run_build(request)
    assert sum(encoded) == result.indexed - kept
    assert verify_index(request.out) == []
    assert not layout.build.joinpath("batches").exists()


def test_too_little_memory_for_the_search_index_is_refused_before_a_resumed_job_encodes(
    config, monkeypatch
):
    request = config()
    stop_after_one_shard(run_build, request)
    with monkeypatch.context() as patch:
        patch.setattr(faiss_index, "_PEAK", 10.0**10)
        patch.setattr(shard_encoding, "encode_shard", None)
        with pytest.raises(
            UsageError, match=r"nearest-neighbour index .* of memory, but only"
        ):
            run_build(request)
    run_build(request)


def test_a_full_disk_while_faiss_writes_is_one_clear_error(config, monkeypatch):
    from edje_index.indexing import faiss_build

    write = faiss_build.write_part
    monkeypatch.setattr(
        faiss_build, "write_part", lambda index, _: write(index, Path("/dev/full"))
    )
    with pytest.raises(
        JobStopped, match=r"No space left on device.*; what is finished is kept"
    ):
        run_build(config())
    monkeypatch.undo()
    assert finished_before(config()) == 3
    assert len(read_rows(config().out)) == 10


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
