"""Reading token blocks by row id."""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs import Blocks, Codec, Records, codec
from storage_formats.codecs.base import check_out
from storage_formats.errors import UsageError
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import Manifest
from storage_formats.reading.base import Batch
from storage_formats.reading.destination import Landing, StraightLanding, landing, read_batch
from storage_formats.reading.engine_selection import Engines, StoreFiles
from storage_formats.reading.memory import aligned_blocks, aligned_bytes, copy_memory

RowIds = Sequence[int] | NDArray[np.integer]


class TokenStore:
    """The token blocks of an index in one precision. Thread-safe.

    Opening reads `index.json` alone: cost and memory do not depend on the number of rows.
    """

    def __init__(self, root: str | Path, manifest: Manifest, precision: str, engine: str = "auto") -> None:
        self._spec = manifest.spec
        self._codec: Codec = codec(precision, manifest.spec.block_shape)
        path = functools.partial(Layout(Path(root)).token_shard, precision, record_ndim=len(self._codec.record_shape))
        files = StoreFiles(path, self._codec.record_bytes, self._spec.shard_size, self._spec.rows)
        self._engines = Engines(files, engine)
        self.precision = precision

    @classmethod
    def open(cls, root: str | Path, precision: str = "bf16", engine: str = "auto") -> TokenStore:
        """The store of the index at `root`.

        Args:
            root: the index.
            precision: one that the index holds; blocks are bfloat16 whatever it is.
            engine: how to read, one of `storage_formats.reading.engines()`, or `auto`, which goes by what the page
                cache holds.

        Raises:
            UsageError: no index there, it does not hold `precision`, or `engine` does not work on this machine.
            IncompleteIndexError, CorruptIndexError: as `Manifest.load`.
        """
        manifest = Manifest.load(root)
        if precision not in manifest.spec.precisions:
            held = ", ".join(manifest.spec.precisions)
            raise UsageError(f"the index at {root} does not hold precision '{precision}'; it holds: {held}")
        return cls(root, manifest, precision, engine)

    def __len__(self) -> int:
        """Number of rows, holes included."""
        return self._spec.rows

    @property
    def record_bytes(self) -> int:
        """Length of a block as it is stored."""
        return self._codec.record_bytes

    @property
    def block_shape(self) -> tuple[int, int]:
        """(m, d), tokens of a block and their width."""
        return self._spec.block_shape

    def fetch(self, row_ids: RowIds, out: Blocks | None = None) -> Blocks:
        """Blocks of `row_ids`, in their order; any number, any order, duplicates allowed.

        Args:
            row_ids: [k], 0 <= id < len(self).
            out: bfloat16 [k, m, d], C-contiguous, to read into, best from `empty`; made where it is None.

        Returns:
            ml_dtypes.bfloat16 [k, m, d]. The block of a hole (a failed or duplicate input) is all NaN: see `holes`.

        Raises:
            UsageError: an id outside the store, or `out` of another shape or type.
            CorruptIndexError: a shard file is missing or too short.
        """
        ids = self._check_ids(row_ids)
        out = self.empty(len(ids)) if out is None else check_out(out, len(ids), self.block_shape)
        if not len(ids):
            return out
        self._read(ids, landing(self._codec, out, self._engines.buffers), out)
        return out

    def fetch_records(self, row_ids: RowIds, out: Records | None = None) -> Records:
        """As `fetch`, without decoding: uint8 [k, record_bytes], for whoever decodes elsewhere (on a GPU).

        `out` must be C-contiguous; where it begins at a page, records of whole sectors are read straight into it.
        """
        ids = self._check_ids(row_ids)
        shape = (len(ids), self._codec.record_bytes)
        if out is None:
            out = aligned_bytes(shape[0] * shape[1]).reshape(shape)
        if out.dtype != np.uint8 or out.shape != shape or not out.flags.c_contiguous or not out.flags.writeable:
            wanted = f"a writeable C-contiguous uint8 array of shape {list(shape)}"
            raise UsageError(f"out must be {wanted}, got {out.dtype} {list(out.shape)}")
        if len(ids):
            self._read(ids, StraightLanding(out), out)
        return out

    def empty(self, count: int) -> Blocks:
        """Memory for `count` blocks, bfloat16 [count, m, d], of any content: an `out` for `fetch`, to use again.

        It is aligned, so that `bf16` blocks are read straight into it; into other arrays they may have to be copied.
        """
        return aligned_blocks(count, self.block_shape)

    def prefetch(self, row_ids: RowIds) -> None:
        """Have the kernel begin to read blocks into the page cache, where `fetch` finds them; returns meanwhile.

        For a few hundred rows that will be asked for soon. More than the device's queue takes make it wait; to
        read large batches ahead use `iter_fetch`. Does nothing on systems that cannot be told (macOS).
        """
        ids = self._check_ids(row_ids)
        if len(ids):
            self._engines.announce(self._batch(ids)[0])

    def iter_fetch(self, batches: Iterable[RowIds], ahead: int = 1) -> Iterator[Blocks]:
        """The blocks of each batch of row ids, in order; the next ones are read while the caller works on one.

        One background thread reads. At most `ahead` batches of blocks exist beside the one that the caller has;
        each is an array of its own, which the caller may keep. Ending early and errors end the thread; an error is
        raised where its batch would have come.

        Raises:
            UsageError, CorruptIndexError: as `fetch`.
        """
        with _Ahead(self, batches, ahead) as results:
            for result in results:
                yield result.result()

    async def aiter_fetch(self, batches: Iterable[RowIds], ahead: int = 1) -> AsyncIterator[Blocks]:
        """As `iter_fetch`, for `async for`: the event loop runs while blocks are read."""
        with _Ahead(self, batches, ahead) as results:
            for result in results:
                yield await asyncio.wrap_future(result)

    def holes(self, blocks: Blocks) -> NDArray[np.bool_]:
        """Which of `blocks` [k, m, d], as `fetch` gave them, are holes -> [k].

        An encoder never stores a NaN, so the first element tells (SPEC.md section 6).
        """
        return np.isnan(blocks[:, 0, 0].astype(np.float32))

    def close(self) -> None:
        """Close the shard files and give back memory; the store may be used again afterwards."""
        self._engines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, ids: NDArray[np.int64], where: Landing, out: NDArray[Any]) -> None:
        """Read each row once and copy rows of `out` [k, ...] that are asked for again."""
        batch, copies, originals = self._batch(ids)
        for engine, part in self._engines.split(batch):
            read_batch(engine, part, where)
        if len(copies):
            size, first = out.strides[0], out.ctypes.data
            copy_memory(first + originals * size, first + copies * size, size)

    def _check_ids(self, row_ids: RowIds) -> NDArray[np.int64]:
        ids = np.asarray(row_ids)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise UsageError(f"row ids must be a flat sequence of integers, got {ids.dtype} {list(ids.shape)}")
        if ids.size and (ids.min() < 0 or ids.max() >= len(self)):
            raise UsageError(f"row ids must be in 0..{len(self) - 1}, got {ids.min()}..{ids.max()}")
        return ids.astype(np.int64)

    def _batch(self, ids: NDArray[np.int64]) -> tuple[Batch, NDArray[np.int64], NDArray[np.int64]]:
        """(each row once, places of repeated ones, where those stand first)."""
        order = np.argsort(ids, kind="stable")
        first = np.concatenate([[True], np.diff(ids[order]) > 0])
        places = order[first]
        shards, positions = np.divmod(ids[places], self._spec.shard_size)
        return Batch(shards, positions, places), order[~first], places[np.cumsum(first) - 1][~first]


class _Ahead:
    """Fetches of batches, begun in a background thread before their turn. Iterates over futures in order."""

    def __init__(self, store: TokenStore, batches: Iterable[RowIds], ahead: int) -> None:
        if ahead < 1:
            raise UsageError(f"ahead must be at least 1, got {ahead}")
        self._store = store
        self._batches = batches
        self._ahead = ahead
        self._thread = ThreadPoolExecutor(1, "edje-fetch")

    def __iter__(self) -> Iterator[Future[Blocks]]:
        pending: deque[Future[Blocks]] = deque()
        for batch in self._batches:
            pending.append(self._thread.submit(self._store.fetch, batch))
            if len(pending) > self._ahead:
                yield pending.popleft()
        yield from pending

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)
