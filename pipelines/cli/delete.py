"""The command `edje-index delete`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from pipelines.cli.options import PATH, json_option, where_option
from pipelines.cli.output import print_json, print_line
from pipelines.progress.wording import counted

_SHOWN = 10


@click.command()
@click.argument("index", type=PATH)
@click.option("--rows", "rows", type=int, multiple=True, metavar="N", help="Row id to delete; repeatable.")
@click.option("--uri", metavar="GLOB", help="Delete the rows whose URI matches this pattern; * also matches slashes.")
@where_option
@click.option("--dry-run", is_flag=True, help="Show what would be deleted and change nothing.")
@json_option
def delete(
    index: Path, rows: tuple[int, ...], uri: str | None, where: str | None, dry_run: bool, as_json: bool
) -> None:
    """Delete rows of INDEX.

    Deleted rows are no longer searched, fetched or evaluated. The other rows keep their ids. The data of deleted rows
    stays on disk, so that 'rollback' can bring the rows back.

    \b
    Examples:
      edje-index delete photos.edje --rows 17 --rows 201
      edje-index delete photos.edje --uri '*/2019/*.jpg' --dry-run
      edje-index delete photos.edje --where "licence is null or width < 100" --dry-run
    """
    from pipelines.jobs.snapshots import run_delete

    result = run_delete(index, rows, uri, where=where, dry_run=dry_run)
    if as_json:
        print_json(asdict(result))
        return
    named = ", ".join(map(str, result.deleted[:_SHOWN]))
    more = f" and {len(result.deleted) - _SHOWN:,} more" if len(result.deleted) > _SHOWN else ""
    what = f" ({named}{more})" if named else ""
    verb = "would be deleted" if dry_run else "deleted"
    before = f", {result.already_deleted:,} were deleted before" if result.already_deleted else ""
    print_line(f"{index}: {counted(len(result.deleted), 'row')} {verb}{what}{before}; {result.left:,} left")
