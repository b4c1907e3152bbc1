"""The command `edje-index append`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from pipelines.cli.options import (
    PATH,
    POSITIVE,
    address_option,
    column_option,
    engine_option,
    json_option,
    max_failed_option,
    model_option,
    quiet_option,
)
from pipelines.cli.output import note, print_json, print_line, running_job
from pipelines.planning.config import AppendConfig
from pipelines.progress.wording import counted
from storage_formats.format.layout import Layout


@click.command()
@click.argument("root", type=PATH, metavar="INDEX")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@model_option
@engine_option("ray")
@click.option("--workers", type=POSITIVE, help="Number of worker processes.  [default: see 'build --help']")
@address_option
@column_option
@max_failed_option
@quiet_option
@json_option
def append(as_json: bool, quiet: bool, **options: Any) -> None:
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
    with running_job(quiet=quiet, can_resume=Layout(config.root).append_plan.exists) as (on_event, should_stop):
        result = run_append(config, on_event, should_stop)
    if as_json:
        print_json(asdict(result))
    else:
        at = "" if result.first_row is None else f" from row {result.first_row:,} on"
        print_line(
            f"{config.root}: {counted(result.inputs, 'input')} = {result.indexed:,} indexed{at} + "
            f"{result.duplicates:,} duplicates + {result.failed:,} failed, in {counted(result.shards, 'new shard')}; "
            f"{result.seconds:.1f} s"
        )
    if result.failed:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in result.failed_by_reason.items())
        note(f"{counted(result.failed, 'input')} failed: {reasons}; 'edje-index failures' lists them")
