"""Finds the index row of each captioned image by the name of the image."""

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
NAME_COLUMNS = ("row_id", "uri", "uri_raw", "status", "reason", "detail", "duplicate_of")
"""Columns of the rows table that `match_items` reads."""


@dataclass(frozen=True)
class MatchedRows:
    """The index rows of n captioned images.

    Attributes:
        rows: row id of each image, int64 [n]; -1 for an image without a row.
        reasons: one entry per image: None for an image with a row, otherwise the reason why the image has no row:
            "not-in-index", "deleted", or the reason why a build could not encode the image.
        truncated: True for an image with a truncated file, if the build indexed the readable part, bool [n].
    """

    rows: NDArray[np.int64]
    reasons: tuple[str | None, ...]
    truncated: NDArray[np.bool_]

    def missing(self) -> dict[str, int]:
        """Return the number of images without a row, by reason."""
        return dict(sorted(Counter(reason for reason in self.reasons if reason is not None).items()))

    def without_truncated(self) -> MatchedRows:
        """Return these rows without the rows of truncated images, for the reason "truncated"."""
        from edje_index.images.decode import TRUNCATED

        reasons = tuple(TRUNCATED if cut else why for cut, why in zip(self.truncated, self.reasons, strict=True))
        return MatchedRows(np.where(self.truncated, -1, self.rows), reasons, np.zeros_like(self.truncated))

    def split(self, count: int) -> tuple[MatchedRows, MatchedRows]:
        """Return the rows of the first `count` images, and the rows of the remaining images."""
        return self._part(slice(None, count)), self._part(slice(count, None))

    def _part(self, part: slice) -> MatchedRows:
        return MatchedRows(self.rows[part], self.reasons[part], self.truncated[part])

    def indexed(self, items: Sequence[CaptionedImage]) -> tuple[list[CaptionedImage], NDArray[np.int64]]:
        """Return the k images in `items` that have a row, and their row ids, int64 [k]."""
        kept = [item for item, row in zip(items, self.rows, strict=True) if row >= 0]
        return kept, self.rows[self.rows >= 0]


def match_items(
    root: Path, table: pa.Table, items: Sequence[CaptionedImage], *, allow_none: bool = False
) -> MatchedRows:
    """Find the rows of `items` by the names of the images.

    A duplicate gets the row of its original. If two rows share a name, the first wins. If a name is not in the index,
    symbolic links in the folders of the name are resolved, and the resolved name is looked up.

    Args:
        root: path of the index, for error messages.
        table: the rows table, with the columns `NAME_COLUMNS`. See `storage_formats.format.rows.read_all_rows`.
        items: captioned images.
        allow_none: True to return without an error even if no image is in the index.

    Raises:
        UsageError: no image is in the index, and `allow_none` is False.
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
    truncated = np.array([match is not None and match.truncated for match in matches], dtype=bool)
    return MatchedRows(rows, reasons, truncated)


@dataclass(slots=True)
class _Match:
    """The index row of a name. If the image failed in the build, `row_id` is -1 and `reason` is set."""

    row_id: int
    reason: str | None = None
    truncated: bool = False


_NOT_REQUESTED = _Match(-1)


def _lookup(table: pa.Table, names: list[bytes], convert: Callable[[bytes], bytes]) -> list[_Match | None]:
    """Return the row of each name; None for a name without a row.

    Args:
        table: the rows table.
        names: names to look up.
        convert: function that is applied to each name in `table` before the comparison.
    """
    names_of_texts = {text: name for name in names if (text := display_path(name).encode()) != name}
    matches: dict[bytes, _Match | None] = dict.fromkeys(names)
    duplicates: dict[int, list[_Match]] = {}
    for row in _lines(table):
        name = _row_name(row, convert, names_of_texts)
        if matches.get(name, _NOT_REQUESTED) is not None:
            continue
        indexed = row["status"] == INDEXED
        match = _Match(row["row_id"] if indexed else -1, row["reason"], indexed and row["detail"] is not None)
        matches[name] = match
        if row["status"] == DUPLICATE:
            duplicates.setdefault(row["duplicate_of"], []).append(match)
    _follow_duplicates(table, duplicates)
    return [matches.get(name) for name in names]


def _lines(table: pa.Table) -> Iterator[dict[str, Any]]:
    for batch in table.to_batches():  # in batches, because as Python objects the rows take several times the memory
        yield from batch.to_pylist()


def _row_name(row: dict[str, Any], convert: Callable[[bytes], bytes], names_of_texts: dict[bytes, bytes]) -> bytes:
    """Return the name of a row as bytes, converted with `convert`.

    `names_of_texts` are the requested names that are not UTF-8, by the text that the rows table has instead.
    """
    is_member = "!" in row["uri"]  # for a member, `uri_raw` is the name of the archive
    if row["uri_raw"] is None or is_member:
        text = convert(row["uri"].encode())
        return names_of_texts.get(text, text)
    return convert(row["uri_raw"])


def _follow_duplicates(table: pa.Table, duplicates: dict[int, list[_Match]]) -> None:
    """Replace the match of each duplicate with the match of its original."""
    originals = table.select(["row_id", "status", "reason", "detail"]).filter(
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
                match.row_id, match.truncated = row_id, original["detail"] is not None


def _resolved(name: bytes) -> bytes:
    """Resolve symbolic links in the folders of `name`, but not in the file name, as a build does."""
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
        f"none of the {len(items):,} captioned images is in the index {root} ({counts}): the captions name, for "
        f"example, {display_path(os.fsencode(items[0].path))}, but the first image of the index is {first}; give the "
        "right base directory of the image paths"
    )
