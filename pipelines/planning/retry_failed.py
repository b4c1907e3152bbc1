"""Prepares a retry of failed inputs: looks up each failed input of an index by its name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edje_index.images.inputs import InputRef, rows_digest
from edje_index.images.remote.urls import is_remote
from pipelines.planning.new_rows import NewInputs
from pipelines.planning.recorded_sources import holds_clips

if TYPE_CHECKING:
    from pipelines.sources import Source
    from storage_formats.format.manifest import CommittedIndex

_DAMAGED = frozenset({"truncated-archive", "damaged-archive"})


@dataclass(frozen=True)
class FailedInputs:
    """The failed rows of an index, and the inputs to try again.

    Attributes:
        row_ids: ids of the failed rows, int64 [n], ascending.
        reasons: reason of each failed row.
        inputs: number of inputs of the failed rows. A failed row of a directory or of a damaged archive stands for all
            inputs in it.
        new: inputs to try again. Inputs with the same content as another row are left out.
    """

    row_ids: NDArray[np.int64]
    reasons: tuple[str, ...]
    inputs: int
    new: NewInputs


def find_failed(index: CommittedIndex) -> FailedInputs:
    """Look up the failed inputs of `index` by name. Nothing is written.

    Raises:
        TransientInputError: an input cannot be read for a temporary reason.
        CorruptIndexError: the rows cannot be read.
    """
    from pipelines.sources import hashed
    from storage_formats.format.rows import FAILED, iter_rows

    names = [column.name for column in index.manifest.columns]
    tables = iter_rows(index, ["row_id", "uri", "uri_raw", "status", "reason", *names])
    failed = [row for table in tables for row in table.to_pylist() if row["status"] == FAILED]
    refs = list(hashed(refs_of_rows(failed, names, clips=holds_clips(index.manifest))))
    held = _hashes_held(index, {ref.content_hash for ref in refs if ref.content_hash is not None})
    # Equal inputs stay separate, so that each of them is listed if they fail again.
    remaining = [ref for ref in refs if ref.content_hash not in held]
    return FailedInputs(
        row_ids=np.array([row["row_id"] for row in failed], dtype=np.int64),
        reasons=tuple(row["reason"] for row in failed),
        inputs=len(refs),
        new=NewInputs(remaining, rows_digest(remaining), len(refs) - len(remaining), {}),
    )


def refs_of_rows(rows: list[dict[str, Any]], names: list[str], *, clips: bool) -> Iterator[InputRef]:
    """Yield the inputs under the names of `rows`, with the stored values of the source columns `names`."""
    from pipelines.sources.archives import archive_source
    from pipelines.sources.base import file_input
    from pipelines.sources.folder import FolderSource

    rows_of_archive: dict[tuple[bytes, str | None], list[dict[str, Any]]] = {}
    for row in rows:
        path = row["uri_raw"] or os.fsencode(row["uri"])
        archive = _archive_of(path, row["uri"])
        if archive is not None:
            rows_of_archive.setdefault(archive, []).append(row)
        elif os.path.isdir(path):
            yield from FolderSource(os.fsdecode(path), clips=clips).iter_inputs()
        elif row["reason"] == "bad-list-line" or (row["reason"] == "not-a-local-path" and not is_remote(path)):
            yield InputRef(row["uri"], path, problem=row["reason"], metadata=_metadata(row, names))
        else:
            yield replace(file_input(path, row["uri"]), metadata=_metadata(row, names))
    for (archive_path, column), members in rows_of_archive.items():
        yield from _members(archive_source(os.fsdecode(archive_path), column, clips=clips), members, names)


def _archive_of(path: bytes, uri: str) -> tuple[bytes, str | None] | None:
    """Return (path, column): the archive or Parquet file that contains an input, and the column of a Parquet file.

    Return None if the input is a file of its own.
    """
    from edje_index.images.containers.container import split_uri
    from pipelines.sources.archives import is_archive_name

    if is_archive_name(os.fsdecode(path)):
        return path, None
    parts = split_uri(uri)
    if parts is None or os.path.lexists(path):
        return None
    archive, member = parts
    return os.fsencode(archive), member.rpartition("/")[0] if archive.lower().endswith(".parquet") else None


def _members(archive: Source, rows: list[dict[str, Any]], names: list[str]) -> Iterator[InputRef]:
    """Yield the members of `archive` that are named in `rows`. If the archive was damaged, yield all members."""
    from edje_index.images.containers.container import split_uri

    rows_of_uri = {row["uri"]: row for row in rows}
    was_damaged = any(row["reason"] in _DAMAGED or split_uri(row["uri"]) is None for row in rows)
    for ref in archive.iter_inputs():
        row = rows_of_uri.pop(ref.uri, None)
        if row is not None:
            yield replace(ref, metadata=_metadata(row, names))
        elif was_damaged:
            yield ref
    for uri, row in rows_of_uri.items():
        if split_uri(uri) is not None:
            yield InputRef(uri, archive.path, problem="missing", metadata=_metadata(row, names))


def _metadata(row: dict[str, Any], names: list[str]) -> dict[str, Any] | None:
    return {name: row[name] for name in names if row[name] is not None} or None


def _hashes_held(index: CommittedIndex, hashes: set[str]) -> set[str]:
    """Return the content hashes in `hashes` that belong to a row that has not failed."""
    from storage_formats.format.rows import FAILED, iter_rows

    held: set[str] = set()
    for table in iter_rows(index, ["content_hash", "status"]):
        pairs = zip(table["content_hash"].to_pylist(), table["status"].to_pylist(), strict=True)
        held |= hashes.intersection(digits for digits, status in pairs if status != FAILED)
    return held
