"""The command `edje-index append`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from pipelines.cli.output import json_option, note, print_json, print_line, quiet_option, running_job
from pipelines.planning.config import AppendConfig
from pipelines.progress.wording import counted
from storage_formats.format.layout import Layout

_PATH = click.Path(path_type=Path)


@click.command()
@click.argument("root", type=_PATH, metavar="INDEX")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option("--model", type=_PATH, help="Directory of the model bundle.  [default: the bundle that built INDEX]")
@click.option(
    "--engine", type=click.Choice(["ray", "inline"]), default="ray", show_default=True, help="Execution engine."
)
@click.option("--workers", type=click.IntRange(min=1), help="Worker processes.  [default: as for 'build']")
@click.option("--address", metavar="HOST:PORT", help="Ray cluster to join.  [default: start Ray on this machine]")
@click.option(
    "--column", metavar="NAME", help="Column of paths in a list file.  [default: path, image, file, uri, ...]"
)
@click.option(
    "--max-failed",
    type=click.FloatRange(0, 1),
    metavar="SHARE",
    help="Stop if a larger share of the new inputs fails.  [default: 0.01, but 20 inputs may always fail]",
)
@quiet_option
@json_option
def append(as_json: bool, quiet: bool, **options: Any) -> None:
    """Add the images of every SOURCE to INDEX.

    'build --help' describes SOURCE. The settings of INDEX apply to the new rows. Images whose content INDEX already
    holds are skipped and counted as duplicates. Existing rows keep their ids, and existing files do not change. New
    rows start in a new shard. INDEX can be searched during the append. Programs that have INDEX open see the new rows
    after they reopen it.

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
