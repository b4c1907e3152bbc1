"""The one way to change an index: a lock, a journal, tasks with receipts, and one
commit (SPEC.md section 11).

A change writes new files under names that no committed snapshot uses, then replaces
`index.json`. Until then, the index is as it was. `build/journal.json` names the change
that is under way. If the change is stopped, the same change resumes it; no other change
begins until it is finished or discarded.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from storage_formats.atomic import (
    fsync_parent,
    fsync_path,
    fsync_paths,
    make_directories,
    naming,
    write_bytes_atomic,
    write_json_atomic,
)
from storage_formats.codecs import precisions
from storage_formats.errors import CorruptIndexError, EdjeError, UsageError, cannot_read
from storage_formats.format.checksum import json_checksum
from storage_formats.format.index_files import check_inside, read_index_file
from storage_formats.format.layout import (
    EDITED_VERSION,
    EXTENDED_VERSION,
    OFFSET_ARRAY,
    PARTIAL_VERSION,
    SNAPSHOT_VERSION,
    IndexSpec,
    Layout,
)
from storage_formats.format.manifest import (
    CommittedIndex,
    Manifest,
    created_by,
    earlier_snapshots,
    kept_snapshots,
)
from storage_formats.format.receipts import ShardReceipt, read_receipts
from storage_formats.format.shard_table import FileEntry, read_shard_table
from storage_formats.format.zarr_metadata import zarr_documents
from storage_formats.remote.urls import local_path
from storage_formats.system_calls import MissingCallError, promised

_NAMES = "|".join(precisions())
_ARRAY_FOLDER = re.compile(rf"(tokens|checksums)/({_NAMES}|{OFFSET_ARRAY})")
DATA_FILE = re.compile(
    rf"tokens/({_NAMES}|{OFFSET_ARRAY})/(c\.\d+(\.0)+|zarr\.json)"
    rf"|checksums/({_NAMES})/\d+\.crc32c"
    r"|embeddings/c\.\d+\.0"
    r"|rows/\d+\.parquet"
    r"|manifest/shards-\w+\.parquet"
    r"|manifest/deleted-\w+\.bin"
    r"|manifest/row-map-\w+\.parquet"
    r"|manifest/edits-\w+\.parquet"
    r"|filters/(rows-\w+|new)\.parquet"
    r"|ann/index(-\w+)?\.faiss"
)
_TEMPORARY = (
    ".index.json.*",
    "manifest/.shards-*",
    "manifest/.deleted-*",
    "manifest/.row-map-*",
    "manifest/.edits-*",
    "filters/.new*",
    "snapshots/.*.json.*",
    "ann/index.faiss.partial",
    "tokens/.zarr.json.*",
    "tokens/*/.zarr.json.*",
    "embeddings/.zarr.json.*",
    "hashes/.rows-*",
)
_VERIFIED = ".verified.bin.*"
LEAST_SNAPSHOTS = 32
MOST_SNAPSHOTS = 64
"""Snapshots that an index keeps. The change that makes one more removes the oldest, so
that `LEAST_SNAPSHOTS` are left.
"""
# a plan lists the checksum of every file of inputs
_MAX_JOURNAL_BYTES = 1 << 30

Notify = Callable[[str], None]
"""Function that takes a message for the user."""


class UnfinishedChangeError(EdjeError):
    """Another change of the index was stopped, and has finished shards."""


@dataclass(frozen=True)
class Journal:
    """The contents of `build/journal.json`, which names the change that is under way.

    Attributes:
        kind: kind of the change, for example "append".
        request: what the change was asked to do. A change of the same kind and request
            resumes it.
        base: SHA-256 of the `index.json` before the change; None if the change writes a
            new index.
        plan: what the change decided before its first task; None if it has not decided
            yet.
    """

    kind: str
    request: dict[str, Any]
    base: str | None
    plan: dict[str, Any] | None = None

    def write(self, layout: Layout) -> None:
        """Write the journal of the index with `layout`."""
        checksum = json_checksum(vars(self))
        write_json_atomic(layout.journal, {**vars(self), "crc32c": checksum})


def read_journal(root: str | Path) -> Journal | None:
    """Return the journal of the unfinished change of the index at `root`; None if
    there is none.
    """
    layout = Layout(Path(root))
    try:
        value = json.loads(
            read_index_file(layout.root, layout.journal, max_bytes=_MAX_JOURNAL_BYTES)
        )
        if value.pop("crc32c") != json_checksum(value):
            raise ValueError("it does not match its checksum")
        return Journal(**value)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (
        OSError,
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
        RecursionError,
    ) as error:
        advice, remedy = _how_to_discard(layout)
        what = f"{layout.journal}, which names the unfinished change"
        problem = cannot_read(what, error, advice)
        problem.remedy = remedy
        raise problem from error


def is_unfinished(root: str | Path) -> Journal | None:
    """Return the journal of the index at `root` if its change was stopped before
    the commit; None otherwise.
    """
    layout = Layout(Path(root))
    journal = read_journal(root)
    return journal if journal is not None and journal.base == _digest(layout) else None


class Change:
    """A change that holds the lock of an index, see `IndexChange` and `NewIndex`.

    Attributes:
        plan: the stored plan of an earlier run of this change; None if there is none.
    """

    def __init__(
        self, layout: Layout, kind: str, request: Mapping[str, Any] | None
    ) -> None:
        self.layout = layout
        self._is_abandoned = False
        # whether data files may be there that no commit names
        self._has_written = True
        # in JSON, as `is_same` compares it with a stored journal
        wanted = json.loads(json.dumps(request or {}))
        self._journal = Journal(kind, wanted, _digest(layout))

    @property
    def plan(self) -> dict[str, Any] | None:
        return self._journal.plan

    def store_plan(self, plan: dict[str, Any]) -> None:
        """Store `plan`, a JSON object. The next run of this change gets it."""
        self._journal = replace(self._journal, plan=plan)
        self._journal.write(self.layout)

    def is_same(self, earlier: Journal) -> bool:
        """Return True if `earlier` is the journal of this change."""
        wanted = self._journal
        return (earlier.kind, earlier.request) == (wanted.kind, wanted.request)

    def receipts(
        self, shards: Iterable[int], fingerprint: str
    ) -> dict[int, ShardReceipt]:
        """Return the receipts of earlier runs, by shard number. A receipt counts if
        it has the task's `fingerprint`.
        """
        self._has_written = True
        clear_staging(self.layout.root)
        return read_receipts(self.layout, shards, fingerprint)

    def abandon(self) -> None:
        """Let the end of this change remove its files, also if a later run could
        use them. A committed change stays.
        """
        self._is_abandoned = True
        self._has_written = True

    def start_again(self) -> None:
        """Remove the plan, the receipts and all files of this change."""
        self._remove_files()
        self._journal = replace(self._journal, plan=None)
        self._journal.write(self.layout)

    def _remove_data(self) -> None:
        """Remove the data files of this change, which is not committed."""
        raise NotImplementedError

    def _remove_files(self) -> None:
        if self._has_written:
            self._remove_data()
        for path in set(self.layout.build.iterdir()) - {
            self.layout.lock,
            self.layout.journal,
        }:
            _remove(path)

    def _is_committed(self) -> bool:
        return _digest(self.layout) != self._journal.base

    def _close(self) -> None:
        """Remove `build/`, unless a later run of this change can use what it holds.
        A committed change stays.
        """
        # then the next change removes the files
        with contextlib.suppress(OSError, EdjeError):
            if self._is_committed():
                return
            if _has_work(self.layout, self._journal) and not self._is_abandoned:
                shutil.rmtree(self.layout.staging, ignore_errors=True)
            else:
                self._remove_files()
                remove_build(self.layout)


class IndexChange(Change):
    """A change of an index that exists. `begin_change` makes it.

    All files of a manifest that is committed must be on disk. If one of the methods
    raises OSError after the index has changed, `begin_change` turns the error into an
    EdjeError.

    Attributes:
        index: the index before the change.
    """

    def __init__(
        self, layout: Layout, kind: str, request: Mapping[str, Any] | None
    ) -> None:
        super().__init__(layout, kind, request)
        self.index = CommittedIndex.open(layout.root)

    def commit(self, manifest: Manifest, details: Mapping[str, Any]) -> Manifest:
        """Commit `manifest` as a new snapshot, and return it as it was written. The
        oldest snapshots are removed if there are more than `MOST_SNAPSHOTS`.

        In this order: `index.json` is copied to `snapshots/`, `zarr.json` files get
        shapes that grow, `index.json` is replaced, `zarr.json` files get shapes that
        shrink, and files that nothing names go.

        Args:
            manifest: manifest after the change. The snapshot number and the format
                version are set here.
            details: members of `change` in `index.json`.
        """
        layout = self.layout
        current = self.index.manifest
        number = current.snapshot.number
        kept = layout.snapshot(number)
        make_directories(kept.parent)
        write_bytes_atomic(kept, read_index_file(layout.root, layout.manifest))
        numbers = [*earlier_snapshots(layout, current), number]
        dropped: list[int] = []
        if len(numbers) >= MOST_SNAPSHOTS:
            # with the new snapshot, LEAST_SNAPSHOTS are left
            dropped = numbers[: 1 - LEAST_SNAPSHOTS]
        snapshot = replace(
            manifest.snapshot,
            number=number + 1,
            change={"kind": self._journal.kind, **details, "created": now()},
            next_shard=max(
                current.snapshot.next_shard, current.spec.shards, manifest.spec.shards
            ),
            oldest=numbers[len(dropped)],
        )
        version = SNAPSHOT_VERSION
        if manifest.columns or manifest.row_maps:
            version = EXTENDED_VERSION
        if any(row_map.is_partial for row_map in manifest.row_maps):
            version = PARTIAL_VERSION
        if manifest.edits:
            version = EDITED_VERSION
        manifest = replace(
            manifest,
            snapshot=snapshot,
            format_version=version,
            created_by=created_by(),
        )
        self._write(manifest)
        if dropped:
            _drop_snapshots(layout, dropped)
        return manifest

    def commit_same_rows(self, manifest: Manifest) -> None:
        """Commit `manifest` without a new snapshot, because no row changes. Remove the
        files that no kept snapshot names then.
        """
        self._write(manifest)
        # readers that opened the index before need the earlier shard tables
        _remove_what_is_not_kept(self.layout, tables=False)

    def _write(self, manifest: Manifest) -> None:
        before = self.index.manifest.spec
        after = manifest.spec
        added = {*after.precisions} - {*before.precisions}
        if after.rows > before.rows or added:
            # a reader that sees the new manifest needs the new shapes
            write_array_shapes(self.layout, after)
        if added:
            # it says nothing about their files
            self.layout.verified.unlink(missing_ok=True)
        manifest.write(self.layout)
        # shapes that shrink follow, so that a reader of the old manifest finds its rows
        write_array_shapes(self.layout, after)

    def _remove_data(self) -> None:
        layout = self.layout
        wrote_shards = any(
            folder.exists() for folder in (layout.staging, layout.receipt(0).parent)
        )
        kept = kept_snapshots(self.index)
        remove_unnamed_files(layout, kept, searches_data=wrote_shards)
        write_array_shapes(layout, self.index.manifest.spec)


class NewIndex(Change):
    """A change that writes a new index. `begin_new_index` makes it."""

    def commit(self, manifest: Manifest) -> None:
        """Write `index.json`. All files of `manifest` must be on disk."""
        write_array_shapes(self.layout, manifest.spec)
        manifest.write(self.layout)

    def commit_copy(self, data: bytes) -> None:
        """Write `index.json` with the contents `data`, the manifest of the copied
        index.
        """
        write_bytes_atomic(self.layout.manifest, data)

    def _remove_data(self) -> None:
        layout = self.layout
        for path in (*layout.data_folders(), layout.snapshot(0).parent):
            _remove(path)
        fsync_path(layout.root)


@contextlib.contextmanager
def begin_change(
    root: str | Path,
    kind: str,
    request: Mapping[str, Any] | None = None,
) -> Iterator[IndexChange]:
    """Lock the index at `root` and begin a change, or resume the same change if it was
    stopped.

    At the end, the files of a change that has not committed are removed, unless it has
    a plan or finished shards. What fails after the commit is left to the next change.

    Args:
        kind: kind of the change, for example "append".
        request: JSON object with what the change is asked to do.

    Raises:
        UsageError: there is no index at `root`, or `root` is a URL.
        UnfinishedChangeError: another change of the index was stopped, and has finished
            shards.
        EdjeError: another process is changing the index; or the change is committed,
            but something failed afterwards.
        OSError: the index cannot be written. It has not changed.
    """
    layout = _local_layout(root)
    if not layout.manifest.exists():
        # fails before the lock makes a directory
        Manifest.load(layout.root)
    # no reader follows such a link, so no writer may
    for folder in (layout.root, layout.root / "tokens", layout.root / "checksums"):
        for entry in _entries(folder):
            check_inside(layout.root, folder / entry)
    with locked(layout.root):
        earlier = _unfinished(layout)
        change = IndexChange(layout, kind, request)
        with _running(change, earlier):
            yield change


@contextlib.contextmanager
def begin_new_index(
    root: str | Path,
    kind: str,
    request: Mapping[str, Any] | None = None,
    *,
    notify: Notify = lambda message: None,
) -> Iterator[NewIndex]:
    """Lock the directory `root` and begin to write a new index, or resume the same
    change if it was stopped. See `begin_change`.

    An unfinished index of the same kind but another request is discarded: what was
    copied is copied again.

    Raises:
        UsageError: `root` is neither missing nor empty, and does not hold this
            unfinished index; or `root` is a URL.
    """
    layout = _local_layout(root)
    check_free(layout)
    with locked(layout.root):
        earlier = _unfinished(layout)
        if layout.manifest.exists():
            raise UsageError(
                f"{layout.root} exists already; choose another directory",
                parameter="out",
            )
        change = NewIndex(layout, kind, request)
        if earlier is not None and earlier.kind == kind and not change.is_same(earlier):
            _discard(change, earlier, notify)
            earlier = None
        with _running(change, earlier):
            yield change


def collect_garbage(
    root: str | Path, keep: int | None = None, *, notify: Notify = lambda message: None
) -> Removal:
    """Remove an unfinished change of the index at `root`, the snapshots before the
    newest `keep`, and the files that no kept snapshot names.

    Args:
        keep: number of snapshots to keep; None keeps all.

    Raises:
        UsageError, EdjeError, OSError: see `begin_change`.
    """
    layout = _local_layout(root)
    Manifest.load(layout.root)
    with locked(layout.root):
        try:
            earlier = _unfinished(layout)
        except CorruptIndexError:
            notify("discarding an unfinished change whose journal is damaged")
            # its plan is unknown, so all of its files go
            earlier = Journal("unknown", {}, _digest(layout), plan={})
        change = IndexChange(layout, "gc", None)
        if earlier is not None:
            _discard(change, earlier, notify)
        with _running(change, None):
            current = change.index.manifest
            numbers = earlier_snapshots(layout, current)
            removed = [] if keep is None else numbers[: max(0, len(numbers) + 1 - keep)]
            if removed:
                oldest = [*numbers, current.snapshot.number][len(removed)]
                snapshot = replace(current.snapshot, oldest=oldest)
                change._write(replace(current, snapshot=snapshot))
            # an erasure leaves nothing of a deleted row
            _remove(layout.hashes)
            sizes = _remove_what_is_not_kept(layout, tables=True)
            return Removal(tuple(removed), len(sizes), sum(sizes))


def _local_layout(root: str | Path) -> Layout:
    advice = (
        "; to change an index at a URL, copy it to a directory, change the copy, and"
        " copy it back"
    )
    return Layout(local_path(root, advice=advice).absolute())


def _has_work(layout: Layout, journal: Journal) -> bool:
    """Return True if a later run of the change can use what it has stored."""
    return journal.plan is not None or bool(_entries(layout.receipt(0).parent))


def _discard(change: Change, earlier: Journal, notify: Notify) -> None:
    layout = change.layout
    if _has_work(layout, earlier):
        notify(
            f"discarding the unfinished '{earlier.kind}', which had {_finished(layout)}"
        )
    change._remove_files()


@contextlib.contextmanager
def _running(change: Change, earlier: Journal | None) -> Iterator[None]:
    """Context manager of a change that begins, or resumes `earlier`. Another change
    that was stopped is refused if it has a plan or finished shards.
    """
    layout = change.layout
    if earlier is not None and not change.is_same(earlier):
        if _has_work(layout, earlier):
            advice, remedy = _how_to_discard(layout)
            raise UnfinishedChangeError(
                f"'{earlier.kind}' of {layout.root} has not finished"
                f" ({_finished(layout)}); run the same '{earlier.kind}' again to finish"
                f" it, or {advice}",
                remedy=remedy,
            )
        change._remove_files()
        earlier = None
    change._has_written = earlier is not None
    if earlier is None:
        change._journal.write(layout)
    else:
        change._journal = earlier
    try:
        yield
        if change._is_committed():
            remove_build(layout)
    except BaseException as error:
        change._has_written = True
        if not isinstance(error, OSError | EdjeError) or not change._is_committed():
            raise
        raise EdjeError(
            f"the change is committed, but something failed afterwards ({error});"
            " the next change of the index does what is left",
            remedy="discard",
        ) from error
    finally:
        change._close()


def finish_committed(root: str | Path) -> None:
    """Finish a change of the index at `root` that was killed after its commit. Does
    nothing if that is not possible.
    """
    layout = Layout(Path(root).absolute())
    if layout.build.is_dir():
        # a read-only index, or another process works on it
        with contextlib.suppress(OSError, EdjeError), locked(root):
            _unfinished(layout)


def _unfinished(layout: Layout) -> Journal | None:
    """Return the journal of a change that was stopped before its commit. Finish a
    change that was killed after it.
    """
    # all changes have a journal, but `verify` has none
    patterns = (*_TEMPORARY, _VERIFIED) if layout.journal.exists() else (_VERIFIED,)
    for path in (path for pattern in patterns for path in layout.root.glob(pattern)):
        # a killed process left it while it wrote a manifest or metadata
        path.unlink()
    journal = read_journal(layout.root)
    if journal is None or journal.base == _digest(layout):
        return journal
    # what the former manifest names may go only once the new one is durable
    fsync_path(layout.root)
    write_array_shapes(layout, Manifest.load(layout.root).spec)
    _remove_what_is_not_kept(layout, tables=False)
    remove_build(layout)
    return None


def _drop_snapshots(layout: Layout, numbers: Sequence[int]) -> None:
    """Remove the snapshots `numbers`, which are no longer kept, and the files that only
    they name.
    """
    dropped = {layout.snapshot(number) for number in numbers}
    named = set[str]()

    def note(members: dict[str, Any]) -> None:
        named.add(str(members.get("path")))

    # much faster than parsing each manifest
    for path in (layout.manifest, *layout.snapshot(0).parent.glob("*.json")):
        if path not in dropped:
            try:
                json.loads(read_index_file(layout.root, path), object_hook=note)
            except (ValueError, RecursionError):
                # a damaged manifest: nobody knows what it names
                return
    unnamed = [
        path
        for folder in layout.own_folders()
        for path in folder.glob("*")
        if layout.relative(path) not in named
        and DATA_FILE.fullmatch(layout.relative(path))
    ]
    if any(path.name.startswith("shards-") for path in unnamed):
        # then data files may go, too
        _remove_what_is_not_kept(layout, tables=True)
        return
    for path in dropped:
        path.unlink()
    fsync_path(layout.snapshot(0).parent)
    for path in unnamed:
        path.unlink()
    # later, no journal says that these files are leftovers
    fsync_paths(path.parent for path in unnamed)


def _remove_what_is_not_kept(layout: Layout, *, tables: bool) -> list[int]:
    """Remove the manifests of snapshots that are no longer kept, and then as
    `remove_unnamed_files`.
    """
    index = CommittedIndex.open(layout.root)
    folder = layout.snapshot(0).parent
    oldest = index.manifest.snapshot.oldest or 0
    if removed := [
        path
        for path in folder.glob("*.json")
        if path.stem.isdecimal() and int(path.stem) < oldest
    ]:
        for path in removed:
            path.unlink()
        fsync_path(folder)
    return remove_unnamed_files(layout, kept_snapshots(index), tables=tables)


def _finished(layout: Layout) -> str:
    shards = sum(1 for _ in layout.receipt(0).parent.glob("*.json"))
    return f"{shards:,} finished shard{'' if shards == 1 else 's'}"


def _how_to_discard(layout: Layout) -> tuple[str, str | None]:
    """Return what to do to discard a change, and the remedy of the error."""
    if layout.manifest.exists():
        return "discard it", "discard"
    return f"delete {layout.root}", None


def _digest(layout: Layout) -> str | None:
    try:
        return hashlib.sha256(layout.manifest.read_bytes()).hexdigest()
    except FileNotFoundError:
        return None


def now() -> str:
    """Return the time in UTC, as manifests store it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def check_free(layout: Layout) -> None:
    """Raise UsageError unless the directory is missing, empty, or holds an
    unfinished index.
    """
    root = layout.root
    for parent in root.resolve().parents:
        if Layout(parent).manifest.exists():
            raise UsageError(
                f"{root} is inside the index {parent}; choose another directory",
                parameter="out",
            )
    if root.exists() and not root.is_dir():
        raise UsageError(
            f"{root} exists and is not a directory; choose another directory",
            parameter="out",
        )
    if root.exists() and not layout.journal.exists() and not layout.manifest.exists():
        others = (name for name in _entries(layout.build) if name != layout.lock.name)
        ours = (
            {layout.build.name}
            if all(name.startswith(f".{layout.journal.name}.") for name in others)
            else set()
        )
        if foreign := sorted(set(_entries(root)) - ours):
            raise UsageError(
                f"{root} is not empty and not an index (it contains"
                f" {', '.join(foreign[:3])}); choose another one",
                parameter="out",
            )


def _entries(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir()] if folder.is_dir() else []


@contextlib.contextmanager
def locked(root: str | Path) -> Iterator[None]:
    """Context manager that holds the lock `build/lock` below `root`. At the end, empty
    directories are removed.

    Raises:
        EdjeError: another process holds the lock.
    """
    layout = Layout(Path(root).absolute())
    was_missing = not layout.root.exists()
    fd = _acquire(layout)
    try:
        with naming(layout.lock):
            os.ftruncate(fd, 0)
            os.write(fd, f"{os.getpid()} on {socket.gethostname()}".encode())
            # workers on other machines read it
            with promised("fsync", layout.lock):
                os.fsync(fd)
        yield
    finally:
        with contextlib.suppress(OSError):
            if _is_lock_file(layout, fd) and set(_entries(layout.build)) == {
                layout.lock.name
            }:
                layout.lock.unlink()
        os.close(fd)
        for directory in (
            (layout.build, layout.root) if was_missing else (layout.build,)
        ):
            # not empty: the change has stored something
            with contextlib.suppress(OSError):
                directory.rmdir()


def _acquire(layout: Layout) -> int:
    """Create and lock the lock file. Return its file descriptor."""
    while True:
        make_directories(layout.build)
        try:
            fd = os.open(
                layout.lock,
                os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW,
                0o666,
            )
        except FileNotFoundError:
            # the previous holder removed the directory
            continue
        try:
            with promised("flock", layout.lock):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except MissingCallError:
            os.close(fd)
            raise
        except BlockingIOError:
            holder = os.read(fd, 200).decode(errors="replace")
            os.close(fd)
            # it has not written its name yet
            process = f"process {holder}" if holder else "another process"
            raise EdjeError(
                f"{process} is working on {layout.root}; wait until the process ends,"
                " or stop the process"
            ) from None
        if _is_lock_file(layout, fd):
            return fd
        # the previous holder removed this file before we locked it
        os.close(fd)


def _is_lock_file(layout: Layout, fd: int) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(layout.lock))
    except FileNotFoundError:
        return False


def begin_index(root: str | Path, spec: IndexSpec) -> None:
    """Create the directories and the `zarr.json` files of a new index. May be
    called repeatedly.
    """
    layout = Layout(Path(root))
    make_directories(layout.root)
    # the caller may have made it
    fsync_parent(layout.root)
    folders = [
        layout.embeddings,
        layout.rows,
        layout.ann,
        layout.staging,
        layout.receipt(0).parent,
    ]
    for name in spec.precisions:
        folders += [layout.token_array(name), layout.checksums(name, 0).parent]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    write_array_shapes(layout, spec)
    fsync_paths([layout.root, layout.tokens, layout.root / "checksums"])


def clear_staging(root: str | Path) -> None:
    """Remove the private files of workers that crashed. Call this only while no
    worker writes to the index.
    """
    layout = Layout(Path(root))
    shutil.rmtree(layout.staging, ignore_errors=True)
    layout.staging.mkdir(parents=True, exist_ok=True)


def write_array_shapes(layout: Layout, spec: IndexSpec) -> None:
    """Rewrite each `zarr.json` that does not match an index of shape `spec`."""
    for path, document in zarr_documents(layout, spec).items():
        try:
            is_current = json.loads(path.read_bytes()) == document
        except (OSError, ValueError):
            is_current = False
        if not is_current:
            write_json_atomic(path, document)


def remove_build(layout: Layout) -> None:
    """Remove `build/`, except the lock. The journal is removed last: until then,
    the files are known as leftovers.
    """
    if others := set(_entries(layout.build)) - {layout.lock.name, layout.journal.name}:
        for name in others:
            _remove(layout.build / name)
        fsync_path(layout.build)
    layout.journal.unlink(missing_ok=True)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Removal:
    """What a change removed."""

    snapshots: tuple[int, ...]
    files: int
    bytes: int


def remove_unnamed_files(
    layout: Layout,
    manifests: Sequence[Manifest],
    *,
    tables: bool = False,
    searches_data: bool = True,
) -> list[int]:
    """Remove the data files that are in none of `manifests`. Return the length of each
    removed file in bytes.

    Args:
        tables: whether shard tables are removed too.
        searches_data: False if no change can have left files of shards.
    """
    own = {file.path for manifest in manifests for file in manifest.own_files}
    written = [
        path
        for folder in layout.own_folders()
        for path in sorted(folder.glob("*"))
        if layout.relative(path) not in own
    ]
    doomed = [path for path in written if tables or not path.name.startswith("shards-")]
    if searches_data:
        named = named_files(layout, manifests)
        doomed += [
            path
            for folder in layout.shard_folders()
            for path in sorted(folder.rglob("*"), reverse=True)
            if layout.relative(path) not in named
        ]
    sizes = []
    changed = set[Path]()
    for path in doomed:
        where = layout.relative(path)
        if DATA_FILE.fullmatch(where):
            sizes.append(path.lstat().st_size)
            path.unlink()
            changed.add(path.parent)
        elif _ARRAY_FOLDER.fullmatch(where):
            # it holds files
            with contextlib.suppress(OSError):
                path.rmdir()
                changed.add(path.parent)
    # later, no journal says that these files are leftovers
    fsync_paths(path for path in changed if path.is_dir())
    return sizes


def named_files(layout: Layout, manifests: Iterable[Manifest]) -> set[str]:
    """Return the relative paths of all data files in `manifests`."""
    names: set[str] = set()
    tables: set[FileEntry] = set()
    for manifest in manifests:
        names |= {layout.relative(path) for path in layout.zarr_files(manifest.spec)}
        names |= {file.path for file in manifest.own_files}
        tables |= set(manifest.shard_tables)
    for table in tables:
        names |= {file.path for _, file in read_shard_table(layout.root, table)}
    return names
