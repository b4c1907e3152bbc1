"""Finds and removes the files of an index that are not named by any kept snapshot
(SPEC.md section 12).
"""

from __future__ import annotations

from storage_formats.format.manifest import (
    CommittedIndex,
    kept_snapshots,
    named_files,
)
from storage_formats.format.places import Place


def remove_what_is_not_kept(
    layout: Place, *, tables: bool, shards: bool = False
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
    index = CommittedIndex.at(layout)
    manifests = kept_snapshots(index)
    oldest = index.manifest.snapshot.oldest or 0
    dropped_manifests = [
        path
        for path in layout.names(layout.snapshots)
        if path.stem.isdecimal() and int(path.stem) < oldest
    ]
    named = {file.path for each in manifests for file in each.own_files}
    unnamed = [
        path
        for own_folder in layout.own_folders()
        for path in layout.names(own_folder)
        if layout.relative(path) not in named
    ]
    unnamed_tables = [path for path in unnamed if path.name.startswith("shards-")]
    layout.remove(dropped_manifests)
    if not tables:
        unnamed = [path for path in unnamed if path not in unnamed_tables]
    # A shard table that no kept snapshot names may list files that no kept snapshot
    # names. Such files are removed even if the table itself stays.
    if shards or unnamed_tables:
        for each in manifests:
            named.update(map(layout.relative, layout.zarr_files(each.spec)))
        named.update(file.path for file in named_files(index, manifests))
        unnamed += [
            path
            for shard_folder in layout.shard_folders()
            for path in layout.names(shard_folder)
            if layout.relative(path) not in named
        ]
    return layout.remove(unnamed)
