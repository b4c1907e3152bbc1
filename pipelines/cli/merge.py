"""The command `edje-index merge`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from pipelines.cli.options import LOCAL_INDEX, json_option, log_option, quiet_option
from pipelines.cli.output import print_json, print_line, running_job
from pipelines.progress.wording import counted


@click.command()
@click.argument("indexes", nargs=-1, required=True, type=LOCAL_INDEX, metavar="INDEX...")
@click.option("--out", required=True, type=LOCAL_INDEX, help="New directory for the merged index.")
@log_option
@quiet_option
@json_option
def merge(indexes: tuple[Path, ...], out: Path, quiet: bool, as_json: bool) -> None:
    """Copy several indexes of the same model into one new index.

    All indexes must have the same shard size and precisions. Tokens and embeddings are copied, so the model is not
    needed. Rows of the first INDEX keep their ids. A constant is added to the row ids of each other INDEX; the command
    prints this constant. If several indexes contain the same image, the new index keeps the row from the first INDEX
    and marks the other rows as deleted. The given indexes do not change. The directory of --out appears when the merge
    is complete.

    Run the same command again to resume a stopped merge.

    \b
    Example:
      edje-index merge 2024.edje 2025.edje --out photos.edje
    """
    from pipelines.jobs.merge import run_merge
    from pipelines.jobs.new_index import partial_directory

    job = running_job(quiet=quiet, can_resume=partial_directory(out).exists)
    with job as (on_event, should_stop):
        result = run_merge(indexes, out, on_event, should_stop)
    if as_json:
        print_json(asdict(result))
        return
    for each in result.inputs:
        print_line(
            f"{each.index}: {counted(each.rows, 'row')}, {each.duplicates:,} duplicates; row ids plus {each.offset:,}"
        )
    print_line(f"{out}: {counted(result.rows, 'row')} in {counted(result.shards, 'shard')}, {result.seconds:.1f} s")
