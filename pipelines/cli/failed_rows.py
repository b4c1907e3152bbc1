"""Lists the failed rows of an index."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from storage_formats.format.layout import Layout

_COLUMNS = ["row_id", "reason", "uri", "detail", "status"]


def failed_rows(root: Path) -> Iterator[dict[str, Any]]:
    """Yield the row id, reason, URI and detail of each failed row. Raises EdjeError if `root` contains no index."""
    from storage_formats.format.rows import FAILED

    for table in _tables(root):
        for row in table.to_pylist():
            if row.pop("status") == FAILED:
                yield row


def _tables(root: Path) -> Iterator[Any]:
    """Return an iterator over the rows of each finished shard, as Arrow tables."""
    from pipelines.planning.plan import read_plan
    from storage_formats.format.manifest import CommittedIndex
    from storage_formats.format.receipts import read_receipts
    from storage_formats.format.rows import iter_rows, read_shard_rows

    layout = Layout(root)
    if layout.manifest.exists() or (plan := read_plan(root)) is None:
        return iter_rows(CommittedIndex.open(root), _COLUMNS)
    finished = sorted(read_receipts(layout, plan.shards, plan.fingerprint))
    return (read_shard_rows(layout, shard, _COLUMNS) for shard in finished)
