"""Merging of several indexes of one model into a new index (SPEC.md section 12.2). No block is decoded."""

from __future__ import annotations

import bisect
import datetime
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from storage_formats.errors import UsageError
from storage_formats.format.layout import IndexSpec, Layout, Segment
from storage_formats.format.manifest import CommittedIndex, Manifest
from storage_formats.format.receipts import ShardReceipt
from storage_formats.format.rows import INDEXED, iter_rows
from storage_formats.format.source_columns import MAX_COLUMNS, SourceColumn, merge_columns
from storage_formats.format.tombstones import Tombstones
from storage_formats.writing.row_copy import ORIGINAL_DELETED, with_row_ids
from storage_formats.writing.shard_copy import (
    CommittedShards,
    NewIndex,
    ShardTarget,
    commit_new_index,
    copy_shard,
)

Ints = NDArray[np.int64]
Hashes = NDArray[np.bytes_]
_HASH = "S64"  # SHA-256, hexadecimal


@dataclass(frozen=True)
class MergeInput:
    """An index to merge, and the offset of its row ids.

    Attributes:
        index: the index.
        offset: number to add to a row id of `index` to get the row id in the merged index. A multiple of the shard
            size.
    """

    index: CommittedIndex
    offset: int

    @property
    def first_row(self) -> int:
        """Row id in the merged index of the first row of this input."""
        return self.index.manifest.spec.used_segments[0].first_row + self.offset

    @property
    def shard_offset(self) -> int:
        return self.offset // self.index.manifest.spec.shard_size


@dataclass(frozen=True)
class Merge:
    """The plan of a merge.

    Attributes:
        inputs: the indexes to merge, in the order of the row ids in the merged index.
        spec: shape of the merged index.
        columns: source columns of the merged index.
        plan: fingerprint of the merge.
    """

    inputs: tuple[MergeInput, ...]
    spec: IndexSpec
    columns: tuple[SourceColumn, ...]
    plan: str


def plan_merge(indexes: Sequence[CommittedIndex]) -> Merge:
    """Plan a merge: check that the indexes can be merged, and assign row ids to each index.

    Raises:
        UsageError: fewer than two indexes are given, an index is given twice, or the model or shape of two indexes
            differs.
    """
    if len(indexes) < 2:
        raise UsageError("a merge needs at least two indexes", parameter="indexes")
    roots = [index.root.resolve() for index in indexes]
    for position, root in enumerate(roots):
        if root in roots[:position]:
            raise UsageError(f"{indexes[position].root} is given twice; give each index only once", parameter="indexes")
    for index in indexes[1:]:
        _refuse_differences(indexes[0], index)
    first, inputs, segments = indexes[0].manifest.spec, list[MergeInput](), list[Segment]()
    for index in indexes:
        used = index.manifest.spec.used_segments
        next_row = -(-segments[-1].stop // first.shard_size) * first.shard_size if segments else 0
        offset = next_row - used[0].first_row
        inputs.append(MergeInput(index, offset))
        segments += [Segment(segment.first_row + offset, segment.rows) for segment in used]
    columns = sorted(merge_columns(*(index.manifest.columns for index in indexes)), key=lambda column: column.name)
    if len(columns) > MAX_COLUMNS:
        raise UsageError(
            f"the merged index would have {len(columns)} source columns; merge fewer indexes, so that the index has at "
            f"most {MAX_COLUMNS}"
        )
    states = [(str(index.root), index.manifest.shard_tables, index.manifest.snapshot.deleted) for index in indexes]
    plan = hashlib.sha256(f"merge {states} {columns}".encode()).hexdigest()
    spec = replace(first, rows=segments[-1].stop, segments=tuple(segments))
    return Merge(tuple(inputs), spec, tuple(columns), plan)


_ADVICE = {
    "encoder fingerprint": "only indexes of the same model can be merged",
    "block shape": "only indexes of the same model can be merged",
    "width of embeddings": "only indexes of the same model can be merged",
    "rows per shard": "build one of the indexes again with the shard size of the other",
    "precisions": "add or drop precisions with 'edje-index quantize' first",
}
"""What to do if a property of two indexes differs."""


def _refuse_differences(first: CommittedIndex, other: CommittedIndex) -> None:
    """Raise UsageError if the model or the shape of two indexes differs."""
    expected, actual = _properties(first), _properties(other)
    for name, advice in _ADVICE.items():
        if expected[name] != actual[name]:
            raise UsageError(
                f"{first.root} and {other.root} cannot be merged: the {name} is {expected[name]} in {first.root} "
                f"and {actual[name]} in {other.root}; {advice}",
                parameter="indexes",
            )


def _properties(index: CommittedIndex) -> dict[str, str]:
    spec = index.manifest.spec
    return {
        "encoder fingerprint": str(index.manifest.model["fingerprint"]),
        "block shape": " x ".join(map(str, spec.block_shape)),
        "width of embeddings": str(spec.embed_dim),
        "rows per shard": str(spec.shard_size),
        "precisions": ", ".join(sorted(spec.precisions)),
    }


class ShardMover:
    """Copies the shards of a merge to the new index.

    Args:
        merge: the merge.
        target: directory of the new index.
    """

    def __init__(self, merge: Merge, target: Path) -> None:
        self._merge = merge
        self._layout = Layout(target)
        self._inputs = [(each, CommittedShards(each.index)) for each in merge.inputs]
        self._first_shards = [each.first_row // merge.spec.shard_size for each in merge.inputs]

    def copy_shard(self, shard: int) -> ShardReceipt:
        """Copy and commit the files of the shard `shard` of the new index, and write the receipt of this shard.

        Raises:
            CorruptIndexError: a file of the input is missing or damaged.
            OSError: a file of the new index cannot be written.
        """
        each, shards = self._inputs[bisect.bisect_right(self._first_shards, shard) - 1]

        def moved(table: pa.Table) -> pa.Table:
            originals = [-1 if row is None else row + each.offset for row in table["duplicate_of"].to_pylist()]
            return with_row_ids(table, self._merge.spec.shard_rows(shard), originals, ORIGINAL_DELETED)

        target = ShardTarget(self._layout, shard, self._merge.plan)
        return copy_shard(shards, shard - each.shard_offset, target, moved)


def find_duplicates(merge: Merge) -> list[Ints]:
    """Find rows that have the same content as an indexed row of an earlier input. Deleted rows are ignored.

    Returns:
        For each input, the row ids of the duplicates in this input, int64 [k].
    """
    known: Hashes = np.empty(0, _HASH)
    duplicates = []
    for each in merge.inputs:
        rows, hashes = [np.empty(0, np.int64)], [np.empty(0, _HASH)]
        for table in iter_rows(each.index, ["row_id", "content_hash", "status"]):
            values = np.array([(value or "").encode() for value in table["content_hash"].to_pylist()], _HASH)
            is_duplicate = (values != b"") & _among(values, known)
            rows.append(table["row_id"].to_numpy()[is_duplicate])
            indexed = np.array([status == INDEXED for status in table["status"].to_pylist()], dtype=np.bool_)
            hashes.append(values[(values != b"") & indexed])
        duplicates.append(np.concatenate(rows))
        known = np.unique(np.concatenate([known, *hashes]))
    return duplicates


def _among(values: Hashes, known: Hashes) -> NDArray[np.bool_]:
    """Return which of `values` [k] are in the sorted array `known`, bool [k]."""
    if not len(known):
        return np.zeros(len(values), dtype=np.bool_)
    positions = np.minimum(np.searchsorted(known, values), len(known) - 1)
    return np.asarray(known[positions] == values)


def commit_merge(
    merge: Merge, target: Path, receipts: Sequence[ShardReceipt], *, settings: dict[str, Any], ann: dict[str, Any]
) -> Manifest:
    """Write tombstones, shard tables and `index.json` of the merged index. Return the manifest.

    Args:
        merge: the merge.
        target: directory of the new index.
        receipts: receipts of all shards of the new index.
        settings: value of `settings` in `index.json`.
        ann: value of `ann` in `index.json`, which describes the nearest-neighbour index.
    """
    spec, duplicates = merge.spec, find_duplicates(merge)
    deleted = Tombstones.none(spec.shard_size)
    for each, rows in zip(merge.inputs, duplicates, strict=True):
        deleted = deleted.with_rows(np.concatenate([each.index.deleted.row_ids(), rows]) + each.offset)
    new = NewIndex(
        spec=spec,
        model=merge.inputs[0].index.manifest.model,
        settings=settings,
        plan=merge.plan,
        change=_change(merge, duplicates),
        deleted=deleted,
        next_shard=spec.shards,
        columns=merge.columns,
        encoded_from=_origins(merge),
    )
    return commit_new_index(target, new, receipts, ann)


def _origins(merge: Merge) -> dict[str, tuple[str, ...]]:
    """Return `encoded_from` of the merged index: for each precision, the longest list among the inputs."""
    lists = [each.index.manifest.encoded_from for each in merge.inputs]
    longest = {name: max((origins.get(name, ()) for origins in lists), key=len) for name in merge.spec.precisions}
    return {name: origins for name, origins in longest.items() if origins}


def _change(merge: Merge, duplicates: Sequence[Ints]) -> dict[str, Any]:
    inputs = [
        {
            "name": each.index.root.name,
            "first_row": each.first_row,
            "offset": each.offset,
            "rows": each.index.manifest.spec.used_rows,
            "duplicates": len(rows),
        }
        for each, rows in zip(merge.inputs, duplicates, strict=True)
    ]
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"kind": "merge", "created": created, "inputs": inputs}
