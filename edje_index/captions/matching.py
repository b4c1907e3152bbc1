"""Which row of an index holds the image of a caption: matched by name, holes accounted for."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edje_index.captions.reading import CaptionedImage
from edje_index.images.inputs import display_path
from storage_formats.errors import UsageError
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import Manifest
from storage_formats.format.rows import DUPLICATE, FAILED, INDEXED, read_shard_rows

NOT_IN_INDEX = "not-in-index"
_COLUMNS = ["row_id", "uri", "uri_raw", "status", "reason", "duplicate_of"]


@dataclass(frozen=True)
class MatchedRows:
    """The rows of n items.

    Attributes:
        rows: int64 [n], -1 for an item without one.
        reasons: why: "not-in-index", or the reason for which indexing failed; None for an item that has its row.
    """

    rows: NDArray[np.int64]
    reasons: tuple[str | None, ...]

    def missing(self) -> dict[str, int]:
        """Items without a row, counted by reason."""
        return dict(sorted(Counter(reason for reason in self.reasons if reason is not None).items()))


def match_rows(root: str | Path, items: Sequence[CaptionedImage]) -> NDArray[np.int64]:
    """Row id of each item's image, int64 [n]; -1 where the index does not hold it. See `match_items`."""
    return match_items(root, items).rows


def match_items(root: str | Path, items: Sequence[CaptionedImage], *, allow_none: bool = False) -> MatchedRows:
    """Find the rows of `items` by the names of their images.

    An image that was indexed as a duplicate has the row of its original. A name that two rows have means the first.
    Folders that are links are followed where the plain name is not in the index.

    Raises:
        UsageError: none of the items is in the index, unless that is allowed.
    """
    found = _lookup(root, [os.fsencode(item.path) for item in items], lambda name: name)
    absent = [at for at, row in enumerate(found) if row is None]
    if absent:
        again = _lookup(root, [_resolved(os.fsencode(items[at].path)) for at in absent], _resolved)
        for at, row in zip(absent, again, strict=True):
            found[at] = row
    rows = np.array([-1 if row is None else row.row_id for row in found], dtype=np.int64)
    reasons = tuple(NOT_IN_INDEX if row is None else row.reason for row in found)
    if not allow_none and not (rows >= 0).any():
        raise UsageError(_nothing_matches(root, items, reasons))
    return MatchedRows(rows, reasons)


@dataclass
class _Row:
    """Where a name is; `row_id` is -1 for a failed row, with its reason."""

    row_id: int
    reason: str | None = None


def _lookup(root: str | Path, names: list[bytes], convert: Callable[[bytes], bytes]) -> list[_Row | None]:
    """The row of each of `names`, which are compared with the names of the rows after `convert`."""
    wanted: dict[bytes, int] = {name: place for place, name in enumerate(dict.fromkeys(names))}
    paraphrased = {display_path(name).encode(): name for name in wanted}
    found: dict[bytes, _Row] = {}
    pending: dict[int, list[_Row]] = {}
    spec = Manifest.load(root).spec
    for shard in range(spec.shards):
        for row in read_shard_rows(Layout(Path(root)), shard, _COLUMNS).to_pylist():
            uri = convert(row["uri"].encode())
            # `uri_raw` is a member's archive, not the member, where the row is one.
            raw = None if row["uri_raw"] is None or "!" in row["uri"] else convert(row["uri_raw"])
            name = paraphrased.get(uri) if raw is None else raw
            if name not in wanted or name in found:
                continue
            found[name] = _Row(row["row_id"] if row["status"] == INDEXED else -1, row["reason"])
            if row["status"] == DUPLICATE:
                pending.setdefault(row["duplicate_of"], []).append(found[name])
    _follow_duplicates(root, pending)
    return [found.get(name) for name in names]


def _follow_duplicates(root: str | Path, pending: dict[int, list[_Row]]) -> None:
    """Give duplicates their originals' rows, or the reason for which those failed."""
    from storage_formats.format.rows import read_rows

    originals = sorted(pending)
    for row in read_rows(root, originals, ["row_id", "status", "reason"]).to_pylist():
        for duplicate in pending[row["row_id"]]:
            if row["status"] == FAILED:
                duplicate.reason = row["reason"]
            else:
                duplicate.row_id = row["row_id"]


def _resolved(name: bytes) -> bytes:
    """The name with its folders' links followed; a link at its end is kept, as builds keep it."""
    folder, base = os.path.split(name)
    return os.path.join(_real_folder(folder), base)


@functools.lru_cache(maxsize=1 << 14)
def _real_folder(folder: bytes) -> bytes:
    return os.path.realpath(folder)


def _nothing_matches(root: str | Path, items: Sequence[CaptionedImage], reasons: Iterable[str | None]) -> str:
    counts = ", ".join(f"{reason} {count:,}" for reason, count in sorted(Counter(map(str, reasons)).items()))
    first = read_shard_rows(Layout(Path(root)), 0, ["uri"])["uri"][0].as_py()
    return (
        f"none of the {len(items):,} captioned images is in the index {root} ({counts}): the captions name "
        f"{display_path(os.fsencode(items[0].path))}, the index {first}; name the folder of the images with --images"
    )
