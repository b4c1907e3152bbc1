"""The commands for a finished index: they delete and edit rows, copy, compact and
merge indexes, add precisions, check and repair files, and list snapshots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import click

from pipelines.cli.command import Job, command
from pipelines.cli.output import note, print_result, run_job
from pipelines.progress.wording import as_text, counted
from storage_formats.errors import UsageError
from storage_formats.remote.urls import IndexLocation


@command("pipelines.jobs.snapshots:delete_rows", resume=True, rows="--rows")
def delete(job: Job) -> Iterator[str]:
    """Delete rows of INDEX.

    Deleted rows are no longer searched, fetched or evaluated. The other rows keep their
    ids. The data of deleted rows remains on disk, so 'edje-index rollback' can restore
    the rows.

    --erase also removes the data of all deleted rows and of their duplicates. The files
    of shards with such rows are written again, and the other rows keep their ids. All
    earlier snapshots are removed. An erasure cannot be undone. Run the same command
    again to finish an interrupted erasure.

    \b
    Examples:
      edje-index delete photos.edje --rows 17 --rows 201
      edje-index delete photos.edje --where "uri like '%/2019/%.jpg'" --dry-run
      edje-index delete photos.edje --where "licence is null or width < 100" --dry-run
      edje-index delete photos.edje --where "uri like '%/jane-doe/%'" --erase
    """
    result = job.run()
    would = "would be " if result.dry_run else ""
    line = f"{counted(len(result.deleted), 'row')} {would}deleted"
    if result.deleted:
        line += f" ({as_text(result.deleted)})"
    if result.already_deleted:
        line += f", {result.already_deleted:,} were deleted before"
    if job.given["erase"]:
        line += f", {result.erased:,} {would}erased"
    yield f"{job.given['index']}: {line}; {result.left:,} left"


@command(settings="--set", unset="--unset")
def edit(
    index: IndexLocation,
    *,
    rows: Sequence[str],
    settings: Sequence[str] = (),
    unset: Sequence[str] = (),
    new_column: bool = False,
) -> None:
    """Set columns of rows of INDEX, such as captions, titles or licences.

    No image is encoded, and searches and filters see the new values at once. A new
    COLUMN is added. The values stay, also if an update finds others in the sources,
    until --unset takes them back. 'edje-index rollback' undoes the edit.

    \b
    Examples:
      edje-index edit photos.edje --rows 17 --rows 201 --set 'title=The lake'
      edje-index edit photos.edje --rows "uri like '%/2019/%'" --set 'year=2019'
      edje-index edit photos.edje --rows 17 --set 'captions=a dog on a beach'
      edje-index edit photos.edje --rows "licence = 'unknown'" --set 'licence='
      edje-index edit photos.edje --rows 17 --unset title

    Args:
        rows: row id, or a filter such as "uri like '%/2019/%'" that selects rows;
            repeatable.
        settings: new value of a column, as COLUMN=VALUE; repeatable. COLUMN= removes
            the value. A repeated COLUMN gets a list of texts.
        unset: COLUMN whose value becomes again what the sources gave last; repeatable.
        new_column: add COLUMN even if its name is similar to that of a column.
    """
    from pipelines.jobs.snapshots import set_columns
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
    # Each column has one value for all rows: a list if several texts are given, a typed
    # value for a single text, and None, which removes the value, for an empty text.
    columns = {
        name: [texts if len(texts) > 1 else PlainText(texts[0]) if texts[0] else None]
        for name, texts in values.items()
    }
    row_ids = [int(row) for row in rows if row.strip().isdecimal()]
    filters = [f"({row})" for row in rows if not row.strip().isdecimal()]
    result = run_job(
        set_columns,
        index,
        row_ids,
        columns,
        resume=True,
        where=" or ".join(filters) or None,
        unset=unset,
        similar_names=new_column,
    )
    print_result(result)


@command("pipelines.jobs.copy:compact_index", resume=True, out="--out")
def compact(job: Job) -> None:
    """Copy INDEX without its deleted rows to a new index.

    The rows get new ids, which count from 0, and shards that are not full are joined.
    INDEX does not change. Tokens are copied, so the model is not needed. The disk needs
    room for the new index.

    Run the same command again to resume a stopped compaction.

    \b
    Examples:
      edje-index compact photos.edje
      edje-index compact photos.edje --out dense.edje
    """


@command("pipelines.jobs.copy:merge_indexes", resume=True, out="--out")
def merge(job: Job) -> None:
    """Copy several indexes of the same model into one new index.

    All indexes must have the same precisions. Tokens and embeddings are copied, so the
    model is not needed. Rows that are not deleted get new ids, which count from 0. The
    rows of every further INDEX begin with a new shard. If several indexes contain the
    same image, the new index has the row from the first of them only. The given indexes
    do not change.

    Run the same command again to resume a stopped merge.

    \b
    Example:
      edje-index merge 2024.edje 2025.edje --out photos.edje
    """


@command(
    "pipelines.jobs.copy:copy_index",
    resume=True,
    rows="--rows",
    snapshot=None,
)
def copy(job: Job) -> None:
    """Copy INDEX to OUT, and check every file with its checksum.

    INDEX and OUT are directories or URLs. A URL begins with s3://, gs:// or az://.
    INDEX can also be an https:// URL, or hf://datasets/OWNER/NAME, a repository of the
    Hugging Face Hub. Credentials come from the environment, for example
    AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. AWS_ENDPOINT_URL selects a server that
    is compatible with S3.

    To share an index on the Hub, run 'hf upload OWNER/NAME INDEX --repo-type dataset'.

    Only the current snapshot is copied. Blocks are not decoded. If the file system can
    share disk blocks, a copy to a directory takes no disk space until INDEX or OUT
    changes.

    If OUT is a URL that holds an earlier snapshot of INDEX, only the missing files are
    copied. Readers see the new snapshot once the copy is complete. If two commands copy
    to the same URL, one command succeeds and the other fails.

    With --rows or --where, OUT is a directory, and only the selected rows are copied.
    Their new row ids count from 0.

    Run the same command again to resume a stopped copy.

    \b
    Examples:
      edje-index copy photos.edje s3://my-bucket/photos.edje
      edje-index copy s3://my-bucket/photos.edje restored.edje
      edje-index copy photos.edje free.edje --where "licence = 'cc0'"
      edje-index copy hf://datasets/me/photos photos.edje
    """


@command("pipelines.jobs.repair:repair_index")
def repair(job: Job) -> None:
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
    job.exit_code = int(bool(job.run().left))


@command("pipelines.jobs.snapshots:history")
def history(job: Job) -> None:
    """List the snapshots of INDEX, oldest first. The last snapshot is the current one.

    INDEX is a directory, or a URL that begins with s3://, gs:// or az://.

    Every change of the rows makes a new snapshot. 'quantize' and 'ann build' change the
    current snapshot only. INDEX keeps at most 64 snapshots. A change that would exceed
    this number removes the oldest, so that 32 are left. 'edje-index gc' removes more.

    \b
    Example:
      edje-index history photos.edje
    """
    job.result = {**job.given, "snapshots": [*map(asdict, job.run())]}


@command("pipelines.jobs.snapshots:roll_back")
def rollback(job: Job) -> None:
    """Restore the contents that INDEX had at SNAPSHOT, a number that 'edje-index
    history' lists.

    All files of SNAPSHOT are read and compared with their checksums first. A rollback
    makes a new snapshot. To undo it, roll back to the snapshot before it.

    \b
    Example:
      edje-index rollback photos.edje 3
    """


@command("pipelines.jobs.snapshots:remove_snapshots", keep="--keep")
def gc(job: Job) -> None:
    """Remove the files of INDEX that no snapshot needs. With --keep, also remove old
    snapshots.

    The command also discards an interrupted change, such as an append or a conversion.
    That change cannot be resumed afterwards.

    \b
    Examples:
      edje-index gc photos.edje
      edje-index gc photos.edje --keep 1
    """


@command("storage_formats.upgrade:upgrade_index")
def upgrade(job: Job) -> Iterator[str]:
    """Upgrade INDEX, which an earlier version of edje-index wrote, so that this version
    can read it.

    The tables of rows are written anew. Tokens and embeddings stay as they are, and
    earlier snapshots are kept. An interrupted change is discarded. Run the same command
    again to finish an interrupted upgrade.

    \b
    Example:
      edje-index upgrade photos.edje
    """
    upgraded = job.run()
    job.result = {"index": str(job.given["index"]), "upgraded": upgraded}
    yield f"{job.given['index']}: {counted(upgraded, 'snapshot')} upgraded"


@command()
def verify(index: IndexLocation) -> int:
    """Check every file of INDEX: lengths, checksums, rows and counts.

    INDEX is a directory, or the URL of an index on an object store. The command
    downloads the objects of up to four shards at a time, and then the other files. It
    keeps none of them. All kept snapshots are checked. The exit code is 1 if the
    command finds a problem.

    \b
    Examples:
      edje-index verify photos.edje
      edje-index verify photos.edje --json
      edje-index verify s3://my-bucket/photos.edje
    """
    from storage_formats.verify import verify_index

    problems = run_job(verify_index, index)
    listed = [asdict(problem) for problem in problems]
    value = {"index": str(index), "sound": not problems, "problems": listed}
    lines = [f"{problem.path}: {problem.message}" for problem in problems]
    verdict = counted(len(problems), "problem") if problems else "sound"
    print_result(value, [*lines, f"{index}: {verdict}"])
    return 1 if problems else 0


@click.group()
def ann() -> None:
    """Build the nearest-neighbour index."""


@command(name="build")
def build_ann(index: IndexLocation, *, ann: str = "auto", recall: float = 0.95) -> None:
    """Build the nearest-neighbour index of INDEX from the stored embeddings, and
    replace the existing one.

    'edje-index info' describes the nearest-neighbour index, and says whether to build
    it again.

    With --ann auto, a search of up to 100,000 rows compares the query with every
    embedding. For more rows, the embeddings are divided into inverted lists and
    compressed to short codes. A search then reads only some lists. The number of these
    lists is chosen to reach --recall. The search then compares the query with the
    stored embeddings of the best rows, so the scores of hits are exact.

    \b
    Examples:
      edje-index ann build photos.edje
      edje-index ann build photos.edje --ann IVF4096,PQ96x4fs --recall 0.98

    Args:
        ann: kind of nearest-neighbour index: auto, or a FAISS factory string such as
            IVF1000,Flat or IVF1000,PQ192x4fs.
        recall: target recall: share of the 100 nearest rows that a search finds.
    """
    from edje_index.indexing.faiss_build import AnnRequest
    from pipelines.jobs.quantize import add_ann
    from storage_formats.cgroups import available_memory

    request = AnnRequest(ann, recall, available_memory())
    built = run_job(add_ann, index, request).ann
    print_result({"index": str(index), **built})
    measured = built.get("recall")
    if measured is not None and measured["value"] < recall:
        note(
            f"the recall is below {recall}; for a higher recall, give --ann a"
            " factory string with longer codes"
        )


ann.add_command(build_ann)


@command(
    "pipelines.jobs.quantize:quantize_index",
    resume=True,
    to="--to",
    source="--from",
)
def quantize(job: Job) -> None:
    """Add or remove precisions of the tokens in INDEX.

    Precisions are for example fp8, nvfp4, gauss2 (2 bits) and sign1 (1 bit); the error
    for an unknown name lists all. INDEX can be searched during the conversion. Run the
    same command again to resume a stopped conversion.

    'edje-index eval INDEX --precision NAME' measures what a precision costs in recall,
    before it is stored.

    \b
    Examples:
      edje-index quantize photos.edje --to fp8 --to nvfp4
      edje-index quantize photos.edje --to fp8 --drop bf16
    """
