"""The commands that change a finished index without a model, and those that show
its snapshots and failures.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from pipelines.cli.models import report
from pipelines.cli.options import (
    LOCAL_INDEX,
    POSITIVE,
    index_argument,
    json_option,
    location,
    model_option,
    quiet_option,
    where_option,
)
from pipelines.cli.output import (
    note,
    print_result,
    run_job,
    running_job,
)
from pipelines.progress.wording import counted, human_bytes
from storage_formats.errors import UsageError
from storage_formats.remote.urls import IndexLocation, hub_kind

_SHOWN = 10


@click.command()
@index_argument
@click.option(
    "--rows",
    "rows",
    type=int,
    multiple=True,
    metavar="N",
    help="Row id to delete; repeatable.",
)
@where_option
@click.option(
    "--erase",
    is_flag=True,
    help="Also remove the data of all deleted rows, and all earlier snapshots.",
)
@click.option(
    "--dry-run", is_flag=True, help="Show what would be deleted and change nothing."
)
@json_option
def delete(index: IndexLocation, as_json: bool, **options: Any) -> None:
    """Delete rows of INDEX.

    Deleted rows are no longer searched, fetched or evaluated. The other rows keep their
    ids. The data of deleted rows remains on disk, so 'edje-index rollback' can restore
    the rows.

    --erase also removes the data of all deleted rows and of their duplicates: the other
    rows of their shards are copied to new shards, where they get new row ids, and all
    earlier snapshots are removed. This cannot be undone. Run the same command again to
    finish an interrupted erasure.

    \b
    Examples:
      edje-index delete photos.edje --rows 17 --rows 201
      edje-index delete photos.edje --where "uri like '%/2019/%.jpg'" --dry-run
      edje-index delete photos.edje --where "licence is null or width < 100" --dry-run
      edje-index delete photos.edje --where "uri like '%/jane-doe/%'" --erase
    """
    from pipelines.jobs.snapshots import delete_rows

    with running_job(resume=index) as (on_event, _):
        result = delete_rows(index, on_event=on_event, **options)
    would = "would be " if result.dry_run else ""
    line = f"{index}: {counted(len(result.deleted), 'row')} {would}deleted"
    if result.deleted:
        named = ", ".join(map(str, result.deleted[:_SHOWN]))
        if len(result.deleted) > _SHOWN:
            named += f" and {len(result.deleted) - _SHOWN:,} more"
        line += f" ({named})"
    if result.already_deleted:
        line += f", {result.already_deleted:,} were deleted before"
    if options["erase"]:
        line += f", {result.erased:,} {would}erased"
    print_result(result, f"{line}; {result.left:,} left", as_json=as_json)


class _RowsOrFilter(click.ParamType["int | str"]):
    """A row id, or a filter expression."""

    name = "row id or filter"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        text = str(value).strip()
        return int(text) if text.isdecimal() else text


@click.command()
@index_argument
@click.option(
    "--rows",
    type=_RowsOrFilter(),
    multiple=True,
    required=True,
    metavar="N|FILTER",
    help=(
        "Row id, or a filter such as \"uri like '%/2019/%'\" that selects rows;"
        " repeatable."
    ),
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    required=True,
    metavar="COLUMN=VALUE",
    help=(
        "New value of a column; repeatable. COLUMN= removes the value. A repeated"
        " COLUMN gets a list of texts."
    ),
)
@json_option
def edit(
    index: IndexLocation,
    rows: tuple[int | str, ...],
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """Set columns of rows of INDEX, such as captions, titles or licences.

    No image is encoded: the new values are written to a small file, and searches and
    filters see them at once. A new COLUMN is added. 'edje-index rollback' undoes the
    edit, and 'edje-index compact' writes the values to the rows.

    \b
    Examples:
      edje-index edit photos.edje --rows 17 --rows 201 --set 'title=The lake'
      edje-index edit photos.edje --rows "uri like '%/2019/%'" --set 'year=2019'
      edje-index edit photos.edje --rows 17 --set 'captions=a dog on a beach'
      edje-index edit photos.edje --rows "licence = 'unknown'" --set 'licence='
    """
    from pipelines.jobs.edit import set_columns
    from storage_formats.format.source_columns import PlainText

    values: dict[str, list[str]] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name.strip():
            raise UsageError(
                f"{setting!r} sets nothing; write COLUMN=VALUE, for example"
                " 'title=The lake'",
                parameter="settings",
            )
        values.setdefault(name.strip(), []).append(value)
    columns = {
        name: [texts if len(texts) > 1 else PlainText(texts[0]) if texts[0] else None]
        for name, texts in values.items()
    }
    row_ids = [row for row in rows if isinstance(row, int)]
    filters = [f"({row})" for row in rows if isinstance(row, str)]
    with running_job(resume=index) as (on_event, _):
        result = set_columns(
            index,
            row_ids,
            columns,
            where=" or ".join(filters) or None,
            on_event=on_event,
        )
    names = ", ".join(result.columns)
    line = f"{index}: {counted(result.values, 'value')} of {names} set"
    if not result.values:
        line = f"{index}: no row has other values; nothing to do"
    elif result.rows > 1:
        line += f" in {counted(result.rows, 'row')}"
    print_result(result, line, as_json=as_json)


@click.command()
@index_argument
@json_option
def compact(index: IndexLocation, as_json: bool) -> None:
    """Rewrite INDEX without its deleted rows, or join its small shards.

    The remaining rows get new ids. If no row is deleted, only the rows of shards that
    are not full are joined and get new ids. A Parquet file maps old row ids to new row
    ids; TokenStore.translate reads this file. Tokens are copied, so the model is not
    needed. INDEX can be searched during the compaction. The disk needs room for a
    second copy of these rows. To remove the old files afterwards, run 'edje-index gc
    --keep 1'.

    Run the same command again to resume a stopped compaction.

    \b
    Example:
      edje-index compact photos.edje
      edje-index gc photos.edje --keep 1
    """
    from pipelines.jobs.copy import compact_index

    result = run_job(compact_index, index, resume=index)
    lines = [f"{index}: no row is deleted, and no shards can be joined; nothing to do"]
    if result.row_map is not None:
        shards = counted(result.shards, "shard")
        copied = (
            f"{index}: {counted(result.rows, 'row')} in {shards}, copied to row ids"
            f" from {result.first_row:,}"
        )
        lines = [f"{copied}, {result.removed:,} removed, {result.seconds:.1f} s"]
        lines.append(f"old and new row ids: {result.row_map}")
    print_result(result, *lines, as_json=as_json)


@click.command()
@click.argument(
    "indexes", nargs=-1, required=True, type=LOCAL_INDEX, metavar="INDEX..."
)
@click.option(
    "--out", required=True, type=LOCAL_INDEX, help="New directory for the merged index."
)
@json_option
def merge(indexes: tuple[Path, ...], out: Path, as_json: bool) -> None:
    """Copy several indexes of the same model into one new index.

    All indexes must have the same shard size and precisions. Tokens and embeddings are
    copied, so the model is not needed. Rows of the first INDEX keep their ids. A
    constant is added to the row ids of each other INDEX; the command prints this
    constant. If several indexes contain the same image, the new index keeps the row
    from the first INDEX and marks the other rows as deleted. The given indexes do not
    change.

    Run the same command again to resume a stopped merge.

    \b
    Example:
      edje-index merge 2024.edje 2025.edje --out photos.edje
    """
    from pipelines.jobs.merge import merge_indexes

    result = run_job(merge_indexes, indexes, out, resume=out)
    lines = [
        f"{each['index']}: {counted(each['rows'], 'row')}, {each['duplicates']:,}"
        f" duplicates; row ids plus {each['offset']:,}"
        for each in result.inputs
    ]
    merged = (
        f"{out}: {counted(result.rows, 'row')} in {counted(result.shards, 'shard')},"
        f" {result.seconds:.1f} s"
    )
    print_result(result, *lines, merged, as_json=as_json)


@click.command()
@index_argument
@click.argument("out", type=location)
@click.option(
    "--replace", is_flag=True, help="Before the copy, remove the index at the URL OUT."
)
@click.option(
    "--rows",
    type=int,
    multiple=True,
    metavar="N",
    help="Copy only this row; repeatable.",
)
@where_option
@quiet_option
@json_option
def copy(
    index: IndexLocation, out: IndexLocation, quiet: bool, as_json: bool, **options: Any
) -> None:
    """Copy INDEX to OUT, and check every file with its checksum.

    INDEX and OUT are directories or URLs. A URL begins with s3://, gs://, az:// or
    hf://datasets/. INDEX can also be an http:// or https:// URL. Credentials come from
    the environment, for example AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.
    AWS_ENDPOINT_URL selects a server that is compatible with S3.

    hf://datasets/OWNER/NAME is a repository of the Hugging Face Hub. The copy creates
    it, private, with a card that describes the index. A model bundle is copied to and
    from hf://OWNER/NAME in the same way. The token is HF_TOKEN, or that of 'hf auth
    login'.

    The current snapshot is copied. Blocks are not decoded. If the file system can share
    disk blocks, a copy to a directory takes no disk space until INDEX or OUT changes.

    If OUT is a URL that holds an earlier snapshot of INDEX, only the missing files are
    copied. Readers see the new snapshot once the copy is complete. If two commands copy
    to the same URL, one command succeeds and the other fails.

    With --rows or --where, only the selected rows are copied, to a directory. They get
    the row ids from 0.

    Run the same command again to resume a stopped copy.

    \b
    Examples:
      edje-index copy photos.edje s3://my-bucket/photos.edje
      edje-index copy s3://my-bucket/photos.edje restored.edje
      edje-index copy photos.edje free.edje --where "licence = 'cc0'"
      edje-index copy photos.edje hf://datasets/me/photos
      edje-index copy hf://me/model model
    """
    from edje_index.bundles.info import INFO_FILE
    from pipelines.jobs.copy import copy_index
    from pipelines.jobs.hub import copy_model

    if hub_kind(index) == "models" or (
        isinstance(index, Path) and (index / INFO_FILE).exists()
    ):
        if any(value not in (None, False, ()) for value in options.values()):
            raise UsageError(
                "a model is copied as a whole: use no option that selects a part of an"
                " index"
            )
        bundle = run_job(copy_model, index, out, resume=True, quiet=quiet)
        report(bundle, as_json=as_json)
        return

    result = run_job(copy_index, index, out, resume=out, quiet=quiet, **options)
    line = (
        f"{out}: snapshot {result.snapshot} in {counted(result.files, 'file')}; copied"
        f" {counted(result.copied_files, 'file')}, {human_bytes(result.copied_bytes)},"
        f" {result.seconds:.1f} s"
    )
    print_result(result, line, as_json=as_json)


@click.command()
@index_argument
@model_option
@json_option
def repair(index: IndexLocation, model: Path | None, as_json: bool) -> int:
    """Rebuild damaged or missing files of INDEX from its other files, or from the
    images.

    Damaged tokens are converted again from another precision, and stored only if they
    have the original checksums. Damaged checksums are computed again from the tokens. A
    damaged nearest-neighbour index is built again from the embeddings.

    Tokens that no other precision determines are encoded again from the images, with
    the model. An image whose content has changed is refused and named. The exit code is
    1 if problems remain.

    \b
    Example:
      edje-index repair photos.edje
    """
    from pipelines.jobs.repair import repair_index

    result = run_job(repair_index, index, model=model)
    for problem in result.left:
        note(f"{problem.path}: {problem.message}")
    lines = [f"{file.path}: repaired from {file.source}" for file in result.repaired]
    left = counted(len(result.left), "problem") if result.left else "no problem"
    total = f"{index}: {counted(len(result.repaired), 'file')} repaired, {left} left"
    print_result(result, *lines, total, as_json=as_json)
    return 1 if result.left else 0


@click.command()
@index_argument
@json_option
def history(index: IndexLocation, as_json: bool) -> None:
    """List the snapshots of INDEX, oldest first. The last snapshot is the current one.

    INDEX is a directory, or a URL that begins with s3://, gs:// or az://.

    Every change of a finished index makes a new snapshot. The newest 32 to 64
    remain; changes remove the oldest, and 'edje-index gc' removes more.

    \b
    Example:
      edje-index history photos.edje
    """
    from pipelines.jobs.snapshots import history as read_history

    snapshots = read_history(index)
    lines = []
    for snapshot in snapshots:
        line = (
            f"{snapshot.snapshot:>4}  {snapshot.kind:<9} {snapshot.created or '':<26}"
            f" {counted(snapshot.rows, 'row')}, {snapshot.deleted:,} deleted"
        )
        details = ", ".join(
            f"{name} {value}"
            for name, value in snapshot.change.items()
            if not isinstance(value, list)
        )
        if details:
            line += f" ({details})"
        lines.append(line)
    value = {"index": str(index), "snapshots": list(map(asdict, snapshots))}
    print_result(value, *lines, as_json=as_json)


@click.command()
@index_argument
@click.argument("snapshot", type=click.IntRange(min=0))
@json_option
def rollback(index: IndexLocation, snapshot: int, as_json: bool) -> None:
    """Restore the contents that INDEX had at SNAPSHOT, a number that 'edje-index
    history' lists.

    All files of SNAPSHOT are read and compared with their checksums first. A rollback
    makes a new snapshot. To undo it, roll back to the snapshot before it.

    \b
    Example:
      edje-index rollback photos.edje 3
    """
    from pipelines.jobs.snapshots import roll_back

    result = roll_back(index, snapshot)
    rows = f"{counted(result.rows, 'row')}, {result.deleted:,} deleted"
    line = (
        f"{index}: snapshot {result.snapshot} has the contents of snapshot {snapshot}:"
        f" {rows}"
    )
    print_result(result, line, as_json=as_json)


@click.command()
@index_argument
@click.option(
    "--keep",
    type=POSITIVE,
    help=(
        "Number of snapshots to keep, including the current one.  [default: all"
        " snapshots]"
    ),
)
@json_option
def gc(index: IndexLocation, keep: int | None, as_json: bool) -> None:
    """Remove the files of INDEX that no snapshot needs. With --keep, also remove old
    snapshots.

    The command also discards an interrupted change, such as an append or a conversion.
    That change cannot be resumed afterwards.

    \b
    Examples:
      edje-index gc photos.edje
      edje-index gc photos.edje --keep 1
    """
    from pipelines.jobs.snapshots import remove_snapshots

    with running_job() as (on_event, _):
        removal = remove_snapshots(index, keep, on_event)
    files = f"{counted(removal.files, 'file')} of {human_bytes(removal.bytes)}"
    line = f"{index}: {counted(len(removal.snapshots), 'snapshot')} and {files} removed"
    print_result(removal, line, as_json=as_json)
