"""The command `edje-index append`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from pipelines.cli.dry_run import show_dry_run
from pipelines.cli.new_rows import new_rows_options, note_failures, run_job
from pipelines.cli.options import column_option, dry_run_option, location, max_failed_option
from pipelines.cli.output import print_json, print_line
from pipelines.planning.config import AppendConfig
from pipelines.progress.events import OnEvent, ShouldStop
from pipelines.progress.wording import counted
from storage_formats.format.object_store import IndexLocation


@click.command()
@click.argument("root", type=location, metavar="INDEX")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@column_option
@max_failed_option
@dry_run_option
@new_rows_options
def append(
    root: IndexLocation,
    as_json: bool,
    quiet: bool,
    dry_run: bool,
    **options: Any,
) -> None:
    """Add the images of every SOURCE to INDEX.

    'edje-index build --help' describes SOURCE. New rows are encoded with the settings of INDEX. Images that INDEX
    already contains are skipped and reported as duplicates. Existing rows keep their ids. INDEX can be searched during
    the append.

    INDEX is a directory, or a URL that begins with s3://, gs:// or az://.

    Run the same command again to resume a stopped append.

    \b
    Examples:
      edje-index append photos.edje photos/2026
      edje-index append cc3m.edje 'cc3m/{00332..00340}.tar' --engine inline
    """
    from pipelines.jobs.append import run_append

    def make_config(directory: Path) -> AppendConfig:
        return AppendConfig(directory, **{**options, "sources": tuple(options["sources"])})

    if dry_run:
        from pipelines.jobs.dry_run import DryRun, try_append
        from storage_formats.writing.working_copy import working_copy

        def trial(on_event: OnEvent, should_stop: ShouldStop) -> DryRun:
            with working_copy(root, read_only=True) as copy:
                return try_append(make_config(copy.root), on_event, should_stop)

        show_dry_run(trial, root, quiet=quiet, as_json=as_json)
        return
    result = run_job(run_append, make_config, root, quiet=quiet)
    if as_json:
        print_json(asdict(result))
    else:
        at = "" if result.first_row is None else f" (row ids from {result.first_row:,})"
        print_line(
            f"{root}: {counted(result.inputs, 'input')} = {result.indexed:,} indexed{at} + "
            f"{result.duplicates:,} duplicates + {result.failed:,} failed, in {counted(result.shards, 'new shard')}; "
            f"{result.seconds:.1f} s"
        )
    note_failures(result)
