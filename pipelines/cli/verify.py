"""The command `edje-index verify`."""

from __future__ import annotations

from dataclasses import asdict

import click

from pipelines.cli.options import index_argument, json_option, quiet_option
from pipelines.cli.output import note, print_json, print_line, running_job
from pipelines.progress.events import Progress
from pipelines.progress.wording import counted
from storage_formats.remote.urls import IndexLocation


@click.command()
@index_argument
@click.option(
    "--sample",
    metavar="SHARE|N",
    help=(
        "Check only some of the shards: a share such as 1% or 0.01, or a number of"
        " shards.  [default: all shards]"
    ),
)
@click.option(
    "--max-duration",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Begin with no further shard after this time.  [default: no limit]",
)
@quiet_option
@json_option
def verify(
    index: IndexLocation,
    sample: str | None,
    max_duration: float | None,
    quiet: bool,
    as_json: bool,
) -> int:
    """Check every file of INDEX: lengths, checksums, rows and counts.

    INDEX is a directory, or the URL of an index on an object store. The command
    downloads the objects of up to four shards at a time, and then the other files. It
    keeps none of them. All kept snapshots are checked. The exit code is 1 if the
    command finds a problem.

    With --sample or --max-duration, the command checks the metadata of the index and
    every file of some of the shards. It takes those first that it has not checked for
    the longest time, so that repeated runs cover a large index. The files of other
    shards are not checked. 'edje-index info' says when all shards were last checked.

    \b
    Examples:
      edje-index verify photos.edje
      edje-index verify photos.edje --sample 1%
      edje-index verify photos.edje --max-duration 3600
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

        problems = verify_index(
            index,
            count,
            sample=None if sample is None else _number(sample),
            max_duration=max_duration,
            record=True,
        )
    drawn = {}
    if sample is not None or max_duration is not None:
        drawn = {"sample": {"shards": checked, "of": _shards_of(index)}}
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
            f" in a sample of {checked:,} of {counted(_shards_of(index), 'shard')}"
            if drawn
            else ""
        )
        print_line(f"{index}: {verdict}{of}")
    return 1 if problems else 0


def _number(sample: str) -> float:
    """Return the number that `sample` means, for example 0.01 for "1%"."""
    try:
        return float(sample.removesuffix("%")) / (100 if sample.endswith("%") else 1)
    except ValueError:
        raise click.BadParameter(
            f"{sample!r} is neither a share nor a number of shards; give for example 1%"
            " or 100",
            param_hint="'--sample'",
        ) from None


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
