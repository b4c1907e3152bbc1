"""A dataset of token blocks for `torch.utils.data.DataLoader`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.data import Dataset

from storage_formats.arguments import repr_of
from storage_formats.errors import RowIdError
from storage_formats.token_store import TokenStore


class TokenDataset(Dataset[torch.Tensor]):
    """A dataset that maps each row id to its block, bfloat16 [m, d]. The values of a
    hole are NaN.

    With a `batch_size` or a `batch_sampler`, the `DataLoader` reads each batch with one
    call.

    Args:
        root: see `TokenStore.open`.
        precision: see `TokenStore.open`.
        engine: see `TokenStore.open`.

    Raises:
        UsageError, IncompleteIndexError, CorruptIndexError: as for `TokenStore.open`.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from edje_index import TokenDataset
        >>> loader = DataLoader(TokenDataset("photos.edje"), batch_size=4)
        >>> [tuple(blocks.shape) for blocks in loader]
        [(4, 4, 16), (2, 4, 16)]
    """

    def __init__(
        self, root: str | Path, precision: str | None = None, engine: str = "auto"
    ) -> None:
        self._arguments = (str(root), precision, engine)
        self._open()

    def __len__(self) -> int:
        return self._length

    __repr__ = repr_of("_store")

    def __getitem__(self, row_id: int) -> torch.Tensor:
        if not -len(self) <= row_id < len(self):
            raise RowIdError(
                f"row id {row_id} is out of range; the index has the row ids 0 to"
                f" {len(self) - 1}"
            )
        return self.__getitems__([row_id % len(self)])[0]

    def __getitems__(self, row_ids: Sequence[int]) -> list[torch.Tensor]:
        """Read the blocks of a batch with one call. The returned blocks are views
        of one tensor.
        """
        if self._owner != os.getpid():
            self._open()
        return list(self._store.fetch(row_ids, as_torch=True))

    def __getstate__(self) -> tuple[str, str | None, str]:
        return self._arguments

    def __setstate__(self, arguments: tuple[str, str | None, str]) -> None:
        self._arguments = arguments
        self._open()

    def _open(self) -> None:
        self._store = TokenStore.open(*self._arguments)
        self._owner = os.getpid()
        self._length = len(self._store)
