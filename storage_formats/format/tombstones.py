"""Tombstones, which record the deleted rows of a snapshot, hashes of removed inputs,
and checks of row ids (SPEC.md section 12).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
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

if TYPE_CHECKING:
    from storage_formats.format.manifest import CommittedIndex

RowIds: TypeAlias = Sequence[int] | NDArray[np.integer]
"""Row ids [k], as a sequence or an array of integers."""


@dataclass(frozen=True)
class Tombstones:
    """The set of deleted rows.

    Attributes:
        row_ids: row ids of the deleted rows, int64 [n], ascending.
    """

    row_ids: Ints = field(default_factory=lambda: np.empty(0, np.int64))

    def __len__(self) -> int:
        """Return the number of deleted rows."""
        return len(self.row_ids)

    def contain(self, row_ids: Ints) -> Bools:
        """Return which of `row_ids` [k] are deleted, bool [k]."""
        # With the deleted rows as its argument `kept`, `renumbered` returns -1 for each
        # row id that is not deleted.
        return renumbered(self.row_ids, 0, row_ids) >= 0

    def refuse(self, row_ids: Ints) -> None:
        """Raise DeletedRowError if one of `row_ids` is deleted."""
        if not len(self):
            return
        deleted = [*dict.fromkeys(row_ids[self.contain(row_ids)].tolist())]
        if not deleted:
            return
        others = f" and {len(deleted) - 1} more were" if len(deleted) > 1 else " was"
        raise DeletedRowError(
            f"row {deleted[0]}{others} deleted; an earlier snapshot of the index may"
            f" still hold {'them' if len(deleted) > 1 else 'it'}",
            row_ids=tuple(deleted),
        )

    def with_rows(self, row_ids: Ints | list[int]) -> Tombstones:
        """Return tombstones with the deleted rows of this object and `row_ids`."""
        return Tombstones(np.union1d(self.row_ids, np.asarray(row_ids, np.int64)))

    def to_bytes(self, shard_size: int) -> bytes:
        """Return the contents of the tombstones file: the numbers of the shards with
        deleted rows, then one bitmap per shard.
        """
        row_shards, positions = np.divmod(self.row_ids, shard_size)
        shards, lines = np.unique(row_shards, return_inverse=True)
        is_deleted = np.zeros((len(shards), shard_size), np.bool_)
        is_deleted[lines, positions] = True
        bits = np.packbits(is_deleted, axis=1, bitorder="little")
        return shards.astype("<i8").tobytes() + bits.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes, spec: IndexSpec) -> Tombstones:
        """Return the tombstones described by `data`, a result of `to_bytes`.

        Raises:
            ValueError: `data` does not match an index of shape `spec`.
        """
        width = -(-spec.shard_size // 8)
        count, rest = divmod(len(data), 8 + width)
        if rest:
            raise ValueError(
                f"the file of deleted rows has {len(data)} bytes, which is not a"
                f" multiple of {8 + width}"
            )
        shards = np.frombuffer(data, dtype="<i8", count=count).astype(np.int64)
        bits = np.frombuffer(data, dtype=np.uint8, offset=8 * count)
        is_deleted = np.unpackbits(
            bits.reshape(count, width),
            axis=1,
            count=spec.shard_size,
            bitorder="little",
        )
        lines, positions = np.nonzero(is_deleted)
        row_ids = shards[lines] * spec.shard_size + positions
        # A row id is not negative, and larger than the one before it.
        ascends = (np.diff(row_ids, prepend=-1) > 0).all()
        if not (ascends and rows_in_use(row_ids, spec).all()):
            raise ValueError(
                "the rows in the file of deleted rows do not ascend, or lie outside the"
                " index"
            )
        return cls(row_ids)


def check_row_ids(row_ids: RowIds, rows: int) -> Ints:
    """Return `row_ids` as an array, int64 [k].

    Raises:
        UsageError: `row_ids` is not a flat sequence of integers.
        RowIdError: a row id is not in 0..rows - 1.
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
    """Return `values` as a flat array of integers, [k]. An empty sequence is accepted
    with any dtype.

    Args:
        name: name of the argument, for error messages.

    Raises:
        UsageError: `values` is not a flat sequence of integers.
    """
    try:
        indices = np.asarray(values)
    except ValueError as error:
        # NumPy refuses nested sequences of different lengths.
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
    """Return which of `row_ids` [k] belong to a segment, bool [k]. The result for a
    negative row id is undefined.
    """
    starts = np.array(
        [segment.first_row for segment in spec.used_segments], dtype=np.int64
    )
    stops = np.array([segment.stop for segment in spec.used_segments], dtype=np.int64)
    # A row id can belong only to the last segment that starts at or before it. A row id
    # before the first segment gets the stop 0, so that it belongs to no segment.
    stops_before = np.concatenate([[0], stops])
    used: Bools = row_ids < stops_before[np.searchsorted(starts, row_ids, side="right")]
    return used


def check_rows_in_use(row_ids: Ints, spec: IndexSpec) -> None:
    """Raise RowIdError if one of `row_ids` [k] belongs to no segment. All row ids must
    be in 0..rows - 1.
    """
    unused = row_ids[~rows_in_use(row_ids, spec)]
    if len(unused):
        raise RowIdError(
            f"row id {unused[0]} belongs to no input; leave this row id out"
        )


_HASH_BYTES = 16


def input_hash(uri: str, uri_raw: bytes | None, content_hash: str | None) -> bytes:
    """Return a hash of the name and the content of an input, 16 bytes. An index stores
    this hash for each input whose row a user has deleted.

    Args:
        uri, uri_raw, content_hash: values of the input in these columns of the rows
            (SPEC.md section 9).
    """
    content = (content_hash or "").encode()
    text = b"\0".join((uri.encode(), uri_raw or b"", content))
    return hashlib.blake2b(text, digest_size=_HASH_BYTES).digest()


def hashes_in(data: bytes) -> frozenset[bytes]:
    """Return the hashes in `data`, the contents of the file of removed inputs: the
    sorted results of `input_hash`.

    Raises:
        ValueError: `data` has another length than such a file.
    """
    if len(data) % _HASH_BYTES:
        raise ValueError(f"its length is not a multiple of {_HASH_BYTES}")
    starts = range(0, len(data), _HASH_BYTES)
    return frozenset(data[start : start + _HASH_BYTES] for start in starts)


def live_rows(index: CommittedIndex) -> Ints:
    """Return the row ids of all rows that are not deleted, int64 [n], ascending. Some
    of these rows may be holes.
    """
    parts = [
        np.arange(segment.first_row, segment.stop, dtype=np.int64)
        for segment in index.spec.used_segments
    ]
    row_ids = np.concatenate(parts)
    return row_ids[~index.deleted.contain(row_ids)]


def evenly_spaced_rows(index: CommittedIndex, count: int) -> Ints:
    """Return the row ids of `count` to 2 * `count` - 1 evenly spaced rows that are not
    deleted, or of all such rows if there are fewer, ascending.

    The memory use does not grow with the number of rows of the index.
    """
    spec = index.spec
    step = max(1, (spec.used_rows - len(index.deleted)) // count)
    sample = list[int]()
    rows = 0
    for shard in spec.shard_numbers():
        of_shard = spec.shard_rows(shard)
        row_ids = np.arange(of_shard.start, of_shard.stop)
        row_ids = row_ids[~index.deleted.contain(row_ids)]
        sample += row_ids[-rows % step :: step].tolist()
        rows += len(row_ids)
    return np.array(sample, np.int64)


def renumbered(kept: Ints, first_row: int, row_ids: Ints) -> Ints:
    """Return the new row id of each of `row_ids`, int64 [k], if the rows `kept` get
    consecutive row ids from `first_row` on. The result is -1 for a row that is not in
    `kept`.

    Args:
        kept: int64 [n], row ids, ascending.
    """
    positions = np.searchsorted(kept, row_ids)
    # A row id above the last kept one has the position len(kept), which is out of range
    # in `kept`.
    is_kept = positions < len(kept)
    is_kept[is_kept] = kept[positions[is_kept]] == row_ids[is_kept]
    return np.where(is_kept, first_row + positions, -1)
