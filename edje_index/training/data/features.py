"""Patch features of images, made by the frozen vision tower: stored in an index, or computed in the training steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from edje_index.models.adapter import PATCH_REDUCTIONS, Adapter, AdapterConfig, build_adapter
from edje_index.models.devices import as_tensor
from storage_formats.errors import CorruptIndexError
from storage_formats.format.manifest import CommittedIndex
from storage_formats.reading.embeddings import read_embeddings
from storage_formats.token_store import TokenStore


@dataclass(frozen=True)
class Loaded:
    """Result of `Features.load` for k images.

    Attributes:
        values: input of `Features.finish` [k, ...], on the CPU. An image that cannot be read has the values of a blank
            image.
        readable: which images could be read, bool [k].
    """

    values: torch.Tensor
    readable: NDArray[np.bool_]


class Features(ABC):
    """Patch features and embeddings of the images of an index.

    The thread that makes batches calls `load`, which uses the CPU. The training step calls `finish`, which uses the
    device.
    """

    def __init__(self, index: CommittedIndex) -> None:
        self.index = index

    @abstractmethod
    def load(self, rows: NDArray[np.int64]) -> Loaded:
        """Read the k `rows` on the CPU. Return the input of `finish`."""

    @abstractmethod
    def finish(self, values: torch.Tensor) -> torch.Tensor:
        """Return the features, bfloat16 [k, n, d], for the `values` of a `Loaded`."""

    @abstractmethod
    def fetch(self, rows: NDArray[np.int64]) -> torch.Tensor:
        """Return the features of the k `rows`, bfloat16 [k, n, d]."""

    def fetch_readable(self, rows: NDArray[np.int64]) -> tuple[torch.Tensor, NDArray[np.bool_]]:
        """Fetch the features of the rows that can be read.

        Returns:
            Features of the j readable rows, bfloat16 [j, n, d], and which of the k `rows` are readable, bool [k].
        """
        return self.fetch(rows), np.ones(len(rows), dtype=bool)

    def unreadable(self) -> int:
        """Return the number of images that the workers of the training run could not read so far."""
        return 0

    def embeddings(self, rows: NDArray[np.int64]) -> torch.Tensor:
        """Read the embeddings of the k `rows`, float32 [k, e]."""
        return torch.from_numpy(read_embeddings(self.index, rows))


class StoredFeatures(Features):
    """Features that an index stores as blocks. They are read in bf16, or else in the first precision of the index.

    Args:
        index: index to read.
        trained: configuration of the adapter to train. If this adapter reduces patches and `index` stores all patches,
            the stored patches are reduced after reading.
    """

    def __init__(self, index: CommittedIndex, trained: AdapterConfig | None = None) -> None:
        super().__init__(index)
        self._reduction: Adapter | None = None
        patches = index.manifest.spec.block_shape[0]
        if trained is not None and trained.kind in PATCH_REDUCTIONS and trained.num_tokens < patches:
            self._reduction = build_adapter(trained.features(patches))
        stored = index.manifest.spec.precisions
        self._store = TokenStore(index, "bf16" if "bf16" in stored else stored[0])

    def load(self, rows: NDArray[np.int64]) -> Loaded:
        """Read the features of the k `rows`. Raises CorruptIndexError if a row is a hole."""
        return Loaded(self.fetch(rows), np.ones(len(rows), dtype=bool))

    def finish(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values`, which are features already."""
        return values

    @torch.inference_mode()
    def fetch(self, rows: NDArray[np.int64]) -> torch.Tensor:
        """Read the features of the k `rows`, bfloat16 [k, n, d].

        Raises:
            CorruptIndexError: a row is a hole.
        """
        blocks = self._store.fetch(rows)
        holes = self._store.holes(blocks)
        if holes.any():
            raise CorruptIndexError(
                f"the index {self.index.root} has no features for row {rows[holes][0]}; run 'edje-index verify'"
            )
        tensor = as_tensor(blocks)
        return tensor if self._reduction is None else self._reduction(tensor.float()).bfloat16()
