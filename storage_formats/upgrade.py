"""Upgrade of an index of format version 1 or 2 to the present one (SPEC.md section 14).

This file has all knowledge of the earlier formats. They stored the rows of each shard
in one file `rows/NNNNNNNN.parquet`, which the shard tables listed. Files of edits held
values that replaced those in the rows, and the hashes of removed inputs.
"""

from __future__ import annotations

import functools
import json
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from storage_formats.atomic import Json, fsync_path, json_bytes
from storage_formats.change import (
    remove_build,
    remove_what_is_not_kept,
    write_array_shapes,
)
from storage_formats.errors import CorruptIndexError, UsageError
from storage_formats.format.checksum import json_checksum
from storage_formats.format.directory import Directory
from storage_formats.format.file_check import FileEntry, committed_content, parsing
from storage_formats.format.journal import manifest_digest, read_journal
from storage_formats.format.layout import FORMAT_VERSION, IndexSpec
from storage_formats.format.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    RowsFile,
    is_old_format,
)
from storage_formats.format.parquet import read_table
from storage_formats.format.rows import SOURCE_VALUES, VALUE_SCHEMA
from storage_formats.format.shard_table import read_shard_table, write_shard_table
from storage_formats.format.source_columns import SourceColumn, source_values_text
from storage_formats.remote.urls import IndexLocation, local_path
from storage_formats.writing.publish import write_removed
from storage_formats.writing.rows_files import write_rows_files

_OLD_ROWS = re.compile(r"rows/\d{8,}\.parquet")
# Prefix of the column name in a line of an edit that records the value that the sources
# gave last to a column that a user has set.
_GIVEN = "\0"
# The entry of a rows file that is not written yet. It counts as long enough for all
# rows.
_PROVISIONAL = {
    "path": "rows/rows-00000000.parquet",
    "bytes": 1 << 62,
    "crc32c": "00000000",
}


def upgrade_index(
    index: IndexLocation, say: Callable[[str], None] = lambda text: None
) -> int:
    """Upgrade the index at `index` to the present format version. Return the number of
    snapshots that were upgraded, which is 0 if the index has this version already.

    The tables of all kept snapshots are written anew. The files of tokens, embeddings,
    checksums and the nearest-neighbour index stay as they are. Readers see the index as
    before until the last step replaces `index.json`. Call the function again to finish
    an upgrade that was stopped.

    Args:
        index: directory of the index.
        say: receives a message if an unfinished change is discarded.

    Raises:
        UsageError: there is no index at `index`, or an earlier version of edje-index
            must upgrade it first.
        CorruptIndexError: a table of the index is damaged.
        EdjeError: another process is changing the index.
        OSError: the index cannot be written.
    """
    advice = (
        "; download the objects of the index to a directory, upgrade the directory, and"
        " copy it back"
    )
    layout = Directory(local_path(index, advice=advice).absolute())
    if not layout.manifest.exists():
        Manifest.load(layout.root)
    with layout.claimed():
        # The manifest of the current snapshot comes last, because replacing it commits
        # the upgrade.
        earlier = (
            path
            for path in sorted(layout.snapshots.glob("*.json"))
            if path.stem.isdecimal()
        )
        paths = [*earlier, layout.manifest]
        values = {path: _read(layout, path) for path in paths}
        oldest = _number(values[layout.manifest], "oldest_snapshot")
        old = [
            path
            for path, value in values.items()
            if is_old_format(value) and _number(value, "snapshot") >= oldest
        ]
        if old:
            _end_change(layout, say)
            # marks of earlier verifications
            layout.remove([layout.root / "verified.bin"])
        write_rows = functools.cache(functools.partial(_write_rows, layout))
        for path in old:
            manifest = _upgraded(layout, path, values[path], write_rows)
            if path == layout.manifest:
                write_array_shapes(layout, manifest.spec)
            layout.write(path, json_bytes(manifest.to_json()))
        # Without a journal, no file belongs to an unfinished change.
        if not layout.is_changing():
            remove_what_is_not_kept(layout, tables=True, shards=True)
    return len(old)


def _end_change(layout: Directory, say: Callable[[str], None]) -> None:
    """Finish a change that was killed after its commit, or discard an unfinished one,
    which an earlier version of the package began.
    """
    try:
        journal = read_journal(layout)
        if journal is not None and journal.base != manifest_digest(layout):
            # The former files may be replaced only after `index.json` is durable.
            fsync_path(layout.root)
            layout.move_erased()
        elif journal is not None:
            say(f"discarding the unfinished '{journal.kind}'")
    except CorruptIndexError:
        say("discarding an unfinished change whose journal is damaged")
    # With the new `index.json`, the journal would seem to be that of a committed
    # change, so its removal reaches the device first.
    remove_build(layout)


def _read(layout: Directory, path: Path) -> Json:
    """Read a manifest, and compare it with its checksum."""
    data = layout.read(path, MAX_MANIFEST_BYTES) or b""
    try:
        Manifest.parse(data, path)
    except UsageError as error:
        if error.remedy != "upgrade":
            raise
    value: Json = json.loads(data)
    if value.get("crc32c") != json_checksum(value):
        raise CorruptIndexError(f"{path} does not match its checksum")
    return value


def _number(value: Json, name: str) -> int:
    member = value.get(name)
    return member if isinstance(member, int) else 0


def _upgraded(
    layout: Directory, path: Path, value: Json, write_rows: Callable[..., Any]
) -> Manifest:
    """Write the tables of a snapshot. Return its manifest in the present format.

    Args:
        value: manifest of the snapshot in an earlier format.
        write_rows: the function `_write_rows` without its first argument. It keeps its
            results, because snapshots often share their rows.
    """
    with parsing(f"a member of {path}"):
        segments = value.get("segments", [])
        first_row = segments[0]["first_row"] if segments else 0
        first_shard = first_row // value["shard_size"]
        edits = tuple(map(FileEntry.from_json, value.get("edits", ())))
        deleted = value.get("deleted")
        offset = value.get("offset")
        new = {
            **value,
            "format_version": FORMAT_VERSION,
            "precisions": [each["name"] for each in value["precisions"]],
            "encoded_from": {
                each["name"]: each["encoded_from"]
                for each in value["precisions"]
                if "encoded_from" in each
            },
            "offset": offset and {**offset, "crc32c": int(offset["crc32c"], 16)},
            "shard_tables": [
                value["shard_table"],
                *(each["shard_table"] for each in segments[1:]),
            ],
            "rows_files": [{"first_shard": first_shard, "file": _PROVISIONAL}],
            "snapshot": {
                "number": value.get("snapshot", 0),
                "change": value.get("change", {}),
                "next_shard": value.get("next_shard", 0),
                "deleted": deleted,
                "deleted_rows": deleted["rows"] if deleted else 0,
                "oldest": value.get("oldest_snapshot"),
            },
        }
    new["crc32c"] = json_checksum(new)
    manifest = Manifest.parse(json.dumps(new).encode(), path)
    files: dict[int, FileEntry] = {}
    tables = []
    for table in manifest.shard_tables:
        lines = read_shard_table(layout, table)
        files |= {shard: file for shard, file in lines if _OLD_ROWS.match(file.path)}
        others = [line for line in lines if not _OLD_ROWS.match(line[1].path)]
        tables.append(write_shard_table(layout, others))
    if [*files] != [*manifest.spec.shard_numbers()]:
        raise CorruptIndexError(f"{path} does not list the rows of all shards")
    rows_files, removed = write_rows(
        manifest.spec, manifest.columns, tuple(files.items()), edits
    )
    return replace(
        manifest, shard_tables=tuple(tables), rows_files=rows_files, removed=removed
    )


def _write_rows(
    layout: Directory,
    spec: IndexSpec,
    columns: tuple[SourceColumn, ...],
    files: tuple[tuple[int, FileEntry], ...],
    edits: tuple[FileEntry, ...],
) -> tuple[tuple[RowsFile, ...], FileEntry | None]:
    """Write the rows files and the file of removed inputs of a snapshot. Return their
    entries.

    Args:
        files: pairs (shard number, entry of its rows file).
        edits: entries of the files of edits. Lines of later files replace those of
            earlier ones.
    """
    lines: dict[tuple[int | None, str], str | None] = {}
    for entry in edits:
        with committed_content(layout, entry, "file of edits") as data:
            for line in read_table(data, VALUE_SCHEMA.names).to_pylist():
                lines[line["row_id"], line["column"]] = line["value"]
    removed = frozenset(
        bytes.fromhex(column) for row_id, column in lines if row_id is None
    )
    values = []
    given: dict[int, dict[str, Any]] = defaultdict(dict)
    for (row_id, column), text in lines.items():
        if row_id is None:
            continue
        name = column.removeprefix(_GIVEN)
        if name == column:
            values.append({"row_id": row_id, "column": column, "value": text})
        # Earlier updates replaced values of users by changed values of the sources.
        elif (row_id, name) not in lines or text != lines[row_id, name]:
            given[row_id][name] = None if text is None else json.loads(text)
    values += [
        {
            "row_id": row_id,
            "column": SOURCE_VALUES,
            "value": json.dumps(source_values_text(of_sources)),
        }
        for row_id, of_sources in given.items()
    ]
    table = pa.Table.from_pylist(values, VALUE_SCHEMA)
    rows_files = write_rows_files(layout, spec, columns, dict(files), None, table)
    return rows_files, write_removed(layout, removed)
