"""Conversion of an index to other precisions, shard by shard (SPEC.md section 11). The
stored blocks are decoded and encoded again, so no model is needed.

Readers can use the index during the conversion. They see a new precision as soon as the
commit adds it to `index.json`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from storage_formats.arrays import holes
from storage_formats.errors import CorruptIndexError, TaskInterrupted
from storage_formats.format.layout import IndexSpec, OffsetBlock
from storage_formats.format.manifest import (
    CommittedIndex,
    kept_snapshots,
)
from storage_formats.format.offset import (
    SAMPLE_BLOCKS,
    Offset,
    estimate_offset,
    offset_block,
    read_offset,
)
from storage_formats.format.places import open_place
from storage_formats.format.receipts import ShardReceipt
from storage_formats.format.tombstones import evenly_spaced_rows
from storage_formats.token_store import TokenStore
from storage_formats.writing.shard_writer import ShardWriter, refuse_outside

_PIECE_BYTES = 8 << 20
# number of sampled rows that are read at once to compute an offset block
_SAMPLE_ROWS = 64


@dataclass(frozen=True)
class ConversionTask:
    """The conversion of one shard.

    Attributes:
        root: path or URL of the index.
        shard: number of the shard.
        spec: shape of the index after the conversion.
        source: name of the precision to read.
        targets: names of the precisions to write.
        plan: fingerprint of the conversion, which is stored in the receipt.
    """

    root: str
    shard: int
    spec: IndexSpec
    source: str
    targets: tuple[str, ...]
    plan: str


def choose_offset(
    index: CommittedIndex, source: str, names: Sequence[str]
) -> tuple[Offset | None, OffsetBlock | None]:
    """Return the offset block with which the precisions `names` are encoded, and its
    description in the manifest after the conversion.

    Both are None if no kept snapshot has an offset block and `sampled_offset` returns
    None. The description is also None if no precision of the index uses an offset block
    after the conversion.

    All snapshots of an index share one offset block. If no kept snapshot has an offset
    block, it is computed from a sample of rows that are not deleted. If a kept snapshot
    already stores one of the precisions `names`, this precision is encoded in the same
    way again, with or without the offset, because the snapshots share its files.

    Args:
        source: name of the precision to read.
        names: names of the precisions to add.
    """
    offset = None
    plain = set[str]()
    with_offset = set[str]()
    for manifest in kept_snapshots(index):
        spec = manifest.spec
        plain.update(spec.precisions)
        # The values of the offset block are the same in all snapshots. Only the lists
        # of precisions that use the offset block differ.
        if spec.offset is not None:
            with_offset.update(spec.offset.precisions)
            offset = read_offset(index.place, spec)
    plain -= with_offset
    if offset is None:
        offset = sampled_offset(index, source)
    if offset is None:
        return None, None
    stored = index.spec.offset
    before = () if stored is None else stored.precisions
    added = [name for name in names if name not in plain and name not in before]
    return offset, offset_block(offset, (*before, *added))


def sampled_offset(index: CommittedIndex, source: str) -> Offset | None:
    """Return the mean of the blocks of 1,024 to 2,047 evenly spaced rows that are not
    deleted, or of all such rows if there are fewer. The blocks are read in the
    precision `source`. Return None if `estimate_offset` does.
    """
    sample = evenly_spaced_rows(index, SAMPLE_BLOCKS)
    with TokenStore(index, source) as store:
        parts = np.split(sample, range(_SAMPLE_ROWS, len(sample), _SAMPLE_ROWS))
        batches = map(store.fetch, parts)
        return estimate_offset(each[~store.holes(each)] for each in batches)


def offset_from_tokens(index: CommittedIndex) -> Iterator[tuple[str, Offset]]:
    """Yield candidates (precision, offset block) for a lost offset block of `index`.

    A conversion computed the offset block from a precision without an offset, in a
    snapshot that may still be kept. The function repeats this computation for every
    kept snapshot, newest first, and every precision that is stored without an offset.
    """
    for manifest in reversed(kept_snapshots(index)):
        block = manifest.spec.offset
        with_offset = () if block is None else block.precisions
        for name in manifest.spec.precisions:
            if name not in with_offset:
                # Damaged tokens give no candidate, but the tokens of another precision
                # or snapshot may be undamaged.
                with contextlib.suppress(CorruptIndexError):
                    offset = sampled_offset(replace(index, manifest=manifest), name)
                    if offset is not None:
                        yield name, offset


def convert_shard(
    task: ConversionTask, _: object, should_stop: Callable[[], bool]
) -> ShardReceipt:
    """Convert one shard, commit the new files, and return the receipt.

    Engines call this function as their worker. The second argument, the function that
    receives the progress within a shard, is not used.

    Args:
        should_stop: called before each piece of the shard. True stops the conversion.

    Raises:
        TaskInterrupted: `should_stop` returned True. The unfinished files were removed.
    """
    rows = np.array(task.spec.shard_rows(task.shard))
    # Deleted rows are converted too, because a rollback can restore them.
    index = CommittedIndex.open(task.root).undeleted()
    with (
        open_place(task.root) as place,
        TokenStore(index, task.source) as store,
        ShardWriter(place, task.spec, task.shard, task.targets) as writer,
    ):
        step = max(1, _PIECE_BYTES // store.record_bytes)
        pieces = np.split(rows, range(step, len(rows), step))
        with contextlib.closing(store.iter_fetch(pieces)) as read:
            for row_ids, blocks in zip(pieces, read, strict=True):
                if should_stop():
                    raise TaskInterrupted
                kept = np.flatnonzero(~holes(blocks))
                present = blocks if len(kept) == len(blocks) else blocks[kept]
                refuse_outside(writer.codecs, present, row_ids[kept])
                writer.put(row_ids[kept] - rows[0], present)
        return writer.commit(None, task.plan)
