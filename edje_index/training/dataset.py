"""The data set of a training run: the rows of an index that have captions.

The tokens of the index are the patch features on which the adapter is trained.
Everything else that depends on a caption, for example its token ids and its embedding,
is computed once, in shards. Each worker of the training run prepares some of the
shards. If the run stops, finished shards are kept. The data do not depend on the number
of workers.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from edje_index.bundles.bundle import load_text_tower
from edje_index.bundles.info import (
    JOINT_FOLDER,
    matching_bundle,
    read_bundle_info,
    verify_files,
)
from edje_index.captions.reading import is_blank, is_of_split
from edje_index.inputs.tables import IMAGE_ID, SPLIT
from edje_index.models.devices import as_tensor
from edje_index.models.joint_inputs import (
    MAX_TEXT_TOKENS,
    clean_canonicalize,
    load_joint_tokenizer,
)
from edje_index.training.workers import WorkerGroup
from storage_formats.arrays import Array, Floats, Ints
from storage_formats.atomic import fsync_path, replacing
from storage_formats.codecs import finest
from storage_formats.errors import CorruptIndexError, TaskInterrupted, UsageError
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.rows import (
    INDEXED,
    iter_rows,
    read_all_rows,
    read_index_rows,
)
from storage_formats.format.source_columns import caption_columns, captions_of
from storage_formats.reading.embeddings import IndexedEmbeddings
from storage_formats.token_store import TokenStore

SHARD_IMAGES = 64
"""Smallest number of images per shard of captions. The size of a shard changes the
embeddings by rounding errors, so it does not depend on the number of workers.
"""
# largest number of shards
_SHARDS = 512
# number of images per forward pass of an adapter
_ADAPTER_BATCH = 32


@dataclass(frozen=True)
class StoredImages:
    """n images that an index stores.

    Attributes:
        index: the index.
        rows: row id of each image, int64 [n].
    """

    index: CommittedIndex
    rows: Ints

    @cached_property
    def _store(self) -> TokenStore:
        return TokenStore(self.index)

    @cached_property
    def _embeddings(self) -> IndexedEmbeddings:
        return IndexedEmbeddings(self.index.layout, self.index.spec, index=self.index)

    def blocks(self, images: Ints) -> Tensor:
        """Return the stored tokens of `images`, in the highest-fidelity precision of
        the index, bfloat16 [k, m, d].

        Args:
            images: numbers of images, int64 [k].

        Raises:
            CorruptIndexError: the row of an image is a hole.
        """
        rows = self.rows[images]
        blocks = self._store.fetch(rows)
        holes = self._store.holes(blocks)
        if holes.any():
            raise CorruptIndexError(
                f"the index {self.index.location} has no tokens for row"
                f" {rows[holes][0]}",
                remedy="verify",
            )
        return as_tensor(blocks)

    def embeddings(self, images: Ints) -> Floats:
        """Return the stored embeddings of `images`, float32 [k, e]."""
        return self._embeddings[self.rows[images]]


@dataclass(frozen=True)
class TrainingData(StoredImages):
    """n images of an index, whose tokens are patch features, and their c captions.

    Attributes:
        path: file of what `prepare_captions` computes for the captions.
        photos: a number per image, int64 [n]. Images with the same `image_id` in the
            index, for example crops of one photo, have the same number.
        caption_starts: offsets of the captions of each image, int64 [n + 1]. Image i
            has the captions ``caption_starts[i]:caption_starts[i + 1]``.
        digest: hash of the encoder of the index, of the contents of the images, and of
            their captions.
        miner: the same images in an index whose model mines hard negatives. None if the
            frozen towers mine them.
        teacher: the same images in an index that stores the tokens of the teacher. None
            if the teacher's adapter computes the tokens from the features of the batch.
    """

    path: Path
    photos: Ints
    caption_starts: Ints
    digest: str
    miner: StoredImages | None = None
    teacher: StoredImages | None = None

    @property
    def images(self) -> int:
        """Number of images."""
        return len(self.rows)

    @cached_property
    def records(self) -> NDArray[Any]:
        """What `prepare_captions` computed for each caption, a memory-mapped structured
        array [c] with the fields

        - ``key``: a number, int64. Captions with the same words have the same number.
        - ``length``: number of tokens, int32.
        - ``tokens``: token ids without special tokens, int32 [62], padded with 0. An
          input row without an image has room for 62 caption tokens.
        - ``embedding``: embedding by the text tower, float32 [e].
        - ``mining``: embedding by the mining model, float32 [e']. The field is missing
          without a mining model.
        """
        records: NDArray[Any] = np.load(self.path, mmap_mode="r")
        return records

    def captions(self, first: int, end: int) -> list[list[str]]:
        """Read the captions of the images ``first:end``."""
        columns = caption_columns(self.index.manifest.columns)
        table = read_index_rows(self.index, self.rows[first:end], columns)
        return [_captions(row) for row in table.to_pylist()]

    def caption(self, number: int) -> list[int]:
        """Return the token ids of caption `number`, at most 62.

        An input row with image tokens has room for 61 caption tokens.
        `JointTokenizer.truncated` truncates token ids to this number.
        """
        record = self.records[number]
        ids: list[int] = record["tokens"][: record["length"]].tolist()
        return ids

    def iter_tokens(
        self, adapter: nn.Module, images: Ints, device: torch.device
    ) -> Iterator[Tensor]:
        """Yield the tokens that `adapter`, which is on `device`, makes of the features
        of `images`, in batches: bfloat16 [b, m, d] on the CPU, rounded as in an index.
        """
        for start in range(0, len(images), _ADAPTER_BATCH):
            features = self.blocks(images[start : start + _ADAPTER_BATCH])
            with torch.inference_mode():
                yield adapter(features.to(device).float()).bfloat16().cpu()


def _captions(row: Mapping[str, Any]) -> list[str]:
    """Return the captions of a row that are not blank."""
    return [caption for caption in captions_of(row) if not is_blank(caption)]


def read_captioned_rows(
    index: CommittedIndex, path: Path, split: str | None = None
) -> tuple[TrainingData, list[str], dict[str, int]]:
    """Find the images of an index that have captions.

    Args:
        path: attribute `path` of the result.
        split: use only rows with this value in the column `split`; None uses all rows.
            The split "train" includes Karpathy's split "restval".

    Returns:
        The images, the content hash of each image, and the number of rows without
        features or captions by reason.

    Raises:
        UsageError: there are no such images.
    """
    manifest = index.manifest
    labels = {SPLIT, IMAGE_ID} & {column.name for column in manifest.columns}
    columns = ["row_id", "status", "reason", "content_hash"]
    columns += [*caption_columns(manifest.columns), *sorted(labels)]
    contents = hashlib.sha256()
    contents.update(
        f"{manifest.model['fingerprint']} {finest(manifest.spec.precisions)}".encode()
    )
    # row id, photo, number of captions and content hash of each image
    images: list[tuple[int, int, int, str]] = []
    left_out = Counter[str]()
    row_of_id: dict[Any, int] = {}
    other_splits = set()
    for table in iter_rows(index, columns):
        for row in table.to_pylist():
            if not is_of_split(row.get(SPLIT), split):
                other_splits.add(str(row.get(SPLIT)))
                continue
            captions = _captions(row)
            if row["status"] != INDEXED or not captions:
                without = "no-caption" if row["status"] == INDEXED else row["status"]
                left_out[row["reason"] or without] += 1
                continue
            row_id = row["row_id"]
            content = row["content_hash"]
            image_id = row.get(IMAGE_ID)
            photo = row_id
            if image_id is not None:
                photo = row_of_id.setdefault(image_id, row_id)
            images.append((row_id, photo, len(captions), content))
            contents.update(json.dumps([content, captions]).encode())
    if not images:
        problem = f"{index.location} has no images with captions"
        remedy = "build it from sources with captions"
        if other_splits:
            problem += f" of the split '{split}'"
            remedy = f"its other splits are {', '.join(sorted(other_splits))}"
        raise UsageError(f"{problem}; {remedy}")
    rows, photos, counts, hashes = zip(*images, strict=True)
    data = TrainingData(
        index,
        np.array(rows),
        path,
        np.array(photos),
        np.concatenate([[0], np.cumsum(counts)]),
        contents.hexdigest(),
    )
    return data, [*hashes], dict(sorted(left_out.items()))


def open_same_images(
    location: str | None, hashes: Sequence[str]
) -> StoredImages | None:
    """Open another index of n images; None without a location.

    Args:
        hashes: content hash of each image.

    Raises:
        UsageError: the index lacks an image.
    """
    if location is None:
        return None
    index = CommittedIndex.open(location)
    table = read_all_rows(index, ["row_id", "status", "content_hash"])
    table = table.filter(pc.equal(table["status"], INDEXED))
    positions = pc.index_in(pa.array(hashes), value_set=table["content_hash"])
    if missing := positions.null_count:
        raise UsageError(
            f"{index.location} lacks {missing:,} training images; build it from the"
            " same images"
        )
    return StoredImages(index, table["row_id"].take(positions).to_numpy())


def prepare_captions(
    data: TrainingData,
    bundle: Path,
    device: torch.device,
    group: WorkerGroup,
    should_stop: Callable[[], bool],
    on_shard: Callable[[int, int], None],
) -> None:
    """Write the records of the captions of `data` to the file `data.path`, unless an
    earlier call wrote them. All workers must call this function. The file does not
    exist until it is complete, see `TrainingData.records`.

    Args:
        bundle: bundle with the tokenizer of the joint encoder and the text tower.
        device: device of the text towers.
        group: rank of this worker, and number of workers.
        should_stop: called before each shard. If the result is True, this worker
            prepares no further shards.
        on_shard: called with the number of finished shards and the number of shards
            after each shard.

    Raises:
        TaskInterrupted: `should_stop` stopped a worker. Finished shards are kept.
        CorruptIndexError: a shard cannot be read.
    """
    path = data.path
    if not group.any(not path.exists()):
        return
    parts = path.with_suffix(".parts")
    parts.mkdir(exist_ok=True)
    # Shard s has the captions of the images ``bounds[s]:bounds[s + 1]``.
    size = max(SHARD_IMAGES, math.ceil(data.images / _SHARDS))
    bounds = [*range(0, data.images, size), data.images]
    shards = [parts / f"{first:012d}.npy" for first in bounds[:-1]]
    missing = [number for number, shard in enumerate(shards) if not shard.exists()]
    # All workers must list the missing shards before a worker finishes another shard.
    # Otherwise, the workers would divide different lists.
    group.any(False)
    missing = missing[group.rank :: group.size]
    if missing:
        info = read_bundle_info(bundle)
        verify_files(info)
        tower = load_text_tower(info, device)
        towers = {"embedding": tower}
        if data.miner is not None:
            info = matching_bundle(data.miner.index)
            verify_files(info)
            miner = load_text_tower(info, device)
            # As in the published code, the text tower of the mining model reads
            # captions in the same form as the tower of `bundle`.
            miner.canonical = tower.canonical
            towers["mining"] = miner
        tokenizer = load_joint_tokenizer(
            bundle / JOINT_FOLDER, canonical=tower.canonical
        )
    stopped = False
    for number in missing:
        stopped = should_stop()
        if stopped:
            break
        groups = data.captions(bounds[number], bounds[number + 1])
        captions = [caption for group in groups for caption in group]
        token_ids = tokenizer.caption_ids(captions, MAX_TEXT_TOKENS - 2)
        tokens = np.zeros((len(captions), MAX_TEXT_TOKENS - 2), np.int32)
        for padded, ids in zip(tokens, token_ids, strict=True):
            padded[: len(ids)] = ids
        columns: dict[str, Array] = {
            "key": np.array([*map(_key, captions)]),
            "length": np.array([len(ids) for ids in token_ids], np.int32),
            "tokens": tokens,
        }
        for name, tower in towers.items():
            columns[name] = tower.encode(captions)
        fields = [
            (name, values.dtype, values.shape[1:]) for name, values in columns.items()
        ]
        records = np.rec.fromarrays([*columns.values()], dtype=fields)
        _write_records(shards[number], parts, [records])
        on_shard(sum(shard.exists() for shard in shards), len(shards))
    if group.any(stopped):
        raise TaskInterrupted(
            "the training run stopped while preparing captions; finished shards are"
            " kept"
        )
    if group.rank == 0:
        finished_shards = []
        for shard in shards:
            try:
                finished_shards.append(np.load(shard, mmap_mode="r"))
            except (OSError, ValueError, EOFError) as error:
                shard.unlink()
                raise CorruptIndexError(
                    f"{shard} was damaged; train again, which prepares its captions"
                    " again"
                ) from error
        _write_records(path, parts, finished_shards)
        fsync_path(path.parent)
        shutil.rmtree(parts, ignore_errors=True)
    # The other workers wait here until worker 0 has written the file.
    group.any(False)


def _write_records(path: Path, staging: Path, arrays: Sequence[NDArray[Any]]) -> None:
    """Write the concatenation of structured arrays to the ``.npy`` file `path`."""
    header = np.lib.format.header_data_from_array_1_0(arrays[0])
    header["shape"] = (sum(map(len, arrays)),)
    with replacing(path, staging) as file:
        np.lib.format.write_array_header_1_0(file, header)
        # On a full disk, numpy.save raises an OSError without an errno, and writing to
        # a memory map ends the process.
        for array in arrays:
            file.write(array.data)


def _key(text: str) -> int:
    """Return a number that is equal for captions with the same words. For two captions
    with different words, it is equal with probability 2**-64.
    """
    words = clean_canonicalize(text).encode()
    digest = hashlib.blake2b(words, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
