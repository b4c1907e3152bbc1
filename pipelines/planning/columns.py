"""Collects the source columns of a list of inputs: names, kinds and numbers of values.

If there are too many columns, the first columns in row order are kept.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from storage_formats.format.source_columns import (
    MAX_COLUMNS,
    MAX_ROW_BYTES,
    MAX_SHARD_BYTES,
    SourceColumn,
    Value,
    kind_of,
)

if TYPE_CHECKING:
    from edje_index.images.inputs import InputRef

TOO_LONG = "(metadata too long)"
TOO_MANY = "(too many metadata columns)"


class CollectedColumns:
    """The source columns of all inputs that were added so far.

    Args:
        shard_size: number of rows per shard, which limits the length of the metadata of a row.
        earlier: columns of the existing rows of the index.
    """

    def __init__(self, shard_size: int, earlier: Iterable[SourceColumn] = ()) -> None:
        self.ignored = Counter[str]()
        self._row_bytes = min(MAX_ROW_BYTES, MAX_SHARD_BYTES // shard_size)
        self._kinds = {column.name: set(column.kinds) for column in earlier}
        self._values = Counter({column.name: column.values for column in earlier})

    def add(self, ref: InputRef) -> InputRef:
        """Add the metadata of one input. Return the input with only the metadata to store.

        Values are left out if the metadata is too long or if there are too many columns. `ignored` counts these values.
        """
        if not ref.metadata:
            return ref
        kept = self._without_long(self._without_new(ref.metadata))
        for name, value in kept.items():
            self._kinds.setdefault(name, set()).add(kind_of(value))
            self._values[name] += 1
        return dataclasses.replace(ref, metadata=kept or None)

    def columns(self) -> tuple[SourceColumn, ...]:
        """Return the earlier and the new columns together, sorted by name."""
        names = sorted(self._kinds)
        return tuple(SourceColumn(name, tuple(sorted(self._kinds[name])), self._values[name]) for name in names)

    def _without_new(self, metadata: Mapping[str, Value]) -> dict[str, Value]:
        """Return `metadata` without new columns, once there are `MAX_COLUMNS` columns."""
        kept: dict[str, Value] = {}
        new = 0
        for name, value in metadata.items():
            new += name not in self._kinds
            if name in self._kinds or len(self._kinds) + new <= MAX_COLUMNS:
                kept[name] = value
            else:
                self.ignored[TOO_MANY] += 1
        return kept

    def _without_long(self, metadata: dict[str, Value]) -> dict[str, Value]:
        """Remove the longest values until the metadata of the row is short enough. Return the rest."""
        from edje_index.images.inputs import metadata_text

        lengths = {name: len(metadata_text({name: value}).encode()) for name, value in metadata.items()}
        total = sum(lengths.values())
        for name in sorted(lengths, key=lambda name: (-lengths[name], name)):
            if total <= self._row_bytes:
                break
            self.ignored[TOO_LONG] += 1
            total -= lengths[name]
            del metadata[name]
        return metadata
