"""The command `edje-index retry-failed`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from pipelines.cli.options import (
    PATH,
    POSITIVE,
    address_option,
    engine_option,
    json_option,
    model_option,
    quiet_option,
)
from pipelines.cli.output import note, print_json, print_line, running_job
from pipelines.planning.config import AppendConfig
from pipelines.progress.wording import counted
from storage_formats.format.layout import Layout


@click.command("retry-failed")
@click.argument("root", type=PATH, metavar="INDEX")
@model_option
@engine_option("ray")
@click.option("--workers", type=POSITIVE, help="Number of worker processes.  [default: see 'build --help']")
@address_option
@quiet_option
@json_option
def retry_failed(as_json: bool, quiet: bool, **options: Any) -> None:
    """Try to index the failed inputs of INDEX again.

    'edje-index failures' lists these inputs. The old failed rows are deleted, and each input gets a new row. Inputs
    that fail again are listed with the new reason. If every input fails for the same reason as before, INDEX does not
    change.

    Run the same command again to resume a stopped retry.

    \b
    Example:
      edje-index retry-failed photos.edje
    """
    from pipelines.jobs.retry_failed import run_retry_failed

    config = AppendConfig(sources=(), **options)
    with running_job(quiet=quiet, can_resume=Layout(config.root).append_plan.exists) as (on_event, should_stop):
        result = run_retry_failed(config, on_event, should_stop)
    if as_json:
        print_json(asdict(result))
    else:
        print_line(
            f"{config.root}: {counted(result.retried, 'failed row')} tried again: {counted(result.inputs, 'input')} = "
            f"{result.indexed:,} indexed + {result.duplicates:,} duplicates + {result.failed:,} failed; "
            f"{result.seconds:.1f} s"
        )
    if result.failed:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in result.failed_by_reason.items())
        note(f"{counted(result.failed, 'input')} failed again: {reasons}")
