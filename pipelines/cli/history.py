"""The commands `edje-index history`, `rollback` and `gc`: the snapshots of an index."""

from __future__ import annotations

from dataclasses import asdict

import click

from pipelines.cli.options import POSITIVE, json_option, location
from pipelines.cli.output import print_json, print_line
from pipelines.progress.wording import counted, human_bytes
from storage_formats.format.object_store import IndexLocation

_INDEX = click.argument("index", type=location)


@click.command()
@_INDEX
@json_option
def history(index: IndexLocation, as_json: bool) -> None:
    """List the snapshots of INDEX, oldest first. The last snapshot is the current one.

    INDEX is a directory, or a URL that begins with s3://, gs:// or az://.

    Every change of a finished index makes a new snapshot. Old snapshots remain until 'edje-index gc' removes them.

    \b
    Example:
      edje-index history photos.edje
    """
    from pipelines.jobs.snapshots import history as read_history

    snapshots = read_history(index)
    if as_json:
        print_json({"index": str(index), "snapshots": [asdict(snapshot) for snapshot in snapshots]})
        return
    for snapshot in snapshots:
        counts = {name: value for name, value in snapshot.change.items() if not isinstance(value, list)}
        details = ", ".join(f"{name} {value}" for name, value in counts.items())
        print_line(
            f"{snapshot.snapshot:>4}  {snapshot.kind:<9} {snapshot.created or '':<26} {counted(snapshot.rows, 'row')}, "
            f"{snapshot.deleted:,} deleted{f' ({details})' if details else ''}"
        )


@click.command()
@_INDEX
@click.argument("snapshot", type=click.IntRange(min=0))
@json_option
def rollback(index: IndexLocation, snapshot: int, as_json: bool) -> None:
    """Restore the contents that INDEX had at SNAPSHOT, a number that 'edje-index history' lists.

    INDEX is a directory, or a URL that begins with s3://, gs:// or az://.

    A rollback makes a new snapshot. To undo a rollback, roll back to the snapshot before it.

    \b
    Example:
      edje-index rollback photos.edje 3
    """
    from pipelines.jobs.snapshots import run_rollback

    result = run_rollback(index, snapshot)
    if as_json:
        print_json(asdict(result))
    else:
        rows = f"{counted(result.rows, 'row')}, {result.deleted:,} deleted"
        print_line(f"{index}: snapshot {result.snapshot} has the contents of snapshot {snapshot}: {rows}")


@click.command()
@_INDEX
@click.option(
    "--keep", type=POSITIVE, help="Number of snapshots to keep, including the current one.  [default: all snapshots]"
)
@json_option
def gc(index: IndexLocation, keep: int | None, as_json: bool) -> None:
    """Remove the files of INDEX that no snapshot needs. With --keep, also remove old snapshots.

    INDEX is a directory, or a URL that begins with s3://, gs:// or az://.

    The command also discards an interrupted change, such as an append or a conversion. That change cannot be resumed
    afterwards.

    \b
    Examples:
      edje-index gc photos.edje
      edje-index gc photos.edje --keep 1
    """
    from pipelines.jobs.snapshots import run_gc

    removal = run_gc(index, keep)
    if as_json:
        print_json(asdict(removal))
    else:
        files = f"{counted(removal.files, 'file')} of {human_bytes(removal.bytes)}"
        print_line(f"{index}: {counted(len(removal.snapshots), 'snapshot')} and {files} removed")
