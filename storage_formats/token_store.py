"""Reads token blocks by row id."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from storage_formats.arguments import as_count, as_text, repr_of
from storage_formats.arrays import as_finite, holes
from storage_formats.codecs import BF16, Blocks, Codec, Records, fill_record, finest
from storage_formats.codecs.base import check_out
from storage_formats.errors import CorruptIndexError, UsageError
from storage_formats.extras import name_missing_extra
from storage_formats.format.layout import padded_shard_bytes
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.offset import stored_codec
from storage_formats.format.tombstones import (
    RowIds,
    Tombstones,
    check_row_ids,
    live_rows,
    rows_in_use,
)
from storage_formats.reading.batch import Batch
from storage_formats.reading.checksums import StoredRecords
from storage_formats.reading.local_reads import LocalReads
from storage_formats.reading.memory import lend
from storage_formats.reading.object_reads import OBJECT_STORE, ObjectReads
from storage_formats.reading.request import ReadRequest
from storage_formats.reading.sinks import BlockSink, RecordSink, ScoreSink, Sink
from storage_formats.remote.urls import IndexLocation
from storage_formats.threads import fork_safe_lock, ordered_map

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Check", "RowIds", "TokenStore"]

Check: TypeAlias = Literal["first", "always"]


class TokenStore:
    """Reads the token blocks of an index in one precision. Thread-safe.

    `TokenStore.open` opens a store from the path or the URL of an index. Opening takes
    the same time and memory for any number of rows. A store used in a `with` statement
    is closed at the end of the block.

    Args:
        index: an open index.
        precision: see `TokenStore.open`, which also describes the errors.
        engine: see `TokenStore.open`.

    Examples:
        >>> from storage_formats import TokenStore
        >>> with TokenStore.open("photos.edje", precision="bf16") as store:
        ...     blocks = store.fetch([3, 1, 3])
        >>> blocks.shape, str(blocks.dtype)
        ((3, 4, 16), 'bfloat16')
    """

    def __init__(
        self, index: CommittedIndex, precision: str | None = None, engine: str = "auto"
    ) -> None:
        self.precision = (
            finest(index.manifest.spec.precisions) if precision is None else precision
        )
        self._engine = engine
        self._refreshing = fork_safe_lock()
        self._view = self._view_of(index)

    @classmethod
    def open(
        cls,
        root: IndexLocation,
        precision: str | None = None,
        engine: str = "auto",
        *,
        snapshot: int | None = None,
    ) -> TokenStore:
        """Open the store of the index at `root`.

        Args:
            root: directory of the index, or its URL on an object store (`s3://`,
                `gs://`, `az://`, `https://`).
            precision: one of the precisions of the index. None selects the most
                accurate of them. Fetched blocks are bfloat16 for every precision.
            engine: name of a read engine, one of `storage_formats.reading.engines()`.
                `auto` selects an engine for each shard by the number of requested
                blocks and by whether the page cache holds the shard. For an index at a
                URL, `auto` selects `object-store`, the only engine for URLs.
            snapshot: number of the snapshot to read. None reads the current snapshot.
                If the index changes, the store still reads the same snapshot until
                `refresh` is called.

        Raises:
            UsageError: there is no index at `root`, the index does not have `snapshot`
                or `precision`, or `engine` does not work on this machine.
            IncompleteIndexError: the build of the index has not finished.
            CorruptIndexError: `index.json` is damaged, or the first or last shard file
                has a wrong length.
            ObjectStoreError: the object store refused a request or cannot be reached.
                `fetch` raises this error too.
            MissingExtraError: obstore, which a URL needs, is not installed.

        Examples:
            >>> from storage_formats import TokenStore
            >>> store = TokenStore.open("photos.edje")
            >>> len(store), store.block_shape, store.precision
            (6, (4, 16), 'bf16')
        """
        return cls(CommittedIndex.open(root, snapshot), precision, engine)

    def refresh(self) -> int:
        """Switch the store to the current snapshot of the index, and return the number
        of this snapshot.

        Other threads may use the store at the same time. A fetch that started before
        the switch reads the earlier snapshot to its end.

        Raises:
            UsageError: the current snapshot does not have the precision of the store,
                or a different index was written at the same location.
            CorruptIndexError: see `open`.

        Examples:
            >>> from edje_index import delete_rows
            >>> from storage_formats import TokenStore
            >>> store = TokenStore.open("photos.edje")
            >>> _ = delete_rows("photos.edje", rows=[2])
            >>> store.fetch([2]).shape
            (1, 4, 16)
            >>> store.refresh()
            1
        """
        # Without the lock, a slow call could replace a newer snapshot, which a faster
        # call has set meanwhile, with an older one.
        with self._refreshing:
            index = self._view.index.reopen()
            self._view = self._view_of(index)
            return index.manifest.snapshot.number

    def row_ids(self) -> NDArray[np.int64]:
        """Return the row ids of all rows that are not deleted, int64 [n], ascending.
        Some of the rows may be holes.

        Examples:
            >>> from storage_formats import TokenStore
            >>> TokenStore.open("photos.edje").row_ids()
            array([0, 1, 2, 3, 4, 5])
        """
        return live_rows(self._view.index)

    def __len__(self) -> int:
        """Return the number of row ids, including holes and deleted rows."""
        return self._view.index.manifest.spec.rows

    __repr__ = repr_of(
        "_view.index.location",
        "_view.index.manifest.spec.rows",
        "precision",
        "block_shape",
    )

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the store. A copy in another process reads the same snapshot."""
        return type(self), (self._view.index, self.precision, self._engine)

    @property
    def record_bytes(self) -> int:
        """Length of a record in bytes."""
        return self._view.codec.record_bytes

    @property
    def offset(self) -> NDArray[np.float32] | None:
        """The offset block that decoding adds to each block, float32 [m, d]. None if
        decoding adds nothing.
        """
        return self._view.codec.offset

    @property
    def block_shape(self) -> tuple[int, int]:
        """(m, d), tokens per block and values per token."""
        return self._view.codec.block_shape

    @overload
    def fetch(
        self, row_ids: RowIds, out: Blocks | None = None, *, check: Check = "first"
    ) -> Blocks: ...

    @overload
    def fetch(
        self,
        row_ids: RowIds,
        out: Blocks | None = None,
        *,
        as_torch: Literal[True],
        check: Check = "first",
    ) -> Tensor: ...

    def fetch(
        self,
        row_ids: RowIds,
        out: Blocks | None = None,
        *,
        as_torch: bool = False,
        check: Check = "first",
    ) -> Blocks | Tensor:
        """Read the blocks of `row_ids`, in the order of `row_ids`.

        Args:
            row_ids: [k], row ids in any order. Duplicates are allowed. The method
                `TokenStore.row_ids` returns the row ids of all rows that are not
                deleted.
            out: array that receives the blocks, bfloat16 [k, m, d], C-contiguous. The
                fetch is fastest into an array from `empty`. None allocates an array.
            as_torch: whether to return a torch.bfloat16 tensor. If `out` is given, the
                tensor shares memory with `out`.
            check: "first" compares a block with its checksum whenever it is read from
                the disk, and once after its shard was mapped into memory, which holds
                the shard from then on. "always" compares it at every fetch.

        Returns:
            ml_dtypes.bfloat16 [k, m, d], or a tensor of this shape. A row without a
            block (a hole) gives a block of NaN. Rows of failed inputs, rows of
            duplicate inputs, and row ids between the segments of the index, which no
            input has, are holes. `holes` finds them.

        Raises:
            RowIdError: a row id is out of range. This error is also an `IndexError`.
            DeletedRowError: a requested row was deleted. This error is also a
                `RowIdError`.
            UsageError: `row_ids` is not a flat sequence of integers, or `out` has a
                wrong shape or type.
            MissingExtraError: `as_torch` is True, but PyTorch is not installed.
            CorruptIndexError: a shard file is missing or too short, or a block is
                damaged. The attribute `row_ids` of the error lists rows with damaged
                blocks. After an error, the contents of `out` are arbitrary.

        Examples:
            >>> from storage_formats import TokenStore
            >>> store = TokenStore.open("photos.edje")
            >>> store.fetch([5, 0, 5]).shape
            (3, 4, 16)
            >>> out = store.empty(2)
            >>> store.fetch([4, 5], out=out) is out
            True
            >>> store.fetch([4, 5], as_torch=True).dtype
            torch.bfloat16
        """
        view = self._view
        if check not in ("first", "always"):
            raise UsageError(f"check must be 'first' or 'always', got {check!r}")
        ids = view.checked(row_ids)
        out = self.empty(len(ids)) if out is None else out
        check_out(out, (len(ids), *self.block_shape))
        sink: Sink = BlockSink(view.codec, out)
        if not view.codec.has_offset:
            # a record is the block
            sink = RecordSink(out.view(np.uint8).reshape(-1, view.codec.record_bytes))
        view.read(ids, out, sink, always_checks=check == "always")
        if not as_torch:
            return out
        with name_missing_extra("search"):
            import torch
        # `torch.from_numpy` does not accept ml_dtypes.bfloat16, so PyTorch gets the
        # bits as int16.
        return torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)

    def fetch_records(self, row_ids: RowIds, out: Records | None = None) -> Records:
        """Read the records of `row_ids` without decoding, for example for a decoder on
        the GPU.

        Args:
            row_ids: [k], see `fetch`.
            out: array that receives the records, uint8 [k, record_bytes], C-contiguous.
                None allocates an array.

        Returns:
            uint8 [k, record_bytes].

        Raises:
            RowIdError, UsageError, CorruptIndexError: see `fetch`.

        Examples:
            >>> from storage_formats import TokenStore
            >>> TokenStore.open("photos.edje").fetch_records([2, 4]).shape
            (2, 128)
        """
        view = self._view
        ids = view.checked(row_ids)
        shape = (len(ids), view.codec.record_bytes)
        out = lend(shape[0] * shape[1]).reshape(shape) if out is None else out
        check_out(out, shape, np.dtype(np.uint8))
        view.read(ids, out, RecordSink(out))
        return out

    def max_sim(
        self, query: NDArray[np.float32], row_ids: RowIds
    ) -> NDArray[np.float32]:
        """Return the MaxSim of a query and the block of each of `row_ids`, float32 [k].
        The score of a hole is NaN.

        MaxSim finds, for each query vector, the largest dot product with a token of the
        block, and sums these maxima over the query vectors. Each record is read,
        decoded and scored in one pass, so the decoded blocks need little memory.

        Args:
            query: query vectors, float32 [q, d]. A query with another shape, or with a
                value that is NaN or infinite, raises UsageError.
            row_ids: [k], see `fetch`, which also describes the other errors.
        """
        view = self._view
        width = self.block_shape[1]
        ids = view.checked(row_ids)
        query = as_finite(query, "query")
        if query.ndim != 2 or not len(query) or query.shape[1] != width:
            raise UsageError(
                f"a query must have the shape [q, {width}] with q >= 1, got"
                f" {list(query.shape)}"
            )
        scores = np.empty(len(ids), dtype=np.float32)
        sink = ScoreSink(view.codec, query, scores)
        view.read(ids, scores, sink)
        return scores

    def empty(self, count: int) -> Blocks:
        """Return an uninitialised array for `count` blocks, bfloat16 [count, m, d], to
        pass to `fetch` as `out`.

        The array starts at a page boundary, so that `fetch` can read `bf16` blocks
        directly into the array. New memory costs page faults. An array of up to 64 MiB
        therefore takes the memory of an earlier array that no longer exists, if there
        is one. A process keeps at most 256 MiB allocated for this purpose.

        Examples:
            >>> from storage_formats import TokenStore
            >>> TokenStore.open("photos.edje").empty(100).shape
            (100, 4, 16)
        """
        m, d = self.block_shape
        count = as_count(count, "count", least=0)
        memory = lend(count * m * d * BF16.itemsize)
        blocks: Blocks = memory.view(BF16).reshape(count, m, d)
        return blocks

    def iter_fetch(
        self, batches: Iterable[RowIds], ahead: int = 1
    ) -> Generator[Blocks]:
        """Yield the blocks of each batch of row ids, while a background thread reads
        the next batches.

        If reading a batch fails, the error is raised when the iteration reaches that
        batch. After a fork, only the parent process can continue the iteration, because
        the background thread does not exist in the child process. The child can start
        a new iteration.

        Args:
            batches: row ids of each batch, see `fetch`.
            ahead: maximum number of batches to read in advance, at least 1.

        Yields:
            ml_dtypes.bfloat16 [k, m, d], a new array for each batch.

        Raises:
            RowIdError, UsageError, CorruptIndexError: see `fetch`.

        Examples:
            >>> from storage_formats import TokenStore
            >>> store = TokenStore.open("photos.edje")
            >>> [len(blocks) for blocks in store.iter_fetch([[0, 1, 2], [3], []])]
            [3, 1, 0]
        """
        yield from ordered_map(self.fetch, batches, 1, 1 + as_count(ahead, "ahead"))

    def holes(self, blocks: Blocks) -> NDArray[np.bool_]:
        """Return which of the fetched `blocks` [k, m, d] are holes, bool [k].

        Examples:
            >>> from storage_formats import TokenStore
            >>> store = TokenStore.open("photos.edje")
            >>> store.holes(store.fetch([0, 5]))
            array([False, False])
        """
        return holes(blocks)

    def close(self) -> None:
        """Close the shard files. A later call of `fetch` opens the files again."""
        view = self._view
        view.reads.close()
        view.records.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _view_of(self, index: CommittedIndex) -> _View:
        """Open `index` for reading. Each view opens files of its own, because a later
        snapshot may have other files with the same names.
        """
        spec = index.manifest.spec
        if as_text(self.precision, "precision") not in spec.precisions:
            held = ", ".join(spec.precisions)
            raise UsageError(
                f"the index does not have precision '{self.precision}'; choose one of:"
                f" {held}",
                remedy="precision",
            )
        token_codec = stored_codec(index.place, spec, self.precision)
        size = token_codec.record_bytes
        records = StoredRecords(index, token_codec)
        reads: LocalReads | ObjectReads
        if (folder := index.remote) is None:
            reads = LocalReads(records, self._engine)
        else:
            if self._engine not in ("auto", OBJECT_STORE):
                raise UsageError(
                    f"the read engine '{self._engine}' cannot read an index on an"
                    f" object store; choose auto or {OBJECT_STORE}"
                )
            reads = ObjectReads(folder, records)
        # Reads allocate memory according to the sizes in `index.json`. If these sizes
        # are wrong, the first or the last shard file has another length, and this check
        # fails before any read. Objects are checked by one request, at the last shard.
        shards = {spec.shards - 1}
        if folder is None:
            shards.add(spec.used_segments[0].first_row // spec.shard_size)
        for shard in shards:
            _, length = padded_shard_bytes(
                len(spec.shard_rows(shard)), spec.shard_size, size
            )
            if (actual := reads.length(shard)) != length:
                raise CorruptIndexError(
                    f"the token file {records.location(shard)} has {actual} bytes"
                    f" instead of {length}",
                    remedy="verify",
                )
        return _View(index, index.deleted, token_codec, reads, records)


@dataclass(frozen=True)
class _View:
    """One snapshot of an index, opened for reading in one precision.

    `TokenStore.refresh` may replace `TokenStore._view` at any time. A method of the
    store therefore keeps the view that it has read first, and takes from it all values
    that can differ between snapshots.
    """

    index: CommittedIndex
    deleted: Tombstones
    codec: Codec
    reads: LocalReads | ObjectReads
    records: StoredRecords

    def checked(self, row_ids: RowIds) -> NDArray[np.int64]:
        """Return `row_ids` as int64 [k]. Raise the errors of `fetch` if a row id is
        not valid.
        """
        ids = check_row_ids(row_ids, self.index.manifest.spec.rows)
        self.deleted.refuse(ids)
        return ids

    def read(
        self,
        ids: NDArray[np.int64],
        out: NDArray[Any],
        sink: Sink,
        *,
        always_checks: bool = False,
    ) -> None:
        """Fill `out`, the output of `sink`, with the blocks, records or scores of the
        rows `ids`.

        A row id that occurs several times in `ids` is read from a file once, and the
        result is copied within `out`. Row ids outside all segments are holes.
        """
        if not len(ids) or (not always_checks and self.reads.read_cached(ids, sink)):
            return
        spec = self.index.manifest.spec
        order = np.argsort(ids, kind="stable")
        # Row ids outside all segments have no file, so they are not read. An index
        # without `segments` has one segment with all row ids.
        if spec.segments:
            used = rows_in_use(ids[order], spec)
            unused = order[~used]
            order = order[used]
            is_records = out.dtype == np.uint8
            out[unused] = fill_record(self.codec) if is_records else np.nan
        in_order = ids[order]
        is_first = np.ones(len(order), dtype=bool)
        np.not_equal(in_order[1:], in_order[:-1], out=is_first[1:])
        firsts = order[is_first]
        if len(firsts):
            batch = Batch(*np.divmod(ids[firsts], spec.shard_size), firsts)
            self.reads.read(ReadRequest(batch, sink, self.records, always_checks))
        if not is_first.all():
            # for each entry of `order`, the index in `out` of the first entry with the
            # same row id
            originals = firsts[np.cumsum(is_first) - 1]
            sources = originals[~is_first].tolist()
            targets = order[~is_first].tolist()
            for source, target in zip(sources, targets, strict=True):
                out[target] = out[source]
