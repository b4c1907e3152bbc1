"""The content hashes of the rows of an index, sorted, in `hashes/` (SPEC.md section 9).
They tell which contents an index has, without a look at all its rows.

Each file holds the rows of some shards. The rows of a shard never change, so no file
becomes wrong. A file that is missing or of wrong length is made again.
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
from storage_formats.format.index_files import open_index_file
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.rows import iter_stored_rows, read_index_rows
from storage_formats.format.tombstones import rows_in_use

# most rows in one file of hashes: 16 bytes each, 32 MiB
_MOST_ROWS = 1 << 21


@dataclass(frozen=True, eq=False)
class _HashFile:
    """The rows of some shards.

    Attributes:
        shards: int64 [n], numbers of the shards.
        hashes: uint64 [k], first 8 bytes of the content hash of each row, big-endian,
            ascending.
        row_ids: int64 [k].
        path: path of the file; None if it is not written yet.
    """

    shards: Ints
    hashes: NDArray[np.uint64]
    row_ids: Ints
    path: Path | None = None


def known_contents(index: CommittedIndex, hashes: Collection[str]) -> set[str]:
    """Return those of the SHA-256 `hashes`, in hexadecimal, that a row of `index` has
    that is not deleted.

    Shards that are in no file of `hashes/` yet are read, and added. Call this only in a
    change of the index, which no other process makes at the same time.
    """
    spec = index.spec
    folder = index.layout.hashes
    files = [_open(index.root, path) for path in folder.glob("rows-*.bin")]
    held = {shard for file in files for shard in file.shards.tolist()}
    missing = [shard for shard in spec.shard_numbers() if shard not in held]
    for new in _read(index, missing):
        parts = [new]
        rows = len(new.hashes)
        # few files stay, and no row is written again more than a few times
        for file in sorted(files, key=lambda file: len(file.hashes)):
            if len(file.hashes) <= 2 * rows <= _MOST_ROWS:
                parts.append(file)
                rows += len(file.hashes)
        files = [file for file in files if file not in parts]
        files.append(_write(folder, parts))
    wanted = _prefixes(hashes)
    found = [np.empty(0, np.int64)]
    for file in files:
        starts = np.searchsorted(file.hashes, wanted)
        stops = np.searchsorted(file.hashes, wanted, side="right")
        ranges = zip(starts.tolist(), stops.tolist(), strict=True)
        found += [file.row_ids[start:stop] for start, stop in ranges]
    row_ids = np.unique(np.concatenate(found))
    row_ids = row_ids[(row_ids >= 0) & (row_ids < spec.rows)]
    row_ids = row_ids[rows_in_use(row_ids, spec) & ~index.deleted.contain(row_ids)]
    # other contents can have the same first bytes
    stored = read_index_rows(index, row_ids, ["content_hash"])["content_hash"]
    return set(hashes).intersection(stored.to_pylist())


def _prefixes(hashes: Collection[str]) -> NDArray[np.uint64]:
    first = b"".join(bytes.fromhex(each[:16]) for each in hashes)
    return np.frombuffer(first, dtype=">u8").astype(np.uint64)


def _read(index: CommittedIndex, shards: Sequence[int]) -> Iterator[_HashFile]:
    """Read the rows of `shards`, a number of shards at a time that fits one file."""
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
    """Map a file. One of wrong length holds no shard."""
    with open_index_file(root, path) as file:
        length = os.fstat(file.fileno()).st_size
        values = np.zeros(2, np.int64)
        if length >= 16 and length % 8 == 0:
            values = np.memmap(file, "<i8", "r")
    shards, rows = values[:2].tolist()
    if min(shards, rows) < 0 or len(values) != 2 + shards + 2 * rows:
        shards = rows = 0
    first, second, third = np.split(values[2:], [shards, shards + rows])
    return _HashFile(first, second.view(np.uint64), third[:rows], path)


def _write(folder: Path, parts: Sequence[_HashFile]) -> _HashFile:
    """Write the rows of `parts` to one file, and remove their files."""
    hashes = np.concatenate([part.hashes for part in parts])
    row_ids = np.concatenate([part.row_ids for part in parts])
    shards = np.concatenate([part.shards for part in parts])
    order = np.argsort(hashes, kind="stable")
    joined = [hashes[order].view(np.int64), row_ids[order]]
    values = np.concatenate([[len(shards), len(hashes)], shards, *joined])
    data = values.astype("<i8").tobytes()
    path = folder / f"rows-{to_hex(crc32c(data))}.bin"
    write_bytes_atomic(path, data)
    for part in parts:
        if part.path not in (None, path):
            part.path.unlink()
    return _HashFile(shards, hashes[order], row_ids[order], path)
