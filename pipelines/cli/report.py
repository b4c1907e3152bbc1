"""The command `edje-index report`."""

from __future__ import annotations

from pathlib import Path

import click

from pipelines.cli.options import PATH, html_page_option, quiet_option
from pipelines.cli.output import note
from storage_formats.errors import UsageError

_HITS = 6
_DEFAULT_QUERIES = 4


@click.command()
@click.argument("index", type=PATH)
@html_page_option("report.html")
@click.option(
    "--query",
    "queries",
    multiple=True,
    metavar="TEXT",
    help="Query of a sample search; repeatable.  [default: 4 built-in captions]",
)
@quiet_option
def report(index: Path, out: Path, queries: tuple[str, ...], quiet: bool) -> None:
    """Write one HTML page about INDEX.

    The page shows the number of images, failed inputs, file sizes, the effect of each precision, build times, and
    sample searches with images.

    \b
    Examples:
      edje-index report photos.edje
      edje-index report photos.edje --out photos.html --query "a red canoe" --query "snow"
    """
    if any(not query.strip() for query in queries):
        raise UsageError("--query is empty; give a text")
    from edje_index.evaluation.quantization_report.queries import GENERIC_CAPTIONS
    from pipelines.jobs.index_report import measure_index
    from pipelines.pages.report_page import report_page
    from pipelines.progress.display import progress_display
    from pipelines.progress.events import progress_callback
    from storage_formats.atomic import write_bytes_atomic

    with progress_display(quiet=quiet) as on_event:
        texts = queries or GENERIC_CAPTIONS[:_DEFAULT_QUERIES]
        measured = measure_index(index, texts, _HITS, progress_callback(on_event))
    write_bytes_atomic(out, report_page(measured).encode())
    note(f"page: {out}")
