"""A dataset of token blocks for `torch.utils.data.DataLoader`."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.data import Dataset

from storage_formats.arguments import repr_of
from storage_formats.errors import RowIdError
from storage_formats.token_store import TokenStore


class TokenDataset(Dataset[torch.Tensor]):
    """A dataset of the blocks of all rows that are not deleted, bfloat16 [m, d] each,
    in ascending order of the row ids. A row without a block (a hole) gives a block of
    NaN.

    With a `batch_size` or a `batch_sampler`, the `DataLoader` reads each batch with one
    call. The dataset and its copies in other processes read the snapshot that was
    current when the dataset was made.

    Args:
        root: see `TokenStore.open`.
        precision: see `TokenStore.open`.
        engine: see `TokenStore.open`.

    Attributes:
        row_ids: row id of each item, int64 [n], ascending.

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
        self.__setstate__(TokenStore.open(root, precision, engine))

    def __len__(self) -> int:
        return len(self.row_ids)

    __repr__ = repr_of("_store")

    def __getitem__(self, item: int) -> torch.Tensor:
        if not -len(self) <= item < len(self):
            raise RowIdError(
                f"item {item} is out of range; the dataset has the items 0 to"
                f" {len(self) - 1}"
            )
        return self.__getitems__([item])[0]

    def __getitems__(self, items: Sequence[int]) -> list[torch.Tensor]:
        """Read the blocks of a batch with one call. The returned blocks are views
        of one tensor.
        """
        if self._owner != os.getpid():
            # This process was forked. The store has the open files of the parent
            # process, and its threads do not exist here. A pickled copy of the store
            # opens the same snapshot again.
            self.__setstate__(pickle.loads(pickle.dumps(self._store)))
        return list(self._store.fetch(self.row_ids[items], as_torch=True))

    def __getstate__(self) -> TokenStore:
        return self._store

    def __setstate__(self, store: TokenStore) -> None:
        self._store = store
        self._owner = os.getpid()
        self.row_ids = store.row_ids()
