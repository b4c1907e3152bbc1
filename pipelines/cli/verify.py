"""The command `edje-index verify`."""

from __future__ import annotations

from dataclasses import asdict

import click

from pipelines.cli.options import json_option, location, quiet_option
from pipelines.cli.output import note, print_json, print_line, running_job
from pipelines.progress.events import Progress
from pipelines.progress.wording import counted
from storage_formats.remote.urls import IndexLocation


@click.command()
@click.argument("index", type=location)
@click.option(
    "--sample",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SHARE|N",
    help=(
        "Check only a random sample of the shards: a share below 1, or a number of"
        " shards.  [default: all shards]"
    ),
)
@quiet_option
@json_option
def verify(
    index: IndexLocation, sample: float | None, quiet: bool, as_json: bool
) -> int:
    """Check every file of INDEX: lengths, checksums, rows and counts.

    INDEX is a directory, or the URL of an index on an object store. The command
    downloads the objects of up to four shards at a time, and then the other files. It
    keeps none of them. All kept snapshots are checked. The exit code is 1 if the
    command finds a problem.

    With --sample, the command checks the metadata of the index and every file of a
    random sample of the shards. Each run draws a new sample. The files of other shards
    are not checked.

    \b
    Examples:
      edje-index verify photos.edje
      edje-index verify photos.edje --sample 0.01
      edje-index verify photos.edje --sample 100 --json
      edje-index verify s3://my-bucket/photos.edje --sample 20
    """
    from pipelines.progress.events import stop_at_events
    from storage_formats.verify import verify_index

    checked = 0
    with running_job(quiet=quiet) as (on_event, should_stop):
        show = stop_at_events(
            on_event, should_stop, "stopped; not all files were checked"
        )

        def count(done: int, total: int) -> None:
            nonlocal checked
            checked = done
            show(Progress("verifying", done, total))

        problems = verify_index(index, count, sample=sample)
    drawn = (
        {}
        if sample is None
        else {"sample": {"shards": checked, "of": _shards_of(index)}}
    )
    if as_json:
        listed = [asdict(problem) for problem in problems]
        print_json(
            {"index": str(index), "sound": not problems, "problems": listed, **drawn}
        )
    for problem in problems:
        note(f"{problem.path}: {problem.message}")
    if not as_json:
        verdict = counted(len(problems), "problem") if problems else "sound"
        of = (
            f" in a random sample of {checked:,} of"
            f" {counted(_shards_of(index), 'shard')}"
            if drawn
            else ""
        )
        print_line(f"{index}: {verdict}{of}")
    return 1 if problems else 0


def _shards_of(index: IndexLocation) -> int:
    """Return the number of shards of `index` that have files; 0 if `index.json`
    cannot be read.
    """
    from storage_formats.errors import CorruptIndexError
    from storage_formats.format.remote import open_index

    try:
        return open_index(index).manifest.spec.used_shards
    except CorruptIndexError:
        return 0
