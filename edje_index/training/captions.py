"""Prepares captions in shards: token ids, embeddings and mining data. Then joins the shards to the training data.

A repeated preparation of a shard gives the same files, on every engine.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from edje_index.bundles.bundle import load_clip_text_tower
from edje_index.bundles.info import JOINT_FOLDER, VISION_FOLDER, BundleInfo, read_bundle_info, verify_files
from edje_index.models.clip_config import read_clip_config
from edje_index.models.devices import resolve_device
from edje_index.models.joint_inputs import JointTokenizer, clean_canonicalize, load_joint_tokenizer
from edje_index.models.text_encoder import embed_texts
from edje_index.models.text_tower import TextTower
from edje_index.progress import OnProgress
from storage_formats.atomic import fsync_paths, naming
from storage_formats.errors import CorruptIndexError
from storage_formats.format.checksum import crc32c_file
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.receipts import ShardReceipt
from storage_formats.reading.embeddings import read_embeddings
from storage_formats.writing.staging import StagedFiles

CAPTION_TABLE = "captions.arrow"
SHARD_FOLDER = "shards"
SHARD_CAPTIONS = 1 << 14
"""Number of captions per shard. The embeddings depend on it by rounding errors, so it must not change."""

_SCHEMA = pa.schema(
    [
        pa.field("caption", pa.large_string(), nullable=False),
        pa.field("mining_row", pa.int64()),  # set for the first caption of each image only
    ]
)


@dataclass(frozen=True)
class CaptionSet:
    """n images and their captions.

    Attributes:
        rows: row of each image in the feature index, int64 [n].
        captions: captions of each image, at least one caption per image.
    """

    rows: NDArray[np.int64]
    captions: Sequence[Sequence[str]]

    def pairs(self, epoch_of: str) -> int:
        """Return the number of pairs per epoch, which visits every caption ("captions") or image ("images") once."""
        return len(self.rows) if epoch_of == "images" else sum(map(len, self.captions))

    def texts(self) -> list[str]:
        """Return all captions in one list, image by image."""
        return [text for group in self.captions for text in group]


@dataclass(frozen=True)
class CaptionTask:
    """One shard of captions to prepare.

    Attributes:
        root: working directory of the preparation. It contains the table of captions.
        shard: shard number.
        plan: fingerprint of everything that determines the prepared data, except the device and the threads.
    """

    root: str
    shard: int
    plan: str


@dataclass(frozen=True)
class CaptionModels:
    """The models that prepare captions.

    Attributes:
        tokenizer: tokenizer of the joint encoder.
        text: text tower that embeds the captions.
        mining_text: text tower of the mining model; None if `text` also mines hard negatives.
        mining_index: index that stores the image embeddings of the mining model.
    """

    tokenizer: JointTokenizer
    text: TextTower
    mining_text: TextTower | None
    mining_index: CommittedIndex

    @classmethod
    def open(
        cls, bundle: Path, miner: Path | None, mining_index: CommittedIndex, *, device: str, threads: int
    ) -> CaptionModels:
        """Load the models, and verify their files.

        Args:
            bundle: bundle with the tokenizer and the text tower.
            miner: bundle of the mining model; None if the text tower of `bundle` mines hard negatives.
            mining_index: index that stores the image embeddings of the mining model.
            device: "cpu", "cuda" or "cuda:N".
            threads: number of torch CPU threads in this process.

        Raises:
            ModelError: a bundle is damaged, or the device is not available.
        """
        torch.set_num_threads(threads)
        target, info = resolve_device(device), read_bundle_info(bundle)
        text = _text_tower(info, target)
        tokenizer = load_joint_tokenizer(bundle / JOINT_FOLDER, canonical=info.canonical_captions)
        mining_text = None if miner is None else _text_tower(read_bundle_info(miner), target)
        return cls(tokenizer, text, mining_text, mining_index)


def _text_tower(info: BundleInfo, device: torch.device) -> TextTower:
    verify_files(info)
    return load_clip_text_tower(info, read_clip_config(info.path / VISION_FOLDER, info.vision_name), device)


def write_caption_table(path: Path, items: CaptionSet, mining_rows: NDArray[np.int64]) -> str:
    """Write the captions of `items` in order, and return the SHA-256 of the content in hexadecimal.

    The file has one Arrow record batch per shard, so that a worker reads only its shard. If writing fails, `path` does
    not change.

    Args:
        path: path of the file.
        items: n images and their captions.
        mining_rows: row of each image in the index of the mining model, int64 [n].
    """
    temporary, digest = path.with_name(f".{path.name}.part"), hashlib.sha256()
    lines = (
        (caption, None if position else int(row))
        for captions, row in zip(items.captions, mining_rows, strict=True)
        for position, caption in enumerate(captions)
    )
    with naming(path), pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_file(file, _SCHEMA) as writer:
        while batch := list(itertools.islice(lines, SHARD_CAPTIONS)):
            writer.write_batch(pa.record_batch([*map(list, zip(*batch, strict=True))], schema=_SCHEMA))
            digest.update(json.dumps(batch).encode())
    fsync_paths([temporary])
    temporary.replace(path)
    fsync_paths([path.parent])
    return digest.hexdigest()


def prepare_shard(
    task: CaptionTask, models: CaptionModels, on_progress: Callable[[int], None] = lambda done: None
) -> ShardReceipt:
    """Prepare one shard of captions, and commit its files with a receipt.

    Args:
        task: shard to prepare.
        models: models that prepare the captions.
        on_progress: called with the number of prepared captions. An exception raised by `on_progress` stops this
            function.

    Raises:
        CorruptIndexError: the table of captions or the index of the mining model is damaged.
        OSError: a file cannot be written.
    """
    layout, started = Layout(Path(task.root)), time.perf_counter()
    table = layout.root / CAPTION_TABLE
    try:
        with pa.memory_map(str(table)) as file:
            batch = pa.ipc.open_file(file).get_batch(task.shard)
            if batch.schema != _SCHEMA:
                raise ValueError("it has other columns")
            captions: list[str] = batch["caption"].to_pylist()
            mining_rows = batch["mining_row"].drop_null().to_numpy()
    except (OSError, ValueError, pa.ArrowException) as error:
        raise CorruptIndexError(f"cannot read the table of captions {table}: {error}; train again") from error
    token_ids = models.tokenizer.caption_ids(captions)
    arrays: dict[str, NDArray[Any]] = {
        "tokens": np.array([token for caption in token_ids for token in caption], dtype=np.int32),
        "token_counts": np.array([len(caption) for caption in token_ids], dtype=np.int64),
        "caption_keys": np.array([_key(caption, models.tokenizer) for caption in captions], dtype=np.int64),
        "image_mining": read_embeddings(models.mining_index, mining_rows),
    }
    towers = {"text_embeddings": models.text}
    if models.mining_text is not None:
        towers["text_mining"] = models.mining_text
    for number, (name, tower) in enumerate(towers.items()):

        def report(_activity: str, done: int, total: int, earlier: int = number) -> None:
            on_progress(int(len(captions) * (earlier + done / total) / len(towers)))

        arrays[name] = embed_texts(tower, captions, report)
    encoded = time.perf_counter()
    staged = StagedFiles(layout, task.shard)
    try:
        for name, values in arrays.items():
            final = _shard_file(layout.root, name, task.shard)
            np.save(staged.path(final.name), values)
            staged.add(final.name, final)
        files = staged.commit()
        seconds = {"encode": encoded - started, "write": time.perf_counter() - encoded}
        receipt = ShardReceipt(task.shard, task.plan, len(captions), len(captions), 0, {}, files, seconds)
        staged.commit_receipt(receipt)
    finally:
        staged.remove()
    return receipt


def _key(text: str, tokenizer: JointTokenizer) -> int:
    """Return a number that captions with the same words share. Other captions share it with probability 2**-64."""
    words = clean_canonicalize(text) if tokenizer.canonical else " ".join(text.lower().split()).rstrip(" .")
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "little", signed=True)


def _shard_file(root: Path, name: str, shard: int) -> Path:
    return root / SHARD_FOLDER / f"{name}-{shard:08d}.npy"


def join_shards(
    root: Path, receipts: Sequence[ShardReceipt], items: CaptionSet, folder: Path, on_progress: OnProgress
) -> None:
    """Write the arrays of `edje_index.training.batches.TrainingData` to the new directory `folder`.

    The memory use does not depend on the number of shards.

    Args:
        root: working directory with the files of the shards.
        receipts: receipts of all shards, in order.
        items: images and captions that were prepared.
        folder: the directory appears when it is complete.
        on_progress: called before each array. An exception raised by `on_progress` stops this function.

    Raises:
        CorruptIndexError: a file of a shard is damaged. The file is removed, so that it is made again.
        OSError: a file cannot be written.
    """
    out = root / folder.name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    for entry in (entry for receipt in receipts for entry in receipt.files):
        if crc32c_file(root / entry.path) != (entry.bytes, entry.crc32c):
            (root / entry.path).unlink()
            raise CorruptIndexError(f"{root / entry.path} was damaged; train again, which prepares its captions again")
    shards = [receipt.shard for receipt in receipts]
    names = ["tokens", "caption_keys", "text_embeddings", "image_mining"]
    if _shard_file(root, "text_mining", shards[0]).exists():
        names.append("text_mining")
    for number, name in enumerate(names):
        on_progress("joining captions", number, len(names))
        _join([_shard_file(root, name, shard) for shard in shards], out / f"{name}.npy")
    if "text_mining" not in names:
        try:
            (out / "text_mining.npy").hardlink_to(out / "text_embeddings.npy")
        except OSError:  # a file system without hard links
            shutil.copyfile(out / "text_embeddings.npy", out / "text_mining.npy")
    on_progress("joining captions", len(names), len(names))
    np.save(out / "rows.npy", np.asarray(items.rows, dtype=np.int64))
    counts = [np.load(_shard_file(root, "token_counts", shard)) for shard in shards]
    lengths = {"caption_starts": np.array([len(g) for g in items.captions]), "token_starts": np.concatenate(counts)}
    for name, values in lengths.items():
        np.save(out / f"{name}.npy", np.concatenate([[0], np.cumsum(values, dtype=np.int64)]))
    fsync_paths([*out.iterdir(), out])
    out.rename(folder)
    fsync_paths([folder.parent])


def _join(paths: Sequence[Path], out: Path) -> None:
    """Write an array that consists of the arrays `paths` in order."""
    mapped = [np.load(path, mmap_mode="r") for path in paths]
    shape = (sum(map(len, mapped)), *mapped[0].shape[1:])
    header = {"descr": np.lib.format.dtype_to_descr(mapped[0].dtype), "fortran_order": False, "shape": shape}
    with open(out, "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for path in paths:
            file.write(np.load(path).data)  # not the mapped array, whose pages would stay in memory
