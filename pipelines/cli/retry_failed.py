"""The command `edje-index retry-failed`."""

from __future__ import annotations

import functools
from dataclasses import asdict
from typing import Any

import click

from pipelines.cli.new_rows import new_rows_options, note_failures, run_job
from pipelines.cli.options import location
from pipelines.cli.output import print_json, print_line
from pipelines.planning.config import AppendConfig
from pipelines.progress.wording import counted
from storage_formats.format.object_store import IndexLocation


@click.command("retry-failed")
@click.argument("root", type=location, metavar="INDEX")
@new_rows_options
def retry_failed(root: IndexLocation, as_json: bool, quiet: bool, **options: Any) -> None:
    """Try to index the failed inputs of INDEX again.

    'edje-index failures' lists these inputs. The old failed rows are deleted, and each input gets a new row. Inputs
    that fail again are listed with the new reason. If every input fails for the same reason as before, INDEX does not
    change.

    INDEX is a directory, or a URL that begins with s3://, gs:// or az://.

    Run the same command again to resume a stopped retry.

    \b
    Example:
      edje-index retry-failed photos.edje
    """
    from pipelines.jobs.retry_failed import run_retry_failed

    make_config = functools.partial(AppendConfig, sources=(), **options)
    result = run_job(run_retry_failed, make_config, root, quiet=quiet)
    if as_json:
        print_json(asdict(result))
    else:
        print_line(
            f"{root}: {counted(result.retried, 'failed row')} tried again: {counted(result.inputs, 'input')} = "
            f"{result.indexed:,} indexed + {result.duplicates:,} duplicates + {result.failed:,} failed; "
            f"{result.seconds:.1f} s"
        )
    note_failures(result, " again")
