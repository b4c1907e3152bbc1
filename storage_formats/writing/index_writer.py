"""Writing of an index from arrays, for callers that compute embeddings and tokens
themselves.

The writer writes each full shard to disk. It writes `index.json` last, so that a reader
sees either all appended rows or none of them. If the process of a writer is killed, the
next writer for the same directory removes what the killed one wrote, and begins again.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias

import numpy as np
import pyarrow as pa

from storage_formats.arguments import (
    as_count,
    as_list,
    as_text,
    refuse_pickle,
    repr_of,
    shown,
)
from storage_formats.arrays import Array, Floats, as_array, finite_blocks
from storage_formats.atomic import Json
from storage_formats.change import (
    Change,
    begin_change,
)
from storage_formats.codecs import BF16, Blocks, codec
from storage_formats.errors import UsageError
from storage_formats.format.layout import IndexSpec, Segment
from storage_formats.format.manifest import (
    Ann,
    CommittedIndex,
    Manifest,
    created_by,
)
from storage_formats.format.offset import stored_codec
from storage_formats.format.places import Place
from storage_formats.format.receipts import (
    ShardReceipt,
    fetch_written_embeddings,
    fingerprint,
)
from storage_formats.format.rows import (
    ROW_SCHEMA,
    RowEntry,
    check_hashes,
    rows_table,
    with_source_values,
)
from storage_formats.format.source_columns import (
    MAX_COLUMNS,
    MAX_NAME_BYTES,
    MAX_ROW_BYTES,
    WIDER_TYPES,
    CountedColumns,
    SourceColumn,
    Value,
    is_allowed,
    python_value,
    stored_name,
)
from storage_formats.remote.urls import IndexLocation, index_location
from storage_formats.writing.publish import (
    add_counts,
    next_first_row,
    total_counts,
    write_tables,
)
from storage_formats.writing.shard_writer import ShardWriter, refuse_outside

BuildAnn: TypeAlias = Callable[[Place, IndexSpec], Ann]


class _ArrowTable(Protocol):
    """A table of pandas, Polars, pyarrow or another library that gives Arrow data."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


Rows: TypeAlias = Sequence[str] | Mapping[str, Any] | _ArrowTable

ROW_COLUMNS = ("uri", "uri_raw", "size", "content_hash", "width", "height")
"""Standard columns of the rows table that a caller of `IndexWriter.append` may give."""
_BLOCK_TYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(BF16))
_EMBEDDING_TYPES = (*_BLOCK_TYPES, np.dtype(np.float64))
_KIND = "import-arrays"


class IndexWriter:
    """Writes an index of token blocks and embeddings that the caller computed, or
    appends rows to such an index. Not thread-safe.

    Use the writer in a `with` statement. The end of the block commits the rows. If an
    exception ends the block, all written files are removed, and an existing index is
    as before. The writer holds at most one shard in memory. To add a nearest-neighbour
    index, call `edje_index.add_ann` after the block.

    Examples:
        >>> import numpy as np
        >>> from storage_formats import IndexWriter, TokenStore
        >>> rng = np.random.default_rng(0)
        >>> writer = IndexWriter.create(
        ...     "arrays.edje", block_shape=(4, 16), embed_dim=8, precisions=["fp8"]
        ... )
        >>> with writer:
        ...     for part in range(3):
        ...         blocks = rng.standard_normal((10, 4, 16), dtype=np.float32)
        ...         embeddings = rng.standard_normal((10, 8), dtype=np.float32)
        ...         uris = [f"page-{part}-{row}" for row in range(10)]
        ...         row_ids = writer.append(blocks, embeddings, uris)
        >>> row_ids
        range(20, 30)
        >>> TokenStore.open("arrays.edje", "fp8").fetch([29, 0]).shape
        (2, 4, 16)
        >>> with IndexWriter.open("arrays.edje") as writer:
        ...     columns = {"uri": ["late"], "captions": [["a late page"]]}
        ...     row_ids = writer.append(blocks[:1], embeddings[:1], columns)
        >>> row_ids
        range(1024, 1025)
    """

    def __init__(
        self,
        root: IndexLocation,
        spec: IndexSpec,
        encoder: str,
        begun: contextlib.AbstractContextManager[Change],
    ) -> None:
        """Do not call this: use `IndexWriter.create` or `IndexWriter.open`."""
        self._location = root
        # The number of new rows is not known yet, so `spec` is the shape of the index
        # before the change. In a new index, it has the rows of one shard.
        self._spec = spec
        self._encoder = encoder
        # The change holds the lock of the index until this stack is closed.
        self._held_change = contextlib.ExitStack()
        self._change = self._held_change.enter_context(begun)
        self._first_row = 0
        earlier: Sequence[SourceColumn] = ()
        if (index := self._change.before) is not None:
            self._first_row = next_first_row(index.manifest)
            earlier = index.manifest.columns
        self._place = self._change.layout
        self._codecs = [
            stored_codec(self._place, spec, name) for name in spec.precisions
        ]
        if self._place.names(self._place.receipts):
            # A killed writer has left these files.
            self._change.start_again()
        # If the change is committed, its files stay.
        self._change.abandon()
        self._open = True
        self._receipts: list[ShardReceipt] = []
        # The entries of the rows that are not on disk yet, and their values of source
        # columns. Their blocks and embeddings are the first items of `_blocks` and
        # `_embeddings`.
        self._rows: list[RowEntry] = []
        self._values: list[dict[str, Value]] = []
        self._columns = CountedColumns(earlier)
        self._earlier_types = {column.name: column.type for column in earlier}
        self._blocks = np.empty((spec.shard_size, *spec.block_shape), dtype=BF16)
        self._embeddings = np.empty((spec.shard_size, spec.embed_dim), dtype=np.float32)
        self._plan = fingerprint(
            {"kind": _KIND, "spec": asdict(spec), "encoder": encoder}
        )

    @classmethod
    def create(
        cls,
        path: IndexLocation,
        *,
        block_shape: tuple[int, int],
        embed_dim: int,
        precisions: Sequence[str] = ("bf16",),
        shard_size: int = 1024,
        encoder: str = "unknown",
    ) -> IndexWriter:
        """Begin a new index in a new or empty directory, or at a URL.

        If the process of an earlier writer was killed and left an unfinished index at
        `path`, the unfinished index is removed first.

        Args:
            path: directory of the index, or its URL (s3://, gs://, az://).
            block_shape: (m, d), tokens per block and values per token.
            embed_dim: width of the embeddings.
            precisions: names of the precisions to store, from
                `storage_formats.precisions()`.
            shard_size: rows per shard. The writer holds one shard in memory.
            encoder: name and version of the model that computed the arrays, stored in
                `index.json`.

        Raises:
            UsageError: `path` is not empty, or an argument is not valid.
            OSError: the directory cannot be written.
        """
        shape = as_list(block_shape, "block_shape", "two integers")
        if len(shape) != 2:
            raise UsageError(f"block_shape must be (m, d), got {shown(shape)}")
        m, d = (as_count(each, "block_shape") for each in shape)
        rows = as_count(shard_size, "shard_size")
        names = [
            codec(name).name for name in as_list(precisions, "precisions", "names")
        ]
        width = as_count(embed_dim, "embed_dim")
        spec = IndexSpec(rows, rows, (m, d), width, tuple(dict.fromkeys(names)))
        if not spec.precisions:
            raise UsageError("precisions is empty; name at least one precision")
        root = index_location(path)
        text = as_text(encoder, "encoder")
        return cls(root, spec, text, begin_change(root, _KIND, is_new=True))

    @classmethod
    def open(cls, path: IndexLocation) -> IndexWriter:
        """Begin to append rows to an index that an `IndexWriter` or `import-arrays`
        wrote. The rows are committed together, as a new snapshot, and have the
        precisions of the index. The first new row id is a multiple of the shard size.

        Args:
            path: directory of the index.

        Raises:
            UsageError: there is no index at `path`, or it was built from images.
            EdjeError: another process is changing the index, or another change was
                stopped; see `begin_change`.
            OSError: the directory cannot be written.
        """
        root = index_location(path)
        manifest = CommittedIndex.open(root).manifest
        if "encoder" not in manifest.model:
            raise UsageError(
                f"{root} was not built from arrays, so no arrays can be appended to it;"
                " append images, or write a new index"
            )
        encoder = manifest.model["encoder"]
        return cls(root, manifest.spec, encoder, begin_change(root, _KIND))

    __repr__ = repr_of("_location", "_spec")
    __reduce__ = refuse_pickle("let one process write, and send it the arrays")

    def __len__(self) -> int:
        """Return the number of rows that this writer has appended."""
        return len(self._receipts) * self._spec.shard_size + len(self._rows)

    @property
    def _spec_after(self) -> IndexSpec:
        """The shape of the index with the rows appended so far, which are at least
        one.
        """
        rows = len(self)
        if self._change.before is None:
            return replace(self._spec, rows=rows)
        segments = (*self._spec.used_segments, Segment(self._first_row, rows))
        return replace(self._spec, rows=segments[-1].stop, segments=segments)

    def append(
        self,
        blocks: Array | Sequence[Any],
        embeddings: Array,
        rows: Rows | None = None,
    ) -> range:
        """Append k rows and return their row ids.

        The arrays are processed shard by shard, so they may be memory maps that are
        larger than the memory. After an error, the writer can still be used, and
        `len(writer)` is the number of rows appended so far.

        Args:
            blocks: [k, m, d], float32, float16 or bfloat16, finite. Values are rounded
                to the nearest bfloat16. A list of k arrays [t, d] with different
                numbers t of vectors, from 1 to m, is also accepted. The last vector of
                each array is then repeated until there are m vectors, which does not
                change MaxSim scores.
            embeddings: [k, embed_dim], floating point, finite, not zero. They are
                scaled to unit length and stored as float32.
            rows: description of the k rows: a list of URIs, a dictionary of columns,
                or a table of pandas, Polars or pyarrow. The index of a pandas table is
                not used. Columns named in `ROW_COLUMNS` are stored as the standard
                columns of the rows table. Any other column, for example of captions,
                becomes a source column. Its values may be truth values, numbers, texts,
                times, lists of texts or None. If the index uses the name of a column
                itself, such as `status`, the column is stored as `source_status`, and
                later appends may use either name.
                Without a column `uri`, the URI of a row is its row id.

        Raises:
            UsageError: an argument has a wrong shape or type, a value is not finite, a
                precision cannot store a block, the type of a column of the existing
                index would change (int64 may become float64, and string a list), or the
                writer is closed.
            OSError: a shard cannot be written. The next call tries to write this shard
                again.
        """
        self._check_open()
        m, d = self._spec.block_shape
        if isinstance(blocks, list | tuple) and len(blocks):
            vectors = [as_array(each) for each in blocks]
            for position, each in enumerate(vectors):
                if each.ndim != 2 or each.shape[1] != d or not 1 <= len(each) <= m:
                    shape = list(each.shape)
                    raise UsageError(
                        f"blocks[{position}] must have the shape [1 to {m}, {d}], got"
                        f" {shape}; pool vectors"
                    )
            # The last vector is repeated: each index above that of the last vector is
            # replaced by the index of the last vector.
            blocks = np.stack(
                [each[np.minimum(np.arange(m), len(each) - 1)] for each in vectors]
            )
        blocks = as_array(blocks)
        embeddings = as_array(embeddings)
        if blocks.dtype not in _BLOCK_TYPES or blocks.shape[1:] != (m, d):
            raise UsageError(
                f"blocks must be float32, float16 or bfloat16 [k, {m}, {d}], got"
                f" {blocks.dtype} {list(blocks.shape)}; convert the blocks first"
            )
        expected = (len(blocks), self._spec.embed_dim)
        if embeddings.dtype not in _EMBEDDING_TYPES or embeddings.shape != expected:
            raise UsageError(
                f"embeddings of {len(blocks)} blocks must be floating-point numbers"
                f" {list(expected)}, got {embeddings.dtype} {list(embeddings.shape)};"
                " convert the embeddings first"
            )
        columns = _given_columns(rows, len(blocks), self._earlier_types)
        sources = {
            name: _source_values(name, columns.pop(name))
            for name in columns.keys() - {*ROW_COLUMNS}
        }
        if len(self._columns.kinds.keys() | sources.keys()) > MAX_COLUMNS:
            raise UsageError(
                f"rows has more than {MAX_COLUMNS} columns; leave some out"
            )
        for column in self._columns.columns():
            new = column.type_with(sources.get(column.name, ()))
            earlier = self._earlier_types.get(column.name, new)
            if new not in (earlier, WIDER_TYPES.get(earlier)):
                raise UsageError(
                    f"the column {column.name} of the index has the type {earlier}, and"
                    f" these rows would change it to {new}; give values of the type"
                    f" {earlier}, or rename the column of these rows"
                )
        first = self._first_row + len(self)
        done = 0
        while done < len(blocks):
            if len(self._rows) == self._spec.shard_size:
                self._commit_shard()
            held = len(self._rows)
            stop = min(len(blocks), done + self._spec.shard_size - held)
            added = slice(held, held + stop - done)
            # Errors count the rows that this writer was given, from 0.
            given = first - self._first_row + done
            converted = _as_bf16(blocks[done:stop], given)
            numbers = np.arange(given, given + stop - done)
            refuse_outside(self._codecs, converted, numbers)
            unit = _as_unit_vectors(embeddings[done:stop], given)
            self._blocks[added] = converted
            self._embeddings[added] = unit
            for position in range(done, stop):
                standard = {name: each[position] for name, each in columns.items()}
                row_id = first + position
                self._rows.append(RowEntry(row_id, **{"uri": str(row_id), **standard}))
                values = {
                    name: value
                    for name, of_column in sources.items()
                    if (value := of_column[position]) is not None
                }
                self._values.append(values)
                for name, value in values.items():
                    self._columns.count(name, value)
            done = stop
        return range(first, first + len(blocks))

    def finish(self, build_ann: BuildAnn | None = None) -> Manifest:
        """Commit the appended rows and close the writer. The end of a `with` block
        calls this method.

        Args:
            build_ann: called as `build_ann(place, spec)`. It writes a nearest-neighbour
                index to the index at `place`, which has the shape `spec`, and returns
                the value of `ann` in `index.json`. None writes no nearest-neighbour
                index. After an append, the function is not called: a search compares
                the query with each of the new rows.

        Raises:
            UsageError: no row was appended, or the writer is closed.
            OSError: the index cannot be written.
        """
        self._check_open()
        # If an error occurs after the commit, the end of this block raises an error
        # that says so.
        with self._held_change:
            self._open = False
            place = self._place
            if not len(self):
                raise UsageError(
                    f"no row was appended to {place.location}; append at least one row"
                    " before you finish the index"
                )
            # The last shard may be shorter, and `len` counts full shards.
            spec = self._spec_after
            rows = len(self)
            if self._rows:
                self._commit_shard()
            columns = self._columns.columns()
            change = self._change
            counts = total_counts(self._receipts)
            tables = write_tables(place, spec, self._receipts, columns, change.before)
            if change.before is None:
                ann: Ann = {"kind": "none"}
                if build_ann is not None:
                    fetch_written_embeddings(place, self._receipts)
                    ann = build_ann(place, spec)
                fingerprint = hashlib.sha256(self._encoder.encode()).hexdigest()
                manifest = Manifest(
                    spec=spec,
                    counts=counts,
                    model={"encoder": self._encoder, "fingerprint": fingerprint},
                    settings={},
                    plan=self._plan,
                    ann=ann,
                    created_by=created_by(),
                    columns=columns,
                    **tables,
                )
            else:
                before = change.index.manifest
                manifest = replace(
                    before,
                    spec=spec,
                    counts=add_counts(before.counts, counts),
                    ann=before.ann_after_append(),
                    columns=columns,
                    **tables,
                )
                details = {"first_row": self._first_row, "rows": rows}
                manifest = change.new_snapshot(manifest, details)
            change.commit(manifest)
            return manifest

    def abort(self) -> None:
        """Remove all written files and close the writer. Does nothing if the writer
        is closed.
        """
        self._open = False
        self._held_change.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None and self._open:
                self.finish()
        finally:
            self.abort()

    def _commit_shard(self) -> None:
        held = len(self._rows)
        shard = self._first_row // self._spec.shard_size + len(self._receipts)
        with ShardWriter(self._place, self._spec_after, shard) as writer:
            positions = np.arange(held, dtype=np.int64)
            writer.put(positions, self._blocks[:held], self._embeddings[:held])
            table = with_source_values(
                rows_table(self._rows), self._columns.columns(), self._values
            )
            receipt = writer.commit(table, self._plan, {})
        self._receipts.append(receipt)
        self._rows.clear()
        self._values.clear()

    def _check_open(self) -> None:
        if not self._open:
            raise UsageError(
                f"the writer of {self._location} is closed; create a new writer"
            )


def _as_bf16(blocks: Array, first: int) -> Blocks:
    """Convert blocks to bfloat16. Raise UsageError if a value is not finite or is too
    large for bfloat16.

    Args:
        first: number of the first block, for the error message.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        converted = np.ascontiguousarray(blocks.astype(BF16, copy=False))
    finite = finite_blocks(converted)
    if not finite.all():
        row = first + int(np.argmin(finite))
        raise UsageError(
            f"the block of row {row} has a value that is NaN, infinite or too large for"
            " bfloat16; correct the value"
        )
    return converted


def _as_unit_vectors(embeddings: Array, first: int) -> Floats:
    """Scale embeddings to unit length. Raise UsageError if an embedding is zero or has
    a value that is not finite.

    Args:
        first: number of the first embedding, for the error message.
    """
    vectors = embeddings.astype(np.float64)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    directed = np.isfinite(norms[:, 0]) & (norms[:, 0] > 0)
    if not directed.all():
        row = first + int(np.argmin(directed))
        raise UsageError(
            f"the embedding of row {row} is zero, or has a value that is NaN or"
            " infinite; correct the embedding"
        )
    unit: Floats = (vectors / norms).astype(np.float32)
    return unit


def _given_columns(
    rows: Rows | None, count: int, earlier_names: Container[str]
) -> Json:
    """Return the columns that the argument `rows` of `append` gives, keyed by stored
    name. Columns in `ROW_COLUMNS` are converted to lists of the right type.

    Args:
        earlier_names: stored names of the columns of the index. A column with such a
            name is this column, unless another column of `rows` is stored under it.

    Raises:
        UsageError: a column has a wrong name, type or length.
    """
    if rows is None:
        return {}
    if hasattr(rows, "reset_index"):
        # Otherwise Arrow would make columns of an index of pandas.
        rows = rows.reset_index(drop=True)
    if hasattr(rows, "__arrow_c_stream__"):
        try:
            table = pa.table(rows)
            columns: Json = {
                name: table[name].to_pylist() for name in table.column_names
            }
        except (pa.ArrowException, ValueError, KeyError) as error:
            raise UsageError(f"cannot read the table rows: {error}") from error
    elif isinstance(rows, Mapping):
        columns = {
            as_text(name, "rows"): as_list(values, f"rows[{name!r}]", "values")
            for name, values in rows.items()
        }
    else:
        columns = {"uri": as_list(rows, "rows", "URIs, a table or a mapping")}
    for name, values in columns.items():
        if not is_allowed(name):
            raise UsageError(
                f"rows cannot have a column {shown(name)}: a name has at most"
                f" {MAX_NAME_BYTES} bytes and printable characters; rename this column"
            )
        if len(values) != count:
            raise UsageError(
                f"{count} blocks need {count} rows, but column {name} of rows has"
                f" {len(values)} values"
            )
    stored = {
        name: stored_name(name, ROW_SCHEMA.names)
        for name in columns
        if name not in ROW_COLUMNS
    }
    # short names first, because a longer name may be that of a renamed column
    for name in sorted(stored, key=len):
        if name in earlier_names and name not in stored.values():
            stored[name] = name
    return {
        **{stored[name]: columns[name] for name in stored},
        **{
            name: _column(ROW_SCHEMA.field(name), columns[name])
            for name in ROW_COLUMNS
            if name in columns
        },
    }


def _source_values(name: str, values: Any) -> list[Value | None]:
    """Convert the values of the source column `name` to Python objects. Raise
    UsageError if a source column cannot store one of them.
    """
    result: list[Value | None] = []
    for item in values:
        # the time is out of range, or a text cannot be encoded
        with contextlib.suppress(OverflowError, UnicodeEncodeError):
            value = python_value(item)
            if _is_source_value(value):
                result.append(value)
                continue
        raise UsageError(
            f"column {name} of rows cannot store {shown(item)}; give truth values,"
            " finite numbers of 64 bits, texts, times or lists of texts, of at most"
            f" {MAX_ROW_BYTES:,} bytes"
        )
    return result


def _is_source_value(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return -(1 << 63) <= value < 1 << 63
    if value is None or isinstance(value, datetime.datetime):
        return True
    texts = value if isinstance(value, list) else [value]
    is_text = all(isinstance(each, str) for each in texts)
    return is_text and len("".join(texts).encode()) <= MAX_ROW_BYTES


def _column(field: pa.Field, values: Sequence[Any]) -> list[Any]:
    """Return the values of a standard column, converted to the type of `field`. Raise
    UsageError if they cannot be converted.
    """
    try:
        column = pa.array([*map(python_value, values)]).cast(field.type)
        if field.name == "content_hash":
            check_hashes(column)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise UsageError(
            f"column {field.name} of rows cannot be converted to {field.type}: {error}"
        ) from error
    if not field.nullable and column.null_count:
        raise UsageError(
            f"column {field.name} of rows has {column.null_count} nulls; give every row"
            " a value"
        )
    values_list: list[Any] = column.to_pylist()
    return values_list
