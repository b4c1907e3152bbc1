"""Token blocks for `torch.utils.data.DataLoader`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.data import Dataset

from edje_index.models.bf16 import as_tensor
from storage_formats.token_store import TokenStore


class TokenDataset(Dataset[torch.Tensor]):
    """The blocks of an index by row id, bfloat16 [m, d] each.

    Workers may be forked or spawned: each process opens a store of its own when it first reads. A batch is read by
    one call, so use a `batch_size` (or `batch_sampler`) and not single items. Holes are all NaN.

    Args:
        root, precision, engine: as `TokenStore.open`, whose errors it raises at once.
    """

    def __init__(self, root: str | Path, precision: str = "bf16", engine: str = "auto") -> None:
        self._arguments = (str(root), precision, engine)
        self._open()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, row_id: int) -> torch.Tensor:
        if not -len(self) <= row_id < len(self):
            raise IndexError(f"row {row_id} of {len(self)}")
        return self.__getitems__([row_id % len(self)])[0]

    def __getitems__(self, row_ids: Sequence[int]) -> list[torch.Tensor]:
        """The blocks of a batch, read together; views of one array."""
        if self._owner != os.getpid():
            self._open()
        return list(as_tensor(self._store.fetch(row_ids)))

    def __getstate__(self) -> tuple[str, str, str]:
        return self._arguments

    def __setstate__(self, arguments: tuple[str, str, str]) -> None:
        self._arguments = arguments
        self._open()

    def _open(self) -> None:
        self._store, self._owner = TokenStore.open(*self._arguments), os.getpid()
        self._length = len(self._store)
