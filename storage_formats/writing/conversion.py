"""Conversion of an index to other precisions, shard by shard and without the model
(SPEC.md section 11).

Readers can use the index during the conversion. They see a new precision after
`index.json` lists it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from storage_formats.codecs import BF16, Blocks, codec
from storage_formats.errors import TaskInterrupted
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.receipts import ShardReceipt
from storage_formats.token_store import TokenStore
from storage_formats.writing.staging import StagedFiles
from storage_formats.writing.token_shard import refuse_outside

_PIECE_BYTES = 8 << 20


@dataclass(frozen=True)
class ConversionTask:
    """The conversion of one shard.

    Attributes:
        source: precision to read, one of the precisions of the index.
    """

    root: str
    shard: int
    spec: IndexSpec
    source: str
    targets: tuple[str, ...]
    plan: str


def convert_shard(
    task: ConversionTask, _: object, should_stop: Callable[[], bool]
) -> ShardReceipt:
    """Convert one shard, commit the new files, and return the receipt.

    This is the worker of an engine. It reports no progress within the shard.

    Args:
        should_stop: called between pieces; True stops the conversion.

    Raises:
        TaskInterrupted: `should_stop` returned True. The unfinished files were removed.
    """
    layout = Layout(Path(task.root))
    staged = StagedFiles(layout, task.shard)
    with contextlib.ExitStack() as stack:
        stack.callback(staged.remove)
        files = {}
        for name in task.targets:
            files[name] = staged.open_tokens(task.spec, name)
            stack.callback(files[name].close)
        holes = done = 0
        for first, blocks in stack.enter_context(
            contextlib.closing(_read_ahead(_blocks(task)))
        ):
            if should_stop():
                raise TaskInterrupted
            kept = np.flatnonzero(~np.isnan(blocks[:, 0, 0].astype(np.float32)))
            present = blocks if len(kept) == len(blocks) else blocks[kept]
            row_ids = task.spec.shard_rows(task.shard).start + first + kept
            for file in files.values():
                refuse_outside(file.codec, present, row_ids)
                file.put(kept + first, file.codec.encode(present))
            done = first + len(blocks)
            holes = holes + len(blocks) - len(kept)
        for file in files.values():
            staged.add_tokens(file)
        committed = staged.commit()
        failed = {"hole": holes} if holes else {}
        receipt = ShardReceipt(
            task.shard, task.plan, done, done - holes, 0, failed, committed, {}
        )
        staged.commit_receipt(receipt)
    return receipt


def _blocks(task: ConversionTask) -> Iterator[tuple[int, Blocks]]:
    """Yield (first position, blocks) of the shard, in bfloat16. Only the last two
    yielded pieces are valid.
    """
    # Two buffers take turns, because new memory would cost a page fault per 4 KiB.
    source = codec(task.source, task.spec.block_shape)
    step = max(1, _PIECE_BYTES // source.record_bytes)
    rows = task.spec.shard_rows(task.shard)
    buffers = [
        np.empty((min(step, len(rows)), *task.spec.block_shape), dtype=BF16)
        for _ in range(2)
    ]
    index = CommittedIndex.open(task.root)
    whole = replace(
        index.manifest,
        snapshot=replace(index.manifest.snapshot, deleted=None, deleted_rows=0),
    )
    # a rollback can bring deleted rows back
    with TokenStore(replace(index, manifest=whole), task.source) as store:
        for first in range(0, len(rows), step):
            buffers.reverse()
            row_ids = np.arange(
                rows.start + first, min(rows.start + first + step, rows.stop)
            )
            records = store.fetch_records(row_ids)
            yield first, source.decode(records, buffers[0][: len(records)])


def _read_ahead(pieces: Iterator[tuple[int, Blocks]]) -> Generator[tuple[int, Blocks]]:
    """Yield the items of `pieces`. A thread computes the next piece while the
    caller processes the current piece.
    """
    with ThreadPoolExecutor(1, "edje-read") as thread:
        next_piece = thread.submit(next, pieces, None)
        while (piece := next_piece.result()) is not None:
            next_piece = thread.submit(next, pieces, None)
            yield piece
