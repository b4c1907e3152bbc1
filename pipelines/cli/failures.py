"""The command `edje-index failures`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from pipelines.cli.options import PATH, json_option
from pipelines.cli.output import print_json, print_line
from storage_formats.format.layout import Layout


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


def failed_rows(root: Path) -> Iterator[dict[str, Any]]:
    """Yield the row id, reason, URI and detail of each failed row. Raises EdjeError if `root` contains no index."""
    from storage_formats.format.rows import FAILED

    columns = ["row_id", "reason", "uri", "detail", "status"]
    for table in _tables(root, columns):
        for row in table.to_pylist():
            if row.pop("status") == FAILED:
                yield row


def _tables(root: Path, columns: list[str]) -> Iterator[Any]:
    """Return an iterator over the rows of each finished shard, as Arrow tables."""
    from pipelines.planning.plan import read_plan
    from storage_formats.format.manifest import CommittedIndex
    from storage_formats.format.receipts import read_receipts
    from storage_formats.format.rows import iter_rows, read_shard_rows

    layout = Layout(root)
    if layout.manifest.exists() or (plan := read_plan(root)) is None:
        return iter_rows(CommittedIndex.open(root), columns)
    finished = sorted(read_receipts(layout, plan.shards, plan.fingerprint))
    return (read_shard_rows(layout, shard, columns) for shard in finished)
