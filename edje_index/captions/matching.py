"""Finds the index row of each captioned image by the name of the image."""

from __future__ import annotations

import functools
import os
import unicodedata
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from edje_index.captions.reading import (
    CaptionedImage,
    is_of_split,
    usable_captions,
)
from edje_index.inputs.refs import display_path
from edje_index.inputs.tables import SPLIT
from storage_formats.arrays import Ints
from storage_formats.errors import UsageError
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.rows import DUPLICATE, INDEXED, read_all_rows
from storage_formats.format.source_columns import caption_columns

NOT_IN_INDEX = "not-in-index"
DELETED = "deleted"
_COLUMNS = ("row_id", "uri", "status", "reason", "duplicate_of")


def stored_captions(
    index: CommittedIndex, split: str | None = None
) -> list[CaptionedImage]:
    """Return the indexed images that have captions in the index, with these captions.

    Args:
        split: return only images with this value in the column `split`; None returns
            all images.

    Raises:
        UsageError: the index has no captions, or no captions of `split`.
    """
    columns = index.manifest.columns
    captioned = caption_columns(columns)
    splits = [column.name for column in columns if column.name == SPLIT]
    table = read_all_rows(index, ("row_id", "uri", "status", *captioned, *splits))
    items = []
    for row in table.to_pylist():
        uri = row["uri"]
        its_split = row.get(SPLIT)
        if row["status"] == INDEXED and is_of_split(its_split, split):
            captions, _ = usable_captions({name: row[name] for name in captioned})
            if captions:
                items.append(CaptionedImage(uri, captions, its_split, row["row_id"]))
    if not items:
        which = "" if split is None else f" of the split '{split}'"
        raise UsageError(
            f"the index {index.location} holds no captions{which}; give a file of"
            " captions"
        )
    return items


def match_items(
    index: CommittedIndex,
    items: Sequence[CaptionedImage],
    *,
    allow_none: bool = False,
) -> tuple[Ints, dict[str, int]]:
    """Find the rows of n captioned images by the names of the images.

    An item with a row id gets this row. A duplicate gets the row of its original. If
    two rows share a name, the first indexed row wins. If a name is not in the index, it
    is compared with the names in the index once more. For this second comparison,
    symbolic links in the folders of all these names are resolved, and the names are
    converted to the Unicode form NFC.

    Args:
        allow_none: True to return without an error even if no image is in the index.

    Returns:
        The row id of each image, int64 [n], which is -1 for an image without a row; and
        the number of images without a row, by the reason: "not-in-index", "deleted", or
        the reason why a build could not encode the image.
    """
    if items and items[0].row_id is not None:
        return np.array([item.row_id for item in items]), {}
    table = read_all_rows(index.undeleted(), _COLUMNS)
    is_deleted = np.isin(table["row_id"].to_numpy(), index.deleted.row_ids)
    is_indexed = pc.equal(table["status"], INDEXED).to_numpy() & ~is_deleted
    # Indexed rows come first, and deleted rows last.
    rank = 1 - is_indexed + is_deleted
    table = table.append_column("is_indexed", [is_indexed])
    table = table.append_column("is_deleted", [is_deleted])
    table = pa.concat_tables(
        [table.filter(pa.array(rank == each)) for each in range(3)]
    )
    keys = table["uri"]
    names = [display_path(os.fsencode(item.path)) for item in items]
    positions = _positions(keys, names)
    if len(unmatched := np.flatnonzero(positions < 0)):
        real_folder = functools.lru_cache(maxsize=1 << 14)(os.path.realpath)

        def resolved(name: str) -> str:
            """Return `name` with the symbolic links in its folders resolved, and in the
            Unicode form NFC.

            If the image file itself is a symbolic link, its name stays, because a build
            does not resolve such a link either. NFC is needed because macOS stores file
            names with decomposed characters, and caption files often have composed
            characters.
            """
            folder, base = os.path.split(name)
            path = os.path.join(real_folder(folder), base)
            return display_path(os.fsencode(unicodedata.normalize("NFC", path)))

        # One chunk is converted at a time, because names as Python objects take several
        # times the memory of an Arrow array.
        chunks = [
            pa.array(map(resolved, chunk.to_pylist()), pa.string())
            for chunk in keys.chunks
        ]
        resolved_keys = pa.chunked_array(chunks, pa.string())
        others = [resolved(names[at]) for at in unmatched.tolist()]
        positions[unmatched] = _positions(resolved_keys, others)
    # The tokens of a duplicate are in the row of its original.
    is_duplicate = pc.and_not(pc.equal(table["status"], DUPLICATE), table["is_deleted"])
    holders = pc.if_else(is_duplicate, table["duplicate_of"], table["row_id"])
    row_ids = holders.take(pa.array(positions, mask=positions < 0))
    originals = pc.index_in(row_ids, value_set=table["row_id"])
    matches = table.select(["row_id", "reason", "is_indexed", "is_deleted"])
    rows = np.full(len(items), -1)
    missing = Counter[str]()
    for at, row in enumerate(matches.take(originals).to_pylist()):
        if row["is_indexed"]:
            rows[at] = row["row_id"]
        elif row["is_deleted"]:
            missing[DELETED] += 1
        else:
            missing[row["reason"] or NOT_IN_INDEX] += 1
    if not allow_none and not (rows >= 0).any():
        counts = ", ".join(
            f"{reason} {count:,}" for reason, count in sorted(missing.items())
        )
        raise UsageError(
            f"none of the {len(items):,} captioned images is in the index"
            f" {index.location} ({counts}): the captions name, for example, {names[0]},"
            f" but the first image of the index is {table['uri'][0].as_py()}; give the"
            " right base directory of the image paths"
        )
    return rows, dict(sorted(missing.items()))


def _positions(keys: pa.ChunkedArray, names: list[str]) -> Ints:
    """Return the first position of each name in `keys`, int64 [n]; -1 for a name that
    is not there.
    """
    matches = pc.index_in(pa.array(names, pa.string()), value_set=keys)
    positions: Ints = np.array(pc.fill_null(matches, -1), dtype=np.int64)
    return positions
