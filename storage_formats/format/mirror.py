"""Opens an index on an object store. A local directory caches the files of one snapshot, except the token files.

The first read of a file downloads the file. A file that has an entry in the manifest or in a shard table is compared
with the entry before the file enters the cache.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from storage_formats.arguments import as_count
from storage_formats.atomic import fsync_path, write_bytes_atomic
from storage_formats.codecs import codec
from storage_formats.errors import CorruptIndexError, IncompleteIndexError, UsageError
from storage_formats.format.checksum import crc32c
from storage_formats.format.committed_files import CommittedFiles
from storage_formats.format.index_files import (
    RemoteFiles,
    add_remote_files,
    check_inside,
    forget_remote_files,
    remote_files,
)
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import MAX_MANIFEST_BYTES, CommittedIndex, Manifest
from storage_formats.format.object_store import IndexLocation, ObjectFolder, ObjectVersion, is_url
from storage_formats.format.shard_table import FileEntry

CLAIM = Layout(Path()).claim.as_posix()
"""Key of the object that keeps other writers away from an index on an object store (SPEC.md section 12.4)."""

_PARALLEL_DOWNLOADS = 16
_MAX_UNLISTED_BYTES = 1 << 20  # files without an entry: the zarr.json files
_KEPT_SECONDS = 7 * 86400.0
_SHARD_NUMBER = {
    "rows": re.compile(r"rows/(\d+)\.parquet"),
    "embeddings": re.compile(r"embeddings/c\.(\d+)\.0"),
    "tokens": re.compile(r"tokens/\w+/c\.(\d+)(\.0)+"),
    "checksums": re.compile(r"checksums/\w+/(\d+)\.crc32c"),
}


def cache_directory() -> Path:
    """Return the directory for cached files: `$EDJE_CACHE` if set, else `edje-index` in the user's cache directory."""
    if configured := os.environ.get("EDJE_CACHE"):
        return Path(configured).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "edje-index"


def open_index(location: IndexLocation, snapshot: int | None = None) -> CommittedIndex:
    """Open the index at `location`, a directory or a URL, to read it.

    For the arguments and errors, see `Manifest.load` and `open_remote`.
    """
    return open_remote(str(location), snapshot) if is_url(location) else CommittedIndex.open(location, snapshot)


def open_remote(url: str, snapshot: int | None = None) -> CommittedIndex:
    """Open the index at `url`. For the arguments and the other errors, see `Manifest.load`.

    Raises:
        ObjectStoreError: the object store refused a request or cannot be reached.
    """
    folder = ObjectFolder.open(url)
    version, manifest = read_root(folder)
    if version is None or manifest is None:
        raise absent(folder)
    if snapshot is not None and snapshot != manifest.snapshot.number:
        version, manifest = _earlier(folder, manifest, snapshot)
    root = _mirror_directory(folder.url, version.data)
    index = CommittedIndex(root, manifest, folder)
    shared = ObjectFolder(folder.url, folder.store)  # `folder` must become garbage together with `index`
    download = Mirror(CommittedIndex(root, manifest, shared)).download
    add_remote_files(root, RemoteFiles(shared, download), user=folder)
    return index


@contextlib.contextmanager
def downloading(root: Path, url: str) -> Iterator[None]:
    """Context manager in which files that are missing in the working copy `root` are downloaded from `url`.

    Does nothing in the process that made the working copy, which downloads missing files anyway.
    """
    if remote_files(root) is not None:
        yield
        return
    folder = ObjectFolder.open(url)
    remote = RemoteFiles(folder, Mirror(CommittedIndex(root, Manifest.load(root), folder)).download)
    add_remote_files(root, remote)
    try:
        yield
    finally:
        forget_remote_files(root, remote)


def download_snapshots(folder: ObjectFolder, layout: Layout) -> None:
    """Make the local directory `snapshots/` equal to that of the object store.

    Raises:
        CorruptIndexError: an object is too long for the manifest of a snapshot.
        OSError: a local file cannot be written.
    """
    below = layout.relative(layout.snapshot(0).parent)
    keys = {key for key in folder.list_sizes(below) if re.fullmatch(rf"{below}/\d+\.json", key)}
    for path in layout.snapshot(0).parent.glob("*.json"):
        if layout.relative(path) not in keys:
            path.unlink(missing_ok=True)  # another process may be faster

    def download(key: str) -> None:
        if (layout.root / key).exists():
            return
        try:
            data = folder.read(key, MAX_MANIFEST_BYTES).data
        except FileNotFoundError:  # 'gc' of another process has removed the snapshot
            return
        except OSError as error:
            raise CorruptIndexError(
                f"{folder.url_of(key)} is not the manifest of a snapshot: {error.strerror}; delete this object"
            ) from error
        write_bytes_atomic(layout.root / key, data)

    with ThreadPoolExecutor(_PARALLEL_DOWNLOADS) as pool:
        list(pool.map(download, sorted(keys)))


def read_root(folder: ObjectFolder) -> tuple[ObjectVersion | None, Manifest | None]:
    """Read `index.json` of a remote index. Return (None, None) if `folder` contains no `index.json`."""
    try:
        version = folder.read("index.json", MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        return None, None
    except OSError as error:
        raise CorruptIndexError(
            f"cannot read {folder.url_of('index.json')}: {error.strerror}; give the URL of an EDJE index"
        ) from error
    return version, Manifest.parse(version.data, folder.url_of("index.json"))


def _earlier(folder: ObjectFolder, current: Manifest, snapshot: int) -> tuple[ObjectVersion, Manifest]:
    key = Layout(Path()).snapshot(as_count(snapshot, "snapshot", least=0)).as_posix()
    try:
        version = folder.read(key, MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        raise UsageError(
            f"{folder.url} has no snapshot {snapshot}; its current snapshot is {current.snapshot.number}",
            parameter="snapshot",
        ) from None
    return version, Manifest.parse(version.data, folder.url_of(key))


def absent(folder: ObjectFolder) -> Exception:
    """Return the exception for a URL without an index."""
    if folder.info(CLAIM) is not None:
        return IncompleteIndexError(f"the copy of an index to {folder.url} has not finished; run the copy again")
    return UsageError(f"there is no index at {folder.url}")


def _mirror_directory(url: str, manifest: bytes) -> Path:
    """Return the cache directory of one snapshot. Delete cached snapshots that were not used for a week."""
    of_index = cache_directory() / "indexes" / hashlib.sha256(url.encode()).hexdigest()[:32]
    root = of_index / hashlib.sha256(manifest).hexdigest()[:32]
    if not (root / "index.json").exists():
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_bytes_atomic(root / "index.json", manifest)
    os.utime(root)
    for other in of_index.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - other.stat().st_mtime > _KEPT_SECONDS:
                shutil.rmtree(other)
    return root


class Mirror:
    """Downloads files of one snapshot to a local directory. Thread-safe.

    Args:
        index: the snapshot; `index.root` is the directory.
        further: entries of files that this snapshot does not name.
    """

    def __init__(self, index: CommittedIndex, further: Iterable[FileEntry] = ()) -> None:
        assert index.remote is not None
        self._folder = index.remote
        self._layout = layout = Layout(index.root)
        self._entries = {entry.path: entry for entry in (*further, *named_by_manifest(index.manifest))}
        paths: dict[str, Callable[[int], Path]] = {"rows": layout.rows_file, "embeddings": layout.embedding_shard}
        for name in index.manifest.spec.precisions:
            paths[f"checksums/{name}"] = functools.partial(layout.checksums, name)
            ndim = len(codec(name, index.manifest.spec.block_shape).record_shape)
            paths[f"tokens/{name}"] = functools.partial(layout.token_shard, name, record_ndim=ndim)
        self._committed = {prefix: CommittedFiles(index, path) for prefix, path in paths.items()}

    def download(self, paths: list[Path]) -> None:
        """Download files. A file with an entry is compared with the entry before the file appears at its path."""
        by_key = {self._layout.relative(path): path for path in paths}
        entries = self._find_entries(by_key)
        with ThreadPoolExecutor(max(1, min(_PARALLEL_DOWNLOADS, len(by_key)))) as pool:
            list(pool.map(lambda key: self._download(key, by_key[key], entries.get(key)), by_key))

    def _find_entries(self, keys: Iterable[str]) -> dict[str, FileEntry]:
        """Return the entries of the files `keys` that the manifest or a shard table lists."""
        entries, shards = dict[str, FileEntry](), dict[str, list[int]]()
        for key in keys:
            folder, _, _ = key.rpartition("/")
            number = _SHARD_NUMBER.get(key.partition("/")[0], re.compile("$.")).fullmatch(key)
            if key in self._entries:
                entries[key] = self._entries[key]
            elif number and folder in self._committed:
                shards.setdefault(folder, []).append(int(number[1]))
        for folder, numbers in shards.items():
            entries |= {entry.path: entry for entry in self._committed[folder].files(numbers).values()}
        return entries

    def _download(self, key: str, path: Path, entry: FileEntry | None) -> None:
        check_inside(self._layout.root, path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if entry is None:
            write_bytes_atomic(path, self._folder.read(key, _MAX_UNLISTED_BYTES).data)
            return
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            with open(temporary, "xb") as file:
                for chunk in checked_chunks(self._folder, entry):
                    file.write(chunk)
            fsync_path(temporary)  # the cache is trusted after a power failure
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def checked_chunks(folder: ObjectFolder, entry: FileEntry) -> Iterable[memoryview]:
    """Yield the contents of a committed file of a remote index in pieces.

    Raises:
        CorruptIndexError: the object is missing, or its length or CRC-32C differs from `entry`. A wrong CRC-32C
            raises the error only after the last piece.
    """
    crc = 0
    try:
        for chunk in folder.chunks(entry.path, entry.bytes):
            crc = crc32c(bytes(chunk), crc)
            yield chunk
    except (FileNotFoundError, EOFError) as error:
        raise CorruptIndexError(
            f"{folder.url_of(entry.path)} is missing or too short; open the index again. If the error remains, copy "
            "the index again from a sound copy"
        ) from error
    if crc != entry.crc32c:
        raise CorruptIndexError(
            f"{folder.url_of(entry.path)} is not the file that was committed; open the index again. If the error "
            "remains, delete this object, and copy the index again from a sound copy"
        )


def named_by_manifest(manifest: Manifest) -> list[FileEntry]:
    """Return the file entries in `index.json`. These are the files that no shard table lists."""
    deleted = [] if manifest.snapshot.deleted is None else [manifest.snapshot.deleted]
    row_maps = [row_map.file for row_map in manifest.row_maps]
    return [*manifest.shard_tables, *deleted, *row_maps, *manifest.ann_files]
