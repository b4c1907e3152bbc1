"""Splitting of an index into several new indexes at shard boundaries (SPEC.md section 12.2). No block is decoded."""

from __future__ import annotations

import datetime
import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from storage_formats.errors import UsageError
from storage_formats.format.layout import IndexSpec, Layout, Segment
from storage_formats.format.manifest import CommittedIndex, Manifest
from storage_formats.format.receipts import ShardReceipt
from storage_formats.format.selection import Selection
from storage_formats.format.tombstones import Tombstones
from storage_formats.writing.row_copy import LostOriginal, count_values, with_row_ids
from storage_formats.writing.shard_copy import (
    CommittedShards,
    NewIndex,
    ShardTarget,
    commit_new_index,
    copy_shard,
)

ORIGINAL_ELSEWHERE = LostOriginal(
    "original-in-another-part", "the original of this duplicate is in another part of the split index"
)


@dataclass(frozen=True)
class IndexPart:
    """A part of an index: the rows of consecutive shards. The rows keep their ids.

    Attributes:
        index: the index that is split.
        shards: first shard number of the part, and the shard number after the last one.
        number: position of the part, from 1.
        parts: number of all parts.
    """

    index: CommittedIndex
    shards: tuple[int, int]
    number: int
    parts: int

    @property
    def spec(self) -> IndexSpec:
        """Shape of the new index."""
        whole = self.index.manifest.spec
        first, stop = (shard * whole.shard_size for shard in self.shards)
        cut = [(max(each.first_row, first), min(each.stop, stop)) for each in whole.used_segments]
        segments = tuple(Segment(start, end - start) for start, end in cut if start < end)
        return replace(whole, rows=segments[-1].stop, segments=segments)

    @property
    def plan(self) -> str:
        """Fingerprint of the part, which identifies the snapshot and the rows."""
        manifest = self.index.manifest
        state = (manifest.plan, manifest.shard_tables, manifest.snapshot, manifest.spec.precisions, manifest.ann)
        return hashlib.sha256(f"split {state} {self.shards} {self.number} of {self.parts}".encode()).hexdigest()


def plan_split(index: CommittedIndex, parts: int) -> list[IndexPart]:
    """Divide `index` into `parts` parts with about equal numbers of rows that are not deleted.

    Raises:
        UsageError: `parts` is less than 2, or more than the number of shards.
        CorruptIndexError: the tombstones file is damaged.
    """
    selection = Selection.of(index)
    if parts < 2:
        raise UsageError("a split needs at least two output directories", parameter="outs")
    if parts > len(selection.shards):
        raise UsageError(
            f"{index.root} has {len(selection.shards)} shards, so it cannot be split into {parts} parts; give at most "
            f"{len(selection.shards)} output directories",
            parameter="outs",
        )
    cuts = [0]
    for number in range(1, parts):
        target = len(selection) * number / parts
        nearest = int(np.abs(selection.ranks - target).argmin())
        cuts.append(min(max(nearest, cuts[-1] + 1), len(selection.shards) - parts + number))
    starts = selection.shards[cuts].tolist()
    stops = [*starts[1:], index.manifest.spec.shards]
    pairs = zip(starts, stops, strict=True)
    return [IndexPart(index, shards, number, parts) for number, shards in enumerate(pairs, 1)]


class PartWriter:
    """Copies the shards of a part to a new index.

    Args:
        part: the part.
        shards: the shards of the whole index.
        target: directory of the new index.
    """

    def __init__(self, part: IndexPart, shards: CommittedShards, target: Path) -> None:
        self._layout = Layout(target)
        self._shards = shards
        self._spec = part.spec
        self._plan = part.plan

    def copy_shard(self, shard: int) -> ShardReceipt:
        """Copy and commit the files of one shard, and write the receipt.

        Raises:
            CorruptIndexError: a file of the index is missing or damaged.
            OSError: a file of the new index cannot be written.
        """
        return copy_shard(self._shards, shard, ShardTarget(self._layout, shard, self._plan), self._changed)

    def _changed(self, table: pa.Table) -> pa.Table:
        """Make failed rows of the duplicates whose original is in another part. Return `table` if there are none."""
        first, stop = self._spec.used_segments[0].first_row, self._spec.rows
        originals = table["duplicate_of"].to_pylist()
        kept = [-1 if row is None or not first <= row < stop else row for row in originals]
        if all(row is None or row == new for row, new in zip(originals, kept, strict=True)):
            return table
        row_ids = table["row_id"].to_pylist()
        return with_row_ids(table, range(row_ids[0], row_ids[0] + len(row_ids)), kept, ORIGINAL_ELSEWHERE)


def commit_part(
    part: IndexPart, target: Path, receipts: list[ShardReceipt], *, settings: dict[str, Any], ann: dict[str, Any]
) -> Manifest:
    """Write tombstones, shard tables and `index.json` of a part. Return the manifest.

    Args:
        part: the part.
        target: directory of the new index.
        receipts: receipts of all shards of the part.
        settings: value of `settings` in `index.json`.
        ann: value of `ann` in `index.json`, which describes the nearest-neighbour index.
    """
    manifest, spec = part.index.manifest, part.spec
    new = NewIndex(
        spec=spec,
        model=manifest.model,
        settings=settings,
        plan=part.plan,
        change=_change(part),
        deleted=_deleted(part),
        next_shard=max(manifest.spec.shards, manifest.snapshot.next_shard),
        columns=count_values(Layout(target), spec.shard_numbers(), manifest.columns),
        encoded_from=manifest.encoded_from,
    )
    return commit_new_index(target, new, receipts, ann)


def _deleted(part: IndexPart) -> Tombstones:
    deleted, (first, stop) = part.index.deleted, part.shards
    of_part = (deleted.shards >= first) & (deleted.shards < stop)
    return Tombstones(deleted.shard_size, deleted.shards[of_part], deleted.bits[of_part])


def _change(part: IndexPart) -> dict[str, Any]:
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    origin = {"name": part.index.root.name, "snapshot": part.index.manifest.snapshot.number}
    return {"kind": "split", "created": created, **origin, "part": part.number, "parts": part.parts}
