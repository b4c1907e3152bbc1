"""Files in `hashes/` with the sorted content hashes of the rows of an index (SPEC.md
section 9). With these files, an append finds out which contents the index already has,
without reading all rows.

Each file holds the hashes of the rows of some shards. The content hashes of the rows of
a shard never change, so the files stay valid. If no valid file has the hashes of a
shard, they are read from the rows of the shard.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from storage_formats.arrays import Ints
from storage_formats.atomic import write_bytes_atomic
from storage_formats.format.checksum import crc32c, to_hex
from storage_formats.format.index_files import IndexFile
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.rows import iter_stored_rows, read_index_rows
from storage_formats.format.tombstones import rows_in_use

# Number of rows whose hashes are read at once. At 16 bytes per row, this takes 32 MiB.
# A new file with more than half of this number of rows is not joined with others.
_MOST_ROWS = 1 << 21


@dataclass(frozen=True, eq=False)
class _HashFile:
    """The content hashes of the rows of some shards. Rows without a content hash are
    left out.

    Attributes:
        shards: int64 [n], numbers of the shards.
        hashes: uint64 [k], first 8 bytes of the content hash of each row, read as a
            big-endian number. If they come from a file, they are in ascending order.
        row_ids: int64 [k], row id of each hash.
        path: path of the file; None if the hashes are not written yet.
    """

    shards: Ints
    hashes: NDArray[np.uint64]
    row_ids: Ints
    path: Path | None = None


def known_contents(index: CommittedIndex, hashes: Collection[str]) -> set[str]:
    """Return those of `hashes` that are the content hash of a row of `index` that is
    not deleted.

    If no file in the directory `hashes/` has the hashes of a shard, the function first
    reads them from the rows of the shard, and writes them to a new file. Call it only
    within a change of the index: the change holds the lock of the index, so no other
    process writes to this directory.

    Args:
        hashes: SHA-256 hashes in hexadecimal.
    """
    spec = index.spec
    layout = index.layout
    files = [_open(index.root, path) for path in layout.hashes.glob("rows-*.bin")]
    in_files = {shard for file in files for shard in file.shards.tolist()}
    missing = [shard for shard in spec.shard_numbers() if shard not in in_files]
    for new in _read(index, missing):
        parts = [new]
        rows = len(new.hashes)
        # Files that are at most about twice as long as the new one are joined with it,
        # so the number of files stays small. Each row is rewritten only a few times,
        # because the joined file is at least 1.5 times as long as the earlier one.
        for file in sorted(files, key=lambda file: len(file.hashes)):
            if len(file.hashes) <= 2 * rows <= _MOST_ROWS:
                parts.append(file)
                rows += len(file.hashes)
        files = [file for file in files if file not in parts]
        files.append(_write(layout, parts))
    prefixes = _prefixes(hashes)
    candidates = [np.empty(0, np.int64)]
    for file in files:
        starts = np.searchsorted(file.hashes, prefixes)
        stops = np.searchsorted(file.hashes, prefixes, side="right")
        ranges = zip(starts.tolist(), stops.tolist(), strict=True)
        candidates += [file.row_ids[start:stop] for start, stop in ranges]
    row_ids = np.unique(np.concatenate(candidates))
    row_ids = row_ids[(row_ids >= 0) & (row_ids < spec.rows)]
    row_ids = row_ids[rows_in_use(row_ids, spec) & ~index.deleted.contain(row_ids)]
    # Different hashes can have the same first 8 bytes, so whole hashes are compared.
    stored = read_index_rows(index, row_ids, ["content_hash"])["content_hash"]
    return set(hashes).intersection(stored.to_pylist())


def _prefixes(hashes: Collection[str]) -> NDArray[np.uint64]:
    """Return the first 8 bytes of each hash as a big-endian number, uint64 [k]."""
    first = b"".join(bytes.fromhex(each[:16]) for each in hashes)
    return np.frombuffer(first, dtype=">u8").astype(np.uint64)


def _read(index: CommittedIndex, shards: Sequence[int]) -> Iterator[_HashFile]:
    """Read the content hashes of the rows of `shards`. Each yielded object has at most
    `_MOST_ROWS` rows, unless a single shard has more. The hashes are not sorted.
    """
    step = max(1, _MOST_ROWS // index.spec.shard_size)
    for start in range(0, len(shards), step):
        group = shards[start : start + step]
        hashes = [np.empty(0, np.uint64)]
        row_ids = [np.empty(0, np.int64)]
        for table in iter_stored_rows(index, ["row_id", "content_hash"], group):
            table = table.filter(table["content_hash"].is_valid())
            hashes.append(_prefixes(table["content_hash"].to_pylist()))
            row_ids.append(table["row_id"].to_numpy())
        yield _HashFile(
            np.array(group, np.int64), np.concatenate(hashes), np.concatenate(row_ids)
        )


def _open(root: Path, path: Path) -> _HashFile:
    """Map a file into memory. If the file has a wrong length, the result holds no
    shards.
    """
    with IndexFile(root, path) as file:
        length = os.fstat(file.fileno()).st_size
        # These two zeros stand for the contents of a file without shards and rows.
        values = np.zeros(2, np.int64)
        if length >= 16 and length % 8 == 0:
            values = np.memmap(file, "<i8", "r")
    shards, rows = values[:2].tolist()
    if min(shards, rows) < 0 or len(values) != 2 + shards + 2 * rows:
        shards = rows = 0
    # If the length is wrong, `shards` and `rows` are 0. The last part, `row_ids`, is
    # then the whole rest of the file, so it is cut to `rows` values.
    numbers, hashes, row_ids = np.split(values[2:], [shards, shards + rows])
    return _HashFile(numbers, hashes.view(np.uint64), row_ids[:rows], path)


def _write(layout: Layout, parts: Sequence[_HashFile]) -> _HashFile:
    """Write the rows of all `parts` to one new file, and remove the files that the
    parts were read from.
    """
    hashes = np.concatenate([part.hashes for part in parts])
    row_ids = np.concatenate([part.row_ids for part in parts])
    shards = np.concatenate([part.shards for part in parts])
    order = np.argsort(hashes, kind="stable")
    joined = [hashes[order].view(np.int64), row_ids[order]]
    values = np.concatenate([[len(shards), len(hashes)], shards, *joined])
    data = values.astype("<i8").tobytes()
    path = layout.hashes / f"rows-{to_hex(crc32c(data))}.bin"
    write_bytes_atomic(path, data, layout.staging)
    for part in parts:
        # The file is named after its contents. An old file with the same contents thus
        # has the same path as the new file, and must stay.
        if part.path not in (None, path):
            part.path.unlink()
    return _HashFile(shards, hashes[order], row_ids[order], path)
