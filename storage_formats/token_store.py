"""Reading token blocks by row id."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from storage_formats.codecs import Blocks, Codec, Records, codec
from storage_formats.codecs.base import check_out
from storage_formats.codecs.bf16 import BF16Codec
from storage_formats.errors import CorruptIndexError, UsageError
from storage_formats.layout import Layout
from storage_formats.manifest import Manifest

_READAHEAD_BLOCKS = 256  # requests in flight that saturate the disks measured in docs/architecture.md
_OPEN_FILES = 256
_MAX_IOVECS = 512  # below Linux's IOV_MAX of 1024


class TokenStore:
    """The token blocks of an index in one precision. Thread-safe.

    Opening reads `index.json` alone: cost and memory do not depend on the number of rows.
    """

    def __init__(self, root: str | Path, manifest: Manifest, precision: str) -> None:
        self._layout = Layout(Path(root))
        self._spec = manifest.spec
        self._codec: Codec = codec(precision, manifest.spec.block_shape)
        self._files = _FileCache(self._layout, precision, len(self._codec.record_shape))
        self.precision = precision

    @classmethod
    def open(cls, root: str | Path, precision: str = "bf16") -> TokenStore:
        """The store of the index at `root`.

        Raises:
            UsageError: no index there, or it does not hold `precision`.
            IncompleteIndexError, CorruptIndexError: as `Manifest.load`.
        """
        manifest = Manifest.load(root)
        if precision not in manifest.spec.precisions:
            held = ", ".join(manifest.spec.precisions)
            raise UsageError(f"the index at {root} does not hold precision '{precision}'; it holds: {held}")
        return cls(root, manifest, precision)

    def __len__(self) -> int:
        """Number of rows, holes included."""
        return self._spec.rows

    @property
    def block_shape(self) -> tuple[int, int]:
        """(m, d), tokens of a block and their width."""
        return self._spec.block_shape

    def fetch(self, row_ids: Sequence[int] | NDArray[np.integer], out: Blocks | None = None) -> Blocks:
        """Blocks of `row_ids`, in their order; any number, any order, duplicates allowed.

        Args:
            row_ids: [k], 0 <= id < len(self).
            out: bfloat16 [k, m, d], C-contiguous, to read into; made where it is None.

        Returns:
            ml_dtypes.bfloat16 [k, m, d]. The block of a hole (a failed or duplicate input) is all NaN: see `holes`.

        Raises:
            UsageError: an id outside the store, or `out` of another shape or type.
            CorruptIndexError: a shard file is missing or too short.
        """
        ids = self._check_ids(row_ids)
        out = check_out(out, len(ids), self.block_shape)
        if not len(ids):
            return out
        stored_as_read = self._codec.name == BF16Codec.name
        shape = (len(ids), self._codec.record_bytes)
        records = out.view(np.uint8).reshape(shape) if stored_as_read else np.empty(shape, dtype=np.uint8)
        order = np.argsort(ids, kind="stable")
        first = np.concatenate([[True], np.diff(ids[order]) > 0])
        self._read(ids[order[first]], records, order[first])
        if not first.all():
            records[order] = records[order[first]][np.cumsum(first) - 1]
        return out if stored_as_read else self._codec.decode(records, out)

    def holes(self, blocks: Blocks) -> NDArray[np.bool_]:
        """Which of `blocks` [k, m, d], as `fetch` gave them, are holes -> [k].

        An encoder never stores a NaN, so the first element tells (SPEC.md section 6).
        """
        return np.isnan(blocks[:, 0, 0].astype(np.float32))

    def close(self) -> None:
        """Close the shard files; the store may be used again afterwards."""
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_ids(self, row_ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int64]:
        ids = np.asarray(row_ids)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise UsageError(f"row ids must be a flat sequence of integers, got {ids.dtype} {list(ids.shape)}")
        if ids.size and (ids.min() < 0 or ids.max() >= len(self)):
            raise UsageError(f"row ids must be in 0..{len(self) - 1}, got {ids.min()}..{ids.max()}")
        return ids.astype(np.int64)

    def _read(self, ids: NDArray[np.int64], records: Records, places: NDArray[np.int64]) -> None:
        """Read the record of each of `ids` (ascending, distinct) into `records[places]`.

        Neighbouring rows of a shard are one request; the kernel is told of the requests ahead, so that
        many are in flight although one thread reads.
        """
        runs = self._runs(ids)
        with contextlib.ExitStack() as files:
            handles = {shard: files.enter_context(self._files.get(shard)) for shard in {run.shard for run in runs}}
            ahead = iter(runs)
            budget = 0
            for run in runs:
                budget += run.count if budget else _READAHEAD_BLOCKS
                while budget > 0 and (soon := next(ahead, None)) is not None:
                    self._announce(handles[soon.shard], soon)
                    budget -= soon.count
                targets = [records[place] for place in places[run.start : run.start + run.count]]
                self._read_run(handles[run.shard], run, targets)

    def _runs(self, ids: NDArray[np.int64]) -> list[_Run]:
        shards, positions = np.divmod(ids, self._spec.shard_size)
        breaks = (np.diff(ids) != 1) | (np.diff(shards) != 0)
        starts = np.concatenate([[0], np.flatnonzero(breaks) + 1, [len(ids)]])
        return [
            _Run(int(start), min(stop - start, _MAX_IOVECS), int(shards[start]), int(positions[start]))
            for begin, end in itertools.pairwise(starts.tolist())
            for start, stop in ((at, end) for at in range(begin, end, _MAX_IOVECS))
        ]

    def _announce(self, fd: int, run: _Run) -> None:
        if hasattr(os, "posix_fadvise"):  # not on macOS
            size = self._codec.record_bytes
            os.posix_fadvise(fd, run.position * size, run.count * size, os.POSIX_FADV_WILLNEED)

    def _read_run(self, fd: int, run: _Run, targets: list[NDArray[np.uint8]]) -> None:
        size = self._codec.record_bytes
        done = 0
        while done < run.count * size:  # a request may be served in part
            skip, inside = divmod(done, size)
            buffers = [targets[skip][inside:].data, *(target.data for target in targets[skip + 1 :])]
            count = os.preadv(fd, buffers, run.position * size + done)
            if not count:
                raise CorruptIndexError(
                    f"shard {run.shard} of '{self.precision}' ends before position {run.position + run.count}; "
                    "run 'edje-index verify'"
                )
            done += count


@dataclass(frozen=True)
class _Run:
    """`count` neighbouring rows from `position` of `shard` on; `start` is the first one's place in the request."""

    start: int
    count: int
    shard: int
    position: int


class _FileCache:
    """Open shard files, the least recently used closed first and never while a reader holds it."""

    def __init__(self, layout: Layout, precision: str, record_ndim: int) -> None:
        self._path = functools.partial(layout.token_shard, precision, record_ndim=record_ndim)
        self._open: OrderedDict[int, _Handle] = OrderedDict()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def get(self, shard: int) -> Iterator[int]:
        """The file descriptor of a shard, valid within the context."""
        with self._lock:
            handle = self._open.pop(shard, None) or _Handle(self._open_shard(shard))
            self._open[shard] = handle
            handle.readers += 1
        try:
            yield handle.fd
        finally:
            with self._lock:
                handle.readers -= 1
                self._evict(_OPEN_FILES)

    def close(self) -> None:
        with self._lock:
            self._evict(0)

    def _open_shard(self, shard: int) -> int:
        path = self._path(shard)
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CorruptIndexError(f"cannot open {path}: {error.strerror}; run 'edje-index verify'") from error

    def _evict(self, keep: int) -> None:
        for shard in list(self._open)[: max(0, len(self._open) - keep)]:
            if not self._open[shard].readers:
                os.close(self._open.pop(shard).fd)


@dataclass
class _Handle:
    fd: int
    readers: int = 0
