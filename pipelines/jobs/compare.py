"""Compares the sources with the rows of an index, for an update.

If a source cannot be read or lists no images, although rows of the index came from it,
the comparison raises an error. Without this error, an update would delete these rows
if, for example, a disk is not mounted.
"""

from __future__ import annotations

import hashlib
import itertools
import pickle
import sqlite3
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from edje_index.inputs.refs import InputRef, display_path
from pipelines.jobs.plan import (
    CollectedInputs,
    SourceGroup,
    settings_of,
)
from pipelines.jobs.snapshots import NewValues
from pipelines.progress.events import OnEvent, ShouldStop, StatusMessage
from pipelines.progress.wording import counted
from pipelines.sources import (
    Listing,
    hashed,
    without_nested,
)
from storage_formats.errors import EdjeError
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.rows import (
    DUPLICATE,
    FAILED,
    SOURCE_VALUES,
    iter_rows,
    read_index_rows,
)
from storage_formats.format.source_columns import (
    SourceColumn,
    Value,
    as_type,
    metadata_text,
    source_values_text,
    values_of_sources,
)
from storage_formats.format.tombstones import input_hash
from storage_formats.remote.urls import is_url

_COLUMNS = (
    "row_id",
    "uri",
    "uri_raw",
    "content_hash",
    "status",
    "reason",
    "duplicate_of",
)
_HIDES_OTHERS = frozenset(
    {"truncated-archive", "damaged-archive", "missing", "unreadable"}
)
"""Problems of a directory or an archive. With such a problem, some of its inputs are
not listed.
"""


@dataclass(frozen=True)
class SourceChanges:
    """The differences between the sources and the rows of an index.

    Attributes:
        refs: inputs that get new rows, in the order of the sources.
        inputs: number of inputs that the sources list.
        duplicates: number of inputs that get no row, because a kept row or an earlier
            input has the same content.
        ignored: number of entries in the sources that are not inputs, by suffix or
            reason.
        unchanged: number of rows that are kept and have not failed.
        failed: number of failed rows that are kept, by reason.
        replaced: number of rows to delete that have tokens. A row is not counted if the
            new content of its input equals that of a kept row: a search then finds the
            kept row.
        changed: positions in `refs` of the inputs that had a row already, except
            retried inputs. The content of the input differs from that of the row, or
            the row is a duplicate whose original is not kept.
        retried: number of `refs` whose old rows failed or are duplicates of the same
            content. The new rows keep the column values that users set in the old rows.
        source_values: for each position in `refs` whose row keeps such values, the text
            for its column `SOURCE_VALUES`.
        moved: new names of kept rows, by row id: their inputs have vanished, but other
            inputs have the same content and no row.
        vanished: number of rows whose input no longer exists.
        deleted: ids of the rows to delete, ascending: vanished rows, and the old rows
            of inputs that get a new row or are duplicates.
        stay_deleted: number of inputs that get no row, because a user deleted their
            row.
        values: column values that the sources gave to kept rows, in parts. They can be
            read only once.
    """

    refs: Sequence[InputRef]
    inputs: int
    duplicates: int
    ignored: dict[str, int]
    unchanged: int = 0
    failed: Mapping[str, int] = field(default_factory=dict)
    replaced: int = 0
    changed: Sequence[int] = ()
    retried: int = 0
    source_values: Mapping[int, str | None] = field(default_factory=dict)
    moved: Mapping[int, str] = field(default_factory=dict)
    vanished: int = 0
    deleted: Sequence[int] = ()
    stay_deleted: int = 0
    values: Iterable[NewValues] = ()


# The states of a row during a comparison follow.

# No input has matched the row so far. If a row is still free at the end, its input has
# vanished.
_FREE = 0
# The row is kept for the input that matched it.
_KEPT = 1
# No input has matched the row. The row is kept as the original of a duplicate that is
# kept because its server cannot be read.
_KEPT_ORIGINAL = 2
# The row is deleted, because its input gets a new row or is a duplicate.
_REPLACED = 3
# An input has matched the row, but the row is a duplicate, or the row failed and its
# input is tried again. A duplicate becomes _KEPT if its original is kept. All other
# rows in this state become _REPLACED.
_REPEATED = 4
_SCHEMA = """CREATE TABLE rows(
    row_id INTEGER PRIMARY KEY, name BLOB, hash BLOB, failed_for TEXT,
    duplicate_of INTEGER, metadata BLOB, state INTEGER
);
CREATE TABLE given(row_id INTEGER PRIMARY KEY, metadata BLOB);
"""
_HAS_TOKENS = "failed_for IS NULL AND duplicate_of IS NULL"
# Selects the first free row with the name of an input. If `any_content` is false, the
# row must also have the content hash of the input or, if one of the two hashes is
# unknown, the row must have failed for the problem of the input. A row that failed for
# changed-since-plan or original-deleted never matches by its hash, because encoding the
# same content again may succeed.
_FIND = """SELECT row_id, name, hash, failed_for, duplicate_of, metadata FROM rows
WHERE name = :name AND state = 0 AND (:any_content OR CASE
    WHEN hash IS NULL OR :hash IS NULL THEN failed_for = :problem
    ELSE hash = :hash AND coalesce(failed_for, '')
        NOT IN ('changed-since-plan', 'original-deleted')
END) ORDER BY row_id LIMIT 1
"""
# Selects the free rows with tokens and with the content hash of an input.
_FIND_MOVED = f"""SELECT row_id, name, hash, failed_for, duplicate_of, metadata
FROM rows WHERE hash = ? AND state = {_FREE} AND {_HAS_TOKENS} ORDER BY row_id
"""


class _Row(NamedTuple):
    """A row of an index in the temporary database.

    Attributes:
        name: see `_name`.
        hash: SHA-256 of the content, 32 bytes; None if it is unknown.
        failed_for: reason of a failed row; None for other rows.
        duplicate_of: row id of the original of a duplicate; None for other rows.
        metadata: hash of the column values that the sources gave last.
    """

    row_id: int
    name: bytes
    hash: bytes | None
    failed_for: str | None
    duplicate_of: int | None
    metadata: bytes

    @property
    def has_tokens(self) -> bool:
        return self.failed_for is None and self.duplicate_of is None


def _name(uri: str, uri_raw: bytes | None) -> bytes:
    """Return a key by which an input and its row are matched."""
    return b"\0".join((uri.encode(), uri_raw or b""))


def _load_rows(
    database: sqlite3.Connection,
    index: CommittedIndex,
    columns: Mapping[str, SourceColumn],
) -> int:
    """Insert the rows of `index` into the database, except deleted rows. Return the
    number of inserted rows. The values that the sources gave last to the `columns` of a
    row are stored as one hash.
    """
    rows = 0
    for table in iter_rows(index, [*_COLUMNS, SOURCE_VALUES, *columns]):
        rows += len(table)
        database.executemany(
            "INSERT INTO rows VALUES(?, ?, ?, ?, ?, ?, 0)",
            (
                (
                    line["row_id"],
                    _name(line["uri"], line["uri_raw"]),
                    _digest(line["content_hash"]),
                    line["reason"] if line["status"] == FAILED else None,
                    line["duplicate_of"] if line["status"] == DUPLICATE else None,
                    metadata_hash(
                        {
                            **{name: line[name] for name in columns},
                            **values_of_sources(line[SOURCE_VALUES], columns),
                        }
                    ),
                )
                for line in table.to_pylist()
            ),
        )
    database.execute("CREATE INDEX names ON rows(name, row_id)")
    database.execute("CREATE INDEX hashes ON rows(hash)")
    return rows


def _digest(content_hash: str | None) -> bytes | None:
    """Convert a content hash from hexadecimal digits to bytes."""
    return None if content_hash is None else bytes.fromhex(content_hash)


def compare_sources(
    database: sqlite3.Connection,
    index: CommittedIndex,
    groups: Iterable[SourceGroup],
    max_vanished: float,
    on_event: OnEvent,
    should_stop: ShouldStop,
    *,
    retry_failed: bool = False,
    restore: bool = False,
) -> SourceChanges:
    """List the sources and compare every input with the rows of `index`. Nothing is
    written.

    An input is compared with the rows of the same name. If a row of this name has the
    same content, the row is unchanged and kept. If the input of a row has vanished, but
    an input of a new name has the same content, the row is kept and gets this name. A
    row that is a duplicate is kept only if its original is kept, too. Otherwise its
    input gets a new row. If an input on a server cannot be read, its row is kept. If
    this row is a duplicate, its original is then kept, too.

    The rows are in a database on disk, so that the memory use grows only with the
    number of inputs that have no row with tokens of the same name and content.

    Args:
        database: an empty `temporary_database`.
        groups: all sources of the index.
        max_vanished: largest allowed share, 0 to 1, of the rows whose input no longer
            exists or cannot be read.
        retry_failed: True to give new rows to failed inputs that can be read.
        restore: True to give rows to inputs whose rows were deleted by users.

    Raises:
        UsageError: a source cannot be used.
        EdjeError: a source or a part of a source cannot be read, or the share of rows
            whose input no longer exists or cannot be read is larger than
            `max_vanished`.
    """
    settings = settings_of(index.root, index.manifest)
    sources = without_nested(
        [
            source
            for group in groups
            for source in replace(settings, **asdict(group)).open_sources()
        ]
    )
    for statement in _SCHEMA.split(";"):
        database.execute(statement)
    columns = {column.name: column for column in index.manifest.columns}
    rows = _load_rows(database, index, columns)

    def mark(row: _Row, state: int) -> None:
        values = (state, row.row_id)
        database.execute("UPDATE rows SET state = ? WHERE row_id = ?", values)

    def find(ref: InputRef, *, any_content: bool) -> _Row | None:
        """Return the first row with the name and content of `ref` that no input has
        matched yet; None if there is no such row. With `any_content`, only the name
        must be the same.
        """
        values = {
            "name": _name(ref.uri, ref.uri_raw),
            "hash": _digest(ref.content_hash),
            "problem": ref.problem,
            "any_content": any_content,
        }
        row = database.execute(_FIND, values).fetchone()
        return None if row is None else _Row._make(row)

    unread = 0
    first_unread = ""
    stored_values = CollectedInputs(index.spec.shard_size, columns.values())

    def compare_values(ref: InputRef, row: _Row) -> None:
        """Note the column values of `ref` if they differ from those of `row`."""
        nonlocal unread, first_unread
        given = stored_values.add(ref).metadata or {}
        if row.metadata != metadata_hash(_typed(given, columns)):
            if any(ref.uri in source.unread for source in sources):
                unread += 1
                first_unread = first_unread or ref.uri
            else:
                database.execute(
                    "INSERT INTO given VALUES(?, ?)", [row.row_id, pickle.dumps(given)]
                )

    listing = Listing(sources, on_event, should_stop)
    inputs = unreachable = 0
    # The problem of each directory or archive whose inputs are not all listed, by its
    # path
    hidden: dict[str, str] = {}
    removed = frozenset[bytes]() if restore else index.removed
    stay_deleted = 0
    # The inputs that may need new rows, each with the row of its name and content
    pending: list[tuple[InputRef, _Row | None]] = []
    # Match every input with a row of the same name and content.
    for ref in hashed(listing):
        inputs += 1
        row = find(ref, any_content=False)
        if ref.problem in _HIDES_OTHERS:
            hidden[display_path(ref.path)] = str(ref.problem)
        if (
            row is None
            and input_hash(ref.uri, ref.uri_raw, ref.content_hash) in removed
        ):
            stay_deleted += 1
            continue
        # If the server of an input does not respond or refuses the request, keep the
        # row with the name of the input, unless that row failed. If the row is a
        # duplicate, also keep its original. Unreadable local files are handled below.
        if row is None and (
            ref.problem == "unreachable"
            or (ref.problem == "unreadable" and is_url(ref.path))
        ):
            named_row = find(ref, any_content=True)
            if named_row is not None and named_row.failed_for is None:
                unreachable += 1
                mark(named_row, _KEPT)
                continue
        stays = row is not None and row.duplicate_of is None
        if retry_failed and ref.problem is None:
            # A failed row does not stay if its input can be read.
            stays = row is not None and row.has_tokens
        if row is not None:
            mark(row, _KEPT if stays else _REPEATED)
            compare_values(ref, row)
        if not stays:
            pending.append((ref, row))

    # If an input without a row has the content of a row that no input has matched, the
    # image was moved: keep the row, and give it the new name. A row whose own input is
    # listed, but cannot be read, was not moved.
    moved: dict[int, str] = {}
    unread_names = {
        _name(ref.uri, ref.uri_raw) for ref, _ in pending if ref.problem is not None
    }
    left: list[tuple[InputRef, _Row | None]] = []
    for ref, row in pending:
        kept = None
        # A name that is not UTF-8 cannot be stored as a new value.
        if row is None and ref.problem is None and ref.uri_raw is None:
            found = database.execute(_FIND_MOVED, [_digest(ref.content_hash)])
            of_content = map(_Row._make, found)
            kept = next(
                (each for each in of_content if each.name not in unread_names), None
            )
        if kept is None:
            left.append((ref, row))
        else:
            mark(kept, _KEPT)
            compare_values(ref, kept)
            moved[kept.row_id] = ref.uri
    database.execute(
        f"UPDATE rows SET state = {_KEPT_ORIGINAL} WHERE state = {_FREE} AND row_id IN"
        f" (SELECT duplicate_of FROM rows WHERE state = {_KEPT})"
    )
    if unread:
        text = (
            f"the columns of {counted(unread, 'input')} stay, because their metadata"
            f" cannot be read in full, first that of {first_unread}; correct the"
            " caption files and tables"
        )
        on_event(StatusMessage(text, is_warning=True))
    if unreachable:
        text = (
            f"{counted(unreachable, 'input')} on servers cannot be read now; the rows"
            " stay"
        )
        on_event(StatusMessage(text, is_warning=True))
    duplicates = database.execute(
        f"UPDATE rows SET state = {_KEPT} WHERE state = {_REPEATED} AND duplicate_of IN"
        f" (SELECT row_id FROM rows WHERE state IN ({_KEPT}, {_KEPT_ORIGINAL}))"
        " RETURNING row_id"
    )
    kept_duplicates = {row_id for (row_id,) in duplicates}
    database.execute(f"UPDATE rows SET state = {_REPLACED} WHERE state = {_REPEATED}")

    def row_ids(condition: str) -> array[int]:
        selected = database.execute(
            f"SELECT row_id FROM rows WHERE {condition} ORDER BY row_id"
        )
        return array("q", (row_id for (row_id,) in selected))

    # Give a new row to each remaining input, unless the input is a duplicate. If the
    # input has an old row, mark that row as replaced.
    # A row with tokens whose content has not changed is kept.
    refs: list[InputRef] = []
    contents = set[bytes]()
    changed = array("q")
    # Positions in `refs` by the ids of the old rows
    retried: dict[int, int] = {}
    cut_off = array("q")
    repeated = held_tokens = lost = 0
    for ref, row in left:
        if row is not None and row.row_id in kept_duplicates:
            continue
        row = row or find(ref, any_content=True)
        if row is not None:
            mark(row, _REPLACED)
            # A row is lost if its input cannot be read and thus has no content hash.
            lost += ref.content_hash is None
            # If an archive is cut off, its listing ends with one input that has the
            # problem of the archive. Check the row of this input below, together with
            # the vanished rows.
            if ref.problem in _HIDES_OTHERS and row.failed_for is None:
                cut_off.append(row.row_id)
            if ref.problem == "unreadable" and row.failed_for is None:
                raise EdjeError(
                    f"cannot read {ref.uri}, which is row {row.row_id} of the index;"
                    " make the file readable, or delete the row and the file. The index"
                    " is unchanged"
                )
        content = _digest(ref.content_hash)
        kept_row = database.execute(
            "SELECT 1 FROM rows WHERE hash = ?"
            f" AND state IN ({_KEPT}, {_KEPT_ORIGINAL})",
            [content],
        ).fetchone()
        is_repeated = kept_row is not None
        # Count the rows with tokens whose input now has the content of a kept row.
        held_tokens += is_repeated and row is not None and row.has_tokens
        if content is not None and not is_repeated:
            is_repeated = content in contents
            contents.add(content)
        if is_repeated:
            repeated += 1
            continue
        is_retry = row is not None and retry_failed and row.failed_for is not None
        if row is not None and (is_retry or row.hash == content):
            retried[row.row_id] = len(refs)
        if row is not None and not is_retry:
            changed.append(len(refs))
        refs.append(ref)
    # New rows keep the values that users set in the old rows.
    source_values: dict[int, str | None] = {}
    for row_id, by_users in _user_values(index, sorted(retried)).items():
        position = retried[row_id]
        given = refs[position].metadata or {}
        of_sources = {name: given.get(name) for name in by_users}
        source_values[position] = source_values_text(of_sources)
        values = {**given, **by_users}
        metadata = {name: each for name, each in values.items() if each is not None}
        refs[position] = replace(refs[position], metadata=metadata or None)
    vanished = row_ids(f"state = {_FREE}")
    gone = f"state IN ({_FREE}, {_REPLACED})"
    reasons = database.execute(
        "SELECT failed_for, COUNT(*) FROM rows"
        f" WHERE state = {_KEPT} GROUP BY failed_for"
    )
    failed = dict(reasons.fetchall())
    unchanged = failed.pop(None, 0)
    own = {display_path(source.path) for source in sources}
    # If all rows may vanish, the sources may be empty. Otherwise, rows of an empty
    # source are not deleted, and neither are rows of an archive that lies beside
    # images. Such an archive is not read, unless it is a source itself.
    for source in sources if max_vanished < 1 else ():
        if not source.inputs:
            hidden.setdefault(display_path(source.path), "it lists no images")
        for path in source.hidden.keys() - own:
            hidden.setdefault(path, source.hidden[path])
    # A row was not moved out of a directory that cannot be read: its input may still be
    # there.
    _refuse_hidden_rows(index, hidden, vanished + cut_off + array("q", moved))
    lost += len(vanished)
    if lost > max_vanished * rows + 1e-6:
        raise EdjeError(
            f"the inputs of {lost:,} of {counted(rows, 'row')} no longer exist, more"
            f" than the share of {max_vanished:g} that may vanish; check the sources,"
            " or raise this share to delete these rows. The index is unchanged",
            parameter="max_vanished",
        )
    return SourceChanges(
        refs,
        inputs,
        repeated,
        listing.ignored,
        unchanged=unchanged,
        failed=failed,
        replaced=len(row_ids(f"{gone} AND {_HAS_TOKENS}")) - held_tokens,
        stay_deleted=stay_deleted,
        values=_given_values(index, database),
        changed=changed,
        retried=len(retried),
        source_values=source_values,
        moved=moved,
        vanished=len(vanished),
        deleted=row_ids(gone),
    )


def _user_values(index: CommittedIndex, row_ids: Sequence[int]) -> NewValues:
    """Return the column values that users set in the rows `row_ids`, by row id and
    column.
    """
    columns = {column.name: column for column in index.manifest.columns}
    read = ["row_id", SOURCE_VALUES]
    rows = read_index_rows(index, row_ids, read)
    edited = rows.filter(rows[SOURCE_VALUES].is_valid())["row_id"].to_pylist()
    return {
        row["row_id"]: {
            name: row[name] for name in values_of_sources(row[SOURCE_VALUES], columns)
        }
        for row in read_index_rows(index, edited, [*read, *columns]).to_pylist()
    }


def metadata_hash(values: Mapping[str, Any]) -> bytes:
    """Return a hash of column values, 16 bytes. Null values are left out."""
    given = {name: value for name, value in values.items() if value is not None}
    return hashlib.blake2b(metadata_text(given).encode(), digest_size=16).digest()


def _typed(
    values: Mapping[str, Value], columns: Mapping[str, SourceColumn]
) -> dict[str, Value]:
    """Return the values that a source gave, each converted to the type of its column.
    Values that do not fit the type are returned unchanged.
    """
    return {
        name: as_type(value, columns[name].type)
        if name in columns and columns[name].fits(value)
        else value
        for name, value in values.items()
    }


def _given_values(
    index: CommittedIndex, database: sqlite3.Connection
) -> Iterator[NewValues]:
    """Yield the column values that the sources gave to kept rows, one shard at a
    time.
    """
    columns = [column.name for column in index.manifest.columns]
    lines = database.execute(
        "SELECT row_id, given.metadata FROM given JOIN rows USING (row_id)"
        f" WHERE state = {_KEPT} ORDER BY row_id"
    )
    size = index.spec.shard_size
    for _, of_shard in itertools.groupby(lines, lambda line: line[0] // size):
        # Unpickling is safe: this process has written the database.
        yield {
            row_id: {**dict.fromkeys(columns), **pickle.loads(given)}
            for row_id, given in of_shard
        }


def _refuse_hidden_rows(
    index: CommittedIndex,
    hidden: Mapping[str, str],
    lost: Sequence[int],
) -> None:
    """Raise EdjeError if rows have lost their inputs because a directory or archive is
    empty or cannot be read.

    Args:
        hidden: problem of each such directory or archive, by path.
        lost: ids of the rows whose inputs are no longer listed, or are listed in place
            of the cut-off end of an archive.
    """
    below: Counter[str] = Counter()
    for table in iter_rows(index, ["row_id", "uri"]) if hidden and len(lost) else ():
        is_lost = np.isin(table["row_id"].to_numpy(), lost)
        for uri in table["uri"].filter(pa.array(is_lost)).to_pylist():
            ends = (position for position, letter in enumerate(uri) if letter in "/!")
            # Count the row for the outermost directory or archive that contains it.
            below.update([uri[:end] for end in ends if uri[:end] in hidden][:1])
    for container, rows in below.items():
        raise EdjeError(
            f"cannot compare {container} with the index ({hidden[container]}). The"
            f" index has {counted(rows, 'row')} from {container}; check that it is"
            " mounted and readable. The index is unchanged"
        )
