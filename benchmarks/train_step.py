"""Compares a step of the training loop with the forward and backward passes of the model.

The difference is the cost of data loading, optimiser and logging. Three variants alternate in one process:

    step        the training loop: prefetched batches, forward and backward pass, clipping, AdamW, logging
    objective   forward and backward pass of adapter and joint encoder on one prepared batch
    joint       forward and backward pass of the joint encoder alone on one prepared batch
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.synthetic import make_synthetic
from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.random_bundle import UntrainedSizes, create_untrained_bundle
from edje_index.models.adapter import AdapterConfig, build_adapter
from edje_index.models.devices import autocast, resolve_dtype
from edje_index.training.config import TrainConfig, make_config
from edje_index.training.data.batches import BatchSource, JointBatch
from edje_index.training.data.dataset import TrainingData
from edje_index.training.data.features import StoredFeatures
from edje_index.training.data.token_rows import SpecialTokens
from edje_index.training.loop.distributed import WorkerGroup
from edje_index.training.loop.feature_task import StoredTask
from edje_index.training.loop.schedule import total_steps
from edje_index.training.loop.task import Runtime, TrainTask
from edje_index.training.loop.train_worker import run_worker
from edje_index.training.model.objectives import TOTAL, JointObjective
from edje_index.training.model.start_bundle import Origin, make_start, make_trainable
from pipelines.environment import environment
from storage_formats.format.layout import IndexSpec
from storage_formats.format.manifest import CommittedIndex

_FEATURES = "features.edje"
_CAPTION_WORDS = (8, 17)  # words per caption: the range of nine in ten captions of Flickr8k
_SIZES = UntrainedSizes(patch_size=14)  # 256 patches of width 384, a MiniLM-L6 of 16,000 words


@dataclass(frozen=True)
class TrainStepCase:
    """Settings of `bench_train_step`.

    Attributes:
        images: number of images in the index.
        batch_size: number of caption-image pairs per step.
        negatives: number of hard negatives per pair.
        dropout: dropout of the language model.
        dtype: data type of matrix products: "float32" or "bfloat16".
        threads: number of torch CPU threads.
        windows: number of timed runs of each variant.
        steps: number of training steps per timed run.
        sizes: layer sizes of the model.
    """

    images: int
    batch_size: int
    negatives: int
    dropout: float
    dtype: str
    threads: int
    windows: int
    steps: int
    sizes: UntrainedSizes = _SIZES


def bench_train_step(folder: Path, case: TrainStepCase) -> dict[str, Any]:
    """Measure each variant. Return seconds per step, medians, and the ratio of each other variant to `step`."""
    config = make_config(
        {
            "architecture": {
                "tokens": case.sizes.tokens,
                "adapter_hidden": case.sizes.adapter_hidden,
                "dropout": case.dropout,
                "attention_dropout": case.dropout,
            },
            "negatives": {"count": case.negatives},
            "loop": {"batch_size": case.batch_size, "dtype": case.dtype, "steps": (case.windows + 1) * case.steps},
        }
    )
    task = _make_task(folder, case, config)
    seconds: dict[str, list[float]] = {"step": [], "objective": [], "joint": []}
    waited: list[float] = []
    torch.set_num_threads(case.threads)
    ready = _ready_subjects(folder, task)

    def measure(record: dict[str, Any]) -> None:
        for name, run in ready.items():
            started = time.perf_counter()
            for _ in range(case.steps):
                run()
            seconds[name].append((time.perf_counter() - started) / case.steps)
        seconds["step"].append(record["step_seconds"])
        waited.append(record["data_wait"] / record["seconds"])

    run_worker(task, WorkerGroup(), lambda: False, measure)
    kept = {name: values[1:] for name, values in seconds.items()}
    median = {name: statistics.median(values) for name, values in kept.items()}
    return {
        "environment": environment(),
        "case": {name: value for name, value in vars(case).items() if name != "sizes"} | {"sizes": vars(case.sizes)},
        "seconds": kept,
        "median": median,
        "ratios": {f"{name} / step": median[name] / median["step"] for name in ready},
        "waiting_for_data": statistics.median(waited[1:]),
    }


def _make_task(folder: Path, case: TrainStepCase, config: TrainConfig) -> TrainTask:
    """Make a training task with random data, in the formats of a real training run."""
    folder.mkdir(parents=True)
    create_untrained_bundle(folder / "model", sizes=case.sizes)
    start = make_start(Origin(folder / "model"), config.architecture, config.loop.seed)
    start.save(folder / "start")
    vision = start.vision
    spec = IndexSpec(case.images, 256, (vision.num_patches, vision.patch_dim), embed_dim=start.embed_dim)
    make_synthetic(folder / _FEATURES, spec)
    _random_data(case.images, start).save(folder / "data")
    runtime = Runtime(folder, device="cpu", threads=case.threads, checkpoint_every=10**9, log_every=case.steps)
    features = StoredTask(CommittedIndex.open(folder / _FEATURES))
    steps = total_steps(config.loop, case.images)
    data = folder / "data"
    return TrainTask(config, runtime, "bench", folder / "start", features, data, temperature=0.05, steps=steps)


def _random_data(images: int, start: ModelBundle) -> TrainingData:
    rng = np.random.default_rng(0)
    lengths = rng.integers(*_CAPTION_WORDS, images)
    embeddings = rng.standard_normal((2, images, start.embed_dim), dtype=np.float32)
    embeddings /= np.linalg.norm(embeddings, axis=2, keepdims=True)
    return TrainingData(
        rows=np.arange(images),
        caption_starts=np.arange(images + 1),
        token_starts=np.concatenate([[0], np.cumsum(lengths)]),
        tokens=rng.integers(200, start.joint.config.vocab_size - 1, lengths.sum()).astype(np.int32),
        caption_keys=np.arange(images),
        text_embeddings=embeddings[0],
        image_mining=embeddings[1],
        text_mining=embeddings[0],
    )


def _ready_subjects(folder: Path, task: TrainTask) -> dict[str, Callable[[], None]]:
    """Return the variants `objective` and `joint`. Each variant runs a forward and a backward pass on one batch."""
    bundle = ModelBundle.load(task.start, verify=False)
    adapter = bundle.adapter
    make_trainable(bundle, task.config.architecture, torch.device("cpu"))
    special_tokens, tokens = SpecialTokens.of(bundle.joint.tokenizer), adapter.config.num_tokens
    features = StoredFeatures(CommittedIndex.open(folder / _FEATURES))
    source = BatchSource(
        TrainingData.open(task.data),
        features,
        None,
        special_tokens,
        tokens,
        0.05,
        task.config,
    )
    batch = source.joint(0)
    width = bundle.joint.width
    with torch.no_grad():
        stored = replace(batch, patches=adapter(batch.patches.float()))
    through = build_adapter(AdapterConfig("patches", tokens, width, width, hidden_dim=0))
    objective, augmentation = task.config.objective, task.config.augmentation
    dtype = resolve_dtype(task.config.loop.dtype, torch.device("cpu"))
    whole = JointObjective(adapter, bundle.joint, objective, augmentation).train()
    joint = JointObjective(through, bundle.joint, objective, augmentation).train()
    return {
        "objective": _forward_and_backward(whole, batch, dtype),
        "joint": _forward_and_backward(joint, stored, dtype),
    }


def _forward_and_backward(objective: JointObjective, batch: JointBatch, dtype: torch.dtype) -> Callable[[], None]:
    def run() -> None:
        with autocast(dtype, torch.device("cpu")):
            losses = objective(batch)
        losses[TOTAL].backward()
        objective.zero_grad(set_to_none=True)

    return run
