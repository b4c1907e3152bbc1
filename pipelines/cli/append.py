"""The command `edje-index append`."""

from __future__ import annotations

import functools
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from pipelines.cli.dry_run import show_dry_run
from pipelines.cli.new_rows import new_rows_options, note_failures, run_job
from pipelines.cli.options import PATH, column_option, dry_run_option, max_failed_option
from pipelines.cli.output import print_json, print_line
from pipelines.planning.config import AppendConfig
from pipelines.progress.wording import counted


@click.command()
@click.argument("root", type=PATH, metavar="INDEX")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@column_option
@max_failed_option
@dry_run_option
@new_rows_options
def append(as_json: bool, quiet: bool, log: Path | None, dry_run: bool, **options: Any) -> None:
    """Add the images of every SOURCE to INDEX.

    'edje-index build --help' describes SOURCE. New rows are encoded with the settings of INDEX. Images that INDEX
    already contains are skipped and reported as duplicates. Existing rows keep their ids. INDEX can be searched during
    the append.

    Run the same command again to resume a stopped append.

    \b
    Examples:
      edje-index append photos.edje photos/2026
      edje-index append cc3m.edje 'cc3m/{00332..00340}.tar' --engine inline
    """
    from pipelines.jobs.append import run_append

    config = AppendConfig(**{**options, "sources": tuple(options["sources"])})
    if dry_run:
        from pipelines.jobs.dry_run import try_append

        show_dry_run(functools.partial(try_append, config), config.root, quiet=quiet, as_json=as_json)
        return
    result = run_job(run_append, config, quiet=quiet, log=log)
    if as_json:
        print_json(asdict(result))
    else:
        at = "" if result.first_row is None else f" (row ids from {result.first_row:,})"
        print_line(
            f"{config.root}: {counted(result.inputs, 'input')} = {result.indexed:,} indexed{at} + "
            f"{result.duplicates:,} duplicates + {result.failed:,} failed, in {counted(result.shards, 'new shard')}; "
            f"{result.seconds:.1f} s"
        )
    note_failures(result)
