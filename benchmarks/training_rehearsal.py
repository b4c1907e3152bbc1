"""Rehearses the preparation, sampling and mining of a large training set with synthetic pairs, and measures memory.

    python -m benchmarks.training_rehearsal --scratch DIR --pairs 2000000

Every stage runs in a process of its own. Like `train`, each process holds the captions that it has read. The images do
not exist: their embeddings are random. The text tower is tiny and has random weights, so the times say nothing about a
real tower.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from benchmarks.process_tree import measure_in_new_process

if TYPE_CHECKING:
    from edje_index.training.data.batches import BatchSource
    from pipelines.jobs.training.matching import MatchedCaptions

STAGES = ("reading and matching", "preparation", "sampling and mining")
_WORDS = ("a", "the", "red", "small", "old", "dog", "cat", "boy", "car", "house", "runs", "sits", "near", "on", "water")
_BATCHES = 200
_INDEX_SHARD = 65_536


@dataclass(frozen=True)
class Rehearsal:
    """The files of a rehearsal, in the directory `scratch`.

    Attributes:
        scratch: directory of the files.
        workers: number of worker processes that prepare captions. Two or more workers run on Ray.
    """

    scratch: Path
    workers: int = 1

    @property
    def model(self) -> Path:
        """Bundle with a tiny text tower."""
        return self.scratch / "model"

    @property
    def index(self) -> Path:
        """Index with random embeddings."""
        return self.scratch / "images.edje"

    @property
    def images(self) -> Path:
        """Empty directory of the images."""
        return self.scratch / "images"

    @property
    def captions(self) -> Path:
        """Caption file with one caption per image."""
        return self.scratch / "captions.jsonl"

    @property
    def data(self) -> Path:
        """Directory of the prepared data."""
        return self.scratch / "data"

    def write_inputs(self, pairs: int) -> None:
        """Write the model, the index and the caption file."""
        from benchmarks.synthetic import make_synthetic
        from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
        from storage_formats.format.layout import IndexSpec

        width = create_untrained_bundle(self.model, sizes=TINY).embed_dim
        self.images.mkdir()
        make_synthetic(self.index, IndexSpec(pairs, _INDEX_SHARD, (1, 8), width), uri_prefix=f"{self.images}/")
        rng = np.random.default_rng(0)
        with self.captions.open("w", encoding="utf-8") as file:
            for number in range(pairs):
                caption = f"{' '.join(rng.choice(_WORDS, 9))} {number}"
                file.write(json.dumps({"image": str(number), "captions": [caption]}) + "\n")

    def run(self, stage: str) -> dict[str, float]:
        """Run a stage in this process. Return its processor seconds, and the memory in bytes before the stage."""
        _import_everything()
        imported, started = psutil.Process().memory_full_info().pss, time.process_time()
        matched = self._read()
        if stage != STAGES[0]:
            started = time.process_time()
            self._prepare(matched) if stage == STAGES[1] else self._mine()
        return {"seconds": time.process_time() - started, "imported": imported}

    def _read(self) -> MatchedCaptions:
        from pipelines.jobs.training.captions import read_training_captions
        from pipelines.jobs.training.matching import match_captions
        from pipelines.jobs.training.request import TrainingInputs
        from storage_formats.format.manifest import CommittedIndex

        captions = read_training_captions(TrainingInputs(captions=(self.captions,), images=self.images))
        return match_captions(CommittedIndex.open(self.index), captions, lambda event: None)

    def _prepare(self, matched: MatchedCaptions) -> None:
        from pipelines.jobs.training.caption_shards import CaptionJob, prepare_captions
        from pipelines.jobs.training.matching import MiningModel
        from pipelines.jobs.training.request import RunSettings

        mining = MiningModel(None, matched.features, matched.captions.rows)
        run = RunSettings(out=self.scratch / "out", workers=self.workers, device="cpu", threads=1)
        prepare_captions(
            CaptionJob(self.data, matched.captions, self.model, mining), run, lambda event: None, lambda: False
        )

    def _mine(self) -> None:
        """Draw the pairs and negatives of the first batches of two epochs."""
        from edje_index.training.data.sampling import Sampler

        source = self._source()
        loop = source.config.loop
        sampler = Sampler(source.data, loop.batch_size, loop.seed)
        per_epoch = source.data.pairs("captions") // loop.batch_size
        for number in range(_BATCHES):
            batch = number % (_BATCHES // 2) + per_epoch * (2 * number // _BATCHES)
            source.negatives(batch, *sampler.pairs(batch))

    def _source(self) -> BatchSource:
        from edje_index.bundles.bundle import ModelBundle
        from edje_index.training.config import make_config
        from edje_index.training.data.batches import BatchSource
        from edje_index.training.data.dataset import TrainingData
        from edje_index.training.data.features import StoredFeatures
        from edje_index.training.data.token_rows import SpecialTokens
        from storage_formats.format.manifest import CommittedIndex

        config = make_config({"loop": {"steps": 1, "batch_size": 256}})
        special_tokens = SpecialTokens.of(ModelBundle.load(self.model).joint.tokenizer)
        features = StoredFeatures(CommittedIndex.open(self.index))
        return BatchSource(TrainingData.open(self.data), features, None, special_tokens, 1, 0.0, config)


def _import_everything() -> None:
    """Import the libraries of all stages, so that their memory is not counted."""
    for name in ("edje_index.training.data.batches", "edje_index.training.data.caption_shards", "pyarrow.parquet"):
        importlib.import_module(name)


def rehearse(rehearsal: Rehearsal, pairs: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Write the inputs. Then run each stage in a new process, and yield its name and its cost.

    The cost has the keys of `benchmarks.process_tree.Cost`. `stdout` is the result of `Rehearsal.run`.
    """
    rehearsal.write_inputs(pairs)
    for stage in STAGES:
        options = ["--scratch", os.fspath(rehearsal.scratch), "--workers", str(rehearsal.workers), "--stage", stage]
        yield stage, measure_in_new_process([sys.executable, "-m", "benchmarks.training_rehearsal", *options])


def main() -> None:
    """Run the rehearsal, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, required=True, help="Empty directory for the data.")
    parser.add_argument("--pairs", type=int, default=2_000_000, help="Number of images with one caption each.")
    parser.add_argument("--workers", type=int, default=1, help="Number of workers that prepare captions.")
    parser.add_argument("--stage", choices=STAGES, help="Run only this stage, in this process.")
    arguments = parser.parse_args()
    rehearsal = Rehearsal(arguments.scratch, arguments.workers)
    if arguments.stage:
        print(json.dumps(rehearsal.run(arguments.stage)))
        return
    print("| stage | processor seconds | memory after imports, GB | peak memory, GB |\n|---|---|---|---|")
    for stage, cost in rehearse(rehearsal, arguments.pairs):
        own = cost["stdout"]
        print(
            f"| {stage} | {own['seconds']:.0f} | {own['imported'] / 1e9:.2f} | {cost['peak_pss'] / 1e9:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
