"""The command `edje-index bench end-to-end`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from benchmarks.commands.output import show
from pipelines.cli.options import PATH, POSITIVE, images_option, json_option, model_option, quiet_option, seed_option


@click.command("end-to-end")
@click.argument("index", type=PATH)
@click.argument("captions", type=PATH)
@images_option
@model_option
@click.option("--folder", type=PATH, required=True, help="New directory for the files of all systems.")
@click.option(
    "--system", "systems", metavar="NAME", multiple=True, help="System to measure; repeatable.  [default: all]"
)
@click.option("--queries", type=POSITIVE, default=200, show_default=True, help="Number of captions to search for.")
@click.option(
    "--memory-cap",
    "memory_gib",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GIB",
    help="Memory limit of a search in GiB, including the page cache.  [default: all memory]",
)
@seed_option
@click.option("--report", type=PATH, help="Directory for a report with a plot.")
@quiet_option
@json_option
def end_to_end_command(
    index: Path, captions: Path, report: Path | None, quiet: bool, as_json: bool, **options: Any
) -> None:
    """Compare whole search systems on the same images: recall, latency, memory and bytes per image.

    All systems get the embeddings and tokens of INDEX. The queries are the captions in the file CAPTIONS. Systems that
    are not installed are left out.

    These systems rank by late interaction: this package in two precisions, FAISS with np.memmap, a multivector column
    of Lance, and Qdrant Edge. The last system is the search of this package with the joint encoder.

    \b
    Example:
      edje-index bench end-to-end photos.edje captions.jsonl --folder /mnt/nvme/scratch --report out
    """
    from benchmarks.end_to_end.bench import EndToEndBench, bench_end_to_end
    from benchmarks.end_to_end.report import table, write_report
    from pipelines.progress.display import progress_display
    from pipelines.progress.events import progress_callback

    with progress_display(quiet=quiet) as on_event:
        result = bench_end_to_end(EndToEndBench(index, captions, **options), progress_callback(on_event))
    if report is not None:
        for path in write_report(result, report):
            click.echo(f"wrote {path}", err=True)
    show(result, as_json, table(result))
