"""Looks up the rows of an index by name and content, for a comparison with the inputs of the sources."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edje_index.images.inputs import InputRef
from storage_formats.format.rows import DUPLICATE, FAILED, INDEXED, iter_rows

if TYPE_CHECKING:
    from storage_formats.format.manifest import CommittedIndex

_COLUMNS = ("row_id", "uri", "uri_raw", "content_hash", "status", "reason", "duplicate_of", "encode_seconds")
_CAN_WORK_NOW = frozenset(
    {"changed-since-plan", "original-deleted", "original-in-another-part"}
)  # the file itself may be sound


@dataclass(slots=True)
class StoredRow:
    """One row of an index.

    Attributes:
        row_id: row id.
        content_hash: SHA-256 of the input, 32 bytes; None if the input could not be read.
        failed_for: reason why the row failed; None if the row has not failed.
        duplicate_of: row id of the original if this row is a duplicate, otherwise None.
        next_of_name: the next row with the same name, in row order; None if there is none.
    """

    row_id: int
    content_hash: bytes | None
    failed_for: str | None
    duplicate_of: int | None
    next_of_name: StoredRow | None = None

    def is_of(self, ref: InputRef) -> bool:
        """Return True if an update keeps this row for the input `ref`, which has the same name."""
        if ref.content_hash is None or self.content_hash is None:
            return self.failed_for is not None and self.failed_for == ref.problem
        return self.content_hash == bytes.fromhex(ref.content_hash) and self.failed_for not in _CAN_WORK_NOW


class StoredRows:
    """The rows of an index that are not deleted. Memory use is about 400 bytes per row.

    Attributes:
        rows: number of rows when the index was read.
        encode_seconds: mean seconds that the model took per encoded row; None if no row has tokens.
    """

    def __init__(self, index: CommittedIndex) -> None:
        self._of_name: dict[bytes, StoredRow] = {}
        self.rows, indexed, seconds = 0, 0, 0.0
        last_of_name: dict[bytes, StoredRow] = {}  # only of names with several rows
        for table in iter_rows(index, _COLUMNS):
            for line in table.to_pylist():
                self._add(line, last_of_name)
                self.rows += 1
                indexed += line["status"] == INDEXED
                seconds += line["encode_seconds"] or 0.0
        self.encode_seconds = seconds / indexed if indexed else None

    def _add(self, line: dict[str, Any], last_of_name: dict[bytes, StoredRow]) -> None:
        content_hash = line["content_hash"]
        row = StoredRow(
            row_id=line["row_id"],
            content_hash=None if content_hash is None else bytes.fromhex(content_hash),
            failed_for=line["reason"] if line["status"] == FAILED else None,
            duplicate_of=line["duplicate_of"] if line["status"] == DUPLICATE else None,
        )
        name = _name(line["uri"], line["uri_raw"])
        first = self._of_name.setdefault(name, row)
        if first is not row:
            last_of_name.get(name, first).next_of_name = row
            last_of_name[name] = row

    def take(self, ref: InputRef) -> StoredRow | None:
        """Remove and return the row with the name and content of `ref`; None if no row matches."""
        name = ref_name(ref)
        before, row = None, self._of_name.get(name)
        while row is not None and not row.is_of(ref):
            before, row = row, row.next_of_name
        if row is not None:
            self._remove(name, before, row)
        return row

    def take_named(self, ref: InputRef) -> StoredRow | None:
        """Remove and return the first row with the name of `ref` and any content; None if no row matches."""
        name = ref_name(ref)
        row = self._of_name.get(name)
        if row is not None:
            self._remove(name, None, row)
        return row

    def take_rows(self, row_ids: Set[int]) -> list[StoredRow]:
        """Remove and return the rows with the ids `row_ids`. Ids of other rows are ignored."""
        taken = []
        for name, first in list(self._of_name.items()):
            before: StoredRow | None = None
            row: StoredRow | None = first
            while row is not None:
                following = row.next_of_name
                if row.row_id in row_ids:
                    self._remove(name, before, row)
                    taken.append(row)
                else:
                    before = row
                row = following
        return taken

    def _remove(self, name: bytes, before: StoredRow | None, row: StoredRow) -> None:
        if before is not None:
            before.next_of_name = row.next_of_name
        elif row.next_of_name is not None:
            self._of_name[name] = row.next_of_name
        else:
            del self._of_name[name]
        row.next_of_name = None

    def __iter__(self) -> Iterator[StoredRow]:
        """Yield the rows that `take` and `take_named` have not removed."""
        for first in self._of_name.values():
            row: StoredRow | None = first
            while row is not None:
                yield row
                row = row.next_of_name


def ref_name(ref: InputRef) -> bytes:
    """Return a hash of the name of an input. An input and its row have the same hash."""
    return _name(ref.uri, ref.uri_raw)


def _name(uri: str, uri_raw: bytes | None) -> bytes:
    return hashlib.blake2b(b"\0".join((uri.encode(), uri_raw or b"")), digest_size=16).digest()
