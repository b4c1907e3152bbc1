"""Prepares one shard of captions: token ids, embeddings and mining data.

All engines call `prepare_shard`, so all engines give the same files. A repeated call gives the same files too.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edje_index.bundles.info import JOINT_FOLDER, VISION_FOLDER, BundleInfo, read_bundle_info, verify_files
from edje_index.bundles.parts import load_clip_text_tower
from edje_index.models.clip_config import read_clip_config
from edje_index.models.devices import resolve_device
from edje_index.models.joint_inputs import JointTokenizer, clean_canonicalize, load_joint_tokenizer
from edje_index.models.text_encoder import embed_texts
from edje_index.models.text_tower import TextTower
from edje_index.training.data.caption_table import read_caption_shard
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.receipts import ShardReceipt
from storage_formats.reading.embeddings import read_embeddings
from storage_formats.writing.staging import StagedFiles

CAPTION_TABLE = "captions.arrow"
SHARD_FOLDER = "shards"


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

    def towers(self) -> dict[str, TextTower]:
        """Return the text tower of each array of caption embeddings, by the name of the array."""
        mining = {} if self.mining_text is None else {"text_mining": self.mining_text}
        return {"text_embeddings": self.text, **mining}


def _text_tower(info: BundleInfo, device: torch.device) -> TextTower:
    verify_files(info)
    return load_clip_text_tower(info, read_clip_config(info.path / VISION_FOLDER, info.vision_name), device)


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
    captions, mining_rows = read_caption_shard(layout.root / CAPTION_TABLE, task.shard)
    arrays = _arrays(captions, models, on_progress)
    arrays["image_mining"] = read_embeddings(models.mining_index, mining_rows)
    encoded = time.perf_counter()
    staged = StagedFiles(layout, task.shard)
    try:
        for name, values in arrays.items():
            final = shard_file(layout.root, name, task.shard)
            np.save(staged.path(final.name), values)
            staged.add(final.name, final)
        files = staged.commit()
        seconds = {"encode": encoded - started, "write": time.perf_counter() - encoded}
        receipt = ShardReceipt(task.shard, task.plan, len(captions), len(captions), 0, {}, files, seconds)
        staged.commit_receipt(receipt)
    finally:
        staged.remove()
    return receipt


def shard_file(root: Path, name: str, shard: int) -> Path:
    """Return the path of the file with one shard of the array `name`. `root` is the working directory."""
    return root / SHARD_FOLDER / f"{name}-{shard:08d}.npy"


def _arrays(captions: list[str], models: CaptionModels, on_progress: Callable[[int], None]) -> dict[str, NDArray[Any]]:
    """Return the arrays of a shard that depend on its c captions, by name."""
    ids = models.tokenizer.caption_ids(captions)
    arrays: dict[str, NDArray[Any]] = {
        "tokens": np.array([token for caption in ids for token in caption], dtype=np.int32),
        "token_counts": np.array([len(caption) for caption in ids], dtype=np.int64),
        "caption_keys": np.array([_key(caption, models.tokenizer) for caption in captions], dtype=np.int64),
    }
    towers = models.towers()
    for number, (name, tower) in enumerate(towers.items()):

        def report(_activity: str, done: int, total: int, earlier: int = number) -> None:
            on_progress(int(len(captions) * (earlier + done / total) / len(towers)))

        arrays[name] = embed_texts(tower, captions, report)
    return arrays


def _key(text: str, tokenizer: JointTokenizer) -> int:
    """Return a number that captions with the same words share. Other captions share it with probability 2**-64."""
    words = clean_canonicalize(text) if tokenizer.canonical else " ".join(text.lower().split()).rstrip(" .")
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "little", signed=True)
