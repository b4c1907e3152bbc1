"""Joins the prepared shards of captions to the arrays of `TrainingData`."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edje_index.progress import OnProgress
from edje_index.training.data.caption_shards import shard_file
from edje_index.training.data.dataset import CaptionSet
from storage_formats.atomic import fsync_paths
from storage_formats.errors import CorruptIndexError
from storage_formats.format.checksum import crc32c_file
from storage_formats.format.receipts import ShardReceipt

_JOINED = ("tokens", "caption_keys", "text_embeddings", "image_mining")
_TEXT_MINING = "text_mining"


def join_shards(
    root: Path, receipts: Sequence[ShardReceipt], items: CaptionSet, folder: Path, on_progress: OnProgress
) -> None:
    """Write the arrays of `TrainingData` to the new directory `folder`. The memory use does not depend on the shards.

    Args:
        root: working directory with the files of the shards.
        receipts: receipts of all shards, in order.
        items: images and captions that were prepared.
        folder: the directory appears when it is complete.
        on_progress: called before each array. An exception raised by `on_progress` stops this function.

    Raises:
        CorruptIndexError: a file of a shard is damaged.
        OSError: a file cannot be written.
    """
    out = root / folder.name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    _check_files(root, receipts)
    shards = [receipt.shard for receipt in receipts]
    mining_file = shard_file(root, _TEXT_MINING, shards[0]).name
    mined_apart = any(Path(entry.path).name == mining_file for entry in receipts[0].files)
    names = [*_JOINED, _TEXT_MINING] if mined_apart else [*_JOINED]
    for number, name in enumerate(names):
        on_progress("joining captions", number, len(names))
        _join(name, root, shards, out)
    if not mined_apart:
        _link_or_copy(out / "text_embeddings.npy", out / f"{_TEXT_MINING}.npy")
    on_progress("joining captions", len(names), len(names))
    np.save(out / "rows.npy", np.asarray(items.rows, dtype=np.int64))
    np.save(out / "caption_starts.npy", _offsets([len(group) for group in items.captions]))
    counts = [np.load(shard_file(root, "token_counts", shard)) for shard in shards]
    np.save(out / "token_starts.npy", _offsets(np.concatenate(counts)))
    fsync_paths([*out.iterdir(), out])
    out.rename(folder)
    fsync_paths([folder.parent])


def _check_files(root: Path, receipts: Sequence[ShardReceipt]) -> None:
    """Compare the files of all shards with their receipts. Remove the first damaged file, so that it is made again."""
    for receipt in receipts:
        for entry in receipt.files:
            if crc32c_file(root / entry.path) != (entry.bytes, entry.crc32c):
                (root / entry.path).unlink()
                raise CorruptIndexError(
                    f"{root / entry.path} was damaged; train again, which prepares its captions again"
                )


def _join(name: str, root: Path, shards: Sequence[int], out: Path) -> None:
    """Write the array `name`, which consists of the arrays of all shards in order."""
    paths = [shard_file(root, name, shard) for shard in shards]
    mapped = [np.load(path, mmap_mode="r") for path in paths]
    shape = (sum(map(len, mapped)), *mapped[0].shape[1:])
    header = {"descr": np.lib.format.dtype_to_descr(mapped[0].dtype), "fortran_order": False, "shape": shape}
    with open(out / f"{name}.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for path in paths:
            file.write(np.load(path).data)  # not the mapped array, whose pages would stay in memory


def _offsets(lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])


def _link_or_copy(path: Path, new: Path) -> None:
    try:
        new.hardlink_to(path)
    except OSError:  # a file system without hard links
        shutil.copyfile(path, new)
