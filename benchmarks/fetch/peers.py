"""The compared libraries of `bench fetch`.

To add one, write a subclass of `Subject` here and name it in `PEERS` at the end of this file. `open`, `fetch` and
`close` are the whole interface. A library with a file format of its own also sets `copies` and implements `prepare`.
Modules of the library are imported in the methods, because each subject runs in a process of its own.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fetch.subjects import DirectReads, EdjeReader, Ids, Memcpy, Subject
from storage_formats.codecs import Records
from storage_formats.threads import default_threads

_TENSORSTORE_REQUESTS = 128
_ARROW_BYTES = 2**31 - 1  # Lance rejects larger result arrays of fixed-size binaries
_LANCE_BATCH = 256
_HDF5_SELECTION = 1000  # rows per selection; the cost of a selection grows faster than its number of rows


class Memmap(Subject):
    """Reads rows of one memory-mapped array with `np.take`. The EDJE paper reads tokens in this way."""

    copies = True
    setting = "one flat file, np.take(mapped, ids, out=buffer)"

    def prepare(self) -> None:
        with (self.folder / "records.bin").open("wb") as file:
            for _, records in self.source.shards():
                records.tofile(file)

    def open(self) -> None:
        shape = (self.source.spec.rows, self.source.record_bytes)
        self._mapped = np.memmap(self.folder / "records.bin", dtype=np.uint8, mode="r", shape=shape)

    def fetch(self, ids: Ids, out: Records) -> Records:
        return np.take(self._mapped, ids, axis=0, out=out, mode="clip")  # mode="raise" would copy twice

    def close(self) -> None:
        del self._mapped


class RandomMemmap(Memmap):
    """Like `Memmap`, whose copy it reads, but madvise(MADV_RANDOM) disables readahead."""

    copy_ratio = 0.0
    setting = "as np.memmap, with madvise(MADV_RANDOM)"

    def open(self) -> None:
        super().open()
        mapping: Any = self._mapped._mmap  # type: ignore[attr-defined]
        mapping.madvise(mmap.MADV_RANDOM)


class TensorStore(Subject):
    """Reads the index with TensorStore, without a cache and with many concurrent requests."""

    package = "tensorstore"
    setting = f"cache_pool 0, file_io_concurrency {_TENSORSTORE_REQUESTS}, data_copy_concurrency = CPUs, into a buffer"

    def open(self) -> None:
        self._ts: Any = import_module("tensorstore")
        limits = {"file_io_concurrency": _TENSORSTORE_REQUESTS, "data_copy_concurrency": default_threads()}
        context = {name: {"limit": limit} for name, limit in limits.items()}
        context["cache_pool"] = {"total_bytes_limit": 0}
        self._array = self._ts.open(
            {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(self.source.array_path)}},
            read=True,
            context=self._ts.Context(context),
            recheck_cached_metadata=False,
            recheck_cached_data=False,
        ).result()

    def fetch(self, ids: Ids, out: Records) -> Records:
        view = out.view(self._array.dtype.numpy_dtype).reshape(len(ids), *self._array.shape[1:])
        self._ts.array(view).write(self._array[ids]).result()
        return out

    def close(self) -> None:
        del self._array


class ZarrPython(Subject):
    """Reads the index with zarr-python, by orthogonal indexing with ascending row ids."""

    package = "zarr"
    setting = "oindex of sorted ids"
    _pipeline = "zarr.core.codec_pipeline.BatchedCodecPipeline"

    def open(self) -> None:
        zarr: Any = import_module("zarr")
        with zarr.config.set({"codec_pipeline.path": self._pipeline}):  # an array keeps the pipeline it was opened with
            self._array = zarr.open_array(str(self.source.array_path), mode="r")

    def fetch(self, ids: Ids, out: Records) -> Records:
        order = np.argsort(ids)
        records = np.ascontiguousarray(self._array.oindex[ids[order]])
        out[order] = records.view(np.uint8).reshape(len(ids), -1)
        return out

    def close(self) -> None:
        del self._array


class Zarrs(ZarrPython):
    """Reads with zarr-python and the codec pipeline of zarrs, one row at a time: zarrs accepts no index arrays."""

    package = "zarrs"
    setting = "zarrs.ZarrsCodecPipeline, one basic index per row"
    _pipeline = "zarrs.ZarrsCodecPipeline"

    def open(self) -> None:
        import_module("zarrs")
        super().open()

    def fetch(self, ids: Ids, out: Records) -> Records:
        for position, row in enumerate(ids.tolist()):
            out[position] = np.ascontiguousarray(self._array[row]).view(np.uint8).reshape(-1)
        return out


class Lance(Subject):
    """Reads a Lance dataset with `take`, which uses io_uring. The records are a column of fixed-size binary values."""

    package = "pylance"
    copies = True
    setting = "fixed-size binary column, file+uring://, dataset.take of at most 2 GiB"

    def prepare(self) -> None:
        pa: Any = import_module("pyarrow")
        kind = pa.binary(self.source.record_bytes)
        schema = pa.schema([pa.field("record", kind, nullable=False)])

        def batches() -> Iterator[Any]:
            for _, records in self.source.shards():
                for start in range(0, len(records), _LANCE_BATCH):
                    part = np.ascontiguousarray(records[start : start + _LANCE_BATCH])
                    column = pa.Array.from_buffers(kind, len(part), [None, pa.py_buffer(part)])
                    yield pa.record_batch([column], schema=schema)

        lance: Any = import_module("lance")
        reader = pa.RecordBatchReader.from_batches(schema, batches())
        lance.write_dataset(reader, str(self.folder / "records.lance"))

    def open(self) -> None:
        lance: Any = import_module("lance")
        self._dataset = lance.dataset(f"file+uring://{(self.folder / 'records.lance').resolve()}")

    def fetch(self, ids: Ids, out: Records) -> Records:
        size, filled = self.source.record_bytes, 0
        for start in range(0, len(ids), _ARROW_BYTES // size):
            for chunk in self._dataset.take(ids[start : start + _ARROW_BYTES // size])["record"].chunks:
                stored = np.frombuffer(chunk.buffers()[1], dtype=np.uint8)
                part = stored[chunk.offset * size : (chunk.offset + len(chunk)) * size]
                out[filled : filled + len(chunk)] = part.reshape(len(chunk), size)
                filled += len(chunk)
        return out

    def close(self) -> None:
        del self._dataset


class Lmdb(Subject):
    """Reads LMDB, a memory-mapped B+ tree with one value per row."""

    package = "lmdb"
    copies = True
    copy_ratio = 1.4  # a long value takes whole pages, with a header
    setting = "8-byte big-endian keys, readahead off, one read transaction per call"

    def _environment(self, **options: Any) -> Any:
        lmdb: Any = import_module("lmdb")
        return lmdb.open(str(self.folder), **options)

    def prepare(self) -> None:
        with self._environment(map_size=1 << 42) as environment:  # the map is sparse
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


class Hdf5(Subject):
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

    def fetch(self, ids: Ids, out: Records) -> Records:
        order = np.argsort(ids)
        for start in range(0, len(ids), _HDF5_SELECTION):
            positions = order[start : start + _HDF5_SELECTION]
            out[positions] = self._file["records"][ids[positions]]
        return out

    def close(self) -> None:
        self._file.close()


PEERS: Mapping[str, type[Subject]] = {
    "np.memmap": Memmap,
    "np.memmap MADV_RANDOM": RandomMemmap,
    "tensorstore": TensorStore,
    "zarr-python": ZarrPython,
    "zarrs-python": Zarrs,
    "lance": Lance,
    "lmdb": Lmdb,
    "hdf5": Hdf5,
}
"""The compared libraries by name, in the order of reports."""

SUBJECTS: Mapping[str, type[Subject]] = {
    "edje": EdjeReader,
    "memcpy": Memcpy,
    "direct reads": DirectReads,
    **PEERS,
}
"""Everything that a worker process can measure, by name."""


def installed_version(name: str) -> str | None:
    """Return the version of the package that a peer needs: "" if it needs none, None if it is not installed."""
    package = PEERS[name].package
    if package is None:
        return ""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
