"""Finds the index rows of captioned images by the names of the images."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from edje_index.captions.reading import CaptionedImage
from edje_index.images.inputs import display_path
from storage_formats.errors import UsageError
from storage_formats.format.rows import DUPLICATE, FAILED, INDEXED

NOT_IN_INDEX = "not-in-index"
DELETED = "deleted"
NAME_COLUMNS = ("row_id", "uri", "uri_raw", "status", "reason", "duplicate_of")
"""Columns of the rows table that matching needs."""


@dataclass(frozen=True)
class MatchedRows:
    """The rows of n items.

    Attributes:
        rows: row ids, int64 [n]; -1 for an item without a row.
        reasons: why an item has no row: "not-in-index", the reason of its failed row, or "deleted" for a duplicate of a
            deleted row; None if it has a row.
    """

    rows: NDArray[np.int64]
    reasons: tuple[str | None, ...]

    def missing(self) -> dict[str, int]:
        """Number of items without a row, by reason."""
        return dict(sorted(Counter(reason for reason in self.reasons if reason is not None).items()))

    def split(self, count: int) -> tuple[MatchedRows, MatchedRows]:
        """The rows of the first `count` items, and those of the others."""
        rows, reasons = self.rows, self.reasons
        return MatchedRows(rows[:count], reasons[:count]), MatchedRows(rows[count:], reasons[count:])

    def indexed(self, items: Sequence[CaptionedImage]) -> tuple[list[CaptionedImage], NDArray[np.int64]]:
        """Those of the n `items` that have a row, and their rows, int64 [k]."""
        kept = [item for item, row in zip(items, self.rows, strict=True) if row >= 0]
        return kept, self.rows[self.rows >= 0]


def match_items(
    root: Path, table: pa.Table, items: Sequence[CaptionedImage], *, allow_none: bool = False
) -> MatchedRows:
    """Find the rows of `items` by the names of their images.

    A duplicate has the row of its original. If two rows share a name, the first wins. If a name is not in the index,
    symbolic links in its folders are resolved and it is looked up again.

    Args:
        root: the index, for messages.
        table: its rows with the columns `NAME_COLUMNS`, see `storage_formats.format.rows.read_all_rows`.
        items: captioned images.
        allow_none: whether to return even if no item is in the index.

    Raises:
        UsageError: no item is in the index, and `allow_none` is false.
    """
    matches = _lookup(table, [os.fsencode(item.path) for item in items], lambda name: name)
    unmatched = [position for position, match in enumerate(matches) if match is None]
    if unmatched:
        resolved = [_resolved(os.fsencode(items[position].path)) for position in unmatched]
        for position, match in zip(unmatched, _lookup(table, resolved, _resolved), strict=True):
            matches[position] = match
    rows = np.array([-1 if match is None else match.row_id for match in matches], dtype=np.int64)
    reasons = tuple(NOT_IN_INDEX if match is None else match.reason for match in matches)
    if not allow_none and not (rows >= 0).any():
        raise UsageError(_nothing_matches(root, table, items, reasons))
    return MatchedRows(rows, reasons)


@dataclass
class _Match:
    """The row of a name; if the row failed, `row_id` is -1 and `reason` is set."""

    row_id: int
    reason: str | None = None


def _lookup(table: pa.Table, names: list[bytes], convert: Callable[[bytes], bytes]) -> list[_Match | None]:
    """The row of each name; `convert` is applied to the names of the rows before they are compared."""
    names_of_texts = {display_path(name).encode(): name for name in names}
    requested = set(names)
    matches: dict[bytes, _Match] = {}
    duplicates: dict[int, list[_Match]] = {}
    for row in _lines(table):
        name = _row_name(row, convert, names_of_texts)
        if name not in requested or name in matches:
            continue
        matches[name] = _Match(row["row_id"] if row["status"] == INDEXED else -1, row["reason"])
        if row["status"] == DUPLICATE:
            duplicates.setdefault(row["duplicate_of"], []).append(matches[name])
    _follow_duplicates(table, duplicates)
    return [matches.get(name) for name in names]


def _lines(table: pa.Table) -> Iterator[dict[str, Any]]:
    for batch in table.to_batches():  # one after another, because Python objects take several times the memory
        yield from batch.to_pylist()


def _row_name(
    row: dict[str, Any], convert: Callable[[bytes], bytes], names_of_texts: dict[bytes, bytes]
) -> bytes | None:
    """Name of a row in bytes. A name that is valid UTF-8 is stored as text only."""
    is_member = "!" in row["uri"]  # then `uri_raw` is the archive, not the member
    if row["uri_raw"] is None or is_member:
        return names_of_texts.get(convert(row["uri"].encode()))
    return convert(row["uri_raw"])


def _follow_duplicates(table: pa.Table, duplicates: dict[int, list[_Match]]) -> None:
    """Give duplicates the row of their original, or the reason it failed."""
    originals = table.select(["row_id", "status", "reason"]).filter(
        pc.is_in(table["row_id"], pa.array(sorted(duplicates), pa.int64()))
    )
    by_row = {row["row_id"]: row for row in originals.to_pylist()}
    for row_id, matches in duplicates.items():
        original = by_row.get(row_id)
        for match in matches:
            if original is None:
                match.reason = DELETED
            elif original["status"] == FAILED:
                match.reason = original["reason"]
            else:
                match.row_id = row_id


def _resolved(name: bytes) -> bytes:
    """The name with symbolic links in its folders resolved; the last part is not resolved, as in builds."""
    folder, base = os.path.split(name)
    return os.path.join(_real_folder(folder), base)


@functools.lru_cache(maxsize=1 << 14)
def _real_folder(folder: bytes) -> bytes:
    return os.path.realpath(folder)


def _nothing_matches(
    root: Path, table: pa.Table, items: Sequence[CaptionedImage], reasons: Iterable[str | None]
) -> str:
    counts = ", ".join(f"{reason} {count:,}" for reason, count in sorted(Counter(map(str, reasons)).items()))
    first = table["uri"][0].as_py()
    return (
        f"none of the {len(items):,} captioned images is in the index {root} ({counts}): the captions name "
        f"{display_path(os.fsencode(items[0].path))}, the index holds {first}; give the right folder of images"
    )
