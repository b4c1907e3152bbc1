"""The command `edje-index split`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from pipelines.cli.options import LOCAL_INDEX, json_option, log_option, metrics_option, quiet_option
from pipelines.cli.output import print_json, print_line, running_job
from pipelines.progress.wording import counted


@click.command()
@click.argument("index", type=LOCAL_INDEX)
@click.argument("outs", nargs=-1, required=True, type=LOCAL_INDEX, metavar="OUT...")
@log_option
@metrics_option
@quiet_option
@json_option
def split(
    index: Path, outs: tuple[Path, ...], log: Path | None, metrics: Path | None, quiet: bool, as_json: bool
) -> None:
    """Divide INDEX into several new indexes, for example one per machine.

    The command writes one part to each directory OUT. Each part holds consecutive shards, and about the same number of
    rows. Rows keep their ids, so a row has the same id in its part as in INDEX. Tokens and embeddings are copied, so
    the model is not needed. Each part gets its own nearest-neighbour index. INDEX does not change.

    A duplicate becomes a failed row if its original is in another part.

    The directory OUT of a part appears when the part is complete. Run the same command again to resume a stopped split.
    'edje-index merge' puts the parts together again.

    \b
    Examples:
      edje-index split photos.edje left.edje right.edje
      edje-index split photos.edje part-{1..8}.edje
    """
    from pipelines.jobs.new_index import partial_directory
    from pipelines.jobs.split import run_split

    def can_resume() -> bool:
        return any(out.exists() or partial_directory(out).exists() for out in outs)

    job = running_job(quiet=quiet, can_resume=can_resume, log=log, metrics=metrics, index=index)
    with job as (on_event, should_stop):
        result = run_split(index, outs, on_event, should_stop)
    if as_json:
        print_json(asdict(result))
        return
    for part in result.parts:
        lost = f"; {counted(part.lost_duplicates, 'duplicate')} failed" if part.lost_duplicates else ""
        print_line(
            f"{part.index}: {counted(part.rows, 'row')} in {counted(part.shards, 'shard')}, row ids {part.first_row:,} "
            f"to {part.last_row:,}{lost}"
        )
