"""The command `edje-index compact`."""

from __future__ import annotations

from dataclasses import asdict

import click

from pipelines.cli.options import json_option, location, log_option, quiet_option
from pipelines.cli.output import print_json, print_line, running_job
from pipelines.progress.wording import counted
from storage_formats.format.object_store import IndexLocation


@click.command()
@click.argument("index", type=location)
@log_option
@quiet_option
@json_option
def compact(index: IndexLocation, quiet: bool, as_json: bool) -> None:
    """Rewrite INDEX without its deleted rows.

    The remaining rows get new ids. A Parquet file maps old row ids to new row ids; TokenStore.translate reads this
    file. Tokens are copied, so the model is not needed. INDEX can be searched during the compaction. The disk needs
    room for a second copy of the remaining rows. To remove the old files afterwards, run 'edje-index gc --keep 1'.

    INDEX is a directory, or a URL that begins with s3://, gs:// or az://.

    Run the same command again to resume a stopped compaction.

    \b
    Example:
      edje-index compact photos.edje
      edje-index gc photos.edje --keep 1
    """
    from pipelines.jobs.compact import run_compact

    with running_job(quiet=quiet) as (on_event, should_stop):
        result = run_compact(index, on_event, should_stop)
    if as_json:
        print_json(asdict(result))
    elif not result.removed:
        print_line(f"{index}: no row is deleted; nothing to do")
    else:
        print_line(
            f"{index}: {counted(result.rows, 'row')} copied to row ids from {result.first_row:,}, {result.removed:,} "
            f"removed, {result.seconds:.1f} s"
        )
        print_line(f"old and new row ids: {result.row_map}")
