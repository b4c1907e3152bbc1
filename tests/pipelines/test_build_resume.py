"""Builds that resume over damage, and what a killed build leaves."""

from __future__ import annotations

import json
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
from tests.pipelines.conftest import run_build, stop_after_one_shard


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
    data = path.read_bytes()
    path.write_bytes(data[:40] + bytes([data[40] ^ 1]) + data[41:])
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
