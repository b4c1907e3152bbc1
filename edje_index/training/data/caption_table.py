"""The captions to prepare, in an Arrow file with one record batch per shard, so that a worker reads only its shard."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from edje_index.training.data.dataset import CaptionSet
from storage_formats.atomic import fsync_paths, naming
from storage_formats.errors import CorruptIndexError

SHARD_CAPTIONS = 1 << 14
"""Number of captions per shard. The embeddings depend on it by rounding errors, so it must not change."""

_SCHEMA = pa.schema(
    [
        pa.field("caption", pa.large_string(), nullable=False),
        pa.field("mining_row", pa.int64()),  # set for the first caption of each image only
    ]
)


def write_caption_table(path: Path, items: CaptionSet, mining_rows: NDArray[np.int64]) -> str:
    """Write the captions of `items` in order, and return the SHA-256 of the content in hexadecimal.

    If writing fails, `path` does not change.

    Args:
        path: path of the file.
        items: n images and their captions.
        mining_rows: row of each image in the index of the mining model, int64 [n].
    """
    temporary, digest = path.with_name(f".{path.name}.part"), hashlib.sha256()
    lines = _lines(items, mining_rows)
    with naming(path), pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_file(file, _SCHEMA) as writer:
        while batch := list(itertools.islice(lines, SHARD_CAPTIONS)):
            writer.write_batch(pa.record_batch([*map(list, zip(*batch, strict=True))], schema=_SCHEMA))
            digest.update(json.dumps(batch).encode())
    fsync_paths([temporary])
    temporary.replace(path)
    fsync_paths([path.parent])
    return digest.hexdigest()


def _lines(items: CaptionSet, mining_rows: NDArray[np.int64]) -> Iterator[tuple[str, int | None]]:
    for captions, row in zip(items.captions, mining_rows, strict=True):
        yield from ((caption, None if position else int(row)) for position, caption in enumerate(captions))


def read_caption_shard(path: Path, shard: int) -> tuple[list[str], NDArray[np.int64]]:
    """Read one shard of the file that `write_caption_table` wrote.

    Returns:
        The captions of the shard, and the mining rows of the images whose first caption is in the shard.

    Raises:
        CorruptIndexError: the file is missing or damaged.
    """
    try:
        with pa.memory_map(str(path)) as file:
            batch = pa.ipc.open_file(file).get_batch(shard)
            if batch.schema != _SCHEMA:
                raise ValueError("it has other columns")
            return batch["caption"].to_pylist(), batch["mining_row"].drop_null().to_numpy()
    except (OSError, ValueError, pa.ArrowException) as error:
        raise CorruptIndexError(f"cannot read the table of captions {path}: {error}; train again") from error
