"""The command `edje-index update`."""

from __future__ import annotations

import functools
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from pipelines.cli.new_rows import new_rows_options, note_failures, run_job
from pipelines.cli.options import column_option, location, max_failed_option
from pipelines.cli.output import print_json, print_line
from pipelines.planning.config import UpdateConfig
from pipelines.progress.wording import counted, duration
from storage_formats.errors import EdjeError
from storage_formats.format.object_store import IndexLocation

if TYPE_CHECKING:
    from pipelines.jobs.update import UpdateResult


@click.command()
@click.argument("root", type=location, metavar="INDEX")
@click.argument("sources", nargs=-1, metavar="[SOURCE...]")
@click.option("--dry-run", is_flag=True, help="Show the changes without applying them.")
@click.option(
    "--max-vanished",
    type=click.FloatRange(0, 1),
    metavar="SHARE",
    default=0.5,
    show_default=True,
    help="Stop if the files of more than this share of the rows are missing.",
)
@column_option
@max_failed_option
@new_rows_options
def update(root: IndexLocation, as_json: bool, quiet: bool, **options: Any) -> None:
    """Add, replace and delete rows so that INDEX matches its sources.

    Without SOURCE, the command uses the sources recorded in INDEX. If you give SOURCE, name all sources of INDEX,
    because the rows of other sources are deleted. 'edje-index build --help' describes SOURCE.

    New and changed files get new rows. The old rows of changed files and the rows of missing files are deleted.
    Unchanged files are read but not encoded again. A program that has INDEX open must reopen it to see the changes.

    INDEX is a directory, or a URL that begins with s3://, gs:// or az://.

    If a source cannot be read, or too many files are missing, the command stops without changing INDEX.

    \b
    Examples:
      edje-index update photos.edje --dry-run
      edje-index update photos.edje
    """
    from pipelines.jobs.update import run_update
    from pipelines.planning.update import VanishedInputsError

    make_config = functools.partial(UpdateConfig, **{**options, "sources": tuple(options["sources"])})
    read_only = options["dry_run"]
    try:
        result = run_job(run_update, make_config, root, quiet=quiet, read_only=read_only)
    except VanishedInputsError as error:
        advice = "check the sources, or raise --max-vanished to delete these rows. The index is unchanged"
        raise EdjeError(f"{error.problem}; {advice}") from error
    if as_json:
        print_json(asdict(result))
    else:
        print_line(f"{root}: {_summary(result)}")
    if not result.dry_run:
        note_failures(result)


def _summary(result: UpdateResult) -> str:
    inputs = (
        f"{counted(result.inputs, 'input')} = {result.unchanged:,} unchanged + {result.new:,} new + "
        f"{result.changed:,} changed + {result.duplicates:,} duplicates + {result.failed:,} failed; "
        f"{result.vanished:,} vanished"
    )
    if not result.dry_run:
        return f"{inputs}; {counted(result.deleted, 'row')} deleted; {result.seconds:.1f} s"
    cost = "" if result.encode_seconds is None else f" (about {duration(result.encode_seconds)} with one worker)"
    return f"{inputs}; would add {counted(result.rows, 'row')}{cost} and delete {counted(result.deleted, 'row')}"
