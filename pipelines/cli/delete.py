"""The command `edje-index delete`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from pipelines.cli.options import json_option, location, where_option
from pipelines.cli.output import print_json, print_line
from pipelines.progress.wording import counted
from storage_formats.format.object_store import IndexLocation

_SHOWN = 10


@click.command()
@click.argument("index", type=location)
@click.option("--rows", "rows", type=int, multiple=True, metavar="N", help="Row id to delete; repeatable.")
@click.option("--uri", metavar="GLOB", help="Delete the rows whose URI matches this pattern. * also matches slashes.")
@where_option
@click.option("--erase", is_flag=True, help="Overwrite the data of the rows, and remove all earlier snapshots.")
@click.option("--dry-run", is_flag=True, help="Show what would be deleted and change nothing.")
@json_option
def delete(index: IndexLocation, erase: bool, as_json: bool, **options: Any) -> None:
    """Delete rows of INDEX.

    Deleted rows are no longer searched, fetched or evaluated. The other rows keep their ids. The data of deleted rows
    remains on disk, so 'edje-index rollback' can restore the rows.

    INDEX is a directory, or a URL that begins with s3://, gs:// or az://.

    --erase also overwrites the data of the selected rows and of their duplicates: tokens, checksums, embeddings, search
    vectors, names and metadata. INDEX must then be a directory. Selected rows that are already deleted are erased too.
    All earlier snapshots are removed, so the erasure cannot be undone. Run the same command again to finish an
    interrupted erasure.

    \b
    Examples:
      edje-index delete photos.edje --rows 17 --rows 201
      edje-index delete photos.edje --uri '*/2019/*.jpg' --dry-run
      edje-index delete photos.edje --where "licence is null or width < 100" --dry-run
      edje-index delete photos.edje --uri '*/jane-doe/*' --erase
    """
    from pipelines.jobs.erase import run_erase
    from pipelines.jobs.snapshots import run_delete

    result = (run_erase if erase else run_delete)(index, **options)
    if as_json:
        print_json(asdict(result))
        return
    named = ", ".join(map(str, result.deleted[:_SHOWN]))
    more = f" and {len(result.deleted) - _SHOWN:,} more" if len(result.deleted) > _SHOWN else ""
    what = f" ({named}{more})" if named else ""
    verb = "would be deleted" if result.dry_run else "deleted"
    before = f", {result.already_deleted:,} were deleted before" if result.already_deleted else ""
    erased = f", {result.erased:,} {'would be erased' if result.dry_run else 'erased'}" if erase else ""
    print_line(f"{index}: {counted(len(result.deleted), 'row')} {verb}{what}{before}{erased}; {result.left:,} left")
