"""Encodes the images of one shard, and commits the shard with a receipt.

All engines call `encode_shard`, so all engines give the same result. A repeated call
gives the same result too.

A worker writes a file in `build/attempts/` for each attempt at a shard, and removes the
file at the end. If the process dies, the file remains. The next attempt at the shard is
then careful: the worker prepares one input at a time, and writes the position of the
current input to the file. If two careful attempts die at the same input, the row of
this input gets the status "failed". The file also names the machine of the attempt. If
this machine is lost, no input is blamed for the death of the process.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edje_index.images.decode import ImageError, content_hash
from edje_index.images.frames import DecodeSettings, decode_input
from edje_index.inputs.input_lists import read_shard_inputs
from edje_index.inputs.refs import InputRef, read_bytes
from edje_index.progress import ShardProgress
from storage_formats.atomic import naming
from storage_formats.errors import EdjeError, TaskInterrupted
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.receipts import ShardReceipt
from storage_formats.format.rows import (
    DUPLICATE,
    FAILED,
    INDEXED,
    RowEntry,
    rows_table,
    with_source_values,
)
from storage_formats.format.source_columns import SourceColumn
from storage_formats.remote.urls import is_url
from storage_formats.threads import ordered_results
from storage_formats.writing.shard_writer import ShardWriter

if TYPE_CHECKING:
    import torch

    from edje_index.indexing.image_encoder import ImageEncoder
    from storage_formats.codecs import Blocks

DEATHS = 2
"""If this number of careful attempts have died at the same input, the row of the input
gets the status "failed".
"""
# minimum number of threads if the shard has inputs on servers, so that requests overlap
_REMOTE_THREADS = 16
# number of batches that are prepared ahead of the model: one is being decoded, one is
# ready
_BATCHES_AHEAD = 2
# If batches are small, at least this number of images is prepared ahead, so that
# requests for inputs on servers overlap.
_IMAGES_AHEAD = 32


@dataclass(frozen=True)
class ShardTask:
    """One shard to encode. The task and the encoder determine the contents of the
    shard.

    Attributes:
        batch_size: number of images, or of frames of clips, per forward pass.
        decode_threads: number of threads that read and decode images. This number does
            not affect the result.
    """

    root: str
    shard: int
    spec: IndexSpec
    plan: str
    batch_size: int
    decoding: DecodeSettings
    decode_threads: int = 1
    columns: tuple[SourceColumn, ...] = ()


@dataclass
class Attempt:
    """One attempt at a shard.

    Attributes:
        machine: id of the machine of the attempt. Empty if the job runs on the same
            machine: if this machine is lost, the job ends too and cannot notice it.
        careful: whether one input at a time is prepared. True if the process of an
            earlier attempt died on a machine that was not lost.
        deaths: number of careful attempts that died at an input, by position of the
            input.
    """

    path: Path
    machine: str
    careful: bool
    deaths: Counter[int] = field(default_factory=Counter)

    def ended_workers(self, position: int) -> bool:
        """Return True if `DEATHS` careful attempts died at the input at `position`."""
        return self.deaths[position] >= DEATHS

    @contextlib.contextmanager
    def preparing(self, position: int) -> Iterator[None]:
        """In a careful attempt, record `position` as the current input during the
        `with` block.
        """
        if not self.careful:
            yield
            return
        self._write(position)
        try:
            yield
        finally:
            self._write(None)

    def _write(self, position: int | None) -> None:
        deaths = {str(key): count for key, count in self.deaths.items()}
        content = {
            "machine": self.machine,
            "careful": self.careful,
            "position": position,
            "deaths": deaths,
        }
        with naming(self.path):
            self.path.write_text(json.dumps(content))


@contextlib.contextmanager
def begin_attempt(
    layout: Layout, shard: int, machine: str = "", alive: Collection[str] = ()
) -> Iterator[Attempt]:
    """Create the file of an attempt, yield the attempt to the `with` block, and
    remove the file after the block.

    The file stays if the process dies. The file also stays if an exception ends the
    attempt and earlier attempts died at an input.

    Args:
        machine: id of this machine, see `Attempt`.
        alive: ids of the machines that are not lost.
    """
    path = layout.attempt(shard)
    attempt = Attempt(path, machine, careful=True)
    try:
        content = json.loads(path.read_text())
        attempt.deaths.update(
            {int(position): int(count) for position, count in content["deaths"].items()}
        )
        if content.get("machine") and content["machine"] not in alive:
            # The machine of the earlier attempt was lost, so its input is not to blame.
            attempt.careful = bool(content["careful"])
        elif content["position"] is not None:
            attempt.deaths[int(content["position"])] += 1
    except FileNotFoundError:
        # no earlier attempt died
        attempt.careful = False
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        # the file is incomplete, because the process died while it wrote the file
        attempt.deaths.clear()
    path.parent.mkdir(parents=True, exist_ok=True)
    attempt._write(None)
    try:
        yield attempt
    except BaseException:
        if not attempt.deaths:
            path.unlink(missing_ok=True)
        raise
    path.unlink(missing_ok=True)


def encode_shard(
    task: ShardTask,
    encoder: ImageEncoder,
    on_progress: Callable[[ShardProgress], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
    *,
    machine: str = "",
    alive: Collection[str] = (),
) -> ShardReceipt:
    """Encode and commit one shard. If an input is damaged or missing, its row gets the
    status "failed".

    If the GPU runs out of memory, the shard is encoded again with half of the batch
    size. The receipt then names the smaller batch size.

    Args:
        encoder: image encoder. The calling thread calls `encode`; several threads call
            `preprocess`.
        should_stop: function that is called before each batch. Encoding stops if the
            function returns True.
        machine: see `begin_attempt`.
        alive: see `begin_attempt`.

    Raises:
        TaskInterrupted: `should_stop` returned True. The next run starts the shard
            again.
        TransientInputError: an input cannot be read or decoded because of a problem of
            the machine.
        EdjeError: the GPU has too little memory for a single image.
    """
    import torch

    try:
        return _encode_whole_shard(
            task, encoder, on_progress, should_stop, machine, alive
        )
    except torch.OutOfMemoryError as error:
        if task.batch_size == 1:
            raise EdjeError(
                "the GPU has too little memory to encode one image: stop other programs"
                " that use it, or build with a smaller model or on a CPU"
            ) from error
    # This call is outside the `except` block. Inside, the exception would keep the
    # tensors of the batch alive, and their memory would not be freed.
    torch.cuda.empty_cache()
    # The whole shard is encoded again, so that all its batches have the same size. Its
    # bytes then do not depend on which batch was too large.
    smaller = replace(task, batch_size=task.batch_size // 2)
    return encode_shard(
        smaller, encoder, on_progress, should_stop, machine=machine, alive=alive
    )


def _encode_whole_shard(
    task: ShardTask,
    encoder: ImageEncoder,
    on_progress: Callable[[ShardProgress], None],
    should_stop: Callable[[], bool],
    machine: str,
    alive: Collection[str],
) -> ShardReceipt:
    layout = Layout(Path(task.root))
    refs = read_shard_inputs(layout, task.spec, task.shard)
    first_row = task.spec.shard_rows(task.shard).start
    images = [
        _Image(ref, _row_entry(first_row + position, ref))
        for position, ref in enumerate(refs)
    ]
    entries = [image.entry for image in images]
    stages = dict.fromkeys(("wait", "encode", "write"), 0.0)
    is_remote_shard = any(is_url(ref.path) for ref in refs)
    threads = (
        max(task.decode_threads, _REMOTE_THREADS)
        if is_remote_shard
        else task.decode_threads
    )
    with (
        ShardWriter(task.root, task.spec, task.shard) as writer,
        begin_attempt(layout, task.shard, machine, alive) as attempt,
        ThreadPoolExecutor(threads, "edje-decode") as pool,
        contextlib.ExitStack() as stack,
    ):
        # if an exception ends the shard, the images that still wait are not prepared
        stack.callback(pool.shutdown, cancel_futures=True)

        def prepare(image: _Image) -> _Image:
            position = image.entry.row_id - first_row
            if attempt.ended_workers(position):
                died = (
                    f"{DEATHS} worker processes died or hung while they read or decoded"
                    " the image"
                )
                image.entry.fail("worker-died", died)
                return image
            with attempt.preparing(position):
                return _prepare(encoder, task.decoding, image)

        size = task.decoding.inputs_per_batch(task.batch_size)
        batches: deque[torch.Tensor] = deque()
        spare: list[torch.Tensor] = []

        def placed() -> Iterator[_Image]:
            """Yield the images, after assigning memory in a batch to each image."""
            for start in range(0, len(images), size):
                batch = (
                    spare.pop()
                    if spare
                    else encoder.new_batch(size, task.decoding.frames)
                )
                batches.append(batch)
                for index, image in enumerate(images[start : start + size]):
                    image.pixels = batch[index]
                    yield image

        ahead = size * (1 + max(_BATCHES_AHEAD, _IMAGES_AHEAD // task.batch_size))
        prepared = ordered_results(
            placed(), lambda image: pool.submit(prepare, image), ahead=ahead
        )
        if attempt.careful:
            prepared = map(prepare, placed())
        for start in range(0, len(images), size):
            if should_stop():
                raise TaskInterrupted
            with _timed(stages, "wait"):
                ready = [
                    image
                    for image in itertools.islice(prepared, size)
                    if image.is_ready
                ]
            batch = batches.popleft()
            if ready:
                with _timed(stages, "encode"):
                    indices = [
                        image.entry.row_id - first_row - start for image in ready
                    ]
                    tokens, embeddings = _encode(encoder, ready, batch, indices)
                with _timed(stages, "write"):
                    problems = writer.outside(tokens)
                    for at, problem in problems.items():
                        ready[at].entry.fail("out-of-range", problem)
                    kept = [at for at in range(len(ready)) if at not in problems]
                    ready = [ready[at] for at in kept]
                    tokens = tokens[kept]
                    embeddings = embeddings[kept]
                    positions = np.array(
                        [image.entry.row_id - first_row for image in ready],
                        dtype=np.int64,
                    )
                    writer.put(positions, tokens, embeddings)
            spare.append(batch)
            done = min(start + size, len(images))
            failed = sum(entry.status == FAILED for entry in entries[:done])
            on_progress(ShardProgress(task.shard, done, failed, dict(stages)))
        with _timed(stages, "write"):
            table = with_source_values(
                rows_table(entries), task.columns, [ref.metadata for ref in refs]
            )
            read, decode = (
                sum(table[f"{stage}_seconds"].to_pylist())
                for stage in ("read", "decode")
            )
        receipt = writer.commit(
            table,
            task.plan,
            {"read": read, "decode": decode, **stages},
            encoder.processor(task.batch_size),
        )
    return receipt


@dataclass
class _Image:
    """One input of the shard. `pixels` is the memory in a batch for its pixels."""

    ref: InputRef
    entry: RowEntry
    pixels: torch.Tensor | None = None
    is_ready: bool = False


def _row_entry(row_id: int, ref: InputRef) -> RowEntry:
    entry = RowEntry(
        row_id, ref.uri, ref.uri_raw, size=ref.size, content_hash=ref.content_hash
    )
    if ref.problem is not None:
        entry.fail(ref.problem, "found while planning")
    elif ref.duplicate_of is not None:
        entry.status = DUPLICATE
        entry.duplicate_of = ref.duplicate_of
    return entry


def _prepare(encoder: ImageEncoder, settings: DecodeSettings, image: _Image) -> _Image:
    """Read, decode and preprocess one image. If this fails, mark the row of the
    image as failed.
    """
    import torch

    entry = image.entry
    if entry.status != INDEXED:
        return image
    started = time.perf_counter()
    try:
        data = read_bytes(image.ref)
        entry.size = len(data)
        entry.content_hash = content_hash(data)
        if image.ref.content_hash not in (None, entry.content_hash):
            raise ImageError(
                reason="changed-since-plan",
                detail="the file has changed since the build was planned",
            )
        entry.read_seconds = time.perf_counter() - started
        started = time.perf_counter()
        target = image.pixels if settings.frames is None else None
        size, frames, truncation = decode_input(
            data,
            entry.uri,
            settings,
            lambda frame: encoder.preprocess(frame, target),
        )
        entry.width, entry.height = size
        entry.detail = truncation
        if settings.frames is not None:
            # a clip
            torch.stack(frames, out=image.pixels)
        image.is_ready = True
        entry.decode_seconds = time.perf_counter() - started
    except ImageError as error:
        entry.fail(error.reason, error.detail)
    return image


def _encode(
    encoder: ImageEncoder, images: list[_Image], batch: torch.Tensor, indices: list[int]
) -> tuple[Blocks, NDArray[np.float32]]:
    """Run the model on `images`. `indices` has the index of each image in `batch`.

    If an output is not finite, mark the row as failed and remove the image from
    `images`. Return the tokens and the embeddings of the remaining images.
    """
    started = time.perf_counter()
    if len(images) == len(batch):
        tokens, embeddings = encoder.encode(batch)
    elif encoder.fills_batches:
        tokens, embeddings = (each[indices] for each in encoder.encode(batch))
    else:
        tokens, embeddings = encoder.encode(batch[indices])
    bits = tokens.view(np.uint16).reshape(len(tokens), -1)
    # a bfloat16 is not finite if all bits of the exponent (0x7F80) are set
    finite = np.isfinite(embeddings).all(axis=1) & ((bits & 0x7F80) != 0x7F80).all(
        axis=1
    )
    for image, good in zip(list(images), finite, strict=True):
        image.entry.encode_seconds = (time.perf_counter() - started) / len(finite)
        if not good:
            image.entry.fail(
                "non-finite-output", "the model returned NaN or infinity for this image"
            )
            images.remove(image)
    return tokens[finite], embeddings[finite]


def encode_inputs(
    refs: Sequence[InputRef],
    encoder: ImageEncoder,
    settings: DecodeSettings,
    batch_size: int,
) -> tuple[dict[int, Blocks], dict[int, str]]:
    """Encode one batch of inputs as `encode_shard` does, and write nothing.

    Args:
        batch_size: see `ShardTask`.

    Returns:
        (blocks, reasons): the block [m, d] of each input that was encoded, and the
        reason for each input that could not be encoded. The keys of both are positions
        in `refs`.

    Raises:
        TransientInputError: an input cannot be read or decoded because of a problem of
            the machine.
    """
    size = settings.inputs_per_batch(batch_size)
    batch = encoder.new_batch(size, settings.frames)
    images = [
        _Image(ref, _row_entry(position, ref), batch[position])
        for position, ref in enumerate(refs)
    ]
    for image in images:
        _prepare(encoder, settings, image)
    ready = [image for image in images if image.is_ready]
    indices = [image.entry.row_id for image in ready]
    tokens = _encode(encoder, ready, batch, indices)[0] if ready else ()
    blocks = {
        image.entry.row_id: block for image, block in zip(ready, tokens, strict=True)
    }
    return blocks, {
        image.entry.row_id: str(image.entry.reason)
        for image in images
        if image.entry.status == FAILED
    }


@contextlib.contextmanager
def _timed(stages: dict[str, float], stage: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    stages[stage] += time.perf_counter() - started
