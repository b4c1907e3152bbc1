"""The command `edje-index failures`."""

from __future__ import annotations

import click

from pipelines.cli.failed_rows import failed_rows
from pipelines.cli.options import json_option, location
from pipelines.cli.output import print_json, print_line
from storage_formats.format.object_store import IndexLocation


@click.command()
@click.argument("index", type=location)
@click.option(
    "--reason", "reasons", metavar="REASON", multiple=True, help="List only rows that failed for REASON; repeatable."
)
@json_option
def failures(index: IndexLocation, reasons: tuple[str, ...], as_json: bool) -> None:
    """List the inputs of INDEX that could not be indexed.

    INDEX is a directory, or a URL that begins with s3://, gs:// or az://.

    The command prints one line per failed row: row id, reason, URI and details. 'edje-index info' shows the number of
    failed rows by reason.

    \b
    Examples:
      edje-index failures photos.edje
      edje-index failures photos.edje --reason truncated --reason corrupt
      edje-index failures photos.edje --json | jq -r '.failures[].uri'
    """
    from storage_formats.writing.working_copy import working_copy

    with working_copy(index, read_only=True) as copy:
        rows = (row for row in failed_rows(copy.root) if not reasons or row["reason"] in reasons)
        if as_json:
            print_json({"index": str(index), "failures": list(rows)})
            return
        for row in rows:
            print_line(f"{row['row_id']}  {row['reason']}  {row['uri']}  {row['detail']}")
