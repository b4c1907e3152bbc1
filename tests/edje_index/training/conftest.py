"""A small training without images: random features, made-up captions, the tiny bundle's towers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.training.config import TrainConfig, make_config
from edje_index.training.data.batches import BatchSource
from edje_index.training.data.dataset import CaptionSet, TrainingData
from edje_index.training.data.features import StoredFeatures
from edje_index.training.data.token_rows import SpecialTokens
from edje_index.training.loop.feature_task import StoredTask
from edje_index.training.loop.schedule import total_steps
from edje_index.training.loop.task import Runtime, TrainTask
from edje_index.training.model.start_bundle import Origin, make_start
from pipelines.jobs.training.caption_shards import CaptionJob, prepare_captions
from pipelines.jobs.training.matching import MiningModel
from pipelines.jobs.training.request import RunSettings
from pipelines.progress.events import OnEvent, ShouldStop
from storage_formats.format.layout import IndexSpec
from storage_formats.format.manifest import CommittedIndex
from tests.conftest import write_random_index

IMAGES = 24
SETTINGS = {
    "architecture__tokens": 4,
    "architecture__adapter_hidden": 48,
    "loop__batch_size": 8,
    "negatives__count": 2,
    "loop__steps": 6,
    "optimizer__lr": 1e-3,
    "optimizer__warmup_steps": 2,
}
WORDS = ["dog", "cat", "red", "house", "water", "boy", "street", "snow", "ball"]


def captions(count: int = IMAGES) -> list[tuple[str, ...]]:
    """Two captions per image; images 0 and 1 share one."""
    rng = np.random.default_rng(3)
    made = [tuple(" ".join(rng.choice(WORDS, rng.integers(2, 7))) for _ in range(2)) for _ in range(count)]
    return [("A dog .", made[0][1]), ("a dog", made[1][1]), *made[2:]]


def prepare(
    job: CaptionJob, on_event: OnEvent = lambda _: None, should_stop: ShouldStop = lambda: False, workers: int = 1
) -> None:
    """Prepare captions on the CPU, with one thread per worker."""
    run = RunSettings(out=job.folder.with_name("out"), workers=workers, device="cpu", threads=1)
    prepare_captions(job, run, on_event, should_stop)


@dataclass(frozen=True)
class Case:
    """Everything on disk that training opens."""

    folder: Path
    bundle: Path
    features: Path
    data: Path

    def config(self, **settings: object) -> TrainConfig:
        """Small settings with changes, each named `group__key`."""
        values: dict[str, dict[str, object]] = {}
        for name, value in {**SETTINGS, **settings}.items():
            group, _, key = name.partition("__")
            values.setdefault(group, {})[key] = value
        return make_config(values)

    def task(self, run_dir: Path, runtime: dict[str, object] | None = None, **settings: object) -> TrainTask:
        """A task whose start is made anew from the tiny bundle."""
        config = self.config(**settings)
        start = run_dir / "start"
        if not start.exists():
            make_start(Origin(self.bundle), config.architecture, config.loop.seed).save(start)
        options = {"run_dir": run_dir, "device": "cpu", "checkpoint_every": 2, "log_every": 1, **(runtime or {})}
        features = StoredTask(CommittedIndex.open(self.features))
        steps = total_steps(config.loop, TrainingData.open(self.data).pairs(config.loop.epoch_of))
        return TrainTask(config, Runtime(**options), "run", start, features, self.data, temperature=0.1, steps=steps)

    def source(self, rank: int = 0, world: int = 1, **settings: object) -> BatchSource:
        bundle = ModelBundle.load(self.bundle)
        data, features = TrainingData.open(self.data), StoredFeatures(CommittedIndex.open(self.features))
        special_tokens = SpecialTokens.of(bundle.joint.tokenizer)
        return BatchSource(data, features, None, special_tokens, 4, 0.1, self.config(**settings), rank, world)


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """The models are so small that handing work between threads would be most of it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory, tiny_bundle: Path) -> Case:
    folder = tmp_path_factory.mktemp("training")
    features = folder / "features.edje"
    write_random_index(features, IndexSpec(IMAGES + 3, 8, (16, 32), embed_dim=24))
    items = CaptionSet(np.arange(IMAGES) + 2, captions())
    mining = MiningModel(None, CommittedIndex.open(features), items.rows)
    prepare(CaptionJob(folder / "data", items, tiny_bundle, mining))
    return Case(folder, tiny_bundle, features, folder / "data")
