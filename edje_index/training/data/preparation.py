"""Prepares the training data of captions: token ids, embeddings and similarities for mining.

The arrays are written to files in chunks, so that memory use does not depend on the number of captions. An interrupted
preparation continues after its last chunk.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edje_index.models.joint_inputs import JointTokenizer
from edje_index.models.text_cleaning import clean_canonicalize
from edje_index.models.text_encoder import embed_texts
from edje_index.models.text_tower import TextTower
from edje_index.progress import OnProgress
from edje_index.training.data.dataset import CaptionSet
from storage_formats.atomic import fsync_paths, write_json_atomic
from storage_formats.errors import UsageError
from storage_formats.format.manifest import CommittedIndex
from storage_formats.reading.embeddings import read_embeddings

CHUNK = 1 << 14
_DONE, _TOKENS = "done.json", "tokens.part"


@dataclass(frozen=True)
class Miner:
    """The embedding model for hard-negative mining.

    Attributes:
        text: text tower of the mining model.
        index: index that stores the image embeddings of the mining model.
        rows: row of each of the n training images in `index`, int64 [n].
    """

    text: TextTower
    index: CommittedIndex
    rows: NDArray[np.int64]


@dataclass(frozen=True)
class CaptionModels:
    """The models that read the captions.

    Attributes:
        tokenizer: tokenizer of the joint encoder.
        text: text tower that embeds the captions.
        miner: mining model. If `miner.text` is `text`, the captions are embedded only once.
    """

    tokenizer: JointTokenizer
    text: TextTower
    miner: Miner


def prepare_data(
    folder: Path,
    items: CaptionSet,
    models: CaptionModels,
    on_progress: OnProgress = lambda activity, done, total: None,
) -> None:
    """Tokenize and embed all captions of `items`, and write the `TrainingData` to the new directory `folder`.

    Args:
        folder: the directory appears when it is complete. Until then, `.NAME.part` beside it keeps finished chunks.
        items: images and captions to train on.
        models: the models that read the captions.
        on_progress: called with the progress. An exception raised by `on_progress` stops this function.

    Raises:
        UsageError: `items` has no captions.
    """
    count = items.pairs("captions")
    if not count:
        raise UsageError("no image with a caption has features; give captions of images in the feature index")
    writer = _Writer(folder.with_name(f".{folder.name}.part"), models, count)
    done, tokens = writer.resume()
    texts = itertools.islice((text for group in items.captions for text in group), done, None)
    while chunk := list(itertools.islice(texts, CHUNK)):
        tokens = writer.write(chunk, done, tokens, on_progress)
        done += len(chunk)
    writer.finish(items, tokens)
    writer.folder.rename(folder)
    fsync_paths([folder.parent])


@dataclass(frozen=True)
class _Writer:
    """Writes the arrays of `TrainingData` to `folder`, for `count` captions."""

    folder: Path
    models: CaptionModels
    count: int

    def resume(self) -> tuple[int, int]:
        """Return the numbers of captions and of tokens that an earlier call has written."""
        try:
            state = json.loads((self.folder / _DONE).read_bytes())
            if state["count"] == self.count:
                return int(state["captions"]), int(state["tokens"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # nothing was written, or its record is damaged
        self.folder.mkdir(parents=True, exist_ok=True)
        self._create("token_starts", (self.count + 1,), np.int64)
        self._create("caption_keys", (self.count,), np.int64)
        for name, tower in self._towers():
            self._create(name, (self.count, tower.encode(["a"]).shape[1]), np.float32)
        return 0, 0

    def write(self, texts: list[str], first: int, tokens: int, on_progress: OnProgress) -> int:
        """Write one chunk of captions. Return the number of tokens in all chunks so far.

        Args:
            texts: the captions of the chunk.
            first: number of captions in the earlier chunks.
            tokens: number of tokens in the earlier chunks.
            on_progress: called with the progress.
        """

        def report(_activity: str, done: int, total: int) -> None:
            on_progress("preparing captions", first + done * len(texts) // total, self.count)

        part = slice(first, first + len(texts))
        values = {name: embed_texts(tower, texts, report) for name, tower in self._towers()}
        ids = [np.array(caption, dtype=np.int32) for caption in self.models.tokenizer.caption_ids(texts)]
        values["caption_keys"] = np.array([_key(text, self.models.tokenizer) for text in texts])
        for name, rows in values.items():
            self._store(name, part, rows)
        ends = tokens + np.cumsum([len(caption) for caption in ids], dtype=np.int64)
        self._store("token_starts", slice(first + 1, part.stop + 1), ends)
        with open(self.folder / _TOKENS, "r+b" if first else "wb") as file:
            file.seek(4 * tokens)
            file.write(np.concatenate(ids).tobytes())
        self._flush(part.stop, int(ends[-1]))
        return int(ends[-1])

    def finish(self, items: CaptionSet, tokens: int) -> None:
        """Write the remaining arrays, after the last chunk of captions."""
        np.save(self.folder / "rows.npy", np.asarray(items.rows, dtype=np.int64))
        lengths = [len(group) for group in items.captions]
        np.save(self.folder / "caption_starts.npy", np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))
        self._copy("tokens", np.memmap(self.folder / _TOKENS, np.int32, "r", shape=(tokens,)))
        miner, pieces = self.models.miner, range(0, len(self.models.miner.rows), CHUNK)
        for start in pieces:
            rows = read_embeddings(miner.index, miner.rows[start : start + CHUNK])
            if not start:
                self._create("image_mining", (len(miner.rows), rows.shape[1]), np.float32)
            self._store("image_mining", slice(start, start + len(rows)), rows)
        if miner.text is self.models.text:
            _link_or_copy(self.folder / "text_embeddings.npy", self.folder / "text_mining.npy")
        for temporary in (_DONE, _TOKENS):  # in this order: without tokens, a resumed preparation must begin again
            (self.folder / temporary).unlink()
        fsync_paths([*self.folder.iterdir(), self.folder])

    def _towers(self) -> Iterator[tuple[str, TextTower]]:
        """Yield the name of each array of embeddings of captions, with its text tower."""
        yield "text_embeddings", self.models.text
        if self.models.miner.text is not self.models.text:
            yield "text_mining", self.models.miner.text

    def _create(self, name: str, shape: tuple[int, ...], dtype: Any) -> None:
        np.lib.format.open_memmap(self._path(name), "w+", dtype, shape).flush()

    def _store(self, name: str, part: slice, values: NDArray[Any]) -> None:
        np.load(self._path(name), mmap_mode="r+")[part] = values

    def _copy(self, name: str, values: NDArray[Any]) -> None:
        self._create(name, values.shape, values.dtype)
        for start in range(0, len(values), CHUNK):
            self._store(name, slice(start, start + CHUNK), values[start : start + CHUNK])

    def _flush(self, captions: int, tokens: int) -> None:
        fsync_paths([path for path in self.folder.iterdir() if path.name != _DONE])
        write_json_atomic(self.folder / _DONE, {"count": self.count, "captions": captions, "tokens": tokens})

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.npy"


def _key(text: str, tokenizer: JointTokenizer) -> int:
    """Return a number that captions with the same words share. Other captions share it with probability 2**-64."""
    words = clean_canonicalize(text) if tokenizer.canonical else " ".join(text.lower().split()).rstrip(" .")
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "little", signed=True)


def _link_or_copy(path: Path, new: Path) -> None:
    new.unlink(missing_ok=True)
    try:
        new.hardlink_to(path)
    except OSError:  # a file system without hard links
        shutil.copyfile(path, new)
