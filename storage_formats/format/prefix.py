"""An index below a URL of an object store.

The object `build/claim.json` keeps other writers away. It names its owner, who renews
it while it works, so that another process can take over the claim of a process that was
killed. `index.json` is replaced only if it is still the object that was read when the
change began.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import json
import os
import shutil
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from storage_formats.atomic import Json, json_bytes, replacing
from storage_formats.cache import cache_directory
from storage_formats.errors import CorruptIndexError, EdjeError, UsageError
from storage_formats.format.checksum import crc32c, to_hex
from storage_formats.format.directory import MAX_BYTES
from storage_formats.format.file_check import FileEntry, checked_pieces
from storage_formats.format.layout import Layout
from storage_formats.remote.objects import (
    CHUNK_BYTES,
    Chunk,
    ObjectChangedError,
    ObjectFolder,
    ObjectStoreError,
    ObjectVersion,
    UncertainWriteError,
)
from storage_formats.remote.urls import STORE_SCHEMES, scheme_of

if TYPE_CHECKING:
    from storage_formats.format.manifest import Manifest
    from storage_formats.format.places import Place

CHECKSUM = "crc32c"
"""Key of the CRC-32C of an object in the metadata of this object."""

# Another process takes over a claim that was not renewed for this number of seconds.
_EXPIRY_SECONDS = 120.0
_RENEWAL_SECONDS = 20.0
# A process that was suspended for longer than this checks that it still has the claim.
_LATE_SECONDS = 60.0
# A worker looks at the journal again after this time.
_FRESH_SECONDS = 1.0
_MAX_CLAIM_BYTES = 1 << 20
_TRANSFERS_AT_ONCE = 8
_DOWNLOADS_AT_ONCE = 16
# A cached snapshot that was not opened for this time, a week, is deleted.
_KEPT_SECONDS = 7 * 86400.0

_honest = set[str]()
"""Schemes and buckets whose servers were found to honour conditional writes."""


@dataclass(eq=False, repr=False)
class Prefix(Layout):
    """An index below the URL of `folder`, with the operations of a `Directory`.

    `root` is a temporary directory on this machine, which `close` removes. For readers,
    it is a directory that caches files. A path below `root` stands for the object with
    the same relative path.

    Attributes:
        owner: identifier of this place in its claim.
        base: `index.json` at the time of the claim; None if there was none.
        renewed: time of the last renewal of the claim, or of the last look at the
            claim or the journal, see `_clock`.
        own_claim: the claim object of this process; None if it has none.
        listed: length of each listed object in bytes, by key.
        task: the journal of the change of this task; None before `begin_task`.
    """

    folder: ObjectFolder
    owner: str = field(default_factory=lambda: uuid.uuid4().hex)
    base: ObjectVersion | None = None
    renewed: float = 0.0
    own_claim: ObjectVersion | None = None
    listed: dict[str, int] = field(default_factory=dict)
    task: bytes | None = None

    @classmethod
    def open(cls, url: str) -> Prefix:
        """Return the place at `url`. No request is sent.

        Raises:
            UsageError: no index can be written to `url`.
            OSError: the temporary directory cannot be created.
        """
        folder = ObjectFolder.open(url)
        if scheme_of(url) not in STORE_SCHEMES:
            raise UsageError(
                f"{folder.url} can only be read, and not verified, because a web server"
                " does not list files; write to a URL that begins with s3://, gs:// or"
                " az://, or copy the index to a directory",
                parameter="out",
            )
        parent = cache_directory() / "scratch"
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _remove_abandoned(parent)
        prefix = f"{_machine()}-{os.getpid()}-"
        root = tempfile.mkdtemp(prefix=prefix, dir=parent)
        return cls(Path(root).resolve(), folder)

    @classmethod
    def reading(cls, url: str) -> Prefix:
        """Return the place at `url` for readers. No request is sent."""
        name = hashlib.sha256(url.encode()).hexdigest()[:32]
        return cls(cache_directory() / "indexes" / name, ObjectFolder.open(url))

    @property
    def location(self) -> str:
        return self.folder.url

    @property
    def remote(self) -> ObjectFolder:
        return self.folder

    def address(self, path: Path) -> str:
        return self.folder.url_of(self.relative(path))

    def of_snapshot(self, manifest: Manifest) -> Prefix:
        contents = json_bytes(manifest.to_json())
        root = self.root / hashlib.sha256(contents).hexdigest()[:32]
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.utime(root)
        for other in self.root.iterdir():
            with contextlib.suppress(OSError):
                if time.time() - other.stat().st_mtime > _KEPT_SECONDS:
                    shutil.rmtree(other)
        return replace(self, root=root)

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        self._claim()
        ended = threading.Event()
        renewal = threading.Thread(
            target=self._renew, args=(ended,), name="edje-claim", daemon=True
        )
        try:
            self._probe()
            renewal.start()
            with contextlib.suppress(FileNotFoundError):
                self.base = self.folder.read(self.relative(self.manifest), MAX_BYTES)
                self._keep(self.manifest, self.base.data)
            yield
        finally:
            ended.set()
            if renewal.ident is not None:
                renewal.join()
            # If the store fails here, the claim stays until it expires.
            with contextlib.suppress(ObjectStoreError):
                if self.is_claimed():
                    self.folder.delete([self.relative(self.claim)])

    def is_claimed(self) -> bool:
        if self.own_claim is None:
            return False
        current = self._read_claim()
        # No other claim contains the random identifier of this place.
        return current is not None and self.owner.encode() in current.data

    def is_changing(self) -> bool:
        keys = map(self.relative, (self.claim, self.journal))
        return any(self.folder.info(key) is not None for key in keys)

    def get(self, path: Path) -> None:
        if not path.exists() and (data := self.read(path)) is not None:
            self._keep(path, data)

    def read(self, path: Path, max_bytes: int = MAX_BYTES) -> bytes | None:
        is_claimed = self.own_claim is not None
        # While this process has the claim, no other one changes the file.
        if is_claimed and path.exists():
            return path.read_bytes()
        try:
            data = self.folder.read(self.relative(path), max_bytes).data
        except FileNotFoundError:
            return None
        if is_claimed:
            self._keep(path, data)
        return data

    def write(self, path: Path, data: bytes) -> None:
        file = FileEntry(self.relative(path), len(data), crc32c(data))
        self._upload(file, lambda: [data])
        self._keep(path, data)

    def begin_task(self) -> None:
        if self.own_claim is None:
            self.task = self.read(self.journal) or b""
            self.renewed = _clock()
            self._check_change()

    def _check_change(self) -> None:
        """Raise EdjeError if another process may have taken over the change."""
        age = _clock() - self.renewed
        if self.own_claim is not None:
            # This process renews the claim, unless it was suspended.
            is_over = age > _LATE_SECONDS and not self.is_claimed()
        else:
            is_over = self.task == b""
            if self.task is not None and age > _FRESH_SECONDS:
                is_over = self.read(self.journal) != self.task
                self.renewed = _clock()
        if is_over:
            raise EdjeError(
                f"the change of {self.folder.url} that this process served has ended,"
                " because another process has taken it over"
            )

    def put(self, staged: Sequence[tuple[Path, FileEntry]]) -> None:
        def pieces(path: Path) -> Iterator[Chunk]:
            with path.open("rb") as opened:
                yield from iter(lambda: opened.read(CHUNK_BYTES), b"")

        def move(path: Path, entry: FileEntry) -> None:
            self._upload(entry, lambda: pieces(path))
            if path != self.root / entry.path:
                path.unlink()

        with ThreadPoolExecutor(_TRANSFERS_AT_ONCE) as pool:
            list(pool.map(move, *zip(*staged, strict=True)))

    def fetch(self, entries: Iterable[FileEntry]) -> None:
        missing = [each for each in entries if not (self.root / each.path).exists()]

        def download(entry: FileEntry) -> None:
            path = self.root / entry.path
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                file.writelines(self.contents(entry))

        if missing:
            with ThreadPoolExecutor(min(_DOWNLOADS_AT_ONCE, len(missing))) as pool:
                list(pool.map(download, missing))

    def contents(self, entry: FileEntry) -> Iterator[Chunk]:
        url = self.folder.url_of(entry.path)
        pieces = self.folder.chunks(entry.path, entry.bytes)
        try:
            yield from checked_pieces(url, entry, pieces)
        except (FileNotFoundError, EOFError) as error:
            raise CorruptIndexError(
                f"{url} is missing or too short; open the index again. If the error"
                " remains, copy the index again from a sound copy"
            ) from error

    def copy(self, source: Place, entry: FileEntry) -> bool:
        info = self.folder.info(entry.path)
        if info is not None and (
            (info.size, info.metadata.get(CHECKSUM))
            == (entry.bytes, to_hex(entry.crc32c))
        ):
            return False
        self._upload(entry, lambda: source.contents(entry))
        return True

    def names(self, folder: Path) -> list[Path]:
        sizes = self.folder.list_sizes(self.relative(folder))
        self.listed |= sizes
        return sorted(self.root / key for key in sizes)

    def lengths(self, entries: Iterable[FileEntry]) -> dict[str, int]:
        folders = {(self.root / entry.path).parent for entry in entries}
        paths = [path for folder in sorted(folders) for path in self.names(folder)]
        listed = self.listed
        return {self.relative(path): listed[self.relative(path)] for path in paths}

    def remove(self, paths: Iterable[Path]) -> list[int]:
        self._check_change()
        paths = list(paths)
        keys = [self.relative(path) for path in paths]
        if keys:
            self.folder.delete(keys)
        for path in paths:
            path.unlink(missing_ok=True)
        return [self.listed.pop(key, 0) for key in keys]

    def commit(self, data: bytes) -> None:
        try:
            if not self.is_claimed():
                url = self.folder.url_of(self.relative(self.claim))
                raise ObjectChangedError(f"another process took over {url}")
            self.base = self.folder.replace(
                self.relative(self.manifest), data, self.base
            )
        except UncertainWriteError as error:
            raise EdjeError(
                f"the change may be committed: {error}. Once the store responds, run"
                " the same command again"
            ) from error
        except ObjectChangedError as error:
            raise EdjeError(
                f"{error} during this change, so nothing was committed; run the same"
                " command again once no other process changes the index"
            ) from error
        self._keep(self.manifest, data)

    def move_erased(self) -> None:
        self._check_change()
        folders = Layout(self.erased).shard_folders()
        paths = [path for folder in folders for path in self.names(folder)]
        finals = [path.relative_to(self.erased).as_posix() for path in paths]
        with ThreadPoolExecutor(_TRANSFERS_AT_ONCE) as pool:
            list(pool.map(self.folder.copy, map(self.relative, paths), finals))
        self.remove(self.names(self.erased))

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    def _upload(self, file: FileEntry, contents: Callable[[], Iterable[Chunk]]) -> None:
        """Write the object with the path of `file`, and with the checksum of `file` in
        its metadata, unless another process may have taken over the change.

        Args:
            contents: function that yields the contents in pieces. If the request is
                repeated, the function is called again.
        """
        self._check_change()
        metadata = {CHECKSUM: to_hex(file.crc32c)}
        self.folder.put(file.path, contents, length=file.bytes, metadata=metadata)

    def _keep(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def _claim(self) -> None:
        """Create the claim, or take over the claim of a process that has ended.

        Raises:
            EdjeError: another process has the claim.
        """
        expected: ObjectVersion | None = None
        while True:
            try:
                self._put_claim(expected)
                return
            except ObjectChangedError:
                # None if the other process has removed its claim meanwhile
                expected = self._read_claim()
            if expected is not None and (problem := _working(expected.data)):
                raise EdjeError(
                    f"{problem} is working on {self.folder.url}; wait until it ends,"
                    " or stop it"
                )

    def _put_claim(self, expected: ObjectVersion | None) -> None:
        """Write a new claim of this process if `expected` is still the current one."""
        key = self.relative(self.claim)
        self.own_claim = self.folder.replace(key, _claim_bytes(self.owner), expected)
        self.renewed = _clock()

    def _read_claim(self) -> ObjectVersion | None:
        """Return the claim object; None if there is none."""
        try:
            return self.folder.read(self.relative(self.claim), _MAX_CLAIM_BYTES)
        except FileNotFoundError:
            return None

    def _renew(self, ended: threading.Event) -> None:
        while not ended.wait(_RENEWAL_SECONDS):
            # After an error, the next renewal tries again. If another process has taken
            # over the claim, `commit` finds out.
            with contextlib.suppress(ObjectStoreError, ObjectChangedError, OSError):
                current = self._read_claim()
                # The answer of an earlier renewal may have been lost, so the claim is
                # recognised by its owner.
                if current and self.owner.encode() in current.data:
                    self._put_claim(current)

    def _probe(self) -> None:
        """Check that the server honours conditional writes.

        Raises:
            UsageError: the server ignores conditions, so two processes that change the
                index at the same time could destroy it.
        """
        bucket = "/".join(self.folder.url.split("/")[:3])
        if bucket in _honest:
            return
        replaced = self.own_claim
        self._put_claim(replaced)
        # The claim exists, so it cannot be created, and its earlier version, which is
        # not current any more, cannot be replaced.
        for expected in (None, replaced):
            with contextlib.suppress(ObjectChangedError):
                self._put_claim(expected)
                raise UsageError(
                    f"the server of {self.folder.url} ignores the conditions of writes"
                    " (If-None-Match, If-Match), so it cannot hold an index that"
                    " changes; build in a directory, and copy the index there"
                )
        _honest.add(bucket)


def _clock() -> float:
    """Return a time in seconds that also runs while the machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@functools.cache
def _machine() -> str:
    """Return an identifier of this machine since its start, or of this container: in
    each, process ids have a meaning of their own.
    """
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _claim_bytes(owner: str) -> bytes:
    """Return the contents of a new claim of this process."""
    now = datetime.datetime.now(datetime.UTC)
    expires = now + datetime.timedelta(seconds=_EXPIRY_SECONDS)
    claim: Json = {
        "owner": owner,
        # No two claims are equal, so the answers of conditional writes are clear.
        "id": uuid.uuid4().hex,
        "machine": _machine(),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "host": socket.gethostname(),
        "expires": expires.isoformat(),
    }
    return json_bytes(claim)


def _working(data: bytes) -> str | None:
    """Return a description of the owner of a claim; None if the claim has expired or
    its owner was a process of this machine that has ended.
    """
    try:
        claim = json.loads(data)
        expires = datetime.datetime.fromisoformat(claim["expires"])
        owner = f"process {claim['pid']} on {claim['host']}"
        if claim["machine"] == _machine() and not _runs(claim["pid"], claim["started"]):
            return None
    except (ValueError, KeyError, TypeError, RecursionError):
        # This is no claim of this package, or it is damaged.
        return None
    if expires < datetime.datetime.now(datetime.UTC):
        return None
    return owner


def _started(pid: int) -> float:
    """Return the number of seconds from the start of this machine to the start of the
    process `pid`. Unlike the time of the start, it does not change with the clock.
    """
    return float(psutil.Process(pid).create_time() - psutil.boot_time())


def _runs(pid: int, started: float) -> bool:
    """Return True if the process `pid` of this machine, for which `_started` was
    `started`, still runs.
    """
    try:
        return abs(_started(pid) - started) < 2
    except psutil.Error:
        return False


def _remove_abandoned(parent: Path) -> None:
    """Remove the temporary directories of processes that have ended."""
    for folder in parent.glob(f"{_machine()}-*"):
        pid = folder.name.split("-")[1]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
