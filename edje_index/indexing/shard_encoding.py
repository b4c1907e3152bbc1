"""Encoding one shard: from a `ShardTask` to a committed shard and its receipt.

Both engines run this one function, so they cannot differ. It depends on the task, the frozen inputs and the
encoder alone, and may be run any number of times. Images are read and decoded in threads ahead of the model;
batches are cut inside the shard, always at the same rows.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from edje_index.images.decode import ImageError, content_hash, decode_rgb
from edje_index.images.inputs import InputRef, read_bytes, read_inputs
from storage_formats.errors import EdjeError
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.receipts import ShardReceipt
from storage_formats.format.rows import DUPLICATE, FAILED, INDEXED, RowEntry, rows_table
from storage_formats.writing.shard_writer import ShardWriter

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from storage_formats.codecs import Blocks

_BATCHES_AHEAD = 2  # decoded batches that may wait for the model: one in work, one ready


class Encoder(Protocol):
    """The part of `edje_index.indexing.image_encoder.ImageEncoder` that a shard needs."""

    def preprocess(self, image: Image) -> torch.Tensor:
        """RGB image -> float32 [3, h, w]. Called from several threads at once."""
        ...

    def encode(self, pixels: torch.Tensor) -> tuple[Blocks, NDArray[np.float32]]:
        """[b, 3, h, w] -> (bfloat16 [b, m, d], float32 [b, embed_dim])."""
        ...


@dataclass(frozen=True)
class ShardTask:
    """All that decides what a shard will hold, given the encoder.

    Attributes:
        root: the index.
        shard: its number.
        spec: shape of the index.
        plan: fingerprint of the build plan.
        batch_size: images a forward pass.
        max_pixels: larger images fail as "too-many-pixels".
        decode_threads: threads that read and decode; does not change any result.
    """

    root: str
    shard: int
    spec: IndexSpec
    plan: str
    batch_size: int
    max_pixels: int
    decode_threads: int


@dataclass(frozen=True)
class StageProgress:
    """How far a shard is, and seconds spent so far by stage; read and decode are summed over threads."""

    shard: int
    done: int
    failed: int
    read: float = 0.0
    decode: float = 0.0
    wait: float = 0.0
    encode: float = 0.0
    write: float = 0.0


class EncodingInterrupted(EdjeError):
    """The caller asked to stop; the attempt was removed."""


def encode_shard(
    task: ShardTask,
    encoder: Encoder,
    on_progress: Callable[[StageProgress], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> ShardReceipt:
    """Encode and commit one shard.

    Args:
        task: what to encode.
        encoder: the model; only this thread calls `encode`, the decode threads call `preprocess`.
        on_progress: called after each batch.
        should_stop: asked before each batch.

    Raises:
        EncodingInterrupted: `should_stop` said so.
        OSError: the index cannot be written. Inputs that cannot be read or decoded become failed rows instead.
    """
    refs = read_inputs(Layout(Path(task.root)).inputs(task.shard))
    first_row = task.spec.shard_rows(task.shard).start
    images = [_Image(ref, _row_record(first_row + position, ref)) for position, ref in enumerate(refs)]
    records = [image.record for image in images]
    stages = dict.fromkeys(("wait", "encode", "write"), 0.0)
    with (
        ShardWriter(task.root, task.spec, task.shard) as writer,
        ThreadPoolExecutor(task.decode_threads, "edje-decode") as pool,
    ):
        done = 0
        for batch in _batches_ahead(task, images, functools.partial(_prepare, encoder, task.max_pixels), pool):
            if should_stop():
                pool.shutdown(wait=True, cancel_futures=True)
                raise EncodingInterrupted(f"stopped inside shard {task.shard}")
            with _timed(stages, "wait"):
                ready = [image for image in (future.result() for future in batch) if image.pixels is not None]
            if ready:
                with _timed(stages, "encode"):
                    tokens, embeddings = _encode(encoder, ready)
                with _timed(stages, "write"):
                    writer.put(np.array([image.record.row_id - first_row for image in ready]), tokens, embeddings)
            done += len(batch)
            on_progress(_progress(task.shard, records, done, stages))
        with _timed(stages, "write"):
            table = rows_table(records)
            read, decode = (sum(table[f"{stage}_seconds"].to_pylist()) for stage in ("read", "decode"))
        return writer.commit(table, task.plan, {"read": read, "decode": decode, **stages})


@dataclass
class _Image:
    """One input on its way through a shard; `pixels` is set while it waits for the model."""

    ref: InputRef
    record: RowEntry
    pixels: torch.Tensor | None = None


def _row_record(row_id: int, ref: InputRef) -> RowEntry:
    record = RowEntry(row_id, ref.uri, _raw_name(ref), size=ref.size, content_hash=ref.content_hash)
    if ref.problem is not None:
        record.fail(ref.problem, "found while planning")
    elif ref.duplicate_of is not None:
        record.status, record.duplicate_of = DUPLICATE, ref.duplicate_of
    return record


def _raw_name(ref: InputRef) -> bytes | None:
    """The bytes of a file name that is not UTF-8, which `ref.uri` can only paraphrase."""
    try:
        ref.path.decode()
    except UnicodeDecodeError:
        return ref.path
    return None


def _batches_ahead(
    task: ShardTask, images: list[_Image], prepare: Callable[[_Image], _Image], pool: Executor
) -> Iterator[list[Future[_Image]]]:
    """Batches in row order, each submitted to `pool` a bounded number of batches before it is asked for."""
    pending: deque[list[Future[_Image]]] = deque()
    for start in range(0, len(images), task.batch_size):
        pending.append([pool.submit(prepare, image) for image in images[start : start + task.batch_size]])
        if len(pending) > _BATCHES_AHEAD:
            yield pending.popleft()
    yield from pending


def _prepare(encoder: Encoder, max_pixels: int, image: _Image) -> _Image:
    """Read, decode and preprocess one image; what fails becomes the row's status and reason."""
    record = image.record
    if record.status != INDEXED:
        return image
    started = time.perf_counter()
    try:
        data = read_bytes(image.ref)
        record.size, record.content_hash = len(data), content_hash(data)
        if image.ref.content_hash not in (None, record.content_hash):
            raise ImageError("changed-since-plan", "its bytes are not those that were planned")
        record.read_seconds = time.perf_counter() - started
        started = time.perf_counter()
        rgb = decode_rgb(data, max_pixels)
        record.width, record.height = rgb.size
        image.pixels = encoder.preprocess(rgb)
        record.decode_seconds = time.perf_counter() - started
    except ImageError as error:
        record.fail(error.reason, error.detail)
    return image


def _encode(encoder: Encoder, images: list[_Image]) -> tuple[Blocks, NDArray[np.float32]]:
    """Run the model on `images`; those with an output that is not finite become failed rows and leave the list."""
    import torch

    started = time.perf_counter()
    tokens, embeddings = encoder.encode(torch.stack([image.pixels for image in images if image.pixels is not None]))
    finite = np.isfinite(embeddings).all(axis=1) & ~_has_non_finite(tokens)
    for image, good in zip(list(images), finite, strict=True):
        image.pixels = None
        image.record.encode_seconds = (time.perf_counter() - started) / len(finite)
        if not good:
            image.record.fail("non-finite-output", "the model gave NaN or infinity for this image")
            images.remove(image)
    return tokens[finite], embeddings[finite]


def _has_non_finite(tokens: Blocks) -> NDArray[np.bool_]:
    """Which of bfloat16 [b, m, d] hold a NaN or an infinity, that is an exponent of all ones -> [b]."""
    bits = tokens.view(np.uint16).reshape(len(tokens), -1)
    return np.asarray(((bits & 0x7F80) == 0x7F80).any(axis=1))


@contextlib.contextmanager
def _timed(stages: dict[str, float], stage: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    stages[stage] += time.perf_counter() - started


def _progress(shard: int, records: list[RowEntry], done: int, stages: dict[str, float]) -> StageProgress:
    finished = records[:done]
    return StageProgress(
        shard=shard,
        done=done,
        failed=sum(record.status == FAILED for record in finished),
        read=sum(record.read_seconds for record in finished),
        decode=sum(record.decode_seconds for record in finished),
        **stages,
    )
