"""A small training without images: random features, made-up captions, the tiny
bundle's towers.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.training.batches import BatchSource
from edje_index.training.config import validated
from edje_index.training.dataset import (
    TrainingData,
    prepare_captions,
    read_captioned_rows,
)
from edje_index.training.loop import TrainTask
from edje_index.training.start import make_start
from edje_index.training.workers import ALONE, WorkerGroup
from pipelines.jobs.snapshots import set_columns
from storage_formats.errors import TaskInterrupted
from storage_formats.format.layout import IndexSpec
from storage_formats.format.manifest import CommittedIndex
from tests.conftest import write_random_index

IMAGES = 24
SETTINGS = {
    "inputs__index": "data.edje",
    "run__out": "out",
    "run__device": "cpu",
    "run__checkpoint_every": 2,
    "run__log_every": 1,
    "architecture__tokens": 4,
    "architecture__adapter_hidden": 48,
    "loop__batch_size": 8,
    "negatives__count": 2,
    "loop__steps": 6,
    "optimizer__lr": 1e-3,
    "optimizer__warmup_steps": 2,
}
WORDS = ["dog", "cat", "red", "house", "water", "boy", "street", "snow", "ball"]


def captions(count=IMAGES):
    """Two captions per image; images 0 and 1 share one."""
    rng = np.random.default_rng(3)
    made = [
        tuple(" ".join(rng.choice(WORDS, rng.integers(2, 7))) for _ in range(2))
        for _ in range(count)
    ]
    return [("A dog .", made[0][1]), ("a dog", made[1][1]), *made[2:]]


@dataclass(frozen=True)
class Case:
    """Everything on disk that training opens."""

    folder: Path
    bundle: Path
    data: TrainingData

    def texts(self):
        return [text for each in self.data.captions(0, IMAGES) for text in each]

    def config(self, **settings):
        """Small settings with changes, each named `group__key`."""
        values = {}
        for name, value in {**SETTINGS, **settings}.items():
            group, _, key = name.partition("__")
            values.setdefault(group, {})[key] = value
        return validated(values)

    def task(self, run_dir, *, dev=False, **settings):
        """A task whose start is made anew from the tiny bundle. The dev captions
        are the training captions.
        """
        config = self.config(
            run__dir=run_dir, inputs__dev="data.edje" if dev else None, **settings
        )
        start = run_dir / "start"
        if not start.exists():
            make_start(config.architecture, config.loop.seed, self.bundle).save(start)
        dev_data = self.data if dev else None
        return TrainTask(config, "run", start, self.data, dev_data)

    def source(self, rank=0, world=1, **settings):
        bundle = ModelBundle.load(self.bundle)
        return BatchSource(
            self.data,
            bundle.joint.tokenizer,
            4,
            self.config(**settings),
            WorkerGroup(rank, world),
        )


def prepare(
    path,
    case,
    *,
    miner=None,
    group=ALONE,
    should_stop=lambda: False,
    on_shard=lambda done, shards: None,
):
    """Prepare the captions of `case` on the CPU."""
    device = torch.device("cpu")
    data = replace(case.data, path=path, miner=miner)
    try:
        prepare_captions(data, case.bundle, device, group, should_stop, on_shard)
    except TaskInterrupted:
        return False
    return True


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """The models are so small that handing work between threads would be most of it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def captioned_index(
    root,
    captions,
    *,
    failed=frozenset(),
    duplicates=frozenset(),
    **columns,
):
    """An index of random features, of which the first two rows have no captions."""
    spec = IndexSpec(len(captions) + 2, 8, (16, 32), 24)
    write_random_index(root, spec, failed=failed, duplicates=duplicates)
    values = {"captions": [*map(list, captions)], **columns}
    set_columns(root, np.arange(2, spec.rows), values)
    return CommittedIndex.open(root)


@pytest.fixture(scope="session")
def case(tmp_path_factory, tiny_bundle):
    folder = tmp_path_factory.mktemp("training")
    index = captioned_index(folder / "data.edje", captions())
    data, *_ = read_captioned_rows(index, folder / "train.npy")
    made = Case(folder, tiny_bundle, data)
    assert prepare(folder / "train.npy", made)
    return made
