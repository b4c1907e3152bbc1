"""Encodes the images of one shard, and commits the shard with a receipt.

All engines call `encode_shard`, so all engines give the same result. A repeated call
gives the same result too.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from edje_index.indexing.kept_batches import Batch, KeptBatches
from edje_index.inputs.helpers import MESSAGE_INPUTS, Helpers, Threads
from edje_index.inputs.input_lists import read_shard_inputs
from edje_index.inputs.preparation import DecodeSettings, Preparation
from edje_index.inputs.refs import InputRef
from edje_index.progress import ShardProgress
from storage_formats.arrays import finite_blocks
from storage_formats.codecs import BF16, Blocks, Codec
from storage_formats.errors import EdjeError, TaskInterrupted
from storage_formats.format.layout import IndexSpec
from storage_formats.format.places import Place, open_place
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
from storage_formats.threads import ordered_results, submit
from storage_formats.writing.shard_writer import ShardWriter, outside

if TYPE_CHECKING:
    import torch

    from edje_index.indexing.image_encoder import ImageEncoder

# number of batches that are prepared ahead of the model: one is being decoded, one is
# ready
_BATCHES_AHEAD = 2
# If batches are small, at least this number of images is prepared ahead, so that
# requests for inputs on servers overlap.
_IMAGES_AHEAD = 32
# The batches of a shard are kept if the whole shard would take longer than this time.
_LONG_SECONDS = 60.0


@dataclass(frozen=True)
class ShardTask:
    """One shard to encode. The task and the encoder determine the contents of the
    shard.

    Attributes:
        batch_size: number of images, or of frames of clips, per forward pass.
    """

    root: str
    shard: int
    spec: IndexSpec
    plan: str
    batch_size: int
    decoding: DecodeSettings
    columns: tuple[SourceColumn, ...] = ()


def batches_in_memory(batch_size: int) -> int:
    """Return the number of batches of pixels in memory: one in the model, and others
    that are prepared ahead.
    """
    return 1 + max(_BATCHES_AHEAD, _IMAGES_AHEAD // batch_size)


def encode_shard(
    task: ShardTask,
    encoder: ImageEncoder,
    helpers: Helpers | Threads,
    on_progress: Callable[[ShardProgress], None],
    should_stop: Callable[[], bool],
) -> ShardReceipt:
    """Encode and commit one shard. If an input is damaged or missing, its row gets the
    status "failed".

    If the shard would take longer than a minute, its batches are kept, and a later
    call uses them, see `KeptBatches`.

    If the GPU runs out of memory, the shard is encoded again with half of the batch
    size. The receipt then names the smaller batch size.

    Args:
        encoder: image encoder. The calling thread calls `encode`.
        helpers: processes or threads that read and decode the inputs. Their memory has
            room for `batches_in_memory` batches.
        should_stop: function that is called before each batch. Encoding stops if the
            function returns True.

    Raises:
        TaskInterrupted: `should_stop` returned True.
        TransientInputError: an input cannot be read or decoded because of a problem of
            the machine.
        EdjeError: the GPU has too little memory for a single image.
    """
    import torch

    while True:
        try:
            with open_place(task.root) as place:
                return _encode_at(
                    place, task, encoder, helpers, on_progress, should_stop
                )
        except torch.OutOfMemoryError as error:
            if task.batch_size == 1:
                raise EdjeError(
                    "the GPU has too little memory to encode one image: stop other"
                    " programs that use it, or build with a smaller model or on a CPU"
                ) from error
        # This call is outside the `except` block. Inside, the exception would keep the
        # tensors of the batch alive, and their memory would not be freed.
        torch.cuda.empty_cache()
        # The whole shard is encoded again, so that all its batches have the same size.
        # Its bytes then do not depend on which batch was too large.
        task = replace(task, batch_size=task.batch_size // 2)


def _encode_at(
    place: Place,
    task: ShardTask,
    encoder: ImageEncoder,
    helpers: Helpers | Threads,
    on_progress: Callable[[ShardProgress], None],
    should_stop: Callable[[], bool],
) -> ShardReceipt:
    import torch

    refs = read_shard_inputs(place, task.spec, task.shard)
    first_row = task.spec.shard_rows(task.shard).start
    entries = [_row_entry(first_row + at, ref) for at, ref in enumerate(refs)]
    names = ("read", "decode", "helpers", "wait", "encode", "write")
    stages = dict.fromkeys(names, 0.0)
    size = task.decoding.inputs_per_batch(task.batch_size)
    # The position of an input in the memory follows from its position in the shard. So
    # the bytes of a batch do not depend on the order in which inputs are prepared.
    memory = torch.from_numpy(helpers.pixels)
    batches = len(memory) // size
    step = min(MESSAGE_INPUTS, -(-size // helpers.count))
    # positions in the shard
    shard = range(len(refs))
    all_batches = [shard[start : start + size] for start in shard[::size]]
    parts = [
        positions[first : first + step]
        for positions in all_batches
        for first in range(0, len(positions), step)
    ]
    processor = encoder.processor(task.batch_size)
    keeper = KeptBatches(
        place, task.shard, f"{task.plan} {task.batch_size} {processor}"
    )
    kept = keeper.read(all_batches, entries)

    def prepare_part(part: range) -> int:
        """Prepare the inputs of `part`, and return the end of `part`."""
        if part.start // size * size not in kept:
            _prepare(helpers, part, entries, refs, batches * size)
        return part.stop

    with (
        ShardWriter(place, task.spec, task.shard) as writer,
        ThreadPoolExecutor(helpers.count, "edje-decode") as pool,
        contextlib.ExitStack() as stack,
    ):
        # if an exception ends the shard, the images that still wait are not prepared
        stack.callback(pool.shutdown, cancel_futures=True)
        ends = ordered_results(
            parts,
            lambda part: submit(pool, prepare_part, part),
            ahead=(batches - 1) * -(-size // step),
        )
        failed = 0
        started = time.monotonic()
        # number of rows that this call has encoded
        encoded = 0
        for positions in all_batches:
            if should_stop():
                raise TaskInterrupted
            start = positions.start
            done = positions.stop
            rows = entries[start:done]
            with _timed(stages, "wait"):
                while next(ends) < done:
                    pass
            batch = kept.pop(start, None)
            if batch is None:
                encoded += len(rows)
                first = start % (batches * size)
                with _timed(stages, "encode"):
                    batch = _encode(
                        encoder, rows, memory[first : first + size], writer.codecs
                    )
                seconds = (time.monotonic() - started) / encoded
                if len(batch.ready) and seconds * len(refs) > _LONG_SECONDS:
                    keeper.write(positions, rows, batch)
            with _timed(stages, "write"):
                writer.put(start + batch.ready, batch.tokens, batch.embeddings)
            failed += sum(row.status == FAILED for row in rows)
            stages["read"] += sum(row.read_seconds for row in rows)
            stages["decode"] += sum(row.decode_seconds for row in rows)
            elapsed = stages["wait"] + stages["encode"] + stages["write"]
            stages["helpers"] = helpers.count * elapsed
            on_progress(ShardProgress(task.shard, done, failed, dict(stages)))
        with _timed(stages, "write"):
            table = with_source_values(
                rows_table(entries), task.columns, [ref.metadata for ref in refs]
            )
        receipt = writer.commit(table, task.plan, stages, processor)
    keeper.remove()
    return receipt


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


def _prepare(
    helpers: Helpers | Threads,
    positions: range,
    rows: Sequence[RowEntry],
    refs: Sequence[InputRef],
    size: int,
) -> None:
    """Prepare the inputs at `positions` of `refs`, unless they have failed or are
    duplicates. The memory of `helpers` has room for `size` inputs.
    """
    pending = [at for at in positions if rows[at].status == INDEXED]
    jobs = [(at % size, refs[at]) for at in pending]
    for at, columns in zip(pending, helpers.prepare(jobs), strict=True):
        vars(rows[at]).update(columns)


def _encode(
    encoder: ImageEncoder,
    rows: Sequence[RowEntry],
    pixels: torch.Tensor,
    codecs: Sequence[Codec],
) -> Batch:
    """Run the model on the images of those of the k `rows` that have not failed and are
    no duplicates, and return the outputs. If an output is not finite, or one of
    `codecs` cannot store it, mark the row as failed.

    Args:
        pixels: the memory of the batch, whose first k images belong to `rows`.
    """
    ready = np.flatnonzero([row.status == INDEXED for row in rows])
    if not len(ready):
        tokens = np.empty((0, *encoder.block_shape), BF16)
        return Batch(ready, tokens, np.empty((0, encoder.embed_dim), np.float32))
    started = time.perf_counter()
    if not encoder.fills_batches:
        # only a batch with gaps is copied
        is_whole = len(ready) == len(rows)
        pixels = pixels[: len(rows)] if is_whole else pixels[ready]
    tokens, embeddings = encoder.encode(pixels)
    if len(tokens) > len(ready):
        tokens = tokens[ready]
        embeddings = embeddings[ready]
    seconds = (time.perf_counter() - started) / len(ready)
    for row in ready.tolist():
        rows[row].encode_seconds = seconds
    for position, problem in outside(codecs, tokens).items():
        rows[ready[position]].fail("out-of-range", problem)
    finite = np.isfinite(embeddings).all(axis=1) & finite_blocks(tokens)
    for row in ready[~finite].tolist():
        rows[row].fail(
            "non-finite-output", "the model returned NaN or infinity for this image"
        )
    sound = [rows[row].status == INDEXED for row in ready.tolist()]
    return Batch(ready[sound], tokens[sound], embeddings[sound])


def encode_inputs(
    refs: Sequence[InputRef],
    encoder: ImageEncoder,
    settings: DecodeSettings,
    batch_size: int,
) -> tuple[list[RowEntry], dict[int, Blocks]]:
    """Encode one batch of inputs as `encode_shard` does, and write nothing.

    Args:
        batch_size: see `ShardTask`.

    Returns:
        (rows, blocks): the row of each input, and the block [m, d] of each input that
        was encoded, by position in `refs`.

    Raises:
        TransientInputError: an input cannot be read or decoded because of a problem of
            the machine.
    """
    import torch

    size = settings.inputs_per_batch(batch_size)
    helpers = Threads(1, Preparation(settings, encoder.preprocess), size)
    rows = [_row_entry(position, ref) for position, ref in enumerate(refs)]
    _prepare(helpers, range(len(refs)), rows, refs, size)
    pixels = torch.from_numpy(helpers.pixels)
    batch = _encode(encoder, rows, pixels, ())
    return rows, dict(zip(batch.ready.tolist(), batch.tokens, strict=True))


@contextlib.contextmanager
def _timed(stages: dict[str, float], stage: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    stages[stage] += time.perf_counter() - started
