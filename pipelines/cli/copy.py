"""The command `edje-index copy`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from pipelines.cli.options import json_option, location, log_option, quiet_option
from pipelines.cli.output import print_json, print_line, running_job
from pipelines.progress.wording import counted, human_bytes


@click.command()
@click.argument("index", type=location)
@click.argument("out", type=location)
@click.option("--snapshot", type=click.IntRange(min=0), help="Snapshot to copy.  [default: the current snapshot]")
@click.option("--replace", is_flag=True, help="Before the copy, remove the index at the URL OUT.")
@log_option
@quiet_option
@json_option
def copy(
    index: Path | str,
    out: Path | str,
    snapshot: int | None,
    replace: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Copy INDEX to OUT, and check every file with its checksum.

    INDEX and OUT are directories or URLs. A URL begins with s3://, gs:// or az://. INDEX can also be an http:// or
    https:// URL. Credentials come from the environment, for example AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.
    AWS_ENDPOINT_URL selects a server that is compatible with S3.

    One snapshot is copied. Blocks are not decoded. If the file system can share disk blocks, a copy to a directory
    takes no disk space until INDEX or OUT changes.

    If OUT is a URL that holds an earlier snapshot of INDEX, only the missing files are copied. Readers see the new
    snapshot once the copy is complete. If two commands copy to the same URL, one command succeeds and the other fails.

    Run the same command again to resume a stopped copy.

    \b
    Examples:
      edje-index copy photos.edje s3://my-bucket/photos.edje
      edje-index copy s3://my-bucket/photos.edje restored.edje
    """
    from pipelines.jobs.copy import run_copy

    with running_job(quiet=quiet) as (on_event, should_stop):
        result = run_copy(index, out, on_event, should_stop, snapshot=snapshot, replace=replace)
    if as_json:
        print_json(asdict(result))
        return
    print_line(
        f"{out}: snapshot {result.snapshot} in {counted(result.files, 'file')}; copied "
        f"{counted(result.copied_files, 'file')}, {human_bytes(result.copied_bytes)}, {result.seconds:.1f} s"
    )
