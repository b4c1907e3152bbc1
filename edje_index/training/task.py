"""The task of a train worker, and what the worker opens for it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from edje_index.bundles.bundle import ModelBundle
from edje_index.images.input_lists import InputTable
from edje_index.images.preprocessing import Preprocessor
from edje_index.indexing.image_encoder import ImageEncoder
from edje_index.models.adapter import build_adapter
from edje_index.models.devices import resolve_device, resolve_dtype
from edje_index.training.batches import BatchSource, SpecialTokens, TrainingData
from edje_index.training.captions import CaptionSet
from edje_index.training.config import TrainSettings
from edje_index.training.features import (
    Crops,
    Features,
    OnlineFeatures,
    StoredFeatures,
    UnreadableImages,
    ViewSource,
)
from edje_index.training.start import trained_part
from edje_index.training.step import Teacher
from storage_formats.cpus import usable_cpus
from storage_formats.format.manifest import CommittedIndex

_MAX_DECODE_THREADS = 16


@dataclass(frozen=True)
class TrainTask:
    """Everything that a train worker needs. Other processes can receive a task, because it contains only plain values.

    Attributes:
        config: settings of the training run.
        run: fingerprint of the settings, data and initial weights of the training run.
        start: path of the bundle with the initial weights.
        features: index of the features that the adapter is trained on. For online features, only its embeddings are
            read.
        data: folder of the `TrainingData`.
        temperature: temperature of the softmax that draws negatives; 0 selects the most similar candidates.
        steps: number of optimiser steps of the joint phase.
        new_adapter: True if the adapter in `start` has random weights.
        inputs: file of an `edje_index.images.input_table.InputTable` with the image of each row, for online features;
            None for stored features.
        views: index of the stored features of augmented views, and the row of each view of each training image, int64
            [n, views], -1 for a missing view; None without stored views.
        teacher: path of the bundle of the teacher; None without distillation.
        teacher_tokens: index of the teacher's tokens, and the row of each training image, int64 [n]. None if the
            teacher's adapter reads the features of the batch.
        dev: dev captions, and the folder of their `TrainingData`; None without dev captions.
    """

    config: TrainSettings
    run: str
    start: Path
    features: CommittedIndex
    data: Path
    temperature: float
    steps: int
    new_adapter: bool = True
    inputs: Path | None = None
    views: tuple[CommittedIndex, NDArray[np.int64]] | None = None
    teacher: Path | None = None
    teacher_tokens: tuple[CommittedIndex, NDArray[np.int64]] | None = None
    dev: tuple[CaptionSet, Path] | None = None


@dataclass(frozen=True)
class WorkerGroup:
    """The rank of this worker, and operations that involve all workers of a training run.

    All workers must call these methods in the same order.

    Attributes:
        rank: rank of this worker, counted from 0. Worker 0 writes the checkpoints and the log.
        size: number of workers.
        on_machine: number of workers on the machine of this worker.
    """

    rank: int = 0
    size: int = 1
    on_machine: int = 1

    def wrap(self, module: nn.Module, device: torch.device) -> nn.Module:
        """Wrap `module` so that gradients are averaged over the workers."""
        if self.size == 1:
            return module
        return DistributedDataParallel(module, device_ids=[device] if device.type == "cuda" else None)

    def any(self, flag: bool, device: torch.device) -> bool:
        """Return True if `flag` is True on at least one worker."""
        if self.size == 1:
            return flag
        value = torch.tensor(int(flag), device=device)
        distributed.all_reduce(value, distributed.ReduceOp.MAX)
        return bool(value.item())

    def mean(self, values: dict[str, torch.Tensor]) -> dict[str, float]:
        """Average each scalar in `values` over the workers."""
        stacked = torch.stack([value.detach().float() for value in values.values()])
        if self.size > 1:
            distributed.all_reduce(stacked)
            stacked /= self.size
        return dict(zip(values, stacked.tolist(), strict=True))

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of all workers, in rank order. Gradients flow back to the worker that the rows come from.

        All workers have the same number of rows.
        """
        gathered: torch.Tensor = rows if self.size == 1 else _Gather.apply(rows, self)  # type: ignore[no-untyped-call]
        return gathered

    def barrier(self) -> None:
        """Wait until all workers call this method."""
        if self.size > 1:
            distributed.barrier()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: WorkerGroup) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(rows) for _ in range(group.size)]
        distributed.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.clone()
        distributed.all_reduce(total)
        return total.chunk(ctx.group.size)[ctx.group.rank], None


@dataclass(frozen=True)
class OpenedTask:
    """The open files of a training task.

    Attributes:
        start: bundle with the initial weights.
        device: device to train on.
        source: makes the batches.
        teacher: the teacher, on `device`; None without distillation.
    """

    start: ModelBundle
    device: torch.device
    source: BatchSource
    teacher: Teacher | None


def open_task(task: TrainTask, group: WorkerGroup) -> OpenedTask:
    """Open the files of `task`. `group` describes the worker that uses the files.

    Raises:
        EdjeError: the device or a file cannot be used.
    """
    config = task.config
    device = resolve_device(config.run.device)
    start = ModelBundle.load(task.start, verify=False)
    adapter = start.adapter.config
    data = TrainingData.open(task.data)
    features: Features
    views: ViewSource | None = None
    if task.inputs is None:
        features = StoredFeatures(task.features, adapter)
        if task.views is not None:
            views = ViewSource(StoredFeatures(task.views[0], adapter), task.views[1])
    else:
        assert start.info is not None
        vision = start.vision.to(device)
        frozen = build_adapter(adapter.features(vision.num_patches)).to(device)
        dtype = resolve_dtype(config.loop.dtype, device)
        encoder = ImageEncoder(start.info, vision, frozen, Preprocessor(start.clip_config), dtype)
        # On a CPU, as many threads as the model has. On a GPU, the workers of a machine share its CPUs equally.
        threads = config.run.threads if device.type == "cpu" else usable_cpus() // group.on_machine
        pool = ThreadPoolExecutor(min(max(1, threads or usable_cpus()), _MAX_DECODE_THREADS), "edje-decode")
        images = InputTable(task.inputs), encoder, UnreadableImages(config.run.folder, group.rank), pool
        features = OnlineFeatures(task.features, *images, compile=config.run.compile)
        if count := config.augmentation.views:
            crops = Crops(count, vision.image_size, config.loop.seed)
            cropped = OnlineFeatures(task.features, *images, crops, compile=config.run.compile)
            views = ViewSource(cropped, data.rows[:, None] * count + np.arange(count))
    teacher, teacher_size, teacher_tokens = None, 0, None
    if task.teacher is not None:
        bundle = ModelBundle.load(task.teacher, verify=False)
        teacher_size = bundle.block_shape[0]
        if task.teacher_tokens is not None:
            teacher_tokens = StoredFeatures(task.teacher_tokens[0]), task.teacher_tokens[1]
        teacher = Teacher(bundle.joint, None if teacher_tokens else trained_part(bundle.adapter), device)
    source = BatchSource(
        data=data,
        features=features,
        special_tokens=SpecialTokens.of(start.joint.tokenizer),
        image_tokens=min(config.augmentation.step_tokens or adapter.num_tokens, adapter.num_tokens),
        temperature=task.temperature,
        config=config,
        rank=group.rank,
        world_size=group.size,
        views=views,
        teacher_tokens=teacher_size,
        teacher=teacher_tokens,
    )
    return OpenedTask(start, device, source, teacher)
