"""The interface of everything that `bench fetch` measures, this project's reader, and the reference measurements."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks.disk import sector_bytes
from storage_formats.codecs import BF16, Records, codec, fill_record
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.tombstones import live_rows
from storage_formats.threads import default_threads
from storage_formats.token_store import TokenStore

Ids: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class Entry:
    """One line of a report: a subject, and the blocks that each of its runs fetches.

    Attributes:
        label: name in reports.
        subject: name of the subject, a key of `benchmarks.fetch.peers.SUBJECTS`, or "fio".
        pattern: "random" rows, "contiguous" rows, or "listed" rows: rows from a few groups of neighbouring rows, like
            the inverted lists of FAISS.
        blocks: number of blocks in all calls together. No row is requested twice.
        pool: blocks per call.
        cache: state of the page cache before the run.
        engine: I/O engine of this project's reader.
    """

    label: str
    subject: str
    pattern: Literal["random", "contiguous", "listed"]
    blocks: int
    pool: int
    cache: Literal["cold", "warm"] = "cold"
    engine: str = "auto"


class StoredRecords:
    """The records of one precision, read with plain file reads: for copies, and to check results.

    Record i of a shard starts at byte i x record_bytes (SPEC.md section 6).
    """

    def __init__(self, root: Path, precision: str) -> None:
        index = CommittedIndex.open(root)
        self.root = root
        self.precision = precision
        self.spec = index.manifest.spec
        self.codec = codec(precision, self.spec.block_shape)
        self.record_bytes = self.codec.record_bytes
        self.row_ids: Ids = live_rows(index)
        self.array_path = Layout(root).token_array(precision)

    @cached_property
    def direct_bytes(self) -> int:
        """Bytes of a record, rounded up to whole sectors."""
        unit = sector_bytes(self.root)
        return -(-self.record_bytes // unit) * unit

    def shard_path(self, shard: int) -> Path:
        return Layout(self.root).token_shard(self.precision, shard, record_ndim=len(self.codec.record_shape))

    def files(self) -> list[Path]:
        """Return the paths of the shard files in row order."""
        return [self.shard_path(shard) for shard in self.spec.shard_numbers()]

    def shards(self) -> Iterator[tuple[int, Records]]:
        """Yield the first row id and the records, uint8 [k, record_bytes], of each shard.

        Unused row ids get the records of holes. In a concatenation of all records, record i therefore has the row id i.
        """
        for shard in range(self.spec.shards):
            rows = self.spec.shard_rows(shard)
            ids = range(rows.start, min(rows.start + self.spec.shard_size, self.spec.rows))
            records = np.tile(fill_record(self.codec), (len(ids), 1))
            if rows:
                stored = np.fromfile(self.shard_path(shard), dtype=np.uint8, count=len(rows) * self.record_bytes)
                records[: len(rows)] = stored.reshape(len(rows), self.record_bytes)
            yield rows.start, records

    def read(self, ids: Ids) -> Records:
        """Return the records of `ids`. Each record is read with one file read."""
        out = np.empty((len(ids), self.record_bytes), dtype=np.uint8)
        for row, (shard, position) in enumerate(zip(*np.divmod(ids, self.spec.shard_size), strict=True)):
            offset = int(position) * self.record_bytes
            out[row] = np.fromfile(self.shard_path(int(shard)), dtype=np.uint8, count=out.shape[1], offset=offset)
        return out


class Subject(ABC):
    """One way to fetch blocks: this project's reader, a compared library, or a reference measurement.

    This project's reader returns decoded blocks. Compared libraries return stored records.

    Attributes:
        package: Python package that must be installed; None if the dependencies of this project suffice.
        copies: True if the subject reads a copy of the records, which `prepare` writes to `folder`.
        copy_ratio: largest size of that copy, as a multiple of the size of the records.
        setting: description of the configuration, for reports.
    """

    package: ClassVar[str | None] = None
    copies: ClassVar[bool] = False
    copy_ratio: ClassVar[float] = 1.05
    setting: ClassVar[str] = ""

    def __init__(self, source: StoredRecords, folder: Path, entry: Entry | None = None) -> None:
        self.source = source
        self.folder = folder
        self.entry = entry
        self.output_bytes = source.record_bytes

    def prepare(self) -> None:
        """Write a copy of the records to `folder`. Only subjects with `copies` implement this method."""
        raise NotImplementedError

    def files(self) -> list[Path]:
        """Return the paths of the files that the subject reads."""
        if self.copies:
            return sorted(path for path in self.folder.rglob("*") if path.is_file())
        return self.source.files()

    @abstractmethod
    def open(self) -> None:
        """Open the files, and prepare everything that the first fetch needs."""

    @abstractmethod
    def fetch(self, ids: Ids, out: Records) -> Records:
        """Fetch the rows `ids`, in this order. Return `out` or a new array, uint8 [k, output_bytes]."""

    @abstractmethod
    def close(self) -> None:
        """Close all files, and free all memory and memory maps."""

    def expected(self, ids: Ids) -> Records:
        """Return the correct result of `fetch`, computed with plain file reads."""
        return self.source.read(ids)


class EdjeReader(Subject):
    """This project's reader: `TokenStore.fetch` into a reused buffer."""

    setting = "TokenStore.fetch into a buffer, decoded to bfloat16"

    def __init__(self, source: StoredRecords, folder: Path, entry: Entry | None = None) -> None:
        super().__init__(source, folder, entry)
        self.output_bytes = int(np.prod(source.spec.block_shape)) * int(BF16.itemsize)

    def open(self) -> None:
        engine = "auto" if self.entry is None else self.entry.engine
        self._store = TokenStore.open(self.source.root, self.source.precision, engine)

    def fetch(self, ids: Ids, out: Records) -> Records:
        self._store.fetch(ids, out.view(BF16).reshape(len(ids), *self._store.block_shape))
        return out

    def close(self) -> None:
        self._store.close()

    def expected(self, ids: Ids) -> Records:
        return self.source.codec.decode(self.source.read(ids)).view(np.uint8).reshape(len(ids), self.output_bytes)


class Memcpy(EdjeReader):
    """Upper limit for warm fetches: copies as many bytes in memory with memmove(3)."""

    setting = "memmove(3) between touched buffers, one part per thread"

    def files(self) -> list[Path]:
        return []

    def open(self) -> None:
        self._bytes = np.ones(0, dtype=np.uint8)
        self._pool = ThreadPoolExecutor(default_threads())

    def fetch(self, ids: Ids, out: Records) -> Records:
        if len(self._bytes) < out.nbytes:
            self._bytes = np.ones(out.nbytes, dtype=np.uint8)
        target, origin = out.ctypes.data, self._bytes.ctypes.data
        cuts = np.linspace(0, out.nbytes, default_threads() + 1, dtype=np.int64).tolist()
        list(self._pool.map(lambda a, b: ctypes.memmove(target + a, origin + a, b - a), cuts[:-1], cuts[1:]))
        return out

    def close(self) -> None:
        self._pool.shutdown()

    def expected(self, ids: Ids) -> Records:
        return np.ones((len(ids), self.output_bytes), dtype=np.uint8)


class DirectReads(Subject):
    """The disk's limit if fio is not installed: O_DIRECT reads of whole records from 64 threads. The data is discarded.

    Contiguous rows are read in pieces of about 1 MiB.
    """

    setting = "O_DIRECT preadv from 64 threads"

    def open(self) -> None:
        self._pool = ThreadPoolExecutor(64)
        self._local = threading.local()
        self._unit = sector_bytes(self.source.root)
        is_sequential = self.entry is not None and self.entry.pattern == "contiguous"
        self._rows_per_read = max(1, (1 << 20) // self.source.record_bytes) if is_sequential else 1
        paths = zip(self.source.spec.shard_numbers(), self.files(), strict=True)
        self._files = {shard: os.open(path, os.O_RDONLY | os.O_DIRECT) for shard, path in paths}

    def fetch(self, ids: Ids, out: Records) -> Records:
        shards = ids // self.source.spec.shard_size
        is_first = (np.arange(len(ids)) % self._rows_per_read == 0) | (np.diff(shards, prepend=-1) != 0)
        firsts = np.flatnonzero(is_first)
        list(self._pool.map(self._read, ids[firsts].tolist(), np.diff(firsts, append=len(ids)).tolist()))
        return out

    def _read(self, row: int, count: int) -> None:
        shard, position = divmod(row, self.source.spec.shard_size)
        size, unit = self.source.record_bytes, self._unit
        start, stop = position * size // unit * unit, -(-(position + count) * size // unit) * unit
        if getattr(self._local, "buffer", None) is None:
            self._local.buffer = mmap.mmap(-1, self._rows_per_read * size + 2 * unit)
        with memoryview(self._local.buffer) as view:
            os.preadv(self._files[shard], [view[: stop - start]], start)

    def close(self) -> None:
        self._pool.shutdown()
        for fd in self._files.values():
            os.close(fd)

    def expected(self, ids: Ids) -> Records:
        return np.ones((len(ids), self.output_bytes), dtype=np.uint8)  # the worker fills the buffer with ones
