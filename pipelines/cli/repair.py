"""The command `edje-index repair`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from pipelines.cli.options import json_option, location, log_option, model_option, quiet_option
from pipelines.cli.output import note, print_json, print_line, running_job
from pipelines.progress.wording import counted
from storage_formats.format.object_store import IndexLocation


@click.command()
@click.argument("index", type=location)
@click.option("--dry-run", is_flag=True, help="Show what would be repaired and change nothing.")
@model_option
@log_option
@quiet_option
@json_option
def repair(
    index: IndexLocation,
    dry_run: bool,
    model: Path | None,
    quiet: bool,
    as_json: bool,
) -> int:
    """Rebuild damaged or missing files of INDEX from its other files, or from the images.

    INDEX is a directory, or a URL that begins with s3://, gs:// or az://.

    Damaged tokens are converted again from another precision, and stored only if they have the original checksums.
    Damaged checksums are computed again from the tokens. A damaged nearest-neighbour index is built again from the
    embeddings.

    Tokens that no other precision determines are encoded again from the images, with the model. An image whose content
    has changed is refused and named. The exit code is 1 if problems remain.

    \b
    Examples:
      edje-index repair photos.edje --dry-run
      edje-index repair photos.edje
    """
    from pipelines.jobs.repair import run_repair

    job = running_job(quiet=quiet, can_resume=lambda: False)
    with job as (on_event, should_stop):
        result = run_repair(index, on_event, should_stop, dry_run=dry_run, model=model)
    if as_json:
        print_json(asdict(result))
    for problem in result.left:
        note(f"{problem.path}: {problem.message}")
    if not as_json:
        verb = "would be repaired from" if dry_run else "repaired from"
        for file in result.repaired:
            print_line(f"{file.path}: {verb} {file.source}")
        left = f"{counted(len(result.left), 'problem')} left" if result.left else "no problem left"
        print_line(f"{index}: {counted(len(result.repaired), 'file')} {verb.removesuffix(' from')}, {left}")
    return 1 if result.left else 0
