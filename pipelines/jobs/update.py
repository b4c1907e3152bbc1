"""Appends and updates: add new rows to an index, and delete the rows that the new rows
replace.

An update first compares the sources with the rows of the index, see `compare_sources`.
If a source cannot be read or lists no images, although rows of the index came from it,
the comparison raises an error. Without this error, an update would delete these rows
if, for example, a disk is not mounted.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import pickle
import re
import sqlite3
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from edje_index.bundles.info import (
    BundleInfo,
    matching_bundle,
)
from edje_index.inputs.refs import InputRef, display_path
from edje_index.inputs.tables import STANDARD_INPUT
from pipelines.jobs.build import (
    BuildResult,
    earlier_plan,
    encoding,
    failed_rows,
    result_of,
    source_names,
)
from pipelines.jobs.changing import (
    Applied,
    Edit,
    FailedInputsError,
    apply,
    begin,
)
from pipelines.jobs.plan import (
    BuildSettings,
    CollectedInputs,
    Execution,
    Plan,
    SourceGroup,
    check_disk,
    choose_workers,
    model_record,
    recorded_sources,
    settings_of,
    store_inputs,
    with_sources,
)
from pipelines.jobs.snapshots import (
    NewValues,
    edited_values,
    typed,
    value_line,
    warn_of_duplicates,
)
from pipelines.metadata import Ignored, source_values
from pipelines.progress.events import (
    OnEvent,
    ShouldStop,
    StatusMessage,
    ignore,
    never,
)
from pipelines.progress.wording import counted
from pipelines.sources import (
    Listing,
    hash_and_mark_duplicates,
    hashed,
    temporary_database,
    without_nested,
)
from pipelines.sources.base import absolute_spec
from storage_formats.arguments import as_list, as_number, as_path, as_text
from storage_formats.atomic import Json
from storage_formats.change import Change
from storage_formats.errors import EdjeError, UsageError
from storage_formats.extras import name_missing_extra
from storage_formats.format.layout import Segment
from storage_formats.format.manifest import CommittedIndex, Counts
from storage_formats.format.receipts import ShardReceipt
from storage_formats.format.rows import (
    DUPLICATE,
    FAILED,
    INDEXED,
    SOURCE_VALUES,
    VALUE_SCHEMA,
    iter_rows,
    read_index_rows,
)
from storage_formats.format.source_columns import (
    SourceColumn,
    metadata_text,
    source_values_text,
    values_of_sources,
)
from storage_formats.format.tombstones import input_hash
from storage_formats.remote.urls import IndexLocation, is_url, local_path
from storage_formats.writing.publish import next_first_row, total_counts

if TYPE_CHECKING:
    from PIL.Image import Image


@name_missing_extra("build")
def append_index(
    index: IndexLocation,
    sources: IndexLocation | Sequence[IndexLocation],
    *,
    model: IndexLocation | None = None,
    engine: Literal["ray", "inline"] = "ray",
    workers: int | None = None,
    helpers: int | None = None,
    address: str | None = None,
    column: str | None = None,
    max_failed: float | None = None,
    on_event: OnEvent = ignore,
    should_stop: ShouldStop = never,
) -> BuildResult:
    """Add new images to an index, as `edje-index append` does.

    Images whose bytes the index already contains are skipped. Call the function again
    with the same arguments to resume a stopped append. The other arguments are those of
    `build_index`.

    Args:
        index: directory of the index. Its rows keep their ids.
        sources: directories, archives, lists of paths or image files, as in
            `build_index`.
        model: directory of the model bundle, which the index then names. None selects
            the bundle that the index names.

    Raises:
        UsageError, ModelError: the request is invalid, or the index was not made by a
            build.
        JobStopped: the append stopped early. Finished shards are kept.
        UnfinishedChangeError: another change was stopped.
        EdjeError: another process is changing the index, none of the new images could
            be indexed, or too many of them failed. The index is unchanged.
        MissingExtraError: a package of the extra `build` is not installed.

    Examples:
        >>> from edje_index import append_index
        >>> result = append_index("photos.edje", "photos", engine="inline")
        >>> result.indexed, result.duplicates, result.rows, result.snapshot
        (0, 6, 0, 0)
    """
    started = time.monotonic()
    group = _source_group(sources, column)
    request = {"sources": group.sources, "column": column}
    execution = Execution(
        engine, workers, helpers, address=address, max_failed=max_failed
    )
    with begin(index, "append", request) as change:
        settings, info, execution = _encoder(change.index, group, model, execution)
        plan = earlier_plan(change, info, on_event)
        if plan is None:
            listing = Listing(settings.open_sources(), on_event, should_stop)
            listed = list(hash_and_mark_duplicates(listing))
            # An input that cannot be read has no content hash.
            keys = [ref.content_hash or ref.uri for ref in listed]
            all_read = all(ref.content_hash for ref in listed)
            known = _known_keys(change.index, keys, with_failed=not all_read)
            refs = [
                ref
                for ref, key in zip(listed, keys, strict=True)
                if ref.duplicate_of is None and key not in known
            ]
            duplicates = len(listed) - len(refs)
            if refs:
                plan = _plan_rows(
                    change, refs, duplicates, listing.ignored, settings, info
                )
        else:
            duplicates = plan.duplicates
        groups = recorded_sources(change.index.manifest)
        if groups is not None and (plan is not None or not _cover(groups, group)):
            groups = tuple(dict.fromkeys((*groups, group)))
        applied = _apply(
            change, plan, execution, on_event, should_stop, groups, (), model
        )
    return result_of(applied, plan, duplicates, started)


@name_missing_extra("build")
def update_index(
    index: IndexLocation,
    sources: IndexLocation | Sequence[IndexLocation] = (),
    *,
    retry_failed: bool = False,
    restore: bool = False,
    dry_run: bool = False,
    max_vanished: float = 0.5,
    model: IndexLocation | None = None,
    engine: Literal["ray", "inline"] = "ray",
    workers: int | None = None,
    helpers: int | None = None,
    address: str | None = None,
    column: str | None = None,
    max_failed: float | None = None,
    on_event: OnEvent = ignore,
    should_stop: ShouldStop = never,
) -> BuildResult:
    """Add, replace and delete rows so that an index matches its sources, as `edje-index
    update` does.

    New and changed files get new rows. The old rows of changed files and the rows of
    missing files are deleted. Unchanged files are not encoded again, and neither are
    files that were moved or renamed: their rows get the new names. Call the function
    again with the same arguments to resume a stopped update. The shards that the
    stopped update finished are used if the files to encode are still the same. The
    other arguments are those of `build_index`.

    Args:
        index: directory of the index. Unchanged rows keep their ids.
        sources: all sources of the index, as in `build_index`. If empty, the sources
            recorded in the index are used.
        retry_failed: also try again to index failed inputs that have not changed. Their
            new rows keep the values that users set. If nothing else has changed and
            every failed input fails again, the index does not change.
        restore: also index again the files whose rows were deleted by a user.
            Otherwise, such a file is skipped until its name or its content changes.
        dry_run: show the changes without applying them.
        max_vanished: stop if the files of more than this share of the rows, 0 to 1, no
            longer exist or cannot be read.
        model: directory of the model bundle, which the index then names. None selects
            the bundle that the index names.

    Raises:
        UsageError, ModelError: the request is invalid, or `sources` is empty and the
            index does not record its sources.
        JobStopped: the update stopped early. Finished shards are kept.
        TransientInputError: an input cannot be read for a temporary reason.
        UnfinishedChangeError: another change was stopped.
        EdjeError: another process is changing the index, a source cannot be read, or
            too many files are missing or failed.
        MissingExtraError: a package of the extra `build` is not installed.

    Examples:
        >>> from edje_index import update_index
        >>> result = update_index("photos.edje", engine="inline")
        >>> result.inputs, result.failed, result.vanished
        (6, 0, 0)
    """
    started = time.monotonic()
    group = _source_group(sources, column) if source_names(sources) else None
    as_number(max_vanished, "max_vanished", most=1)
    if retry_failed and max_failed is None:
        # Most inputs that failed before fail again, so allow all to fail.
        max_failed = 1.0
    execution = Execution(
        engine, workers, helpers, address=address, max_failed=max_failed
    )
    plan = None
    changed = 0
    request = {"retry_failed": bool(retry_failed)}
    with (
        temporary_database() as database,
        begin(index, "update", request, dry_run=dry_run) as change,
    ):
        manifest = change.index.manifest
        recorded = recorded_sources(manifest)
        if group is not None and column is None:
            # If the index records one of the sources, use the path column recorded with
            # it.
            for each in recorded or ():
                if {*each.sources} & {*group.sources}:
                    group = replace(group, column=each.column)
        groups = recorded if group is None else (group,)
        if groups is None:
            settings_of(change.index.location, manifest)
            raise UsageError(
                "the index does not record the sources of all its rows; name all"
                " sources",
                parameter="sources",
            )
        if group is None and any(STANDARD_INPUT in each.sources for each in groups):
            raise UsageError(
                "the index was made from a list on standard input, which cannot be read"
                " again; name all sources",
                parameter="sources",
            )
        changes = compare_sources(
            database,
            change.index,
            groups,
            max_vanished,
            on_event,
            should_stop,
            retry_failed=retry_failed,
            restore=restore,
        )

        def check_lost(receipts: Sequence[ShardReceipt]) -> None:
            # This protects an index whose images are on a server that answers every
            # request with the same error page: the images then seem changed, but none
            # can be decoded.
            lost = changes.replaced - sum(each.indexed for each in receipts)
            failed = any(each.failed for each in receipts)
            rows = manifest.counts.inputs - manifest.snapshot.deleted_rows
            if failed and lost > max_vanished * rows + 1e-6:
                change.abandon()
                raise FailedInputsError(
                    f"{counted(lost, 'row')} would be deleted, and inputs of the"
                    " sources cannot be decoded any more; check the sources, or raise"
                    " the share of rows that may vanish. The index is unchanged",
                    parameter="max_vanished",
                )

        if changes.rows and not dry_run:
            settings, info, execution = _encoder(
                change.index, group or SourceGroup(()), model, execution
            )
            plan = _plan_rows(
                change,
                changes.refs,
                changes.duplicates,
                changes.ignored,
                settings,
                info,
            )
        elif change.plan is not None:
            change.start_again()
        columns = manifest.columns if plan is None else plan.columns
        lines, columns = edited_values(
            change.index, changes.values, columns, from_sources=True
        )
        edited = len(lines["row_id"].unique())
        others = [
            value_line(row_id, name, value)
            for row_id, uri in changes.moved.items()
            for name, value in (("uri", uri), ("uri_raw", None))
        ]
        if plan is not None:
            others += [
                value_line(plan.first_row + position, SOURCE_VALUES, text)
                for position, text in changes.source_values.items()
            ]
        lines = pa.concat_tables([lines, pa.Table.from_pylist(others, VALUE_SCHEMA)])
        # If the update only tries failed inputs again, and all fail again, nothing is
        # committed.
        applied = _apply(
            change,
            plan,
            execution,
            on_event,
            should_stop,
            groups,
            changes.deleted,
            model,
            check_lost,
            values=lines,
            columns=columns,
            removed=frozenset[bytes]() if restore else None,
            needs_indexed=groups == recorded
            and not edited
            and not changes.moved
            and not changes.changed
            and 0 < changes.retried == changes.rows == len(changes.deleted),
        )
        failed = Counter(changes.kept)
        unchanged = failed.pop("", 0)
        if plan is not None and applied.manifest is manifest:
            # Every failed input failed again, so nothing was committed.
            failed.update(total_counts(applied.receipts).failed)
            applied = Applied(manifest)
            plan = None
            changes = replace(changes, deleted=())
        shards = len(applied.receipts)
        counts = total_counts(applied.receipts)
        if dry_run:
            problems = {
                position: ref.problem
                for position, ref in enumerate(changes.refs)
                if ref.problem is not None
            }
            indexed = changes.rows - len(problems)
            counts = Counts(changes.rows, indexed, 0, Counter(problems.values()))
            shards = -(-changes.rows // manifest.spec.shard_size)
            changed = len({*changes.changed} - problems.keys())
        elif plan is not None and changes.changed:
            row_ids = [plan.first_row + position for position in changes.changed]
            after = CommittedIndex.at(change.layout)
            statuses = read_index_rows(after, row_ids, ["status"])["status"]
            changed = statuses.to_pylist().count(INDEXED)
    failed.update(counts.failed)
    return replace(
        result_of(applied, plan, changes.duplicates, started, counts),
        inputs=changes.inputs,
        failed=failed.total(),
        failed_by_reason=dict(failed),
        shards=shards,
        unchanged=unchanged,
        edited=edited,
        moved=len(changes.moved),
        stay_deleted=changes.stay_deleted,
        new=counts.indexed - changed,
        changed=changed,
        vanished=changes.vanished,
        deleted=len(changes.deleted),
        dry_run=dry_run,
    )


@name_missing_extra("build")
def add_images(
    index: IndexLocation,
    images: Sequence[str | Path | bytes | Image],
    uris: Sequence[str],
    columns: Sequence[Json] | None = None,
    *,
    model: IndexLocation | None = None,
    on_event: OnEvent = ignore,
) -> BuildResult:
    """Add images to an index under names that you choose, or replace the rows with
    these names, in one commit.

    Each image gets a new row, even if the index has an identical image. The older rows
    with its uri are deleted. If an image cannot be indexed, the index does not change.

    After this call the index records no sources, because no source lists the new rows.
    A later `update_index` must be given all sources, and deletes the rows that were
    added here. Thumbnails of the new rows are shown only if their uris are paths or
    URLs of the images.

    Args:
        index: directory of the index.
        images: paths, bytes of image files, or PIL images.
        uris: names of the rows, one per image.
        columns: one mapping per image from column names to values, for example to
            captions; see docs/sources.md. None adds no values.
        model: directory of the model bundle, which the index then names; None selects
            the bundle that the index names.
        on_event: as in `build_index`.

    Raises:
        UsageError, ModelError: an argument is invalid, an image cannot be indexed, or
            the index was not made by a build.
        UnfinishedChangeError: another change was stopped.
        EdjeError: another process is changing the index.
        MissingExtraError: a package of the extra `build` is not installed.

    Examples:
        >>> from pipelines import add_images
        >>> columns = [{"captions": ["a dog"]}]
        >>> result = add_images("photos.edje", ["photos/0.jpg"], ["my-id"], columns)
        >>> again = add_images("photos.edje", ["photos/1.jpg"], ["my-id"])
        >>> result.new, result.changed, again.changed
        (1, 0, 1)
    """
    import PIL.Image

    from edje_index.images.decode import ImageError, decode_rgb

    started = time.monotonic()
    images = as_list(images, "images", "images")
    uris = [as_text(uri, "uris") for uri in as_list(uris, "uris", "texts")]
    values = (
        [{}] * len(images)
        if columns is None
        else as_list(columns, "columns", "mappings")
    )
    different = len(set(uris))
    mappings = sum(isinstance(row, Mapping) for row in values)
    if (
        not len(images) == len(uris) == different == len(values) == mappings
        or not images
    ):
        raise UsageError(
            f"got {len(images)} images, {len(uris)} uris ({different} different) and"
            f" {mappings} mappings of columns: give one different uri and one mapping"
            " per image",
            parameter="uris",
        )
    with (
        tempfile.TemporaryDirectory(prefix="edje-add-") as folder,
        begin(index, "add") as change,
    ):
        # After an error, remove the files of this change. A later run could not finish
        # the change, because the images are in the temporary folder.
        change.abandon()
        refs = []
        ignored = Ignored()
        for number, (image, uri, row) in enumerate(
            zip(images, uris, values, strict=True)
        ):
            path = Path(folder, str(number))
            try:
                if isinstance(image, PIL.Image.Image):
                    decode_rgb(image).save(path, "PNG", compress_level=1)
                else:
                    path.write_bytes(
                        image
                        if isinstance(image, bytes)
                        else as_path(image, "images").read_bytes()
                    )
            except (ImageError, OSError, ValueError) as error:
                raise UsageError(
                    f"the image of {uri} cannot be read: {error}", parameter="images"
                ) from error
            metadata = source_values(row, ignored)
            refs.append(InputRef(uri, os.fsencode(path), metadata=metadata))
        settings, info, execution = _encoder(
            change.index, SourceGroup(()), model, Execution("inline", max_failed=1.0)
        )
        plan = _plan_rows(change, refs, 0, ignored, settings, info)

        def check_all(receipts: Sequence[ShardReceipt]) -> None:
            for row in failed_rows(change.layout, receipts):
                raise UsageError(
                    f"the image of {row['uri']} cannot be indexed: {row['reason']}"
                    f" ({row['detail']}); nothing was added",
                    parameter="images",
                )

        deleted = []
        names = pa.array(uris, pa.string())
        for table in iter_rows(change.index, ["row_id", "uri"]):
            deleted += table.filter(pc.is_in(table["uri"], names)).to_pylist()
        row_ids = [row["row_id"] for row in deleted]
        warn_of_duplicates(change.index, row_ids, on_event)
        applied = _apply(
            change, plan, execution, on_event, never, None, row_ids, model, check_all
        )
    changed = len({row["uri"] for row in deleted})
    return replace(
        result_of(applied, plan, 0, started),
        new=len(uris) - changed,
        changed=changed,
        deleted=len(deleted),
    )


def _known_keys(
    index: CommittedIndex, keys: Iterable[str], *, with_failed: bool
) -> set[str]:
    """Return those of `keys` that are the content hash of a row of `index` or, if
    `with_failed` is true, the uri of a failed row. Rows whose content may still be
    encoded, such as duplicates of deleted rows, do not count.
    """
    wanted = pa.array(keys, pa.string())
    known = set[str]()
    columns = ["content_hash"]
    counts = index.manifest.counts
    is_mixed = counts.indexed < counts.inputs
    if is_mixed:
        columns += ["reason", "duplicate_of", "uri", "status"]
    for table in iter_rows(index, columns):
        if is_mixed:
            originals = table["duplicate_of"].fill_null(-1).to_numpy()
            is_lost = index.deleted.contain(originals)
            is_lost |= pc.is_in(table["reason"], pa.array(_MAY_SUCCEED)).to_numpy()
            table = table.filter(~is_lost)
        candidates = [table["content_hash"]]
        if with_failed and is_mixed:
            candidates.append(table.filter(pc.field("status") == FAILED)["uri"])
        for column in candidates:
            known.update(column.filter(pc.is_in(column, wanted)).to_pylist())
    return known


def _source_group(
    sources: IndexLocation | Sequence[IndexLocation], column: str | None
) -> SourceGroup:
    """Return a group of the given sources as absolute paths, as an index records it."""
    return SourceGroup(tuple(map(absolute_spec, source_names(sources))), column)


def _cover(groups: Iterable[SourceGroup], group: SourceGroup) -> bool:
    """Return True if each source of `group` is a source of `groups`, or is inside
    one.
    """
    prefixes = tuple(f"{source}/" for each in groups for source in each.sources)
    return all(f"{source}/".startswith(prefixes) for source in group.sources)


def _encoder(
    index: CommittedIndex,
    group: SourceGroup,
    model: IndexLocation | None,
    execution: Execution,
) -> tuple[BuildSettings, BundleInfo, Execution]:
    """Return the settings and the bundle that encode new rows of `index`, and
    `execution` with the number of workers.

    The settings are those of `index`, but with the sources of `group`, and duplicates
    are not encoded.
    """
    settings = replace(
        settings_of(index.location, index.manifest),
        sources=group.sources,
        column=group.column,
        dedupe=True,
        precisions=index.spec.precisions,
    )
    info = matching_bundle(index, None if model is None else local_path(model))
    return settings, info, choose_workers(settings, info, execution)


def _plan_rows(
    change: Change,
    refs: Iterable[InputRef],
    duplicates: int,
    ignored: Mapping[str, int],
    settings: BuildSettings,
    info: BundleInfo,
) -> Plan:
    """Plan new shards for new rows of `refs`, and store the plan.

    If an earlier run of `change` stored the same plan, the shards that it finished are
    used. If that run stored another plan, the files of that run are removed.
    """
    digest = hashlib.sha256()
    rows = 0
    for ref in refs:
        rows += 1
        # The plan differs if captions have changed since an earlier run.
        values = (ref.duplicate_of, ref.problem, metadata_text(ref.metadata or {}))
        digest.update(f"{(*ref.location, *values)}\n".encode())
    manifest = change.index.manifest
    spec = manifest.spec
    check_disk(change.layout, replace(spec, rows=rows, segments=()))
    first_row = next_first_row(manifest)
    segments = (*spec.used_segments, Segment(first_row, rows))
    spec = replace(spec, rows=segments[-1].stop, segments=segments)
    plan = Plan(
        spec,
        model_record(info),
        settings,
        digest.hexdigest(),
        duplicates,
        dict(ignored),
    )
    if (
        change.plan is not None
        and Plan.parse(change.plan).fingerprint != plan.fingerprint
    ):
        change.start_again()
    stored = store_inputs(
        change,
        refs,
        spec.shard_size,
        first_shard=first_row // spec.shard_size,
        earlier_columns=manifest.columns,
    )
    plan = replace(
        plan,
        ignored={**ignored, **stored.ignored},
        columns=stored.columns(),
    )
    change.store_plan(plan.to_json())
    return plan


def _apply(
    change: Change,
    plan: Plan | None,
    execution: Execution,
    on_event: OnEvent,
    should_stop: ShouldStop,
    groups: tuple[SourceGroup, ...] | None,
    deleted: Sequence[int],
    model: IndexLocation | None,
    check_all: Callable[[Sequence[ShardReceipt]], None] | None = None,
    **changes: Any,
) -> Applied:
    """Add rows to an index and delete rows, see `apply`.

    Args:
        plan: plan of the new rows; None adds no rows.
        execution, check_all: see `encoding`.
        groups: sources of all rows after the change; None if they are unknown.
        deleted: ids of the rows to delete.
        model: directory of the bundle that the index names after the change; None keeps
            the name.
        changes: further attributes of the `Edit`.
    """
    manifest = change.index.manifest
    spec = manifest.spec
    details: Json = {}
    if plan is not None:
        spec = plan.spec
        details = {"first_row": plan.first_row, "rows": plan.rows}
        work = encoding(change, plan, execution, on_event, check_all)
        changes = {"columns": plan.columns, "work": work, **changes}
    if len(deleted):
        details["deleted"] = len(deleted)
    if plan is not None or groups != recorded_sources(manifest):
        changes["settings"] = with_sources(manifest, groups)
    if model is not None:
        bundle = matching_bundle(change.index, local_path(model))
        changes["model"] = model_record(bundle)
    edit = Edit(spec, details, deleted=deleted, **changes)
    return apply(change, edit, on_event, should_stop)


_COLUMNS = (
    "row_id",
    "uri",
    "uri_raw",
    "content_hash",
    "status",
    "reason",
    "duplicate_of",
)
_HIDES_OTHERS = frozenset(
    {"truncated-archive", "damaged-archive", "missing", "unreadable"}
)
"""Problems of a directory or an archive. With such a problem, some of its inputs are
not listed.
"""


@dataclass(frozen=True)
class SourceChanges:
    """The differences between the sources and the rows of an index.

    Attributes:
        refs: inputs that get new rows, in the order of the sources.
        rows: number of `refs`.
        inputs: number of inputs that the sources list.
        duplicates: number of inputs that get no row, because a kept row or an earlier
            input has the same content.
        ignored: number of entries in the sources that are not inputs, by suffix or
            reason.
        kept: number of inputs whose rows are kept, by the reason of a failed row; ""
            is the key of the other rows.
        replaced: number of rows to delete that have tokens. A row is not counted if the
            new content of its input equals that of a kept row: a search then finds the
            kept row.
        changed: positions in `refs` of the inputs that had a row already, except
            retried inputs. The content of the input differs from that of the row, or
            the row is a duplicate whose original is not kept.
        retried: number of `refs` whose old rows failed or are duplicates of the same
            content. The new rows keep the column values that users set in the old rows.
        source_values: for each position in `refs` whose row keeps such values, the text
            for its column `SOURCE_VALUES`.
        moved: new names of kept rows, by row id: their inputs have vanished, but other
            inputs have the same content and no row.
        vanished: number of rows whose input no longer exists.
        deleted: ids of the rows to delete, ascending: vanished rows, and the old rows
            of inputs that get a new row or are duplicates.
        stay_deleted: number of inputs that get no row, because a user deleted their
            row.
        values: column values that the sources gave to kept rows, in parts. They can be
            read only once.
    """

    refs: Iterable[InputRef]
    rows: int
    inputs: int
    duplicates: int
    ignored: dict[str, int]
    kept: Counter[str]
    replaced: int
    changed: Sequence[int]
    retried: int
    source_values: Mapping[int, str | None]
    moved: Mapping[int, str]
    vanished: int
    deleted: Sequence[int]
    stay_deleted: int
    values: Iterable[NewValues]


# The states of a row during a comparison follow.

# No input has matched the row so far. If a row is still free at the end, its input has
# vanished.
_FREE = 0
# The row is kept for the input that matched it, or as the original of a kept duplicate.
_KEPT = 1
# The row is deleted, because its input gets a new row or is a duplicate. A duplicate is
# kept after all if its original is kept.
_REPLACED = 2
# The table `inputs` has the inputs that may get new rows, each with the row of its name
# and content.
_SCHEMA = """CREATE TABLE rows(
    row_id INTEGER PRIMARY KEY, name BLOB, hash BLOB, failed_for TEXT,
    duplicate_of INTEGER, metadata BLOB, by_users BLOB, state INTEGER, given BLOB
);
CREATE TABLE inputs(
    position INTEGER PRIMARY KEY, name BLOB, hash BLOB, row_id INTEGER, ref BLOB
);
CREATE INDEX contents ON inputs(hash);
"""
# reasons of failed rows whose content may be encoded after all
_MAY_SUCCEED = ("changed-since-plan", "original-deleted")
_HAS_TOKENS = "failed_for IS NULL AND duplicate_of IS NULL"
_OF_NAME = f"name = :name AND state = {_FREE}"
# Free rows with the name of an input that also have its content hash. If one of the two
# hashes is unknown, the row must have failed for the problem of the input. A row that
# failed for one of `_MAY_SUCCEED` never matches by its hash.
_OF_CONTENT = f"""{_OF_NAME} AND CASE
    WHEN hash IS NULL OR :hash IS NULL THEN failed_for = :problem
    ELSE hash = :hash AND coalesce(failed_for, '') NOT IN {_MAY_SUCCEED}
END"""
# Free rows with tokens that may have moved. A row whose own input is listed, but cannot
# be read, has not moved.
_MAY_HAVE_MOVED = f"""state = {_FREE} AND {_HAS_TOKENS}
    AND name NOT IN (SELECT name FROM inputs WHERE hash IS NULL)"""


class _Row(NamedTuple):
    """A row of an index in the temporary database.

    Attributes:
        name: see `_name`.
        hash: SHA-256 of the content, 32 bytes; None if it is unknown.
        failed_for: reason of a failed row; None for other rows.
        duplicate_of: row id of the original of a duplicate; None for other rows.
        metadata: hash of the column values that the sources gave last.
        by_users: pickled values that users set, by column; None if there are none.
    """

    row_id: int
    name: bytes
    hash: bytes | None
    failed_for: str | None
    duplicate_of: int | None
    metadata: bytes
    by_users: bytes | None

    @property
    def has_tokens(self) -> bool:
        return self.failed_for is None and self.duplicate_of is None


class _Inputs:
    """The inputs in the temporary database, in the order of the sources."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def __iter__(self) -> Iterator[InputRef]:
        return (ref for _, ref, _ in self.where("TRUE"))

    def where(
        self, condition: str, *values: object
    ) -> Iterator[tuple[int, InputRef, int | None]]:
        """Yield (position, input, id of the row of its name and content)."""
        query = (
            f"SELECT position, ref, row_id FROM inputs WHERE {condition}"
            " ORDER BY position"
        )
        for position, ref, row_id in self._database.execute(query, values):
            # Unpickling is safe: this process has written the database.
            yield position, pickle.loads(ref), row_id


def _name(uri: str, uri_raw: bytes | None) -> bytes:
    """Return a key by which an input and its row are matched."""
    return b"\0".join((uri.encode(), uri_raw or b""))


def _load_rows(
    database: sqlite3.Connection,
    index: CommittedIndex,
    columns: Mapping[str, SourceColumn],
) -> int:
    """Insert the rows of `index` into the database, except deleted rows. Return the
    number of inserted rows. The values that the sources gave last to the `columns` of a
    row are stored as one hash.
    """
    rows = 0
    for table in iter_rows(index, [*_COLUMNS, SOURCE_VALUES, *columns]):
        rows += len(table)
        for line in table.to_pylist():
            of_sources = values_of_sources(line[SOURCE_VALUES], columns)
            # The index may lack a column in which a user has only removed values.
            by_users = {name: line.get(name) for name in of_sources}
            values = {**{name: line[name] for name in columns}, **of_sources}
            row = _Row(
                line["row_id"],
                _name(line["uri"], line["uri_raw"]),
                _digest(line["content_hash"]),
                line["reason"] if line["status"] == FAILED else None,
                line["duplicate_of"] if line["status"] == DUPLICATE else None,
                _metadata_hash(values),
                pickle.dumps(by_users) if by_users else None,
            )
            database.execute(
                f"INSERT INTO rows VALUES(?, ?, ?, ?, ?, ?, ?, {_FREE}, NULL)", row
            )
    database.execute("CREATE INDEX names ON rows(name, row_id)")
    database.execute("CREATE INDEX hashes ON rows(hash)")
    return rows


def _digest(content_hash: str | None) -> bytes | None:
    """Convert a content hash from hexadecimal digits to bytes."""
    return None if content_hash is None else bytes.fromhex(content_hash)


def compare_sources(
    database: sqlite3.Connection,
    index: CommittedIndex,
    groups: Iterable[SourceGroup],
    max_vanished: float,
    on_event: OnEvent,
    should_stop: ShouldStop,
    *,
    retry_failed: bool = False,
    restore: bool = False,
) -> SourceChanges:
    """List the sources and compare every input with the rows of `index`. Nothing is
    written.

    An input is compared with the rows of the same name. If a row of this name has the
    same content, the row is unchanged and kept. If the input of a row has vanished, but
    an input of a new name has the same content, the row is kept and gets this name. A
    row that is a duplicate is kept only if its original is kept, too. Otherwise its
    input gets a new row. If an input on a server cannot be read, its row is kept. If
    this row is a duplicate, its original is then kept, too.

    The rows, and the inputs that may get new rows, are in a database on disk, so that
    the memory use does not grow with their metadata.

    Args:
        database: an empty `temporary_database`.
        groups: all sources of the index.
        max_vanished: largest allowed share, 0 to 1, of the rows whose input no longer
            exists or cannot be read.
        retry_failed: True to give new rows to failed inputs that can be read.
        restore: True to give rows to inputs whose rows were deleted by users.

    Raises:
        UsageError: a source cannot be used.
        EdjeError: a source or a part of a source cannot be read, or the share of rows
            whose input no longer exists or cannot be read is larger than
            `max_vanished`.
    """
    settings = settings_of(index.location, index.manifest)
    sources = without_nested(
        [
            source
            for group in groups
            for source in replace(settings, **asdict(group)).open_sources()
        ]
    )
    for statement in _SCHEMA.split(";"):
        database.execute(statement)
    columns = {column.name: column for column in index.manifest.columns}
    rows = _load_rows(database, index, columns)
    inputs = _Inputs(database)

    def rows_where(condition: str, **values: object) -> Iterator[_Row]:
        query = f"SELECT {', '.join(_Row._fields)} FROM rows WHERE {condition}"
        return map(_Row._make, database.execute(f"{query} ORDER BY row_id", values))

    def mark(row: _Row, state: int) -> None:
        values = (state, row.row_id)
        database.execute("UPDATE rows SET state = ? WHERE row_id = ?", values)

    # The inputs whose metadata cannot be read in full
    unread: list[str] = []
    stored_values = CollectedInputs(index.spec.shard_size, columns.values())

    def compare_values(ref: InputRef, row: _Row) -> None:
        """Note the column values of `ref` if they differ from those of `row`."""
        given = stored_values.add(ref).metadata or {}
        values = {name: typed(each, columns.get(name)) for name, each in given.items()}
        if row.metadata == _metadata_hash(values):
            return
        if any(ref.uri in source.unread for source in sources):
            unread.append(ref.uri)
        else:
            database.execute(
                "UPDATE rows SET given = ? WHERE row_id = ?",
                [pickle.dumps(given), row.row_id],
            )

    listing = Listing(sources, on_event, should_stop)
    # The problem of each directory or archive whose inputs are not all listed, by its
    # path
    hidden: dict[str, str] = {}
    removed = frozenset[bytes]() if restore else index.removed
    stay_deleted = unreachable = 0
    kept = Counter[str]()
    # Match every input with a row of the same name and content.
    for ref in hashed(listing):
        name = _name(ref.uri, ref.uri_raw)
        content = _digest(ref.content_hash)
        same = rows_where(_OF_CONTENT, name=name, hash=content, problem=ref.problem)
        row = next(same, None)
        if ref.problem in _HIDES_OTHERS:
            hidden[display_path(ref.path)] = str(ref.problem)
        if (
            row is None
            and input_hash(ref.uri, ref.uri_raw, ref.content_hash) in removed
        ):
            stay_deleted += 1
            continue
        # If the server of an input does not respond or refuses the request, keep the
        # row with the name of the input, unless that row failed. If the row is a
        # duplicate, also keep its original. Unreadable local files are handled below.
        if row is None and (
            ref.problem == "unreachable"
            or (ref.problem == "unreadable" and is_url(ref.path))
        ):
            named_row = next(rows_where(_OF_NAME, name=name), None)
            if named_row is not None and named_row.failed_for is None:
                unreachable += 1
                mark(named_row, _KEPT)
                continue
        if row is not None:
            compare_values(ref, row)
            # A failed row does not stay if its input can be read now.
            is_retry = retry_failed and ref.problem is None and not row.has_tokens
            if row.duplicate_of is None and not is_retry:
                mark(row, _KEPT)
                kept[row.failed_for or ""] += 1
                continue
            mark(row, _REPLACED)
        database.execute(
            "INSERT INTO inputs VALUES(NULL, ?, ?, ?, ?)",
            [name, content, row and row.row_id, pickle.dumps(ref)],
        )
    own = {display_path(source.path) for source in sources}
    # If all rows may vanish, the sources may be empty. Otherwise, rows of an empty
    # source are not deleted, and neither are rows of an archive that lies beside
    # images. Such an archive is not read, unless it is a source itself.
    for source in sources if max_vanished < 1 else ():
        if not source.inputs:
            hidden.setdefault(display_path(source.path), "it lists no images")
        for path in source.hidden.keys() - own:
            hidden.setdefault(path, source.hidden[path])
    # Numbers of rows with unlisted inputs, by the outermost hidden directory or archive
    below = Counter[str]()

    def unlist(row: _Row) -> None:
        """Count a row whose own input is not listed any more."""
        uri = row.name.split(b"\0")[0].decode()
        ends = (match.start() for match in re.finditer("[/!]", uri))
        containers = (uri[:end] for end in ends if uri[:end] in hidden)
        below.update(itertools.islice(containers, 1))

    # If an input without a row has the content of a row that no input has matched, the
    # image was moved: keep the row, and give it the new name. If the directory of the
    # row cannot be read, its own input may still be there.
    moved: dict[int, str] = {}
    for row in rows_where(_MAY_HAVE_MOVED):
        of_content = inputs.where("hash = ? AND row_id IS NULL", row.hash)
        # A name that is not UTF-8 cannot be stored as a new value.
        named = (each for each in of_content if each[1].uri_raw is None)
        for position, ref, _ in itertools.islice(named, 1):
            mark(row, _KEPT)
            unlist(row)
            compare_values(ref, row)
            moved[row.row_id] = ref.uri
            database.execute("DELETE FROM inputs WHERE position = ?", [position])
    if unread:
        text = (
            f"the columns of {counted(len(unread), 'input')} stay, because their"
            f" metadata cannot be read in full, first that of {unread[0]}; correct the"
            " caption files and tables"
        )
        on_event(StatusMessage(text, is_warning=True))
    if unreachable:
        text = (
            f"{counted(unreachable, 'input')} on servers cannot be read now; the rows"
            " stay"
        )
        on_event(StatusMessage(text, is_warning=True))
    database.execute(
        f"UPDATE rows SET state = {_KEPT} WHERE state = {_FREE} AND row_id IN"
        f" (SELECT duplicate_of FROM rows WHERE state = {_KEPT})"
    )
    database.execute(
        f"UPDATE rows SET state = {_KEPT} WHERE state = {_REPLACED} AND duplicate_of IN"
        f" (SELECT row_id FROM rows WHERE state = {_KEPT})"
    )
    duplicates = database.execute(
        "DELETE FROM inputs WHERE row_id IN"
        f" (SELECT row_id FROM rows WHERE state = {_KEPT})"
    )
    kept[""] += unreachable + len(moved) + duplicates.rowcount

    # Give a new row to each remaining input, unless the input is a duplicate. If the
    # input has an old row, mark that row as replaced.
    new = 0
    changed = array("q")
    source_values: dict[int, str | None] = {}
    repeated = replaced = lost = retried = 0
    for position, ref, row_id in inputs.where("TRUE"):
        content = _digest(ref.content_hash)
        condition = _OF_NAME if row_id is None else "row_id = :row_id"
        name = _name(ref.uri, ref.uri_raw)
        row = next(rows_where(condition, name=name, row_id=row_id), None)
        if row is not None:
            mark(row, _REPLACED)
            # A row is lost if its input cannot be read and thus has no content hash.
            lost += content is None
            # If an archive is cut off, its listing ends with one input that has the
            # problem of the archive.
            if ref.problem in _HIDES_OTHERS and row.failed_for is None:
                unlist(row)
            if ref.problem == "unreadable" and row.failed_for is None:
                raise EdjeError(
                    f"cannot read {ref.uri}, which is row {row.row_id} of the index;"
                    " make the file readable, or delete the row and the file. The index"
                    " is unchanged"
                )
        held = rows_where(f"hash = :hash AND state = {_KEPT}", hash=content)
        is_held = next(held, None) is not None
        replaced += row is not None and row.has_tokens and not is_held
        # All earlier inputs that are left get new rows.
        earlier = inputs.where("hash = ? AND position < ?", content, position)
        if is_held or next(earlier, None) is not None:
            repeated += 1
            database.execute("DELETE FROM inputs WHERE position = ?", [position])
            continue
        is_retry = row is not None and retry_failed and row.failed_for is not None
        if row is not None and not is_retry:
            changed.append(new)
        if row is not None and (is_retry or row.hash == content):
            retried += 1
            if row.by_users is not None:
                by_users = pickle.loads(row.by_users)
                given = ref.metadata or {}
                of_sources = {name: given.get(name) for name in by_users}
                source_values[new] = source_values_text(of_sources)
                values = {**given, **by_users}
                stored = {key: each for key, each in values.items() if each is not None}
                ref = replace(ref, metadata=stored or None)
                database.execute(
                    "UPDATE inputs SET ref = ? WHERE position = ?",
                    [pickle.dumps(ref), position],
                )
        new += 1
    vanished = 0
    for row in rows_where(f"state = {_FREE}"):
        unlist(row)
        vanished += 1
        replaced += row.has_tokens
    lost += vanished
    for container, number in below.items():
        raise EdjeError(
            f"cannot compare {container} with the index ({hidden[container]}). The"
            f" index has {counted(number, 'row')} from {container}; check that it is"
            " mounted and readable. The index is unchanged"
        )
    if lost > max_vanished * rows + 1e-6:
        raise EdjeError(
            f"the inputs of {lost:,} of {counted(rows, 'row')} no longer exist, more"
            f" than the share of {max_vanished:g} that may vanish; check the sources,"
            " or raise this share to delete these rows. The index is unchanged",
            parameter="max_vanished",
        )
    return SourceChanges(
        inputs,
        new,
        listing.inputs,
        repeated,
        listing.ignored,
        kept,
        replaced,
        changed,
        retried,
        source_values,
        moved,
        vanished,
        array("q", (row.row_id for row in rows_where(f"state != {_KEPT}"))),
        stay_deleted,
        _given_values(index, database),
    )


def _metadata_hash(values: Mapping[str, Any]) -> bytes:
    """Return a hash of column values, 16 bytes. Null values are left out."""
    given = {name: value for name, value in values.items() if value is not None}
    return hashlib.blake2b(metadata_text(given).encode(), digest_size=16).digest()


def _given_values(
    index: CommittedIndex, database: sqlite3.Connection
) -> Iterator[NewValues]:
    """Yield the column values that the sources gave to kept rows, as many rows at a
    time as a shard has.
    """
    columns = [column.name for column in index.manifest.columns]
    lines = database.execute(
        f"SELECT row_id, given FROM rows WHERE state = {_KEPT} AND given IS NOT NULL"
        " ORDER BY row_id"
    )
    while part := lines.fetchmany(index.spec.shard_size):
        yield {
            row_id: {**dict.fromkeys(columns), **pickle.loads(given)}
            for row_id, given in part
        }
