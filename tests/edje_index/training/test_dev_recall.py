"""Dev recall during a training, and the checkpoints that are kept for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.errors import ModelError
from edje_index.training.data.dataset import CaptionSet, DevCaptions
from edje_index.training.data.features import StoredFeatures
from edje_index.training.fitting.trained_bundle import trained_bundle
from edje_index.training.loop.checkpoint import Checkpoints
from edje_index.training.loop.dev_recall import DEV, best_steps
from edje_index.training.loop.distributed import WorkerGroup
from edje_index.training.loop.log import read_log
from edje_index.training.loop.task import TrainTask
from edje_index.training.loop.train_worker import run_worker
from edje_index.training.loop.training_loop import TrainingStopped
from storage_formats.format.manifest import CommittedIndex
from storage_formats.reading.embeddings import read_embeddings
from tests.edje_index.training.conftest import IMAGES, captions

POOL = 12
SETTINGS = {
    "loop__steps": 12, "optimizer__lr": 3e-3, "optimizer__warmup_steps": 0, "fitting__dev_pool": POOL,
    "objective__mlm_weight": 0.0, "objective__recovery_weight": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def dev(case) -> DevCaptions:
    items = CaptionSet(np.arange(IMAGES) + 2, captions())
    return DevCaptions(items, read_embeddings(CommittedIndex.open(case.features), items.rows))


def task(case, dev, run_dir: Path, **runtime: object) -> TrainTask:
    options = {"checkpoint_every": 5, **runtime}
    return replace(case.task(run_dir, options, **SETTINGS), dev=dev)


def evaluations(run_dir: Path) -> dict[int, dict[str, float]]:
    return {record["step"]: record for record in read_log(run_dir) if record["phase"] == DEV}


def plain_recalls(case, dev: DevCaptions, bundle: ModelBundle) -> dict[str, float]:
    """R@1 by the logit in pools of the nearest by embedding, one query at a time."""
    bundle.joint.eval()
    features = StoredFeatures(CommittedIndex.open(case.features))
    with torch.inference_mode():
        blocks = bundle.adapter(features.fetch(dev.captions.rows).float()).bfloat16()
    owners = [image for image, group in enumerate(dev.captions.captions) for _ in group]
    texts = dev.captions.texts()
    similarities = bundle.text.encode(texts) @ dev.image_embeddings.T
    t2i = []
    for caption, text in enumerate(texts):
        pool = np.argsort(-similarities[caption], kind="stable")[:POOL]
        best = pool[int(bundle.joint.score(text, blocks[torch.from_numpy(pool)]).argmax())]
        t2i.append(best == owners[caption])
    i2t = []
    for image in range(IMAGES):
        pool = np.argsort(-similarities[:, image], kind="stable")[:POOL]
        scores = bundle.joint.score([texts[at] for at in pool], blocks[image].expand(POOL, -1, -1))
        i2t.append(owners[pool[int(scores.argmax())]] == image)
    return {"t2i": float(np.mean(t2i)), "i2t": float(np.mean(i2t))}


@pytest.fixture(scope="module")
def everything(case, dev, tmp_path_factory) -> TrainTask:
    """A training that was evaluated every two steps and kept every checkpoint."""
    made = task(case, dev, tmp_path_factory.mktemp("all"), evaluate_every=2, keep_all=True)
    run_worker(made, WorkerGroup(), lambda: False)
    return made


def test_recalls_are_those_of_the_checkpoint(case, dev, everything):
    records = evaluations(everything.runtime.run_dir)
    assert list(records) == [2, 4, 6, 8, 10, 12]
    for step in (2, 6, 12):
        bundle, steps = trained_bundle(everything, ModelBundle.load(everything.start), step)
        assert steps == step
        expected = plain_recalls(case, dev, bundle)
        assert {name: records[step][name] for name in expected} == pytest.approx(expected)
        assert records[step]["recall"] == pytest.approx(sum(expected.values()) / 2)
    assert len({record["recall"] for record in records.values()}) > 1, "the training changes nothing"


def test_all_checkpoints_are_kept(everything):
    names = [path.name for path in Checkpoints(everything.runtime.run_dir, "run").paths()]
    assert names == [f"00-{step:09d}.pt" for step in (2, 4, 5, 6, 8, 10, 12)]


def test_evaluations_do_not_change_what_is_trained(case, dev, everything, tmp_path):
    never = task(case, dev, tmp_path, evaluate_every=0)
    run_worker(never, WorkerGroup(), lambda: False)
    assert not evaluations(tmp_path)
    assert len(Checkpoints(tmp_path, "run").paths()) == 2
    states = [Checkpoints(folder, "run").latest().weights for folder in (tmp_path, everything.runtime.run_dir)]
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())


def test_the_best_are_kept_also_after_a_stop(case, dev, everything, tmp_path):
    made = task(case, dev, tmp_path, evaluate_every=2, keep_best=2)
    calls = iter([False] * 6 + [True] + [False] * 20)
    with pytest.raises(TrainingStopped):
        run_worker(made, WorkerGroup(), lambda: next(calls))
    run_worker(made, WorkerGroup(), lambda: False)
    records = evaluations(tmp_path)
    assert {step: record["recall"] for step, record in records.items()} == {
        step: record["recall"] for step, record in evaluations(everything.runtime.run_dir).items()
    }
    best = sorted(records, key=lambda step: (records[step]["recall"], step))[-2:]
    steps = {int(path.stem.partition("-")[2]) for path in Checkpoints(tmp_path, "run").paths()}
    assert set(best) <= steps
    assert steps <= {*best, 10, 12}
    with pytest.raises(ModelError, match="has no checkpoint of step 3; choose one of"):
        trained_bundle(made, ModelBundle.load(made.start), 3)


def test_the_default_is_every_epoch(case, dev, tmp_path):
    """48 captions in batches of 8: six steps."""
    run_worker(task(case, dev, tmp_path), WorkerGroup(), lambda: False)
    assert list(evaluations(tmp_path)) == [6, 12]


def test_the_later_of_equal_evaluations_is_better():
    records = [
        {"phase": DEV, "stage": 1, "step": step, "recall": recall} for step, recall in ((1, 0.5), (2, 0.5), (3, 0.1))
    ]
    assert best_steps([{"phase": "joint", "stage": 1, "step": 9}, *records], 1) == {(1, 2)}
