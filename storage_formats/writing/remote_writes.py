"""The writes that copies and changes of an index on an object store have in common (SPEC.md section 12.4)."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import socket
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage_formats.atomic import json_bytes
from storage_formats.change import DATA_FILE
from storage_formats.errors import CorruptIndexError, EdjeError, UsageError, cannot_read
from storage_formats.format.checksum import crc32c, to_hex
from storage_formats.format.index_files import open_index_file
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import CommittedIndex, Manifest
from storage_formats.format.mirror import CLAIM, checked_chunks
from storage_formats.format.object_store import (
    CHUNK_BYTES,
    STORE_SCHEMES,
    Chunk,
    ObjectChangedError,
    ObjectFolder,
    ObjectStoreError,
    ObjectVersion,
)
from storage_formats.format.shard_table import EXCHANGED, FileEntry
from storage_formats.format.zarr_metadata import zarr_documents

ROOT = "index.json"
_CHECKSUM = "crc32c"  # name of the object metadata
_MAX_CLAIM_BYTES = 1 << 20
_SNAPSHOT = re.compile(r"snapshots/\d+\.json")


def refuse_read_only(folder: ObjectFolder, parameter: str) -> None:
    """Raise UsageError if the URL of `folder` can only be read. The error names `parameter` as the wrong parameter."""
    if folder.scheme not in STORE_SCHEMES:
        raise UsageError(
            f"{folder.url} can only be read; write to a URL that begins with s3://, gs:// or az://",
            parameter=parameter,
        )


@dataclass(frozen=True)
class Claim:
    """The object that keeps other writers away from an index.

    Attributes:
        is_new: whether this writer created it. Otherwise an earlier writer with the same identity has left it.
        contents: members of the object.
    """

    is_new: bool
    contents: Mapping[str, Any]


def take_claim(folder: ObjectFolder, identity: Mapping[str, str], further: Mapping[str, Any] | None = None) -> Claim:
    """Create the claim of a writer. A claim that holds the same `identity` is taken over.

    Args:
        folder: objects of the index.
        identity: members that tell whether two claims belong to the same writer.
        further: further members.

    Raises:
        EdjeError: another writer has claimed the index.
    """
    owner = f"process {os.getpid()} on {socket.gethostname()}"
    # The microseconds make each claim unique.
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
    claim = {**identity, **(further or {}), "owner": owner, "created": created}
    try:
        folder.replace(CLAIM, json.dumps(claim).encode(), None)
        return Claim(is_new=True, contents=claim)
    except ObjectChangedError:
        other = _read_claim(folder)
    if other is not None and identity.items() <= other.items():
        return Claim(is_new=False, contents=other)
    holder = f"{other.get('owner')}, since {other.get('created')}" if other else "unknown owner"
    raise EdjeError(
        f"another copy to {folder.url} or change of it is running or was stopped ({holder}); wait until it ends. If "
        f"its process does not run any more, delete the object {folder.url_of(CLAIM)}"
    )


def holds_claim(folder: ObjectFolder, identity: Mapping[str, str]) -> bool:
    """Return True if the index is still claimed by the writer with this identity."""
    claim = _read_claim(folder)
    return claim is not None and identity.items() <= claim.items()


def release_claim(folder: ObjectFolder, identity: Mapping[str, str]) -> None:
    """Remove the claim of the writer with this identity. If the object store does not respond, the claim stays."""
    with contextlib.suppress(ObjectStoreError):
        if holds_claim(folder, identity):
            folder.delete([CLAIM])


def _read_claim(folder: ObjectFolder) -> dict[str, Any] | None:
    try:
        claim = json.loads(folder.read(CLAIM, _MAX_CLAIM_BYTES).data)
    except (OSError, ValueError, RecursionError):
        return None
    return claim if isinstance(claim, dict) else None


def zarr_files(index: CommittedIndex) -> dict[str, bytes]:
    """Return the contents of each `zarr.json` of a snapshot, keyed by path.

    The files on disk are not read, because they describe the number of rows of the current snapshot.
    """
    layout = Layout(index.root)
    documents = zarr_documents(layout, index.manifest.spec)
    return {layout.relative(path): json_bytes(document) for path, document in documents.items()}


def zarr_entries(index: CommittedIndex) -> list[FileEntry]:
    """Return an entry for each `zarr.json` of a snapshot."""
    return [FileEntry(path, len(data), crc32c(data)) for path, data in zarr_files(index).items()]


def is_zarr_file(path: str) -> bool:
    """Return True if `path` names metadata that Zarr readers read."""
    return path.endswith("zarr.json")


def contents(index: CommittedIndex, entry: FileEntry) -> Generator[Chunk, None, None]:
    """Yield the contents of a file of `index` in pieces, and compare them with `entry`.

    Raises:
        CorruptIndexError: the file is missing or differs from `entry`.
    """
    if is_zarr_file(entry.path):
        yield zarr_files(index)[entry.path]
        return
    if index.remote is not None:
        yield from checked_chunks(index.remote, entry)
        return
    path, crc, length = index.root / entry.path, 0, 0
    try:
        with open_index_file(index.root, path) as file:
            while piece := file.read(CHUNK_BYTES):
                crc, length = crc32c(piece, crc), length + len(piece)
                yield piece
    except OSError as error:
        raise cannot_read(path, error) from error
    if (length, crc) != (entry.bytes, entry.crc32c):
        raise CorruptIndexError(f"{path} is not the file that was committed: {EXCHANGED}")


def put_file(folder: ObjectFolder, index: CommittedIndex, entry: FileEntry) -> bool:
    """Write a file of `index` to an object store. Return False if the same object was there already.

    Raises:
        CorruptIndexError: the file is missing or differs from `entry`.
    """
    info, checksum = folder.info(entry.path), to_hex(entry.crc32c)
    if info is not None and info.size == entry.bytes and info.metadata.get(_CHECKSUM) == checksum:
        return False
    overwrite_file(folder, index, entry)
    return True


def overwrite_file(folder: ObjectFolder, index: CommittedIndex, entry: FileEntry) -> None:
    """Write a file of `index` to an object store, also if an object is there that seems to be the same.

    Raises the same error as `put_file`.
    """
    metadata = {_CHECKSUM: to_hex(entry.crc32c)}
    folder.put(entry.path, lambda: contents(index, entry), length=entry.bytes, metadata=metadata)


def put_root(folder: ObjectFolder, data: bytes, replaced: ObjectVersion | None) -> ObjectVersion:
    """Commit the `index.json` with the contents `data` in place of `replaced`, whose snapshot is kept.

    Returns the new version of `index.json`.

    Raises:
        ObjectChangedError: another writer has replaced `index.json`.
        UncertainWriteError: it is not known whether `index.json` was replaced.
    """
    if replaced is not None and replaced.data != data:
        number = Manifest.parse(replaced.data, folder.url_of(ROOT)).snapshot.number
        if number != Manifest.parse(data, folder.url_of(ROOT)).snapshot.number:
            kept = replaced.data
            metadata = {_CHECKSUM: to_hex(crc32c(kept))}
            key = Layout(Path()).snapshot(number).as_posix()
            folder.put(key, lambda: (piece for piece in (kept,)), length=len(kept), metadata=metadata)
    return folder.replace(ROOT, data, replaced)


def is_data(key: str) -> bool:
    """Return True if `key` is the name of a data file, or of the manifest of an earlier snapshot."""
    return DATA_FILE.fullmatch(key) is not None or _SNAPSHOT.fullmatch(key) is not None
