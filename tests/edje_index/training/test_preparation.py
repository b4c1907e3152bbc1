"""Preparation of captions in shards: the data are those of the models, and finished shards are prepared once."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from edje_index.bundles.bundle import ModelBundle
from edje_index.training.data import caption_table
from edje_index.training.data.dataset import CaptionSet, TrainingData
from pipelines.jobs.training.caption_shards import CaptionJob
from pipelines.jobs.training.matching import MiningModel
from pipelines.progress.events import JobStopped, Progress, StatusMessage
from storage_formats.errors import CorruptIndexError, UsageError
from storage_formats.format.manifest import CommittedIndex
from storage_formats.reading.embeddings import read_embeddings
from tests.edje_index.training.conftest import IMAGES, captions, prepare

ITEMS = CaptionSet(np.arange(IMAGES) + 2, captions())


@pytest.fixture
def job(case, tmp_path):
    return CaptionJob(
        tmp_path / "data", ITEMS, case.bundle, MiningModel(None, CommittedIndex.open(case.features), ITEMS.rows)
    )


def check_equal(one: TrainingData, other: TrainingData) -> None:
    for field in fields(TrainingData):
        left, right = getattr(one, field.name), getattr(other, field.name)
        assert left.dtype == right.dtype
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-6 if left.dtype == np.float32 else 0)


def stop_after(shards: int):
    """Return a list of the progress events, a callback that adds to the list, and a callback to stop."""
    events: list[Progress] = []

    def on_event(event):
        if isinstance(event, Progress) and event.shards:
            events.append(event)

    return events, on_event, lambda: bool(events) and events[-1].finished_shards >= shards


def receipts(job: CaptionJob) -> list[Path]:
    return sorted((job.root / "build" / "receipts").iterdir())


def test_the_data_are_those_of_the_models(case, job):
    bundle, data = ModelBundle.load(case.bundle), TrainingData.open(case.data)
    texts = ITEMS.texts()
    np.testing.assert_allclose(data.text_embeddings, bundle.text.encode(texts), rtol=0, atol=1e-6)
    assert [data.caption(number).tolist() for number in range(len(texts))] == bundle.joint.tokenizer.caption_ids(texts)
    np.testing.assert_array_equal(data.image_mining, read_embeddings(job.mining.index, ITEMS.rows))
    assert data.text_mining.tobytes() == data.text_embeddings.tobytes()
    assert data.caption_starts.tolist() == list(range(0, 2 * IMAGES + 1, 2))
    assert data.rows.tolist() == ITEMS.rows.tolist()
    equal = {tuple(np.flatnonzero(data.caption_keys == key)) for key in data.caption_keys}
    assert (0, 2) in equal, "the captions 'A dog .' and 'a dog' have the same words"


@pytest.mark.parametrize("captions_per_shard", [7, 47])
def test_shards_do_not_change_the_data(case, job, monkeypatch, captions_per_shard):
    monkeypatch.setattr(caption_table, "SHARD_CAPTIONS", captions_per_shard)
    prepare(job)
    check_equal(TrainingData.open(case.data), TrainingData.open(job.folder))
    assert [path.name for path in job.folder.parent.iterdir()] == ["data"]


def test_an_image_may_have_more_captions_than_a_shard(case, job, monkeypatch):
    monkeypatch.setattr(caption_table, "SHARD_CAPTIONS", 3)
    items = CaptionSet(ITEMS.rows[:2], [tuple(f"dog {number}" for number in range(7)), ("a cat",)])
    prepare(replace(job, captions=items, mining=replace(job.mining, rows=items.rows)))
    data = TrainingData.open(job.folder)
    assert (len(data.caption_keys), data.image_mining.shape) == (8, (2, 24))
    assert data.caption_starts.tolist() == [0, 7, 8]


def test_another_mining_model_has_its_own_embeddings(case, job):
    prepare(replace(job, mining=replace(job.mining, bundle=case.bundle)))
    check_equal(TrainingData.open(case.data), TrainingData.open(job.folder))
    assert (job.folder / "text_mining.npy").stat().st_nlink == 1


def test_a_stopped_preparation_resumes_after_its_finished_shards(case, job, monkeypatch):
    monkeypatch.setattr(caption_table, "SHARD_CAPTIONS", 10)
    events, on_event, should_stop = stop_after(2)
    with pytest.raises(JobStopped, match=r"^stopped; 20 of 48 captions are kept, 2 of 5 shards are finished$"):
        prepare(job, on_event, should_stop)
    assert not job.folder.exists()
    written = [path.stat().st_mtime_ns for path in receipts(job)]
    events, on_event, should_stop = stop_after(4)
    with pytest.raises(JobStopped, match="4 of 5 shards are finished"):
        prepare(job, on_event, should_stop)
    assert [path.stat().st_mtime_ns for path in receipts(job)][:2] == written
    assert [event.finished_shard[0] for event in events if event.finished_shard] == [2, 3]
    events, on_event, _ = stop_after(6)
    prepare(job, on_event)
    assert (events[-1].activity, events[-1].done, events[-1].total) == ("preparing captions", 48, 48)
    assert {event.bottleneck for event in events} <= {"model", "write", None}
    check_equal(TrainingData.open(case.data), TrainingData.open(job.folder))


def test_a_stop_within_a_shard_leaves_no_receipt(job):
    reports = []
    with pytest.raises(JobStopped, match="0 of 48 captions are kept"):
        prepare(job, should_stop=lambda: len(reports) > 1 or reports.append(None))
    assert list((job.root / "shards").iterdir()) == []


def test_shards_of_other_captions_are_prepared_again(case, job, monkeypatch):
    monkeypatch.setattr(caption_table, "SHARD_CAPTIONS", 10)
    other = CaptionSet(ITEMS.rows, [("another dog", texts[1]) for texts in ITEMS.captions])
    _, on_event, should_stop = stop_after(3)
    with pytest.raises(JobStopped, match="3 of 5 shards"):
        prepare(replace(job, captions=other), on_event, should_stop)
    prepare(job)
    check_equal(TrainingData.open(case.data), TrainingData.open(job.folder))


@pytest.mark.parametrize("damaged", [b"", b"[]", b"[" * 10**5, b'{"shard": 0}'])
def test_a_shard_with_a_damaged_receipt_is_prepared_again(case, job, monkeypatch, damaged):
    monkeypatch.setattr(caption_table, "SHARD_CAPTIONS", 10)
    _, on_event, should_stop = stop_after(2)
    with pytest.raises(JobStopped):
        prepare(job, on_event, should_stop)
    receipts(job)[0].write_bytes(damaged)
    events, on_event, _ = stop_after(6)
    prepare(job, on_event)
    assert [event.finished_shard[0] for event in events if event.finished_shard] == [0, 2, 3, 4]
    check_equal(TrainingData.open(case.data), TrainingData.open(job.folder))


def test_a_damaged_shard_is_found_and_prepared_again(case, job, monkeypatch):
    monkeypatch.setattr(caption_table, "SHARD_CAPTIONS", 10)
    _, on_event, should_stop = stop_after(2)
    with pytest.raises(JobStopped):
        prepare(job, on_event, should_stop)
    path = job.root / "shards" / "text_embeddings-00000001.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"\xaa")
    with pytest.raises(CorruptIndexError, match=r"text_embeddings-00000001.npy was damaged; train again"):
        prepare(job)
    prepare(job)
    check_equal(TrainingData.open(case.data), TrainingData.open(job.folder))


def test_a_full_disk_stops_the_preparation(job, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    monkeypatch.setattr(Path, "hardlink_to", full)
    with pytest.raises(JobStopped, match=f"^cannot write {job.folder}: No space left on device; finished shards are k"):
        prepare(job)
    monkeypatch.undo()
    prepare(job)
    assert job.folder.exists()


def test_a_stop_while_joining_keeps_all_shards(case, job):
    joined = []

    def on_event(event):
        if isinstance(event, Progress) and event.activity == "joining captions":
            joined.append(event)

    with pytest.raises(JobStopped, match=r"^stopped while joining captions, after 1 of 4; run the command again"):
        prepare(job, on_event, lambda: bool(joined))
    written = [path.stat().st_mtime_ns for path in receipts(job)]
    prepare(job, lambda event: joined.append([path.stat().st_mtime_ns for path in receipts(job)]))
    assert joined[-1] == written
    check_equal(TrainingData.open(case.data), TrainingData.open(job.folder))


def test_leftovers_of_a_killed_run_are_removed(case, job):
    shutil.copytree(case.data, job.folder)
    job.root.mkdir()
    prepare(job)
    assert not job.root.exists()


def test_workers_and_device_are_announced(job):
    events = []
    prepare(job, events.append)
    texts = [event.text for event in events if isinstance(event, StatusMessage)]
    assert "preparing 48 captions in 1 shard, 1 worker on cpu" in texts


def test_captions_in_any_script_are_kept(case, job):
    texts = ["ein Hund läuft", "狗", "🐕‍🦺 " * 40, '"quoted" \\ \0 \x1f', json.dumps({"a": 1})]
    items = CaptionSet(ITEMS.rows[:1], [tuple(texts)])
    prepare(replace(job, captions=items, mining=replace(job.mining, rows=items.rows)))
    bundle, data = ModelBundle.load(case.bundle), TrainingData.open(job.folder)
    assert [data.caption(number).tolist() for number in range(5)] == bundle.joint.tokenizer.caption_ids(texts)


def test_images_without_captions_are_refused(job):
    with pytest.raises(UsageError, match="no image with a caption"):
        prepare(replace(job, captions=CaptionSet(np.zeros(0, np.int64), [])))
