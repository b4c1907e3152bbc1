"""The command `edje-index verify`."""

from __future__ import annotations

import contextlib
from dataclasses import asdict

import click

from pipelines.cli.options import index_argument, json_option, quiet_option
from pipelines.cli.output import note, print_result, running_job
from pipelines.progress.events import Progress
from pipelines.progress.wording import counted
from storage_formats.remote.urls import IndexLocation


def share(sample: str) -> float:
    """Return the number that `sample` means, for example 0.01 for "1%".

    Raises:
        click.BadParameter: `sample` is no number.
    """
    try:
        return float(sample.removesuffix("%")) / (100 if sample.endswith("%") else 1)
    except ValueError:
        raise click.BadParameter(
            f"{sample!r} is neither a share nor a number of shards; give for example 1%"
            " or 100"
        ) from None


@click.command()
@index_argument
@click.option(
    "--sample",
    type=share,
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
    sample: float | None,
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
    from storage_formats.errors import CorruptIndexError
    from storage_formats.format.remote import open_index
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
            sample=sample,
            max_duration=max_duration,
            record=True,
        )
    listed = [asdict(problem) for problem in problems]
    value = {"index": str(index), "sound": not problems, "problems": listed}
    verdict = counted(len(problems), "problem") if problems else "sound"
    if sample is not None or max_duration is not None:
        shards = 0
        with contextlib.suppress(CorruptIndexError):
            shards = open_index(index).manifest.spec.used_shards
        value["sample"] = {"shards": checked, "of": shards}
        verdict += f" in a sample of {checked:,} of {counted(shards, 'shard')}"
    for problem in problems:
        note(f"{problem.path}: {problem.message}")
    print_result(value, f"{index}: {verdict}", as_json=as_json)
    return 1 if problems else 0
