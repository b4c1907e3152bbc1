"""Tells the workers of a training run where to get features from. Tasks can be sent to other processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from storage_formats.cpus import usable_cpus
from storage_formats.format.manifest import CommittedIndex

if TYPE_CHECKING:
    import torch

    from edje_index.bundles.bundle import ModelBundle
    from edje_index.training.data.batches import ViewSource
    from edje_index.training.data.dataset import TrainingData
    from edje_index.training.data.features import Features
    from edje_index.training.loop.task import TrainTask

_MAX_DECODE_THREADS = 16


@dataclass(frozen=True)
class FeatureReader:
    """The worker that opens a `FeatureTask`.

    Attributes:
        task: task of the training run.
        start: bundle with the initial weights.
        data: images and captions to train on.
        rank: rank of the worker.
        device: device of the worker.
    """

    task: TrainTask
    start: ModelBundle
    data: TrainingData
    rank: int
    device: torch.device


class FeatureTask(ABC):
    """Base class of tasks that tell a worker where to get features from."""

    @abstractmethod
    def open(self, reader: FeatureReader) -> tuple[Features, ViewSource | None]:
        """Return the features of the images, and the features of their augmented views.

        The second value is None without views.

        Raises:
            EdjeError: a file cannot be used.
        """


@dataclass(frozen=True)
class ViewTask:
    """Features of augmented views.

    Attributes:
        index: index of the features of all views.
        rows: NumPy file with the rows in `index` of each training image's views, int64 [n, views]; -1 for a missing
            view.
    """

    index: CommittedIndex
    rows: Path


@dataclass(frozen=True)
class StoredTask(FeatureTask):
    """Features that indexes store.

    Attributes:
        index: index of the features that the adapter is trained on.
        views: augmented views; None without views.
    """

    index: CommittedIndex
    views: ViewTask | None = None

    def open(self, reader: FeatureReader) -> tuple[Features, ViewSource | None]:
        """See `FeatureTask.open`."""
        import numpy as np

        from edje_index.training.data.batches import ViewSource
        from edje_index.training.data.features import StoredFeatures

        adapter = reader.start.adapter.config
        features = StoredFeatures(self.index, adapter)
        if self.views is None:
            return features, None
        return features, ViewSource(StoredFeatures(self.views.index, adapter), np.load(self.views.rows))


@dataclass(frozen=True)
class OnlineTask(FeatureTask):
    """Features that the vision tower computes in the training steps.

    Attributes:
        index: index of the images. Only its embeddings are read.
        inputs: file of an `edje_index.images.input_table.InputTable` with the image of each row.
        truncated: what to do with truncated images, see `edje_index.images.decoded_input`.
    """

    index: CommittedIndex
    inputs: Path
    truncated: str

    def open(self, reader: FeatureReader) -> tuple[Features, ViewSource | None]:
        """See `FeatureTask.open`."""
        import numpy as np

        from edje_index.images.decoded_input import DecodeSettings
        from edje_index.images.input_table import InputTable
        from edje_index.training.data.batches import ViewSource
        from edje_index.training.data.crops import Crops
        from edje_index.training.data.online import ImageLoader, OnlineFeatures, frozen_encoder
        from edje_index.training.data.unreadable import UnreadableImages

        config, runtime = reader.task.config, reader.task.runtime
        encoder = frozen_encoder(reader.start, reader.device, config.loop.dtype)
        pool = ThreadPoolExecutor(_decode_threads(reader), "edje-decode")
        unreadable = UnreadableImages(runtime.run_dir, reader.rank)
        images = ImageLoader(
            InputTable(self.inputs), encoder, DecodeSettings(truncated=self.truncated), unreadable, pool
        )
        features = OnlineFeatures(self.index, images, encoder, compile=runtime.compile)
        views = config.augmentation.views
        if not views:
            return features, None
        crops = Crops(views, encoder.vision.image_size, config.loop.seed)
        cropped = OnlineFeatures(self.index, images, encoder, crops, compile=runtime.compile)
        return features, ViewSource(cropped, reader.data.rows[:, None] * views + np.arange(views))


def _decode_threads(reader: FeatureReader) -> int:
    """Return the number of threads that decode images, at most 16.

    On a CPU, this is the number of threads of the model. On a GPU, the workers share the CPUs of the machine equally.
    """
    runtime = reader.task.runtime
    threads = runtime.threads if reader.device.type == "cpu" else usable_cpus() // runtime.workers
    return min(max(1, threads or usable_cpus()), _MAX_DECODE_THREADS)
