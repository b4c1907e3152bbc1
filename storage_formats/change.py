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
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from storage_formats.atomic import (
    Json,
    fsync_parent,
    fsync_path,
    fsync_paths,
    make_directories,
    write_bytes_atomic,
    write_json_atomic,
)
from storage_formats.errors import CorruptIndexError, EdjeError, UsageError, cannot_read
from storage_formats.format.checksum import json_checksum
from storage_formats.format.index_files import check_inside, read_index_file
from storage_formats.format.layout import (
    IndexSpec,
    Layout,
)
from storage_formats.format.manifest import (
    CommittedIndex,
    Manifest,
    created_by,
    earlier_snapshots,
)
from storage_formats.format.receipts import ShardReceipt, read_receipts
from storage_formats.format.remote import open_index
from storage_formats.format.zarr_metadata import zarr_documents
from storage_formats.garbage import remove_what_is_not_kept
from storage_formats.lock import locked
from storage_formats.remote.urls import IndexLocation, local_path

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


@dataclass(frozen=True)
class Removal:
    """What a change removed."""

    snapshots: tuple[int, ...]
    files: int
    bytes: int


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
    request: Json
    base: str | None
    plan: Json | None = None

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
        advice, remedy = how_to_discard(layout)
        what = f"{layout.journal}, which names the unfinished change"
        problem = cannot_read(what, error, advice)
        problem.remedy = remedy
        raise problem from error


def unfinished_journal(root: str | Path) -> Journal | None:
    """Return the journal of the index at `root` if its change was stopped before
    the commit; None otherwise.
    """
    layout = Layout(Path(root))
    journal = read_journal(root)
    return journal if journal is not None and journal.base == _digest(layout) else None


class Change:
    """A change that holds the lock of an index, see `IndexChange` and `NewIndex`.

    Attributes:
        is_dry: whether the change is only tried. It holds no lock and writes nothing.
    """

    def __init__(
        self,
        layout: Layout,
        kind: str,
        request: Mapping[str, Any] | None,
        *,
        is_dry: bool = False,
    ) -> None:
        self.layout = layout
        self.is_dry = is_dry
        self._is_abandoned = False
        # in JSON, as `is_same` compares it with a stored journal
        wanted = json.loads(json.dumps(request or {}))
        self._journal = Journal(kind, wanted, _digest(layout))

    @property
    def plan(self) -> Json | None:
        """The stored plan of an earlier run of this change; None if there is none."""
        return self._journal.plan

    def store_plan(self, plan: Json | None) -> None:
        """Store `plan`, a JSON object. The next run of this change gets it."""
        self._journal = replace(self._journal, plan=plan)
        if not self.is_dry:
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
        if not self.is_dry:
            clear_staging(self.layout.root)
        return read_receipts(self.layout, shards, fingerprint)

    def abandon(self) -> None:
        """Let the end of this change remove its files, also if a later run could
        use them. A committed change stays.
        """
        self._is_abandoned = True

    def start_again(self) -> None:
        """Remove the plan, the receipts and all files of this change."""
        if not self.is_dry:
            self._remove_files()
        self.store_plan(None)

    def _remove_data(self) -> None:
        """Remove the data files of this change, which is not committed."""
        raise NotImplementedError

    def _remove_files(self) -> None:
        self._remove_data()
        remove_build(self.layout)

    def _is_committed(self) -> bool:
        return _digest(self.layout) != self._journal.base

    @contextlib.contextmanager
    def _running(self, earlier: Journal | None) -> Iterator[None]:
        """Context manager of this change, which begins, or resumes `earlier`. Another
        change that was stopped is refused if it has a plan or finished shards.

        At the end, `build/` is removed, unless a later run of this change can use what
        it holds. A committed change stays.
        """
        layout = self.layout
        if self.is_dry:
            if earlier is not None and self.is_same(earlier):
                self._journal = earlier
            yield
            return
        if earlier is not None and _has_work(layout, earlier):
            if not self.is_same(earlier):
                advice, remedy = how_to_discard(layout)
                raise UnfinishedChangeError(
                    f"'{earlier.kind}' of {layout.root} has not finished"
                    f" ({_finished(layout)}); run the same '{earlier.kind}' again to"
                    f" finish it, or {advice}",
                    remedy=remedy,
                )
            self._journal = earlier
        else:
            if earlier is not None:
                self._remove_files()
            self._journal.write(layout)
        may_have_data = True
        try:
            yield
            if self._is_committed():
                remove_build(layout)
            else:
                # the job had nothing to do and has written no data files, unless it was
                # abandoned
                may_have_data = self._is_abandoned
        except (OSError, EdjeError) as error:
            if not self._is_committed():
                raise
            raise EdjeError(
                f"the change is committed, but something failed afterwards ({error});"
                " the next change of the index does what is left",
                remedy="discard",
            ) from error
        finally:
            # what cannot be removed now, the next change removes
            with contextlib.suppress(OSError, EdjeError):
                if not self._is_committed():
                    if _has_work(layout, self._journal) and not self._is_abandoned:
                        shutil.rmtree(layout.staging, ignore_errors=True)
                    elif may_have_data:
                        self._remove_files()
                    else:
                        remove_build(layout)


class IndexChange(Change):
    """A change of an index that exists. `begin_change` makes it.

    If one of the methods raises OSError after the index has changed, `begin_change`
    turns the error into an EdjeError.

    Attributes:
        index: the index before the change.
    """

    def __init__(
        self,
        index: CommittedIndex,
        kind: str,
        request: Mapping[str, Any] | None,
        *,
        is_dry: bool = False,
    ) -> None:
        super().__init__(index.layout, kind, request, is_dry=is_dry)
        self.index = index

    def new_snapshot(self, manifest: Manifest, details: Mapping[str, Any]) -> Manifest:
        """Return `manifest` as the next snapshot of the index. If there would be more
        than `MOST_SNAPSHOTS`, it keeps only the newest.

        Args:
            manifest: manifest after the change. Only its member `snapshot` is set here.
            details: members of `change` in `index.json`.
        """
        current = self.index.manifest
        number = current.snapshot.number
        numbers = [*earlier_snapshots(self.layout, current), number]
        if len(numbers) >= MOST_SNAPSHOTS:
            # with the new snapshot, LEAST_SNAPSHOTS are left
            numbers = numbers[1 - LEAST_SNAPSHOTS :]
        snapshot = replace(
            manifest.snapshot,
            number=number + 1,
            change={"kind": self._journal.kind, **details, "created": now()},
            next_shard=max(
                current.snapshot.next_shard, current.spec.shards, manifest.spec.shards
            ),
            oldest=numbers[0],
        )
        return replace(manifest, snapshot=snapshot, created_by=created_by())

    def commit(self, manifest: Manifest) -> list[int]:
        """Commit `manifest`, whose tables and other files are all on disk. Return the
        length of each file that no kept snapshot named any more, and that was removed.

        The steps, in this order: the present `index.json` is copied to `snapshots/` if
        `manifest` is a new snapshot, arrays grow, the record of verified files goes if
        a precision is new, `index.json` is replaced, arrays shrink, and files go. A
        crash between two steps leaves the index of before or after.
        """
        layout = self.layout
        current = self.index.manifest
        before = current.spec
        after = manifest.spec
        is_new = manifest.snapshot.number > current.snapshot.number
        if is_new:
            kept = layout.snapshot(current.snapshot.number)
            write_bytes_atomic(kept, read_index_file(layout.root, layout.manifest))
        added = {*after.precisions} - {*before.precisions}
        if after.rows > before.rows or added:
            # a reader that sees the new manifest needs the new shapes
            write_array_shapes(layout, after)
        if added:
            # it records nothing about the files of the new precisions
            layout.verified.unlink(missing_ok=True)
        manifest.write(layout)
        # Arrays shrink only now: a reader of the old manifest may look for its rows.
        write_array_shapes(layout, after)
        drops = (manifest.snapshot.oldest or 0) > (current.snapshot.oldest or 0)
        # a new snapshot keeps the files of the one before it
        if is_new and not drops:
            return []
        # with a damaged manifest of a snapshot, nobody knows what it names
        with contextlib.suppress(CorruptIndexError):
            # a reader that opened the index before may still need its shard tables
            return remove_what_is_not_kept(layout, tables=drops)
        return []

    def _remove_data(self) -> None:
        layout = self.layout
        has_shards = layout.staging.exists() or layout.receipts.exists()
        remove_what_is_not_kept(layout, tables=False, shards=has_shards)
        write_array_shapes(layout, self.index.spec)


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
        for path in (*layout.data_folders(), layout.snapshots):
            _remove(path)
        fsync_path(layout.root)


@contextlib.contextmanager
def begin_change(
    root: IndexLocation,
    kind: str,
    request: Mapping[str, Any] | None = None,
    *,
    dry_run: bool = False,
) -> Iterator[IndexChange]:
    """Lock the index at `root` and begin a change, or resume the same change if it was
    stopped.

    At the end, the files of a change that has not committed are removed, unless it has
    a plan or finished shards. What fails after the commit is left to the next change.

    Args:
        kind: kind of the change, for example "append".
        request: JSON object with what the change is asked to do.
        dry_run: True to only try the change; `root` may then be a URL.

    Raises:
        UsageError: there is no index at `root`, or `root` is a URL.
        UnfinishedChangeError: another change of the index was stopped, and has finished
            shards.
        EdjeError: another process is changing the index; or the change is committed,
            but something failed afterwards.
        OSError: the index cannot be written. It has not changed.
    """
    if dry_run:
        change = IndexChange(open_index(root), kind, request, is_dry=True)
        with change._running(unfinished_journal(root)):
            yield change
        return
    layout = _local_layout(root)
    if not layout.manifest.exists():
        # fails before the lock makes a directory
        Manifest.load(layout.root)
    # no reader follows such a link, so no writer may
    for folder in (layout.root, layout.root / "tokens", layout.root / "checksums"):
        for entry in _entries(folder):
            check_inside(layout.root, folder / entry)
    with locked(layout.root):
        earlier = _recover(layout)
        change = IndexChange(CommittedIndex.open(layout.root), kind, request)
        with change._running(earlier):
            yield change


@contextlib.contextmanager
def begin_new_index(
    root: str | Path,
    kind: str,
    request: Mapping[str, Any] | None = None,
    *,
    notify: Notify = lambda message: None,
    dry_run: bool = False,
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
    if dry_run:
        change = NewIndex(layout, kind, request, is_dry=True)
        with change._running(unfinished_journal(root)):
            yield change
        return
    with locked(layout.root):
        earlier = _recover(layout)
        if layout.manifest.exists():
            raise UsageError(
                f"{layout.root} exists already; choose another directory",
                parameter="out",
            )
        change = NewIndex(layout, kind, request)
        if earlier is not None and earlier.kind == kind and not change.is_same(earlier):
            _discard(change, earlier, notify)
            earlier = None
        with change._running(earlier):
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
            earlier = _recover(layout)
        except CorruptIndexError:
            notify("discarding an unfinished change whose journal is damaged")
            # its plan is unknown, so all of its files go
            earlier = Journal("unknown", {}, _digest(layout), plan={})
        change = IndexChange(CommittedIndex.open(layout.root), "gc", None)
        if earlier is not None:
            _discard(change, earlier, notify)
        with change._running(None):
            current = change.index.manifest
            numbers = earlier_snapshots(layout, current)
            removed = [] if keep is None else numbers[: max(0, len(numbers) + 1 - keep)]
            sizes = []
            if removed:
                oldest = [*numbers, current.snapshot.number][len(removed)]
                snapshot = replace(current.snapshot, oldest=oldest)
                sizes += change.commit(replace(current, snapshot=snapshot))
            # an erasure leaves nothing of a deleted row
            _remove(layout.hashes)
            sizes += remove_what_is_not_kept(layout, tables=True, shards=True)
            return Removal(tuple(removed), len(sizes), sum(sizes))


def _local_layout(root: str | Path) -> Layout:
    advice = (
        "; to change an index at a URL, copy it to a directory, change the copy, and"
        " copy it back"
    )
    return Layout(local_path(root, advice=advice).absolute())


def _has_work(layout: Layout, journal: Journal) -> bool:
    """Return True if a later run of the change can use what it has stored."""
    return journal.plan is not None or bool(_entries(layout.receipts))


def _discard(change: Change, earlier: Journal, notify: Notify) -> None:
    layout = change.layout
    if _has_work(layout, earlier):
        notify(
            f"discarding the unfinished '{earlier.kind}', which had {_finished(layout)}"
        )
    change._remove_files()


def finish_committed(root: str | Path) -> None:
    """Finish a change of the index at `root` that was killed after its commit. Does
    nothing if that is not possible.
    """
    layout = Layout(Path(root).absolute())
    if layout.build.is_dir():
        # a read-only index, or another process works on it
        with contextlib.suppress(OSError, EdjeError), locked(root):
            _recover(layout)


def _recover(layout: Layout) -> Journal | None:
    """Finish a change that was killed after its commit. Return the journal of a change
    that was stopped before it.
    """
    # all changes have a journal, but `verify` has none
    patterns = (*_TEMPORARY, _VERIFIED) if layout.journal.exists() else (_VERIFIED,)
    for path in (path for pattern in patterns for path in layout.root.glob(pattern)):
        # a killed process left it while it wrote a manifest or metadata
        path.unlink()
        # for good, before the journal goes, without which nobody looks for it
        fsync_parent(path)
    journal = read_journal(layout.root)
    if journal is None or journal.base == _digest(layout):
        return journal
    # what the former manifest names may go only once the new one is durable
    fsync_path(layout.root)
    write_array_shapes(layout, Manifest.load(layout.root).spec)
    remove_what_is_not_kept(layout, tables=False, shards=True)
    remove_build(layout)
    return None


def _finished(layout: Layout) -> str:
    shards = sum(1 for _ in layout.receipts.glob("*.json"))
    return f"{shards:,} finished shard{'' if shards == 1 else 's'}"


def how_to_discard(layout: Layout) -> tuple[str, str | None]:
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


def begin_index(root: str | Path, spec: IndexSpec) -> None:
    """Create the directories and the `zarr.json` files of a new index. May be
    called repeatedly.
    """
    layout = Layout(Path(root))
    make_directories(layout.root)
    # `make_directories` flushes only what it makes; the caller may have made the root
    fsync_parent(layout.root)
    folders = [
        layout.embeddings,
        layout.rows,
        layout.ann,
        layout.staging,
        layout.receipts,
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
