"""Prepares the captions of a training run in shards: computes their token ids, their
embeddings, and the embeddings for hard-negative mining. The training data are the
joined arrays of all shards.

Each worker of the training run prepares some of the shards. If the run stops, finished
shards are kept. The training data do not depend on the number of workers.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import math
import os
import shutil
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from edje_index.bundles.bundle import load_text_tower
from edje_index.bundles.info import JOINT_FOLDER, read_bundle_info, verify_files
from edje_index.models.joint_inputs import (
    MAX_TEXT_TOKENS,
    clean_canonicalize,
    load_joint_tokenizer,
)
from edje_index.training.workers import WorkerGroup
from storage_formats.arrays import Array, Floats, Ints
from storage_formats.atomic import fsync_paths, naming, write_bytes_atomic
from storage_formats.errors import CorruptIndexError, TaskInterrupted, UsageError
from storage_formats.format.manifest import CommittedIndex
from storage_formats.reading.embeddings import read_embeddings

SHARD_CAPTIONS = 256, 1 << 14
"""Smallest and largest number of captions per shard. The number of captions in a shard
changes the embeddings by rounding errors, so it does not depend on the number of
workers.
"""
# Number of shards, unless `SHARD_CAPTIONS` requires fewer or more. A small dev set is
# also divided into several shards, so that several workers prepare its captions.
_SHARDS = 32

_TABLE = "captions.arrow"
_ROWS = "rows.npy"
_SCHEMA = pa.schema(
    [
        pa.field("caption", pa.large_string(), nullable=False),
        # row of the image in the index of the mining model; null except for the first
        # caption of each image
        pa.field("mining_row", pa.int64()),
    ]
)


@dataclass(frozen=True)
class CaptionSet:
    """n images and their captions.

    Attributes:
        rows: row of each image in the feature index, int64 [n].
        captions: captions of each image, at least one caption per image.
    """

    rows: Ints
    captions: Sequence[Sequence[str]]

    def texts(self) -> list[str]:
        """Return all captions in one list, image by image."""
        return [text for group in self.captions for text in group]


@dataclass(frozen=True)
class TrainingData:
    """n images and all their c captions, as memory-mapped NumPy arrays. The captions of
    an image are adjacent.

    Attributes:
        rows: row of each image in the feature index, int64 [n].
        caption_starts: offsets of the captions of each image, int64 [n + 1]. Image i
            has the captions ``caption_starts[i]:caption_starts[i + 1]``.
        token_starts: offsets of the tokens of each caption, int64 [c + 1]. Caption i
            has the tokens ``tokens[token_starts[i]:token_starts[i + 1]]``.
        tokens: token ids of all captions in order, without special tokens, int32.
            Captions are truncated to 62 tokens, because an input row without an image
            has room for 62 caption tokens.
        caption_keys: a number per caption, int64 [c]. Captions with the same words have
            the same number.
        text_embeddings: embeddings of the captions, computed by the text tower, float32
            [c, e].
        image_mining: embeddings of the images, computed by the mining model, float32
            [n, e'].
        text_mining: embeddings of the captions, computed by the mining model, float32
            [c, e'].
    """

    rows: Ints
    caption_starts: Ints
    token_starts: Ints
    tokens: NDArray[np.int32]
    caption_keys: Ints
    text_embeddings: Floats
    image_mining: Floats
    text_mining: Floats

    @classmethod
    def open(cls, folder: Path) -> TrainingData:
        """Memory-map the arrays that `prepare_captions` wrote to `folder`. If there is
        no mining model, `text_mining` are the embeddings of the text tower.
        """
        paths = {entry.name: folder / f"{entry.name}.npy" for entry in fields(cls)}
        if not paths["text_mining"].exists():
            paths["text_mining"] = paths["text_embeddings"]
        return cls(
            **{name: np.load(path, mmap_mode="r") for name, path in paths.items()}
        )

    @property
    def images(self) -> int:
        """Number of images."""
        return len(self.rows)

    def caption(self, number: int) -> list[int]:
        """Return the token ids of caption `number`, at most 62.

        An input row with image tokens has room for 61 caption tokens.
        `JointTokenizer.truncated` truncates token ids to this number.
        """
        part: list[int] = self.tokens[
            self.token_starts[number] : self.token_starts[number + 1]
        ].tolist()
        return part


def write_caption_table(folder: Path, items: CaptionSet, mining_rows: Ints) -> None:
    """Write the table of the captions that `prepare_captions` prepares. If an earlier
    call wrote the table of the same images, do nothing.

    The table contains the captions in order, in one Arrow record batch per shard, so
    that a worker reads only its own shards.

    Args:
        mining_rows: row of each image in the index of the mining model, int64 [n].

    Raises:
        UsageError: an earlier call wrote the captions of other images.
    """
    root = _parts(folder)
    for written in (folder, root):
        if (written / _ROWS).exists():
            if not np.array_equal(np.load(written / _ROWS), items.rows):
                raise UsageError(
                    f"{written} contains the training data of other images: the"
                    " features have changed, or another version of edje-index chose"
                    " the images; set run.dir to another folder"
                )
            return
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    lines = (
        (caption, None if position else int(row))
        for captions, row in zip(items.captions, mining_rows, strict=True)
        for position, caption in enumerate(captions)
    )
    counts = [len(captions) for captions in items.captions]
    lowest, highest = SHARD_CAPTIONS
    size = min(max(lowest, math.ceil(sum(counts) / _SHARDS)), highest)
    table = root / _TABLE
    with (
        naming(table),
        open(table, "wb") as file,
        pa.ipc.new_file(file, _SCHEMA) as writer,
    ):
        while batch := list(itertools.islice(lines, size)):
            writer.write_batch(
                pa.record_batch([*map(list, zip(*batch, strict=True))], schema=_SCHEMA)
            )
    np.save(root / "caption_starts.npy", _starts(counts))
    # The file of the rows is written last. It shows that the table is complete.
    fsync_paths([*root.iterdir()])
    content = io.BytesIO()
    np.save(content, np.asarray(items.rows, dtype=np.int64))
    write_bytes_atomic(root / _ROWS, content.getvalue())


def prepare_captions(
    folder: Path,
    bundle: Path,
    miner: Path | None,
    mining_index: CommittedIndex,
    device: torch.device,
    group: WorkerGroup,
    should_stop: Callable[[], bool],
    on_shard: Callable[[int, int], None],
) -> bool:
    """Write the `TrainingData` to `folder`, unless an earlier call wrote them. All
    workers must call this function.

    Args:
        folder: directory of the training data. It does not exist until all of its files
            are complete. `write_caption_table` must be called first.
        bundle: bundle with the tokenizer of the joint encoder and the text tower.
        miner: bundle of the mining model; None if the text tower of `bundle` mines hard
            negatives.
        mining_index: index that stores the image embeddings of the mining model.
        group: rank of this worker, and number of workers.
        should_stop: called between batches. If the result is True, this worker prepares
            no further captions.
        on_shard: called with the number of finished shards and the number of shards.

    Returns:
        True if the training data are complete, and False if `should_stop` stopped a
        worker. In the second case, finished shards are kept.

    Raises:
        CorruptIndexError: the table of captions, or a shard, cannot be read.
    """
    if not group.any(not folder.exists()):
        return True
    root = _parts(folder)
    try:
        table = pa.ipc.open_file(pa.memory_map(os.fsencode(root / _TABLE)))
    except (OSError, pa.ArrowException) as error:
        raise CorruptIndexError(
            f"cannot read the table of captions {root / _TABLE}: {error}; train again"
        ) from error
    shards = [root / f"{number:08d}.npz" for number in range(table.num_record_batches)]
    missing = [number for number, path in enumerate(shards) if not path.exists()][
        group.rank :: group.size
    ]
    # All workers must list the missing shards before a worker finishes another shard.
    # Otherwise, the workers would divide different lists.
    group.any(False)
    stopped = False
    if missing:
        towers = {}
        canonical = read_bundle_info(bundle).canonical_captions
        for name, path in (("text_embeddings", bundle), ("text_mining", miner)):
            if path is not None:
                info = read_bundle_info(path)
                verify_files(info)
                towers[name] = load_text_tower(info, device)
                # As in the published code, the text tower of the mining model reads
                # captions in the same form as the tower of `bundle`.
                towers[name].canonical = canonical
        tokenizer = load_joint_tokenizer(bundle / JOINT_FOLDER, canonical=canonical)

        def check(_activity: str, _done: int, _total: int) -> None:
            if should_stop():
                raise TaskInterrupted

        try:
            for number in missing:
                batch = table.get_batch(number)
                captions: list[str] = batch["caption"].to_pylist()
                token_ids = tokenizer.caption_ids(captions, MAX_TEXT_TOKENS - 2)
                keys = [_key(caption, canonical) for caption in captions]
                embeddings = {
                    name: tower.encode(captions, on_progress=check)
                    for name, tower in towers.items()
                }
                content = io.BytesIO()
                np.savez(
                    content,
                    tokens=np.fromiter(itertools.chain(*token_ids), np.int32),
                    token_counts=np.array([len(ids) for ids in token_ids], np.int64),
                    caption_keys=np.array(keys, np.int64),
                    image_mining=read_embeddings(
                        mining_index, batch["mining_row"].drop_null().to_numpy()
                    ),
                    **embeddings,  # type: ignore[arg-type]
                )
                write_bytes_atomic(shards[number], content.getvalue())
                on_shard(sum(path.exists() for path in shards), len(shards))
        except TaskInterrupted:
            stopped = True
    if group.any(stopped):
        return False
    if group.rank == 0:
        _join_shards(root, shards, folder)
    # The other workers wait here until worker 0 has written the training data.
    group.any(False)
    return True


def _parts(folder: Path) -> Path:
    """Return the directory of finished shards, which are later joined to `folder`."""
    return folder.with_name(f".{folder.name}.part")


def _key(text: str, canonical: bool) -> int:
    """Return a number that is equal for captions with the same words. For two captions
    with different words, it is equal with probability 2**-64.
    """
    words = (
        clean_canonicalize(text)
        if canonical
        else " ".join(text.lower().split()).rstrip(" .")
    )
    return int.from_bytes(
        hashlib.blake2b(words.encode(), digest_size=8).digest(), "little", signed=True
    )


def _join_shards(root: Path, shards: Sequence[Path], folder: Path) -> None:
    """Join the arrays of all `shards`, and write them as `TrainingData` to `folder`.

    Memory holds the lengths of all captions, and one array of one shard at a time.
    """
    out = root / folder.name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    counts = np.concatenate([_read(path, "token_counts") for path in shards])
    np.save(out / "token_starts.npy", _starts(counts))
    for name in (_ROWS, "caption_starts.npy"):
        shutil.copyfile(root / name, out / name)
    lengths = {"tokens": int(counts.sum()), "image_mining": len(np.load(root / _ROWS))}
    for name in set(np.load(shards[0])) - {"token_counts"}:
        first = _read(shards[0], name)
        shape = (lengths.get(name, len(counts)), *first.shape[1:])
        joined = np.lib.format.open_memmap(
            out / f"{name}.npy", "w+", first.dtype, shape
        )
        end = 0
        for path in shards:
            array = _read(path, name)
            joined[end : end + len(array)] = array
            end += len(array)
        joined.flush()
    fsync_paths([*out.iterdir(), out])
    out.rename(folder)
    fsync_paths([folder.parent])
    shutil.rmtree(root, ignore_errors=True)


def _read(path: Path, name: str) -> Array:
    """Read the array `name` of the shard `path`, an .npz file. NumPy compares the array
    with the checksum in the file. A damaged shard is removed, so that the next run
    prepares it again.
    """
    try:
        array: Array = np.load(path)[name]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        path.unlink()
        raise CorruptIndexError(
            f"{path} was damaged; train again, which prepares its captions again"
        ) from error
    return array


def _starts(lengths: Sequence[int] | Ints) -> Ints:
    """Return the offset of each of k consecutive parts with the given `lengths`, and
    the end of the last part, int64 [k + 1].
    """
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
