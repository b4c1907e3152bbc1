"""Row ids that an index has, and tombstones, which record the deleted rows of a
snapshot (SPEC.md section 12).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from storage_formats.arrays import Bools, Ints
from storage_formats.errors import (
    DeletedRowError,
    RowIdError,
    UsageError,
)
from storage_formats.format.layout import IndexSpec
from storage_formats.format.shard_table import committed_content

if TYPE_CHECKING:
    from storage_formats.format.manifest import CommittedIndex, Snapshot

RowIds: TypeAlias = Sequence[int] | NDArray[np.integer]
"""Row ids, [k]: any sequence or array of integers."""


@dataclass(frozen=True)
class Tombstones:
    """The set of deleted rows. It uses memory only for shards with deleted rows.

    Attributes:
        shards: int64 [n], numbers of the shards with deleted rows, ascending.
        bits: uint8 [n, ceil(shard_size / 8)], one bitmap per shard in `shards`. Bit i %
            8 of byte i // 8 is 1 if the row at position i of the shard is deleted.
    """

    shard_size: int
    shards: Ints
    bits: NDArray[np.uint8]

    @classmethod
    def none(cls, shard_size: int) -> Tombstones:
        """Return the tombstones of an index without deleted rows."""
        return cls(
            shard_size,
            np.empty(0, np.int64),
            np.empty((0, _bitmap_bytes(shard_size)), np.uint8),
        )

    def __len__(self) -> int:
        """Return the number of deleted rows."""
        return int(np.bitwise_count(self.bits).sum())

    def contain(self, row_ids: Ints | list[int]) -> Bools:
        """Return which of `row_ids` [k] are deleted, bool [k]."""
        shards, positions = np.divmod(
            np.asarray(row_ids, dtype=np.int64), self.shard_size
        )
        if not len(self.shards):
            return np.zeros(len(shards), dtype=np.bool_)
        lines = np.minimum(np.searchsorted(self.shards, shards), len(self.shards) - 1)
        is_set = (
            self.bits[lines, positions // 8] >> (positions % 8).astype(np.uint8)
        ) & 1
        return np.asarray((self.shards[lines] == shards) & (is_set == 1))

    def refuse(self, row_ids: Ints) -> None:
        """Raise DeletedRowError if one of `row_ids` is deleted."""
        if len(self.shards) and (deleted := self.contain(row_ids)).any():
            raise DeletedRowError(tuple(dict.fromkeys(row_ids[deleted].tolist())))

    def row_ids(self) -> Ints:
        """Return the row ids of the deleted rows, int64 [n], ascending."""
        positions = np.unpackbits(self.bits, axis=1, bitorder="little")
        lines, offsets = np.nonzero(positions)
        return np.asarray(
            self.shards[lines] * self.shard_size + offsets, dtype=np.int64
        )

    def with_rows(self, row_ids: Ints | list[int]) -> Tombstones:
        """Return new tombstones that contain the rows of this object and `row_ids`."""
        added = np.asarray(row_ids, dtype=np.int64)
        shards = np.union1d(self.shards, added // self.shard_size)
        bits = np.zeros((len(shards), self.bits.shape[1]), dtype=np.uint8)
        bits[np.searchsorted(shards, self.shards)] = self.bits
        lines = np.searchsorted(shards, added // self.shard_size)
        positions = added % self.shard_size
        np.bitwise_or.at(
            bits,
            (lines, positions // 8),
            np.left_shift(1, positions % 8).astype(np.uint8),
        )
        return Tombstones(self.shard_size, shards, bits)

    def to_bytes(self) -> bytes:
        """Return the contents of the tombstones file: all shard numbers, then all
        bitmaps.
        """
        return self.shards.astype("<i8").tobytes() + self.bits.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes, spec: IndexSpec) -> Tombstones:
        """Return the tombstones described by `data`, a result of `to_bytes`.

        Raises:
            ValueError: `data` does not match an index of shape `spec`.
        """
        width = _bitmap_bytes(spec.shard_size)
        count, rest = divmod(len(data), 8 + width)
        if rest:
            raise ValueError(
                f"the file of deleted rows has {len(data)} bytes, which is not a"
                f" multiple of {8 + width}"
            )
        shards = np.frombuffer(data, dtype="<i8", count=count).astype(np.int64)
        bits = np.frombuffer(data, dtype=np.uint8, offset=8 * count).reshape(
            count, width
        )
        if count and (
            shards[0] < 0
            or shards[-1] >= spec.shards
            or not (np.diff(shards) > 0).all()
        ):
            raise ValueError(
                "the shard numbers in the file of deleted rows are not ascending, or"
                f" not in 0..{spec.shards - 1}"
            )
        tombstones = cls(spec.shard_size, shards, bits)
        if not rows_in_use(tombstones.row_ids(), spec).all():
            raise ValueError("the file of deleted rows contains rows outside the index")
        return tombstones


def check_row_ids(row_ids: RowIds, rows: int) -> Ints:
    """Return `row_ids` as an array, int64 [k].

    Raises:
        UsageError: `row_ids` is not a flat sequence of integers.
    """
    ids = as_indices(row_ids, "row_ids")
    if ids.size and (ids.min() < 0 or ids.max() >= rows):
        outside = ids[(ids < 0) | (ids >= rows)]
        others = f" (and {len(outside) - 1} more)" if len(outside) > 1 else ""
        raise RowIdError(
            f"row id {outside[0]}{others} is out of range; the index has the row ids 0"
            f" to {rows - 1}"
        )
    return ids.astype(np.int64)


def as_indices(
    values: Sequence[int] | NDArray[np.integer], name: str
) -> NDArray[np.integer]:
    """Return `values` as a flat array of integers, [k].

    Raises:
        UsageError: `values` is not a flat sequence of integers.
    """
    try:
        indices = np.asarray(values)
    except ValueError as error:
        # nested sequences of different lengths
        raise UsageError(
            f"{name} must be a flat sequence of integers: {error}"
        ) from None
    if indices.ndim == 1 and (indices.dtype.kind in "iu" or not indices.size):
        return indices
    hint = (
        "; convert a boolean mask with numpy.flatnonzero(mask)"
        if indices.dtype == np.bool_
        else ""
    )
    raise UsageError(
        f"{name} must be a flat sequence of integers, got {indices.dtype} of shape"
        f" {list(indices.shape)}{hint}"
    )


def rows_in_use(row_ids: Ints, spec: IndexSpec) -> Bools:
    """Return which of `row_ids` [k] belong to a segment, bool [k]. All ids must be
    in 0..rows - 1.
    """
    starts = np.array(
        [segment.first_row for segment in spec.used_segments], dtype=np.int64
    )
    stops = np.array([segment.stop for segment in spec.used_segments], dtype=np.int64)
    # the stop of the last segment that starts at or before a row id; 0 if none does
    stops_before = np.concatenate([[0], stops])
    used: Bools = row_ids < stops_before[np.searchsorted(starts, row_ids, side="right")]
    return used


def check_rows_in_use(row_ids: Ints, spec: IndexSpec) -> None:
    """Raise RowIdError if one of `row_ids` [k] belongs to no segment. All ids must
    be in 0..rows - 1.
    """
    refuse_before_first(row_ids, spec)
    unused = row_ids[~rows_in_use(row_ids, spec)]
    if len(unused):
        raise RowIdError(
            f"row id {unused[0]} belongs to no input; leave this row id out"
        )


def refuse_before_first(row_ids: Ints, spec: IndexSpec) -> None:
    """Raise RowIdError if a row id lies before the first segment: a compaction
    renumbered it.
    """
    first = spec.used_segments[0].first_row
    if first and len(row_ids) and (lowest := int(row_ids.min())) < first:
        raise RowIdError(
            f"row id {lowest} is below {first}, the first row id of the index: a"
            " compaction renumbered the row; translate row ids with"
            " TokenStore.translate"
        )


def read_tombstones(root: Path, spec: IndexSpec, snapshot: Snapshot) -> Tombstones:
    """Read the tombstones of a snapshot of the index at `root`."""
    entry = snapshot.deleted
    if entry is None:
        return Tombstones.none(spec.shard_size)
    with committed_content(root, entry, "file of deleted rows") as data:
        tombstones = Tombstones.from_bytes(data, spec)
        if len(tombstones) != snapshot.deleted_rows:
            raise ValueError(
                f"it marks {len(tombstones)} rows as deleted, but index.json lists"
                f" {snapshot.deleted_rows}"
            )
    return tombstones


def live_rows(index: CommittedIndex, shards: Sequence[int] | None = None) -> Ints:
    """Return the row ids of all rows that are not deleted, int64 [n], ascending; with
    `shards`, of those in these shards. Some of the rows may be holes.
    """
    spec = index.spec
    parts = [
        np.arange(segment.first_row, segment.stop, dtype=np.int64)
        for segment in spec.used_segments
    ]
    row_ids = np.concatenate(parts)
    if shards is not None:
        row_ids = row_ids[np.isin(row_ids // spec.shard_size, shards)]
    return row_ids[~index.deleted.contain(row_ids)]


def renumbered(kept: Ints, first_row: int, row_ids: Ints) -> Ints:
    """Return the new id of each of `row_ids`, int64 [k], if the rows `kept`, ascending,
    are numbered from `first_row` on; -1 if a row is not kept.
    """
    positions = np.searchsorted(kept, row_ids)
    is_kept = positions < len(kept)
    is_kept[is_kept] = kept[positions[is_kept]] == row_ids[is_kept]
    return np.where(is_kept, first_row + positions, -1)


def _bitmap_bytes(shard_size: int) -> int:
    return -(-shard_size // 8)
