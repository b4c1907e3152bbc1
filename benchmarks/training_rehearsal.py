"""Rehearses the preparation, sampling and mining of a large training set with synthetic pairs, and measures memory.

    python -m benchmarks.training_rehearsal --scratch DIR --pairs 2000000

The text tower is tiny and has random weights, so the times say nothing about a real tower.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks.synthetic import make_synthetic
from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
from edje_index.training.config import make_config
from edje_index.training.data.batches import BatchSource
from edje_index.training.data.dataset import CaptionSet, TrainingData
from edje_index.training.data.features import StoredFeatures
from edje_index.training.data.preparation import CaptionModels, Miner, prepare_data
from edje_index.training.data.sampling import Sampler
from edje_index.training.data.token_rows import SpecialTokens
from storage_formats.format.layout import IndexSpec
from storage_formats.format.manifest import CommittedIndex

_WORDS = np.array(
    [
        "a",
        "the",
        "red",
        "small",
        "old",
        "dog",
        "cat",
        "boy",
        "woman",
        "car",
        "street",
        "house",
        "runs",
        "sits",
        "near",
        "on",
        "with",
        "water",
    ]
)
_BATCHES = 200


def rehearse(scratch: Path, pairs: int) -> Iterator[tuple[str, float, float]]:
    """Yield the name of each stage, its seconds, and the peak of resident memory so far in GB."""
    model, index, data = scratch / "model", scratch / "index.edje", scratch / "data"
    create_untrained_bundle(model, sizes=TINY)
    bundle = ModelBundle.load(model)
    yield _measured("index", lambda: make_synthetic(index, IndexSpec(pairs, 65_536, (1, 8), bundle.embed_dim)))
    features = CommittedIndex.open(index)
    items = CaptionSet(np.arange(pairs), [(caption,) for caption in _captions(pairs)])
    models = CaptionModels(bundle.joint.tokenizer, bundle.text, Miner(bundle.text, features, items.rows))
    yield _measured("preparation", lambda: prepare_data(data, items, models))
    config = make_config({"loop": {"steps": 1, "batch_size": 256}})
    special_tokens = SpecialTokens.of(bundle.joint.tokenizer)
    source = BatchSource(TrainingData.open(data), StoredFeatures(features), None, special_tokens, 1, 0.0, config)
    yield _measured("sampling and mining", lambda: _mine(source))


def _captions(count: int) -> Iterator[str]:
    rng = np.random.default_rng(0)
    for number in range(count):
        yield f"{' '.join(rng.choice(_WORDS, 9))} {number}"


def _mine(source: BatchSource) -> None:
    """Draw the pairs and negatives of the first batches of several epochs."""
    loop = source.config.loop
    sampler = Sampler(source.data, loop.batch_size, loop.seed)
    per_epoch = source.data.pairs("captions") // loop.batch_size
    for number in range(_BATCHES):
        batch = number % (_BATCHES // 2) + per_epoch * (2 * number // _BATCHES)
        source.negatives(batch, *sampler.pairs(batch))


def _measured(stage: str, run: Callable[[], object]) -> tuple[str, float, float]:
    started = time.process_time()
    run()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return stage, time.process_time() - started, peak


def main() -> None:
    """Run the rehearsal, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, required=True, help="Empty directory for the data.")
    parser.add_argument("--pairs", type=int, default=2_000_000, help="Number of images with one caption each.")
    arguments = parser.parse_args()
    print("| stage | processor seconds | peak memory, GB |\n|---|---|---|")
    for stage, seconds, peak in rehearse(arguments.scratch, arguments.pairs):
        print(f"| {stage} | {seconds:.0f} | {peak:.2f} |", flush=True)


if __name__ == "__main__":
    main()
