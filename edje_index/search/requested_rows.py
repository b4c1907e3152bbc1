"""Finds the rows that a caller names by row id or uri, and checks that these rows have tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from storage_formats.arguments import as_list, as_text, shown
from storage_formats.errors import UsageError
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.rows import DUPLICATE, INDEXED, iter_rows, read_index_rows
from storage_formats.row_ids import check_row_ids

_SHOWN = 3


def requested_rows(index: CommittedIndex, rows: Sequence[int | str]) -> NDArray[np.int64]:
    """Return the row id of each entry of `rows`, int64 [k].

    A row id is returned unchanged. A uri gives the first row with this uri; if this row is a duplicate, its original.

    Raises:
        RowIdError: a row id is out of range, unused or deleted.
        UsageError: an entry is neither an integer nor a string, no row has the uri, or a row has no tokens.
    """
    rows = as_list(rows, "rows", "row ids and uris")
    if any(isinstance(row, bool) or not isinstance(row, int | np.integer | str) for row in rows):
        raise UsageError(f"rows must be a sequence of row ids and uris, got {shown(rows)}", parameter="rows")
    row_of_uri = _rows_of_uris(index, [as_text(row, "rows") for row in rows if isinstance(row, str)])
    row_ids = check_row_ids(
        [row_of_uri[row] if isinstance(row, str) else int(row) for row in rows], index.manifest.spec.rows
    )
    _check_indexed(index, row_ids)
    return row_ids


def _rows_of_uris(index: CommittedIndex, uris: Sequence[str]) -> Mapping[str, int]:
    """Return the row id of each uri. For a duplicate, return the row id of the original."""
    if not uris:
        return {}
    wanted, row_of_uri = pa.array(dict.fromkeys(uris), pa.string()), dict[str, int]()
    for table in iter_rows(index, ["row_id", "uri", "status", "duplicate_of"]):
        for row in table.filter(pc.is_in(table["uri"], wanted)).to_pylist():
            row_id = row["duplicate_of"] if row["status"] == DUPLICATE else row["row_id"]
            row_of_uri.setdefault(row["uri"], row_id)
        if len(row_of_uri) == len(wanted):
            break
    unknown = [uri for uri in wanted.to_pylist() if uri not in row_of_uri]
    if unknown:
        raise UsageError(
            f"no row of {index.root} has the uri {_listed(unknown)}; give uris of indexed images", parameter="rows"
        )
    return row_of_uri


def _check_indexed(index: CommittedIndex, row_ids: NDArray[np.int64]) -> None:
    table = read_index_rows(index, row_ids, ["row_id", "status", "reason", "duplicate_of"])
    holes = table.filter(pc.not_equal(table["status"], INDEXED)).to_pylist()
    if not holes:
        return
    first = holes[0]
    why = f"it is a duplicate of row {first['duplicate_of']}" if first["status"] == DUPLICATE else first["reason"]
    others = f" (and {len(holes) - 1} more)" if len(holes) > 1 else ""
    raise UsageError(
        f"row {first['row_id']}{others} of {index.root} has no tokens: {why}; choose rows with the status 'indexed'",
        parameter="rows",
    )


def _listed(uris: list[str]) -> str:
    more = f" (and {len(uris) - _SHOWN} more)" if len(uris) > _SHOWN else ""
    return ", ".join(map(repr, uris[:_SHOWN])) + more
