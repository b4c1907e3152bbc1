"""Changes of an index. Every change takes the lock, keeps a journal, runs tasks that
leave receipts, and ends with one commit (SPEC.md section 11).

A change writes new files under names that no committed snapshot uses, and then replaces
`index.json`. Only a conversion may write files again that a snapshot names, with the
same bytes, and only an erasure replaces such files by others. Until the end, readers
see the index as it was before the change.
`build/journal.json` describes the change that is under way. If a change is stopped, a
later change of the same kind and request resumes it. If the stopped change has a plan
or finished shards, any other change is refused until it is finished or discarded.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import itertools
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
    json_bytes,
)
from storage_formats.errors import CorruptIndexError, EdjeError, UsageError
from storage_formats.format.journal import (
    Journal,
    how_to_discard,
    manifest_digest,
    read_journal,
    unfinished_journal,
)
from storage_formats.format.layout import ROOT, IndexSpec, Layout
from storage_formats.format.manifest import (
    REPLACED,
    CommittedIndex,
    Manifest,
    created_by,
    earlier_snapshots,
    kept_snapshots,
    named_files,
)
from storage_formats.format.places import Place, open_place
from storage_formats.format.receipts import ShardReceipt, read_receipts
from storage_formats.format.zarr_metadata import zarr_documents
from storage_formats.remote.objects import ObjectStoreError
from storage_formats.remote.urls import IndexLocation, is_url

LEAST_SNAPSHOTS = 32
MOST_SNAPSHOTS = 64
"""An index keeps at most `MOST_SNAPSHOTS` snapshots. The change that would exceed this
number removes the oldest snapshots, so that `LEAST_SNAPSHOTS` are left.
"""
Notify = Callable[[str], None]
"""Function that takes a message for the user."""


@dataclass(frozen=True)
class Removal:
    """The result of `collect_garbage`.

    Attributes:
        snapshots: numbers of the removed snapshots.
        files: number of removed data files.
        bytes: total length of the removed data files in bytes.
        discarded: kind of the unfinished change that was discarded, for example
            "append"; None if there was none.
    """

    snapshots: tuple[int, ...]
    files: int
    bytes: int
    discarded: str | None


class UnfinishedChangeError(EdjeError):
    """Another change of the index was stopped, and has a plan or finished shards."""


class Change:
    """A change of an index, or one that writes a new index. `begin_change` yields an
    object of this class.

    If a method raises an OSError after the commit, `begin_change` raises an EdjeError
    instead, which says that the change is committed.

    Attributes:
        layout: place of the index that is changed or written.
        before: the index before the change; None if the change writes a new index.
        is_dry: True for a dry run, which takes no claim and writes nothing.
    """

    def __init__(
        self,
        layout: Place,
        before: CommittedIndex | None,
        kind: str,
        request: Mapping[str, Any] | None,
        *,
        is_dry: bool = False,
    ) -> None:
        self.layout = layout
        self.before = before
        self.is_dry = is_dry
        self._is_abandoned = False
        # True from the moment at which this change replaces `index.json`
        self._is_committing = False
        # `is_same` compares this request with the one of a stored journal, which was
        # converted to JSON. This request is therefore converted too: for example,
        # tuples become lists.
        wanted = json.loads(json.dumps(request or {}))
        self._journal = Journal(kind, wanted, manifest_digest(layout))
        if is_dry:
            # Some stores refuse to say that an object is missing.
            with contextlib.suppress(ObjectStoreError):
                earlier = unfinished_journal(layout)
                if earlier is not None and self.is_same(earlier):
                    self._journal = earlier

    @property
    def index(self) -> CommittedIndex:
        """The index before the change, which does not write a new index."""
        assert self.before is not None
        return self.before

    @property
    def plan(self) -> Json | None:
        """The stored plan of this change; None if there is none. A resumed change has
        the plan of its earlier run.
        """
        return self._journal.plan

    def store_plan(self, plan: Json | None) -> None:
        """Store `plan`, a JSON object, in the journal, so that a later run of this
        change can use the plan. None removes the stored plan.
        """
        self._journal = replace(self._journal, plan=plan)
        if not self.is_dry:
            self._journal.write(self.layout)

    def is_same(self, earlier: Journal) -> bool:
        """Return True if `earlier` is the journal of an earlier run of this change,
        which has the same kind and an equal request.
        """
        wanted = self._journal
        return (earlier.kind, earlier.request) == (wanted.kind, wanted.request)

    def receipts(
        self, shards: Iterable[int], fingerprint: str
    ) -> dict[int, ShardReceipt]:
        """Return the receipts of those of `shards` that earlier runs finished, keyed by
        shard number. Receipts whose `plan` differs from `fingerprint`, the fingerprint
        of the tasks of this change, are left out.

        The private files of crashed workers are removed, unless the change is dry.
        """
        if not self.is_dry:
            shutil.rmtree(self.layout.staging, ignore_errors=True)
        return read_receipts(self.layout, shards, fingerprint)

    def abandon(self) -> None:
        """Make the end of this change remove its files even if a later run could use
        them. If the change is committed, its files stay.
        """
        self._is_abandoned = True

    def start_again(self) -> None:
        """Remove the plan, the receipts and all other files of this change, so that it
        starts from the beginning.
        """
        if not self.is_dry:
            self._remove_files()
        self.store_plan(None)

    def _remove_data(self) -> None:
        """Remove the data files of this change, which is not committed."""
        layout = self.layout
        if self.before is None:
            for folder in (*layout.data_folders(), layout.snapshots):
                layout.remove(layout.names(folder))
                shutil.rmtree(folder, ignore_errors=True)
            fsync_path(layout.root)
            return
        # Listing the files of all shards is slow. If neither of these directories
        # exists, the change has written no files of shards, so they are not listed.
        # At a URL, another process may have written them.
        has_shards = layout.remote is not None or layout.staging.exists()
        has_shards = has_shards or bool(layout.names(layout.receipts))
        _remove_garbage(layout, shards=has_shards)
        write_array_shapes(layout, self.before.spec)

    def _remove_files(self) -> None:
        self._remove_data()
        remove_build(self.layout)

    def _is_unchanged(self) -> bool:
        return manifest_digest(self.layout) == self._journal.base

    def _is_committed(self) -> bool:
        # If `index.json` cannot be read now, the error of the commit says more.
        with contextlib.suppress(OSError, EdjeError):
            return self._is_committing and not self._is_unchanged()
        return False

    @contextlib.contextmanager
    def _running(self, earlier: Journal | None) -> Iterator[None]:
        """Context manager that runs this change.

        A change that ends without a commit keeps its plan and its finished shards for a
        later run. If it has neither, or was abandoned, its data files and `build/` are
        removed at the end. Only `build/` is removed after a commit, or if the change
        had nothing to do.

        Args:
            earlier: journal of a stopped change; None if there is none. If the stopped
                change has a plan or finished shards, this change resumes it. If it has
                neither, its files are removed.

        Raises:
            UnfinishedChangeError: `earlier` has a plan or finished shards, but it is
                not the journal of this change.
        """
        layout = self.layout
        if earlier is not None and _has_work(layout, earlier):
            if not self.is_same(earlier):
                advice, remedy = how_to_discard(layout)
                raise UnfinishedChangeError(
                    f"'{earlier.kind}' of {layout.location} has not finished"
                    f" ({_finished(layout)}); run the same '{earlier.kind}' again to"
                    f" finish it, or {advice}",
                    remedy=remedy,
                )
            self._journal = earlier
        else:
            if earlier is not None:
                self._remove_files()
            self._journal.write(layout)
        had_nothing_to_do = False
        try:
            yield
            if self._is_committing:
                remove_build(layout)
            else:
                # The block ended without an error and without a commit. Unless the
                # change was abandoned, it had nothing to do, and has written no data
                # files.
                had_nothing_to_do = not self._is_abandoned
        except (OSError, EdjeError) as error:
            if not self._is_committed():
                raise
            raise EdjeError(
                f"the change is committed, but something failed afterwards ({error});"
                " the next change of the index does what is left",
                remedy="discard",
            ) from error
        finally:
            # The next change removes the files that cannot be removed here, and those
            # that another process, which has changed the index, may need.
            # An object store may have replaced `index.json` although no answer arrived.
            is_open = self._is_committing and layout.remote is not None
            with contextlib.suppress(OSError, EdjeError):
                if not is_open and self._is_unchanged() and layout.is_claimed():
                    if _has_work(layout, self._journal) and not self._is_abandoned:
                        # The finished shards stay for the run that resumes the change.
                        shutil.rmtree(layout.staging, ignore_errors=True)
                    elif had_nothing_to_do:
                        remove_build(layout)
                    else:
                        self._remove_files()

    def new_snapshot(
        self,
        manifest: Manifest,
        details: Mapping[str, Any],
        *,
        is_only: bool = False,
    ) -> Manifest:
        """Return `manifest` as the next snapshot of the index. If the index would then
        keep more than `MOST_SNAPSHOTS` snapshots, the returned manifest keeps only the
        newest `LEAST_SNAPSHOTS`.

        Args:
            manifest: manifest after the change. The result differs from it in
                `snapshot` and `created_by` only.
            details: members of `change` in `index.json`, apart from `kind` and
                `created`, which are added here.
            is_only: True to keep no earlier snapshot.
        """
        current = self.index.manifest
        number = current.snapshot.number
        numbers = [*earlier_snapshots(self.layout, current), number]
        if len(numbers) >= MOST_SNAPSHOTS:
            # Keep LEAST_SNAPSHOTS - 1 earlier snapshots, and the new one.
            numbers = numbers[1 - LEAST_SNAPSHOTS :]
        if is_only:
            numbers = [number + 1]
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
        length in bytes of each data file that was removed because no kept snapshot
        names it.

        The steps are, in this order:

        1. Unless the arrays shrink, write the `zarr.json` files that differ.
        2. If `manifest` is a new snapshot, copy the current `index.json` to
           `snapshots/`.
        3. Replace `index.json`.
        4. If the change is an erasure, move the new files of its shards into place.
        5. If the arrays shrink, write the `zarr.json` files.
        6. If a snapshot was dropped or replaced, remove the files that no kept
           snapshot names.

        After a crash, a reader sees the index from before or after the change.

        Raises:
            EdjeError: another process has replaced `index.json` during this change. On
                some network file systems, the lock of an index works within one machine
                only.
        """
        layout = self.layout
        current = None
        if self.before is not None:
            current = self.before.manifest
        else:
            # The directory may have existed before this change.
            fsync_parent(layout.root)
        after = manifest.spec
        shrinks = current is not None and after.rows < current.spec.rows
        if not shrinks:
            # Arrays grow before the commit, because a reader of the new manifest needs
            # the new shapes.
            write_array_shapes(layout, after)
        if not self._is_unchanged():
            raise EdjeError(
                f"another process has changed {layout.location} during this change, so"
                " nothing was committed; run the same command again, on the same"
                " machine as other changes"
            )
        self._is_committing = True
        if current is not None:
            number = current.snapshot.number
            earlier = layout.read(layout.manifest)
            is_new = manifest.snapshot.number > number
            if is_new and earlier is not None:
                layout.write(layout.snapshot(number), earlier)
        manifest.write(layout)
        if current is None:
            return []
        # an erasure has created this directory
        if layout.erased.exists():
            layout.move_erased()
        if shrinks:
            # Arrays shrink after the commit, because a reader of the old manifest may
            # still read rows that the new manifest does not have.
            write_array_shapes(layout, after)
        drops_snapshots = (manifest.snapshot.oldest or 0) > (
            current.snapshot.oldest or 0
        )
        # A new snapshot keeps the files of the snapshot before it. There are files to
        # remove only if the change drops a snapshot, or replaces the current snapshot
        # instead of adding one.
        if is_new and not drops_snapshots:
            return []
        # A reader that opened the index before the change may still need the earlier
        # shard tables, so they stay unless a snapshot is dropped.
        return _remove_garbage(layout, tables=drops_snapshots)


@contextlib.contextmanager
def begin_change(
    root: IndexLocation,
    kind: str,
    request: Mapping[str, Any] | None = None,
    *,
    is_new: bool = False,
    notify: Notify = lambda message: None,
    dry_run: bool = False,
) -> Iterator[Change]:
    """Lock the index at `root` and begin a change, or resume the same change if it was
    stopped.

    At the end of the block, the files of a change without a commit are removed, unless
    the change has a plan or finished shards. If a step after the commit fails, the next
    change of the index repeats it.

    Args:
        kind: kind of the change, for example "append".
        request: JSON object that says what the change is asked to do. A stopped change
            is resumed only if its kind and request are equal to these.
        is_new: True writes a new index at `root`. If `root` holds an unfinished index
            of the same kind but with another request, its files are removed, and the
            new index is written from the beginning.
        notify: receives a message if an unfinished index is removed.
        dry_run: True yields a change that takes no lock and writes nothing. If the
            index exists, `root` may then be a URL that can only be read.

    Raises:
        UsageError: there is no index at `root`, or it cannot be written there. Or
            `is_new` is True, and `root` holds a finished index or other files, or lies
            inside an index.
        UnfinishedChangeError: another change of the index was stopped, and has a plan
            or finished shards.
        EdjeError: another process is changing the index; or the change is committed,
            but a later step failed.
        OSError: the index cannot be written. `index.json` is unchanged.
    """
    if not is_new:
        # If there is no index, no claim is made, because that would create the
        # directory.
        index = CommittedIndex.open(root)
        if dry_run:
            yield Change(index.place, index, kind, request, is_dry=True)
            return
    with open_place(root) as place:
        if is_new:
            check_free(place)
        if dry_run:
            yield Change(place, None, kind, request, is_dry=True)
            return
        with place.claimed():
            earlier = _recover(place)
            if is_new and place.manifest.exists():
                # Only an index of arrays can be appended to by the same command.
                remedy = "append" if kind == "import-arrays" else None
                raise UsageError(
                    f"{place.location} exists already; choose another directory or URL",
                    parameter="out",
                    remedy=remedy,
                )
            before = None if is_new else CommittedIndex.at(place)
            change = Change(place, before, kind, request)
            if (
                is_new
                and earlier is not None
                and earlier.kind == kind
                and not change.is_same(earlier)
            ):
                _discard(change, earlier, notify)
                earlier = None
            with change._running(earlier):
                yield change


@contextlib.contextmanager
def begin_copy(
    index: CommittedIndex,
    out: IndexLocation,
    *,
    replace: bool = False,
    notify: Notify = lambda message: None,
) -> Iterator[Change]:
    """Begin to copy the snapshot of `index` to `out`, or resume a copy to `out`. The
    caller copies the files that `out` lacks, and commits the manifest of `index`.

    A directory must be free, see `begin_change`. At a URL, the copy may add its
    snapshot to an index that it loses nothing of.

    Args:
        replace: True allows the copy to discard snapshots and files of the index at
            `out`, a URL, that `index` does not have. If there are any, readers find no
            index there until the copy ends.

    Raises:
        UsageError: `out` is read-only, or has an index that the copy would discard.
        CorruptIndexError: `out` has a damaged index.
        UnfinishedChangeError: another change of the index at `out` was stopped.
        EdjeError: another process is changing the index at `out`.
    """
    if not is_url(out):
        with begin_change(out, "copy", is_new=True, notify=notify) as change:
            yield change
        return
    with open_place(out) as place, place.claimed():
        before: CommittedIndex | None = None
        earlier: Journal | None = None
        try:
            earlier = _recover(place)
            if place.read(place.manifest) not in (None, REPLACED):
                before = CommittedIndex.at(place)
                _refuse_loss(index, before)
        except (CorruptIndexError, UsageError):
            if not replace:
                raise
            before = None
        if replace:
            # The caller removes the files of an unfinished change.
            remove_build(place)
            earlier = None
        # `index.json` is overwritten and not deleted. An object store deletes without a
        # condition, so a delayed request could remove the `index.json` of the copy.
        if before is None and place.manifest.exists():
            place.commit(REPLACED)
            # After the commit, these would be snapshots of the copy.
            place.remove(place.names(place.snapshots))
        change = Change(place, before, "copy", None)
        with change._running(earlier):
            yield change


def _refuse_loss(index: CommittedIndex, before: CommittedIndex) -> None:
    """Raise UsageError if the index `before` has a snapshot or a file that `index` does
    not have, because a copy of `index` in its place would discard it.
    """
    kept = kept_snapshots(index)
    snapshot = before.manifest.snapshot
    if snapshot in [each.snapshot for each in kept]:
        # A conversion may replace a shard table without discarding a file that it
        # lists.
        own_entries = {*named_files(index, kept)}
        lost = {*named_files(before)} - {*before.manifest.shard_tables} - own_entries
        if not lost:
            return
        what = f"has the file {min(file.path for file in lost)}"
    else:
        what = f"is at snapshot {snapshot.number}"
    raise UsageError(
        f"{before.location} {what}, which {index.location} does not have; choose"
        " another destination. To discard that index, copy with replace=True",
        parameter="out",
    )


def collect_garbage(
    root: IndexLocation,
    keep: int | None = None,
    *,
    notify: Notify = lambda message: None,
) -> Removal:
    """Discard an unfinished change of the index at `root`, and remove all snapshots
    except the newest `keep`, and the files that no kept snapshot names.

    Args:
        keep: number of snapshots to keep, including the current one. None keeps all.
        notify: receives a message if an unfinished change is discarded.

    Raises:
        UsageError, EdjeError, OSError: see `begin_change`.
    """
    CommittedIndex.open(root)
    with open_place(root) as layout, layout.claimed():
        try:
            earlier = _recover(layout)
        except CorruptIndexError:
            notify("discarding an unfinished change whose journal is damaged")
            # A change with a damaged journal cannot be resumed. This stand-in for the
            # journal makes `_discard` remove the files of the change.
            earlier = Journal("unknown", {}, manifest_digest(layout), plan={})
        change = Change(layout, CommittedIndex.at(layout), "gc", None)
        if earlier is not None:
            _discard(change, earlier, notify)
        remove_build(layout)
        current = change.index.manifest
        numbers = [*earlier_snapshots(layout, current), current.snapshot.number]
        removed = [] if keep is None else numbers[:-keep]
        oldest = numbers[len(removed)]
        sizes = []
        if keep is not None and oldest > (current.snapshot.oldest or 0):
            snapshot = replace(current.snapshot, oldest=oldest)
            manifest = replace(current, snapshot=snapshot)
            try:
                with change._running(None):
                    sizes += change.commit(manifest)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                # There is no space for a new `index.json`. Without their manifests, the
                # snapshots do not exist any more, so their files can be removed first.
                layout.remove(map(layout.snapshot, removed))
                sizes += _remove_garbage(layout, tables=True)
                # A journal could take the last space, and a later call removes what a
                # killed one leaves.
                sizes += change.commit(manifest)
        sizes += remove_what_is_not_kept(layout, tables=True, shards=True)
        discarded = None if earlier is None else earlier.kind
        return Removal(tuple(removed), len(sizes), sum(sizes), discarded)


def _has_work(layout: Place, journal: Journal) -> bool:
    """Return True if a later run of the change can use what it has stored."""
    return journal.plan is not None or bool(layout.names(layout.receipts))


def _discard(change: Change, earlier: Journal, notify: Notify) -> None:
    layout = change.layout
    if _has_work(layout, earlier):
        notify(
            f"discarding the unfinished '{earlier.kind}', which had {_finished(layout)}"
        )
    change._remove_files()


def finish_committed(place: Place) -> None:
    """Finish a change of the index at `place` that was killed after its commit. Does
    nothing if the index cannot be written or another process is changing it.
    """
    # A reader may lack the permission to write, so errors are ignored.
    with contextlib.suppress(OSError, EdjeError):
        # A reader must not disturb writers whose change is not committed.
        if place.journal.exists() and unfinished_journal(place) is None:
            with place.claimed():
                _recover(place)


def _recover(layout: Place) -> Journal | None:
    """If a change was killed after its commit, finish it and return None. If a change
    was stopped before its commit, return its journal. If no change is unfinished,
    return None.
    """
    journal = read_journal(layout)
    # `base` is the digest of the current `index.json` until the change is committed.
    if journal is None or journal.base == manifest_digest(layout):
        return journal
    # The files of the former manifest may be removed only after the new manifest is
    # durable.
    fsync_path(layout.root)
    layout.move_erased()
    # Files are removed first, because the disk may be full.
    _remove_garbage(layout, shards=True)
    write_array_shapes(layout, CommittedIndex.at(layout).spec)
    remove_build(layout)
    return None


def _remove_garbage(
    layout: Place, *, tables: bool = False, shards: bool = False
) -> list[int]:
    """Call `remove_what_is_not_kept`, unless a kept snapshot cannot be read. The files
    that it names are then not known, so none is removed. A later `collect_garbage`
    removes them.
    """
    with contextlib.suppress(CorruptIndexError, UsageError):
        return remove_what_is_not_kept(layout, tables=tables, shards=shards)
    return []


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

    def unnamed_in(folders: Iterable[Path]) -> list[Path]:
        paths = itertools.chain(*map(layout.names, folders))
        return [path for path in paths if layout.relative(path) not in named]

    unnamed = unnamed_in(layout.own_folders())
    unnamed_tables = [path for path in unnamed if path.name.startswith("shards-")]
    layout.remove(dropped_manifests)
    if not tables:
        unnamed = [path for path in unnamed if path not in unnamed_tables]
    # A shard table that no kept snapshot names may list files that no kept snapshot
    # names. Such files are removed even if the table itself stays.
    if shards or unnamed_tables:
        for each in manifests:
            named.update(map(layout.relative, zarr_documents(layout, each.spec)))
        named.update(file.path for file in named_files(index, manifests))
        unnamed += unnamed_in([*layout.shard_folders(), *layout.old_folders()])
    return layout.remove(unnamed)


def _finished(layout: Place) -> str:
    shards = len(layout.names(layout.receipts))
    return f"{shards:,} finished shard{'' if shards == 1 else 's'}"


def now() -> str:
    """Return the time in UTC, as manifests store it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def check_free(layout: Place) -> None:
    """Raise UsageError unless the directory is missing, is empty, or holds a finished
    or unfinished index. Also raise UsageError if it lies inside another index.
    """
    root = layout.root
    if layout.remote is not None:
        files, folders = layout.remote.list_folder("")
        is_index = ROOT in files or layout.is_changing()
        if (files or folders) and not is_index:
            raise UsageError(
                f"{layout.location} has other objects; choose another URL",
                parameter="out",
            )
        return
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
        # A process that was killed while it wrote its first journal leaves `build/`
        # with the lock and a private file of the journal. Such a directory counts as
        # empty.
        begun = {layout.lock.name, layout.staging.name}
        ignored = {layout.build.name} if {*_entries(layout.build)} <= begun else set()
        if foreign := sorted({*_entries(root)} - ignored):
            raise UsageError(
                f"{root} is not empty and not an index (it contains"
                f" {', '.join(foreign[:3])}); choose another one",
                parameter="out",
            )


def _entries(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir()] if folder.is_dir() else []


def write_array_shapes(layout: Place, spec: IndexSpec) -> None:
    """Rewrite each `zarr.json` that does not match an index of shape `spec`."""
    for path, document in zarr_documents(layout, spec).items():
        try:
            is_current = json.loads(layout.read(path) or b"null") == document
        except (OSError, ValueError):
            is_current = False
        if not is_current:
            layout.write(path, json_bytes(document))


def remove_build(layout: Place) -> None:
    """Remove `build/`, except the claim. The journal is removed last, because it tells
    the next change that the other files are leftovers.
    """
    kept = (layout.lock, layout.claim, layout.journal)
    others = [path for path in layout.names(layout.build) if path not in kept]
    layout.remove(others)
    for name in {*_entries(layout.build)} - {path.name for path in kept}:
        # directories that were empty
        shutil.rmtree(layout.build / name, ignore_errors=True)
    layout.remove([layout.journal])
