"""Compared libraries that read arrays: NumPy memory maps of a copy, and Zarr libraries on the files of the index."""

from __future__ import annotations

import mmap
from importlib import import_module
from typing import Any

import numpy as np

from benchmarks.fetch.subjects import Subject
from benchmarks.fetch.workloads import Ids
from storage_formats.codecs import Records
from storage_formats.threads import default_threads

_FILE = "records.bin"
_TENSORSTORE_REQUESTS = 128


class MemmapPeer(Subject):
    """Reads rows of one memory-mapped array with `np.take`. The EDJE paper reads tokens in this way."""

    copies = True
    setting = "one flat file, np.take(mapped, ids, out=buffer)"

    def prepare(self) -> None:
        with (self.folder / _FILE).open("wb") as file:
            for _, records in self.source.shards():
                records.tofile(file)

    def open(self) -> None:
        shape = (self.source.spec.rows, self.source.record_bytes)
        self._mapped = np.memmap(self.folder / _FILE, dtype=np.uint8, mode="r", shape=shape)

    def fetch(self, ids: Ids, out: Records) -> Records:
        return np.take(self._mapped, ids, axis=0, out=out, mode="clip")  # mode="raise" would copy twice

    def close(self) -> None:
        del self._mapped


class RandomMemmapPeer(MemmapPeer):
    """Like `MemmapPeer`, but madvise(MADV_RANDOM) disables readahead."""

    setting = "as np.memmap, with madvise(MADV_RANDOM)"

    @classmethod
    def copy_bytes(cls, rows: int, record_bytes: int) -> int:
        return 0  # it reads the copy that MemmapPeer writes

    def open(self) -> None:
        super().open()
        mapping: Any = self._mapped._mmap  # type: ignore[attr-defined]
        mapping.madvise(mmap.MADV_RANDOM)


class TensorStorePeer(Subject):
    """Reads with TensorStore, without a cache and with many concurrent requests."""

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


class ZarrPythonPeer(Subject):
    """Reads with zarr-python, by orthogonal indexing with ascending row ids."""

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


class ZarrsPeer(ZarrPythonPeer):
    """Reads with zarr-python and the codec pipeline of zarrs, one row at a time."""

    # zarrs accepts no index arrays.
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
