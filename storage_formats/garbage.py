"""Finds and removes the files of an index that are not named by any kept snapshot
(SPEC.md section 12).
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from storage_formats.atomic import fsync_path, fsync_paths
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import (
    CommittedIndex,
    kept_snapshots,
    named_files,
)


def remove_what_is_not_kept(
    layout: Layout, *, tables: bool, shards: bool = False
) -> list[int]:
    """Remove the manifests of snapshots that are not kept, and then the data files that
    no kept snapshot names. Return the length in bytes of each removed data file.

    Args:
        tables: True removes shard tables too. False keeps them for readers that opened
            the index earlier.
        shards: True always looks for files of shards that no kept snapshot names, which
            takes long in a large index. False looks for such files only if there is a
            shard table that no kept snapshot names.

    Raises:
        CorruptIndexError, UsageError: a manifest or a shard table of a kept snapshot is
            damaged, or a later version of the package wrote it, so the files that it
            names are not known.
    """
    index = CommittedIndex.open(layout.root)
    manifests = kept_snapshots(index)
    oldest = index.manifest.snapshot.oldest or 0
    dropped_manifests = [
        path
        for path in layout.snapshots.glob("*.json")
        if path.stem.isdecimal() and int(path.stem) < oldest
    ]
    named = {file.path for each in manifests for file in each.own_files}
    unnamed = [
        path
        for own_folder in layout.own_folders()
        for path in sorted(own_folder.glob("*"))
        if layout.relative(path) not in named
    ]
    unnamed_tables = [path for path in unnamed if path.name.startswith("shards-")]
    for path in dropped_manifests:
        path.unlink()
    if dropped_manifests:
        fsync_path(layout.snapshots)
    if not tables:
        unnamed = [path for path in unnamed if path not in unnamed_tables]
    # A shard table that no kept snapshot names may list files that no kept snapshot
    # names. Such files are removed even if the table itself stays.
    if shards or unnamed_tables:
        for each in manifests:
            named.update(map(layout.relative, layout.zarr_files(each.spec)))
        named.update(file.path for file in named_files(index, manifests))
        # Files come before their directories, which can then be removed too.
        unnamed += [
            path
            for shard_folder in layout.shard_folders()
            for path in sorted(shard_folder.rglob("*"), reverse=True)
            if layout.relative(path) not in named
        ]
    sizes = []
    changed = set[Path]()
    for path in unnamed:
        if path.is_dir() and not path.is_symlink():
            # `rmdir` fails if the directory holds files.
            with contextlib.suppress(OSError):
                path.rmdir()
                changed.add(path.parent)
        else:
            sizes.append(path.lstat().st_size)
            path.unlink()
            changed.add(path.parent)
    # The removals must reach the device before the caller removes the journal. Without
    # a journal, no later change would look for these files.
    fsync_paths(path for path in changed if path.is_dir())
    return sizes
