"""Opens an index at a URL. A local directory caches the files of a snapshot, except
the token files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from pathlib import Path

from storage_formats.arguments import as_count
from storage_formats.atomic import write_bytes_atomic
from storage_formats.cache import cache_directory
from storage_formats.errors import CorruptIndexError, IncompleteIndexError, UsageError
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import MAX_MANIFEST_BYTES, CommittedIndex, Manifest
from storage_formats.remote.objects import ObjectFolder, ObjectVersion
from storage_formats.remote.urls import IndexLocation, is_url

CLAIM = Layout(Path()).claim.as_posix()
"""Key of the object that a writer creates to keep other writers away from an index on
an object store (SPEC.md section 12.4).
"""
JOURNAL = Layout(Path()).journal.as_posix()
ROOT = "index.json"
REPLACED = b"{}"
"""The contents of `index.json` while a copy replaces the index."""

# A cached snapshot that was not opened for this time, a week, is deleted.
_KEPT_SECONDS = 7 * 86400.0


def open_index(location: IndexLocation, snapshot: int | None = None) -> CommittedIndex:
    """Open the index at `location`, a directory or a URL, to read it. For the
    arguments, see `Manifest.load`.

    Raises:
        UsageError, IncompleteIndexError, CorruptIndexError: as for `Manifest.load`.
    """
    if not is_url(location):
        return CommittedIndex.open(location, snapshot)
    folder = ObjectFolder.open(str(location))
    version, manifest = read_root(folder)
    if version is None or manifest is None:
        raise absent(folder)
    if snapshot is not None and snapshot != manifest.snapshot.number:
        key = (
            Layout(Path()).snapshot(as_count(snapshot, "snapshot", least=0)).as_posix()
        )
        try:
            version = folder.read(key, MAX_MANIFEST_BYTES)
        except FileNotFoundError:
            raise UsageError(
                f"{folder.url} has no snapshot {snapshot}; its current snapshot is"
                f" {manifest.snapshot.number}",
                parameter="snapshot",
            ) from None
        manifest = Manifest.parse(version.data, folder.url_of(key))
    return CommittedIndex(_cached_snapshot(folder.url, version.data), manifest, folder)


def index_exists(location: IndexLocation) -> bool:
    """Return True if there is a finished index at `location`, a directory or a URL."""
    if not is_url(location):
        return Layout(Path(location)).manifest.exists()
    return read_root(ObjectFolder.open(str(location)))[1] is not None


def reopen_index(index: CommittedIndex) -> CommittedIndex:
    """Open the current snapshot of an opened index.

    Raises:
        UsageError: a different index was written at the same location, so that the row
            ids of `index` mean other rows.
        IncompleteIndexError, CorruptIndexError: as for `Manifest.load`.
    """
    current = open_index(index.location)
    before = index.manifest
    after = current.manifest

    # No change of an index changes these values.
    def identity(manifest: Manifest) -> tuple[object, ...]:
        model = (manifest.model or {}).get("fingerprint")
        return manifest.plan, manifest.spec.shard_size, model

    if identity(before) != identity(after):
        raise UsageError(
            f"the index at {index.location} was replaced by another index; open the"
            " index again"
        )
    return current


def read_root(folder: ObjectFolder) -> tuple[ObjectVersion | None, Manifest | None]:
    """Read `index.json` of an index on an object store.

    Returns:
        (object, manifest). Both are None if there is no `index.json`. Only the manifest
        is None while a copy replaces the index.

    Raises:
        UsageError, CorruptIndexError: the object cannot be read or is not the manifest
            of an index.
    """
    try:
        version = folder.read(ROOT, MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        return None, None
    except OSError as error:
        raise CorruptIndexError(
            f"cannot read {folder.url_of(ROOT)}: {error.strerror}; give the URL of an"
            " EDJE index"
        ) from error
    return version, (
        None
        if version.data == REPLACED
        else Manifest.parse(version.data, folder.url_of(ROOT))
    )


def is_changing(folder: ObjectFolder) -> bool:
    """Return True if the index at the URL of `folder` has an unfinished change."""
    return any(folder.info(key) is not None for key in (CLAIM, JOURNAL))


def absent(folder: ObjectFolder) -> Exception:
    """Return the exception to raise if there is no readable index at the URL of
    `folder`. The exception tells whether an index is being written there.
    """
    if is_changing(folder):
        return IncompleteIndexError(
            f"the index at {folder.url} is unfinished; if no process is writing it,"
            " run the same command again to finish it"
        )
    return UsageError(f"there is no index at {folder.url}")


def _cached_snapshot(url: str, manifest: bytes) -> Path:
    """Return the cache directory of one snapshot of the index at `url`, and create it
    if it is missing. Delete cached snapshots of the same index that were not opened for
    a week.

    Args:
        manifest: the bytes of the `index.json` of the snapshot.
    """
    of_index = (
        cache_directory() / "indexes" / hashlib.sha256(url.encode()).hexdigest()[:32]
    )
    root = of_index / hashlib.sha256(manifest).hexdigest()[:32]
    if not (root / ROOT).exists():
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_bytes_atomic(root / ROOT, manifest)
    os.utime(root)
    for other in of_index.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - other.stat().st_mtime > _KEPT_SECONDS:
                shutil.rmtree(other)
    return root
