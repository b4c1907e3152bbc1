"""The command `edje-index failures`."""

from __future__ import annotations

from pathlib import Path

import click

from pipelines.cli.failed_rows import failed_rows
from pipelines.cli.options import PATH, json_option
from pipelines.cli.output import print_json, print_line


@click.command()
@click.argument("index", type=PATH)
@click.option(
    "--reason", "reasons", metavar="REASON", multiple=True, help="List only rows that failed for REASON; repeatable."
)
@json_option
def failures(index: Path, reasons: tuple[str, ...], as_json: bool) -> None:
    """List the inputs of INDEX that could not be indexed.

    The command prints one line per failed row: row id, reason, URI and details. 'edje-index info' shows the number of
    failed rows by reason.

    \b
    Examples:
      edje-index failures photos.edje
      edje-index failures photos.edje --reason truncated --reason corrupt
      edje-index failures photos.edje --json | jq -r '.failures[].uri'
    """
    rows = (row for row in failed_rows(index) if not reasons or row["reason"] in reasons)
    if as_json:
        print_json({"index": str(index), "failures": list(rows)})
        return
    for row in rows:
        print_line(f"{row['row_id']}  {row['reason']}  {row['uri']}  {row['detail']}")
