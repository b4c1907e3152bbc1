"""Compared libraries with other file formats: Lance, LMDB, HDF5 and Parquet.

Before the timed runs, the records are copied to each format.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fetch.subjects import Subject
from benchmarks.fetch.workloads import Ids
from storage_formats.atomic import fsync_path
from storage_formats.codecs import Records
from storage_formats.format.layout import PAGE_BYTES

_COLUMN = "record"
_BATCH = 256
_ARROW_BYTES = 2**31 - 1  # Lance rejects larger result arrays of fixed-size binaries
_LMDB_HEADER = 16
_LMDB_TREE = 16 << 20  # space for the tree of a small store
_GROUPS_A_READ = 1024  # bounds the memory of a read
_HDF5_SELECTION = 1000  # rows per selection; the cost of a selection grows faster than its number of rows


class _ArrowPeer(Subject):
    """Base class of libraries that store records as an Arrow column of fixed-size binary values."""

    copies = True

    def _batches(self) -> Iterator[Any]:
        pa: Any = import_module("pyarrow")
        kind = pa.binary(self.source.record_bytes)
        for _, records in self.source.shards():
            for start in range(0, len(records), _BATCH):
                part = np.ascontiguousarray(records[start : start + _BATCH])
                column = pa.Array.from_buffers(kind, len(part), [None, pa.py_buffer(part)])
                yield pa.record_batch([column], schema=self._schema())

    def _schema(self) -> Any:
        pa: Any = import_module("pyarrow")
        return pa.schema([pa.field(_COLUMN, pa.binary(self.source.record_bytes), nullable=False)])

    def _bytes_of(self, chunk: Any) -> Records:
        """View an Arrow array as records, uint8 [k, record_bytes], without copying."""
        size = self.source.record_bytes
        flat = np.frombuffer(chunk.buffers()[1], dtype=np.uint8)
        return flat[chunk.offset * size : (chunk.offset + len(chunk)) * size].reshape(len(chunk), size)


class LancePeer(_ArrowPeer):
    """Reads a Lance dataset with `take`, which uses io_uring."""

    package = "pylance"
    setting = "fixed-size binary column, file+uring://, dataset.take of at most 2 GiB"

    def prepare(self) -> None:
        pa: Any = import_module("pyarrow")
        lance: Any = import_module("lance")
        reader = pa.RecordBatchReader.from_batches(self._schema(), self._batches())
        lance.write_dataset(reader, str(self.folder / "records.lance"))

    def open(self) -> None:
        lance: Any = import_module("lance")
        self._dataset = lance.dataset(f"file+uring://{(self.folder / 'records.lance').resolve()}")

    def fetch(self, ids: Ids, out: Records) -> Records:
        filled, most = 0, _ARROW_BYTES // self.source.record_bytes
        for start in range(0, len(ids), most):
            for chunk in self._dataset.take(ids[start : start + most])[_COLUMN].chunks:
                out[filled : filled + len(chunk)] = self._bytes_of(chunk)
                filled += len(chunk)
        return out

    def close(self) -> None:
        del self._dataset


class LmdbPeer(Subject):
    """Reads LMDB, a memory-mapped B+ tree with one value per row."""

    package = "lmdb"
    copies = True
    setting = "8-byte big-endian keys, readahead off, one read transaction per call"

    @classmethod
    def copy_bytes(cls, rows: int, record_bytes: int) -> int:
        pages = -(-(record_bytes + _LMDB_HEADER) // PAGE_BYTES)  # a long value takes whole pages
        return int(rows * pages * PAGE_BYTES * 1.05) + _LMDB_TREE

    def prepare(self) -> None:
        size = self.copy_bytes(self.source.spec.rows, self.source.record_bytes)
        with self._environment(map_size=size, sync=True) as environment:
            for first, records in self.source.shards():
                with environment.begin(write=True) as transaction:
                    for row, record in enumerate(records, first):
                        transaction.put(row.to_bytes(8, "big"), record.tobytes(), append=True)

    def files(self) -> list[Path]:
        return [self.folder / "data.mdb"]

    def open(self) -> None:
        self._opened = self._environment(readonly=True, lock=False, readahead=False)

    def fetch(self, ids: Ids, out: Records) -> Records:
        with self._opened.begin(buffers=True) as transaction:
            for position, row in enumerate(ids.tolist()):
                out[position] = np.frombuffer(transaction.get(row.to_bytes(8, "big")), dtype=np.uint8)
        return out

    def close(self) -> None:
        self._opened.close()

    def _environment(self, **options: Any) -> Any:
        lmdb: Any = import_module("lmdb")
        return lmdb.open(str(self.folder), **options)


class Hdf5Peer(Subject):
    """Reads a contiguous HDF5 dataset by lists of ascending row ids."""

    package = "h5py"
    copies = True
    setting = f"contiguous dataset, sorted fancy selections of {_HDF5_SELECTION} rows"

    def prepare(self) -> None:
        h5py: Any = import_module("h5py")
        shape = (self.source.spec.rows, self.source.record_bytes)
        with h5py.File(self.folder / "records.h5", "w") as file:
            dataset = file.create_dataset("records", shape=shape, dtype="uint8")
            for first, records in self.source.shards():
                dataset[first : first + len(records)] = records

    def open(self) -> None:
        h5py: Any = import_module("h5py")
        self._file = h5py.File(self.folder / "records.h5", "r")
        self._dataset = self._file["records"]

    def fetch(self, ids: Ids, out: Records) -> Records:
        order = np.argsort(ids)
        for start in range(0, len(ids), _HDF5_SELECTION):
            positions = order[start : start + _HDF5_SELECTION]
            out[positions] = self._dataset[ids[positions]]
        return out

    def close(self) -> None:
        self._file.close()


class ParquetPeer(_ArrowPeer):
    """Reads a Parquet file with uncompressed row groups of 16 rows.

    Each row group with a requested row is read whole.
    """

    setting = "row groups of 16 rows, uncompressed, whole groups read"
    _GROUP = 16

    def prepare(self) -> None:
        pq: Any = import_module("pyarrow.parquet")
        options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
        path = self.folder / "records.parquet"
        with pq.ParquetWriter(path, self._schema(), **options) as writer:
            for batch in self._batches():
                writer.write_batch(batch, row_group_size=self._GROUP)
        fsync_path(path)

    def open(self) -> None:
        pq: Any = import_module("pyarrow.parquet")
        self._file = pq.ParquetFile(self.folder / "records.parquet", pre_buffer=True)
        groups = self._file.metadata
        lengths = [groups.row_group(group).num_rows for group in range(groups.num_row_groups)]
        self._starts = np.concatenate([[0], np.cumsum(lengths)])  # first row of each group, then the number of rows

    def fetch(self, ids: Ids, out: Records) -> Records:
        order = np.argsort(ids)
        groups = np.searchsorted(self._starts, ids[order], side="right") - 1
        chosen = np.unique(groups)
        for part in np.array_split(chosen, -(-len(chosen) // _GROUPS_A_READ)):
            within = (groups >= part[0]) & (groups <= part[-1])
            self._take(part, order[within], groups[within], ids, out)
        return out

    def close(self) -> None:
        self._file.close()

    def _take(self, chosen: Ids, positions: Ids, groups: Ids, ids: Ids, out: Records) -> None:
        chunks = self._file.read_row_groups(chosen.tolist(), columns=[_COLUMN])[_COLUMN].chunks
        parts = [self._bytes_of(chunk) for chunk in chunks]
        records = np.concatenate(parts) if len(parts) > 1 else parts[0]
        before = np.concatenate([[0], np.cumsum(np.diff(self._starts)[chosen])])
        out[positions] = records[before[np.searchsorted(chosen, groups)] + ids[positions] - self._starts[groups]]
