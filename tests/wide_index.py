"""Writes indexes of many shards in a short time, to measure what grows with the number
of shards.

All shards have the same tokens and embeddings: their files are hard links to those of
the first shard. Only the rows differ, because they contain row ids.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.synthetic import make_synthetic
from storage_formats.change import remove_build
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.places import Directory
from storage_formats.format.rows import iter_row_groups, write_rows
from storage_formats.format.shard_table import FileEntry, write_shard_table
from storage_formats.writing.rows_files import write_rows_files

# ext4 allows 65,000
_LINKS = 60_000


def make_wide_index(root: Path, shards: int, spec: IndexSpec) -> Path:
    """Write an index of `shards` copies of the single shard that `spec` describes."""
    make_synthetic(root, spec)
    layout = Directory(root)
    index = CommittedIndex.open(root)
    entries = [entry for _, entry in index.shard_files()]
    rows = next(iter_row_groups(index))
    lines = [(0, entry) for entry in entries]
    for shard in range(1, shards):
        for entry in entries:
            path = Path(_renamed(entry.path, shard))
            # a new copy before the file system refuses more links
            source = _renamed(entry.path, shard - shard % _LINKS)
            if source == path.as_posix():
                shutil.copyfile(root / entry.path, root / path)
            else:
                os.link(root / source, root / path)
            lines.append((shard, replace(entry, path=path.as_posix())))
    staged: dict[int, tuple[Layout, FileEntry]] = {}
    layout.staged_rows(0).parent.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        row_ids = np.arange(spec.shard_size) + shard * spec.shard_size
        table = rows.set_column(0, "row_id", pa.array(row_ids)).cast(rows.schema)
        write_rows(layout.staged_rows(shard), table)
        entry = FileEntry.of(layout, layout.staged_rows(shard))
        staged[shard] = (layout, entry)
    manifest = index.manifest
    rows_in_all = shards * spec.shard_size
    wide = replace(manifest.spec, rows=rows_in_all, segments=())
    replace(
        manifest,
        spec=wide,
        rows_files=write_rows_files(layout, wide, manifest.columns, staged),
        counts=replace(manifest.counts, inputs=rows_in_all, indexed=rows_in_all),
        shard_tables=(write_shard_table(layout, lines),),
    ).write(layout)
    remove_build(layout)
    return root


def _renamed(path: str, shard: int) -> str:
    """Return the path of the file of `shard` that corresponds to a file of shard 0."""
    folder, _, name = path.rpartition("/")
    if name.startswith("c."):
        return f"{folder}/{name.replace('c.0', f'c.{shard}', 1)}"
    return f"{folder}/{shard:08d}{name[8:]}"
