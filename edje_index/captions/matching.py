"""Finds the index row of each captioned image by the name of the image."""

from __future__ import annotations

import functools
import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from edje_index.captions.reading import SPLIT_KEY, CaptionedImage
from edje_index.inputs.refs import display_path
from storage_formats.arrays import Bools, Ints
from storage_formats.errors import UsageError
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.rows import DUPLICATE, INDEXED, read_all_rows
from storage_formats.format.source_columns import caption_column

NOT_IN_INDEX = "not-in-index"
DELETED = "deleted"
NAME_COLUMNS = (
    "row_id",
    "uri",
    "uri_raw",
    "status",
    "reason",
    "detail",
    "duplicate_of",
)
"""Columns of the rows table that `match_items` reads."""


@dataclass(frozen=True)
class MatchedRows:
    """The index rows of n captioned images.

    Attributes:
        rows: row id of each image, int64 [n]; -1 for an image without a row.
        reasons: one entry per image: None for an image with a row, otherwise the reason
            why the image has no row: "not-in-index", "deleted", or the reason why a
            build could not encode the image.
        truncated: True for an image with a truncated file, if the build indexed the
            readable part, bool [n].
    """

    rows: Ints
    reasons: tuple[str | None, ...]
    truncated: Bools

    def missing(self) -> dict[str, int]:
        """Return the number of images without a row, by reason."""
        return dict(
            sorted(
                Counter(reason for reason in self.reasons if reason is not None).items()
            )
        )

    def indexed(
        self, items: Sequence[CaptionedImage]
    ) -> tuple[list[CaptionedImage], Ints]:
        """Return the k images in `items` that have a row, and their row ids, int64
        [k].
        """
        kept = [item for item, row in zip(items, self.rows, strict=True) if row >= 0]
        return kept, self.rows[self.rows >= 0]


def stored_captions(
    index: CommittedIndex, split: str | None = None
) -> list[CaptionedImage]:
    """Return the indexed images whose captions the index holds.

    Args:
        split: only images with this value in the column `split`; None for all.

    Raises:
        UsageError: the index holds no captions, or none of `split`.
    """
    columns = index.manifest.columns
    captioned = caption_column(columns)
    splits = [SPLIT_KEY] if SPLIT_KEY in {column.name for column in columns} else []
    table = read_all_rows(index, ("uri", "status", *captioned, *splits))
    items = []
    for row in table.to_pylist():
        captions = row[captioned[0]] if captioned else None
        if not captions or row["status"] != INDEXED:
            continue
        if split is not None and row.get(SPLIT_KEY) != split:
            continue
        if isinstance(captions, str):
            captions = [captions]
        uri = row["uri"]
        items.append(CaptionedImage(uri, uri, tuple(captions), row.get(SPLIT_KEY), uri))
    if not items:
        which = "" if split is None else f" of the split '{split}'"
        raise UsageError(
            f"the index {index.location} holds no captions{which}; give a file of"
            " captions"
        )
    return items


def match_items(
    root: Path,
    table: pa.Table,
    items: Sequence[CaptionedImage],
    *,
    allow_none: bool = False,
) -> MatchedRows:
    """Find the rows of `items` by the names of the images.

    A duplicate gets the row of its original. If two rows share a name, the first wins.
    If a name is not in the index, symbolic links in the folders of the name are
    resolved, and the resolved name is looked up, in the Unicode form NFC.

    Args:
        table: the rows table, with the columns `NAME_COLUMNS`. See
            `storage_formats.format.rows.read_all_rows`.
        allow_none: True to return without an error even if no image is in the index.
    """
    matches = _lookup(
        table, [os.fsencode(item.path) for item in items], lambda name: name
    )
    unmatched = [position for position, match in enumerate(matches) if match is None]
    if unmatched:
        real_folder = functools.lru_cache(maxsize=1 << 14)(os.path.realpath)

        def resolved(name: bytes) -> bytes:
            """Resolve symbolic links in the folders of `name`, but not in the file
            name, as a build does. Compose its characters (NFC), which macOS stores
            decomposed.
            """
            folder, base = os.path.split(name)
            path = os.fsdecode(os.path.join(real_folder(folder), base))
            return os.fsencode(unicodedata.normalize("NFC", path))

        names = [resolved(os.fsencode(items[position].path)) for position in unmatched]
        for position, match in zip(
            unmatched, _lookup(table, names, resolved), strict=True
        ):
            matches[position] = match
    found = [match or (-1, NOT_IN_INDEX, False) for match in matches]
    rows = np.array([row for row, _, _ in found], dtype=np.int64)
    reasons = tuple(reason for _, reason, _ in found)
    if not allow_none and not (rows >= 0).any():
        counts = ", ".join(
            f"{reason} {count:,}"
            for reason, count in sorted(Counter(map(str, reasons)).items())
        )
        raise UsageError(
            f"none of the {len(items):,} captioned images is in the index {root}"
            f" ({counts}): the captions name, for example,"
            f" {display_path(os.fsencode(items[0].path))}, but the first image of the"
            f" index is {table['uri'][0].as_py()}; give the right base directory of the"
            " image paths"
        )
    return MatchedRows(
        rows, reasons, np.array([truncated for _, _, truncated in found], dtype=bool)
    )


_Match: TypeAlias = tuple[int, str | None, bool]
"""(row id, None, whether the file is truncated), or (-1, reason, False) of an image
that failed in the build.
"""

_NOT_REQUESTED: _Match = (-1, None, False)


def _lookup(
    table: pa.Table,
    names: list[bytes],
    convert: Callable[[bytes], bytes],
) -> list[_Match | None]:
    """Return the row of each name; None for a name without a row.

    Args:
        convert: function that is applied to each name in `table` before the comparison.
    """
    # Names that are not UTF-8, by the text that the rows table has instead.
    names_of_texts = {
        text: name for name in names if (text := display_path(name).encode()) != name
    }
    matches: dict[bytes, _Match | None] = dict.fromkeys(names)
    # row ids of the originals of duplicates, by name
    originals: dict[bytes, int] = {}
    # in batches, because as Python objects the rows take several times the memory
    for batch in table.to_batches():
        for row in batch.to_pylist():
            # for a member, `uri_raw` is the name of the archive
            if row["uri_raw"] is None or "!" in row["uri"]:
                text = convert(row["uri"].encode())
                name = names_of_texts.get(text, text)
            else:
                name = convert(row["uri_raw"])
            if matches.get(name, _NOT_REQUESTED) is not None:
                continue
            matches[name] = _match(row)
            if row["status"] == DUPLICATE:
                originals[name] = row["duplicate_of"]
    ids = pa.array(sorted(set(originals.values())), pa.int64())
    stored = table.select(["row_id", "status", "reason", "detail"]).filter(
        pc.is_in(table["row_id"], ids)
    )
    by_row = {row["row_id"]: _match(row) for row in stored.to_pylist()}
    for name, row_id in originals.items():
        matches[name] = by_row.get(row_id, (-1, DELETED, False))
    return [matches[name] for name in names]


def _match(row: dict[str, Any]) -> _Match:
    is_indexed = row["status"] == INDEXED
    return (
        (row["row_id"], None, row["detail"] is not None)
        if is_indexed
        else (-1, row["reason"], False)
    )
