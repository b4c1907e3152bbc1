"""Preparation of captions in shards: the data are those of the models, and finished shards are prepared once."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pytest

from edje_index.bundles.bundle import ModelBundle
from edje_index.training import captions as caption_shards
from edje_index.training.batches import TrainingData
from pipelines.progress.events import JobStopped, Progress
from storage_formats.errors import CorruptIndexError
from storage_formats.format.manifest import CommittedIndex
from storage_formats.reading.embeddings import read_embeddings
from tests.edje_index.training.conftest import IMAGES, Case, prepare


@dataclass(frozen=True)
class Job:
    case: Case
    folder: Path

    @property
    def root(self) -> Path:
        return self.folder.with_name(f".{self.folder.name}.part")

    def run(self, on_event=lambda _: None, should_stop=lambda: False, items=None, miner=None) -> None:
        case = self.case
        items = items or case.items
        prepare(self.folder, items, case.bundle, case.features, miner=miner, on_event=on_event, should_stop=should_stop)


@pytest.fixture
def job(case, tmp_path):
    return Job(case, tmp_path / "data")


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


def receipts(job: Job) -> list[Path]:
    return sorted((job.root / "build" / "receipts").iterdir())


def test_the_data_are_those_of_the_models(case, job):
    bundle, data = ModelBundle.load(case.bundle), TrainingData.open(case.data)
    texts = case.items.texts()
    np.testing.assert_allclose(data.text_embeddings, bundle.text.encode(texts), rtol=0, atol=1e-6)
    assert [data.caption(number).tolist() for number in range(len(texts))] == bundle.joint.tokenizer.caption_ids(texts)
    np.testing.assert_array_equal(
        data.image_mining, read_embeddings(CommittedIndex.open(case.features), case.items.rows)
    )
    assert data.text_mining.tobytes() == data.text_embeddings.tobytes()
    assert data.caption_starts.tolist() == list(range(0, 2 * IMAGES + 1, 2))
    assert data.rows.tolist() == case.items.rows.tolist()
    equal = {tuple(np.flatnonzero(data.caption_keys == key)) for key in data.caption_keys}
    assert (0, 2) in equal, "the captions 'A dog .' and 'a dog' have the same words"


@pytest.mark.parametrize("captions_per_shard", [7, 47])
def test_shards_do_not_change_the_data(case, job, monkeypatch, captions_per_shard):
    monkeypatch.setattr(caption_shards, "SHARD_CAPTIONS", captions_per_shard)
    job.run()
    check_equal(TrainingData.open(case.data), TrainingData.open(job.folder))
    assert [path.name for path in job.folder.parent.iterdir()] == ["data"]


def test_another_mining_model_has_its_own_embeddings(case, job):
    job.run(miner=case.bundle)
    check_equal(TrainingData.open(case.data), TrainingData.open(job.folder))
    assert (job.folder / "text_mining.npy").stat().st_nlink == 1


def test_a_stopped_preparation_resumes_after_its_finished_shards(case, job, monkeypatch):
    monkeypatch.setattr(caption_shards, "SHARD_CAPTIONS", 10)
    events, on_event, should_stop = stop_after(2)
    with pytest.raises(JobStopped, match=r"^stopped; 20 of 48 captions are kept, 2 of 5 shards are finished$"):
        job.run(on_event, should_stop)
    assert not job.folder.exists()
    written = [path.stat().st_mtime_ns for path in receipts(job)]
    events, on_event, should_stop = stop_after(4)
    with pytest.raises(JobStopped, match="4 of 5 shards are finished"):
        job.run(on_event, should_stop)
    assert [path.stat().st_mtime_ns for path in receipts(job)][:2] == written
    assert [event.finished_shard[0] for event in events if event.finished_shard] == [2, 3]
    events, on_event, _ = stop_after(6)
    job.run(on_event)
    assert (events[-1].activity, events[-1].done, events[-1].total) == ("preparing captions", 48, 48)
    assert {event.bottleneck for event in events} <= {"model", "write", None}
    check_equal(TrainingData.open(case.data), TrainingData.open(job.folder))


def test_a_damaged_shard_is_found_and_prepared_again(case, job, monkeypatch):
    monkeypatch.setattr(caption_shards, "SHARD_CAPTIONS", 10)
    _, on_event, should_stop = stop_after(2)
    with pytest.raises(JobStopped):
        job.run(on_event, should_stop)
    path = job.root / "shards" / "text_embeddings-00000001.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"\xaa")
    with pytest.raises(CorruptIndexError, match=r"text_embeddings-00000001.npy was damaged; train again"):
        job.run()
    job.run()
    check_equal(TrainingData.open(case.data), TrainingData.open(job.folder))


def test_a_full_disk_stops_the_preparation(job, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    monkeypatch.setattr(Path, "hardlink_to", full)
    with pytest.raises(JobStopped, match=f"^cannot write {job.folder}: No space left on device; finished shards are k"):
        job.run()
    monkeypatch.undo()
    job.run()
    assert job.folder.exists()
