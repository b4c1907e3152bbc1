"""Appends and updates: add new rows to an index, and delete the rows that the new rows
replace.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from edje_index.bundles.info import (
    BundleInfo,
    matching_bundle,
)
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
    ShardWork,
    apply,
    begin,
)
from pipelines.jobs.compare import compare_sources, metadata_hash
from pipelines.jobs.plan import (
    BuildSettings,
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
from pipelines.jobs.snapshots import edited_values, value_line
from pipelines.metadata import Ignored, source_values
from pipelines.progress.events import (
    OnEvent,
    ShouldStop,
    ignore,
    never,
)
from pipelines.progress.wording import counted
from pipelines.sources import Listing, hash_and_mark_duplicates, temporary_database
from pipelines.sources.base import absolute_spec
from storage_formats.arguments import as_list, as_number, as_path, as_text
from storage_formats.atomic import Json
from storage_formats.change import Change
from storage_formats.errors import UsageError
from storage_formats.extras import name_missing_extra
from storage_formats.format.layout import Segment
from storage_formats.format.manifest import CommittedIndex, Counts
from storage_formats.format.receipts import ShardReceipt
from storage_formats.format.rows import (
    FAILED,
    INDEXED,
    SOURCE_VALUES,
    VALUE_SCHEMA,
    iter_rows,
    read_index_rows,
)
from storage_formats.remote.urls import IndexLocation, local_path
from storage_formats.writing.publish import next_first_row, total_counts

if TYPE_CHECKING:
    from PIL.Image import Image

    from edje_index.inputs.refs import InputRef


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
            keys_in_index = _known_keys(change.index, listed)
            refs = [
                ref
                for ref in listed
                if ref.duplicate_of is None
                and (ref.content_hash or ref.uri) not in keys_in_index
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
        work = None
        if plan is not None:
            work = encoding(change, plan, execution, on_event)
        edit = _new_rows(change, plan, work, groups, (), model)
        applied = apply(change, edit, on_event, should_stop)
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
        work = None
        if changes.refs and not dry_run:
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
            work = encoding(change, plan, execution, on_event, needs_one=False)
            rows = manifest.counts.inputs - manifest.snapshot.deleted_rows
            work = _with_lost(work, change, changes.replaced, max_vanished * rows)
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
        edit = _new_rows(
            change,
            plan,
            work,
            groups,
            changes.deleted,
            model,
            values=lines,
            columns=columns,
            removed=frozenset[bytes]() if restore else None,
            needs_indexed=groups == recorded
            and not edited
            and not changes.moved
            and not changes.changed
            and 0 < changes.retried == len(changes.refs) == len(changes.deleted),
        )
        applied = apply(change, edit, on_event, should_stop)
        failed = Counter(changes.failed)
        if plan is not None and applied.manifest is manifest:
            # Every failed input failed again, so nothing was committed.
            failed.update(total_counts(applied.receipts).failed)
            applied = Applied(manifest)
            plan = None
            changes = replace(changes, deleted=())
        shards = len(applied.receipts)
        counts = total_counts(applied.receipts)
        if dry_run:
            refs = changes.refs
            problems = Counter(ref.problem for ref in refs if ref.problem is not None)
            counts = Counts(len(refs), len(refs) - problems.total(), 0, dict(problems))
            shards = -(-len(refs) // manifest.spec.shard_size)
            changed = sum(refs[each].problem is None for each in changes.changed)
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
        unchanged=changes.unchanged,
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
    from edje_index.inputs.refs import InputRef

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
        work = encoding(change, plan, execution, on_event, needs_one=False)

        def check(receipts: Sequence[ShardReceipt]) -> None:
            for row in failed_rows(change.layout, receipts[-1:]):
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
        work = replace(work, check=check)
        edit = _new_rows(change, plan, work, None, row_ids, model)
        applied = apply(change, edit, on_event, never)
    changed = len({row["uri"] for row in deleted})
    return replace(
        result_of(applied, plan, 0, started),
        new=len(uris) - changed,
        changed=changed,
        deleted=len(deleted),
    )


def _known_keys(index: CommittedIndex, refs: Iterable[InputRef]) -> set[str]:
    """Return the content hashes of `refs` that are those of rows of `index`. An input
    that cannot be read has no content hash: its uri is returned if the index has a
    failed row with this uri.
    """
    hashes = {ref.content_hash for ref in refs}
    unread = {ref.uri for ref in refs if ref.content_hash is None}
    columns = ["content_hash", *(["uri", "status"] if unread else [])]
    known = set[str]()
    for table in iter_rows(index, columns):
        of_rows = table["content_hash"]
        is_known = pc.is_in(of_rows, pa.array(hashes - {None}, pa.string()))
        known.update(of_rows.filter(is_known).to_pylist())
        if unread:
            failed = table.filter(pc.field("status") == FAILED)
            known |= unread.intersection(failed["uri"].to_pylist())
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


def _with_lost(
    work: ShardWork, change: Change, replaced: int, allowed: float
) -> ShardWork:
    """Return `work` with a further check: raise an error after the last shard if inputs
    failed, and more than `allowed` of the `replaced` rows get no new row with tokens.

    This protects an index whose images are on a server that answers every request with
    the same error page: the images then seem changed, but none can be decoded.
    """

    def check(receipts: Sequence[ShardReceipt]) -> None:
        work.check(receipts)
        lost = replaced - sum(each.indexed for each in receipts)
        failed = any(each.failed for each in receipts)
        if len(receipts) == len(work.shards) and failed and lost > allowed + 1e-6:
            change.abandon()
            raise FailedInputsError(
                f"{counted(lost, 'row')} would be deleted, and inputs of the sources"
                " cannot be decoded any more; check the sources, or raise the share of"
                " rows that may vanish. The index is unchanged",
                parameter="max_vanished",
            )

    return replace(work, check=check)


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
        settings_of(index.root, index.manifest),
        sources=group.sources,
        column=group.column,
        dedupe=True,
        precisions=index.spec.precisions,
    )
    info = matching_bundle(index, None if model is None else local_path(model))
    return settings, info, choose_workers(settings, info, execution)


def _plan_rows(
    change: Change,
    refs: Sequence[InputRef],
    duplicates: int,
    ignored: Mapping[str, int],
    settings: BuildSettings,
    info: BundleInfo,
) -> Plan:
    """Plan new shards for new rows of `refs`, and store the plan.

    If an earlier run of `change` stored the same plan, the shards that it finished are
    used. If that run stored another plan, the files of that run are removed.
    """
    from edje_index.inputs.refs import rows_digest

    # The plan differs if captions have changed since an earlier run.
    digest = hashlib.sha256(rows_digest(refs).encode())
    for ref in refs:
        digest.update(metadata_hash(ref.metadata or {}))
    manifest = change.index.manifest
    spec = manifest.spec
    rows = len(refs)
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


def _new_rows(
    change: Change,
    plan: Plan | None,
    work: ShardWork | None,
    groups: tuple[SourceGroup, ...] | None,
    deleted: Sequence[int],
    model: IndexLocation | None,
    **changes: Any,
) -> Edit:
    """Return the edit that adds rows to an index and deletes rows.

    Args:
        plan: plan of the new rows, which `work` encodes; None adds no rows.
        groups: sources of all rows after the change; None if they are unknown.
        deleted: ids of the rows to delete.
        model: directory of the bundle that the index names after the change; None keeps
            the name.
        changes: further attributes of the edit.
    """
    manifest = change.index.manifest
    details: Json = {}
    if plan is not None:
        details = {"first_row": plan.first_row, "rows": plan.rows}
        changes = {"columns": plan.columns, **changes}
    if len(deleted):
        details["deleted"] = len(deleted)
    settings = None
    if plan is not None or groups != recorded_sources(manifest):
        settings = with_sources(manifest, groups)
    named = None
    if model is not None:
        named = model_record(matching_bundle(change.index, local_path(model)))
    return Edit(
        manifest.spec if plan is None else plan.spec,
        details,
        work,
        deleted,
        settings=settings,
        model=named,
        **changes,
    )
