"""What fetches blocks in `bench fetch` and `bench search`: this project's reader and
other libraries (peers).

To add a peer, write a subclass of `Subject` here and name it in `PEERS` at the end of
this file. `open` and `fetch` are the whole interface. A library with a file format of
its own also sets `copies` and implements `prepare`. Import the modules of the library
in the methods, because each run is a process of its own.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks.harness import READER, RECORDS
from edje_index import __version__
from storage_formats.arrays import Ints
from storage_formats.codecs import BF16, Records
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import Manifest
from storage_formats.threads import default_threads
from storage_formats.token_store import TokenStore

_TENSORSTORE_REQUESTS = 128
# largest size in bytes of an array of fixed-size binary values that Lance returns
_ARROW_BYTES = 2**31 - 1
# number of rows in each batch of a copy
_BATCH = 256
# Number of rows per selection. The cost of a selection grows faster than its number of
# rows, so that several small selections are faster than one large one.
_HDF5_SELECTION = 1000


class StoredRecords:
    """The first `rows` records of one precision of an index, to copy them for a peer
    and to check results.
    """

    def __init__(self, root: Path, precision: str, rows: int) -> None:
        self.root = root
        self.precision = precision
        self.store = TokenStore.open(root, precision)
        self.record_bytes = self.store.record_bytes
        self.rows = min(rows, len(self.store))
        row_ids = self.store.row_ids()
        self.row_ids = row_ids[row_ids < self.rows]
        self.array_path = Layout(root).token_array(precision)

    def files(self) -> list[Path]:
        """Return the paths of the shard files in row order."""
        last = (self.rows - 1) // Manifest.load(self.root).spec.shard_size
        return [
            path
            for shard in range(last + 1)
            for path in self.array_path.glob(f"c.{shard}.*")
        ]

    def batches(self) -> Iterator[tuple[int, Records]]:
        """Yield the first row id and the records, uint8 [k, record_bytes], of each
        batch of rows. The records of deleted rows are zeros.
        """
        for first in range(0, self.rows, _BATCH):
            rows = np.arange(first, min(first + _BATCH, self.rows))
            ids = np.intersect1d(rows, self.row_ids)
            records = np.zeros((len(rows), self.record_bytes), dtype=np.uint8)
            records[ids - first] = self.store.fetch_records(ids)
            yield first, records


class Subject(ABC):
    """One way to fetch blocks. This project's reader returns decoded blocks, and peers
    return stored records.

    Args:
        folder: directory of the subject's copy of the records, if it reads a copy.

    Attributes:
        package: distribution that must be installed; None for this project.
        setting: description of how the library is used, which is its fastest known
            configuration.
        copies: True if the subject reads a copy of the records, which `prepare` writes
            to `folder`.
    """

    package: ClassVar[str | None] = None
    setting: ClassVar[str]
    copies: ClassVar[bool] = False

    def __init__(self, source: StoredRecords, folder: Path) -> None:
        self.source = source
        self.folder = folder
        self.output_bytes = source.record_bytes

    def files(self) -> list[Path]:
        """Return the paths of the files that the subject reads."""
        if self.copies:
            return sorted(path for path in self.folder.rglob("*") if path.is_file())
        return self.source.files()

    def prepare(self) -> None:
        """Write a copy of the records to `folder`. Only subjects with `copies`
        implement this method.
        """
        raise NotImplementedError

    @abstractmethod
    def open(self) -> None:
        """Open the files, and prepare everything that the first fetch needs.

        Files and memory maps must be closed when the last reference to the subject is
        deleted. This is usually the case if they belong to Python objects.
        """

    @abstractmethod
    def fetch(self, ids: Ints, out: Records) -> Records:
        """Fetch the rows `ids`, in the order of `ids`. The result is uint8 [k,
        output_bytes], either written to `out` and returned, or a new array.
        """

    def expected(self, ids: Ints) -> Records:
        """Return the correct result of `fetch`."""
        return self.source.store.fetch_records(ids)


class EdjeRecords(Subject):
    """This project's reader without decoding: `TokenStore.fetch_records`."""

    setting = (
        "TokenStore.fetch_records into a buffer: stored bytes, as the other libraries"
        " return, but checked"
    )

    def open(self) -> None:
        self._store = TokenStore.open(self.source.root, self.source.precision)

    def fetch(self, ids: Ints, out: Records) -> Records:
        return self._store.fetch_records(ids, out)


class EdjeReader(EdjeRecords):
    """This project's reader: `TokenStore.fetch` into a reused buffer."""

    setting = (
        "TokenStore.fetch into a buffer, decoded to bfloat16; blocks are checked by"
        " compiled code, as in a process that has fetched 4 GiB or imported Numba; cold"
        " calls of more than 512 blocks: O_DIRECT, up to 512 reads and 16 MiB in"
        " flight; others: through the page cache"
    )

    def __init__(self, source: StoredRecords, folder: Path) -> None:
        super().__init__(source, folder)
        self.output_bytes = source.store.empty(1).nbytes

    def fetch(self, ids: Ints, out: Records) -> Records:
        self._store.fetch(
            ids, out.view(BF16).reshape(len(ids), *self._store.block_shape)
        )
        return out

    def expected(self, ids: Ints) -> Records:
        blocks = self.source.store.fetch(ids, check="always")
        return blocks.view(np.uint8).reshape(len(ids), -1)


class Memmap(Subject):
    """Reads rows of one memory-mapped array with `np.take`. The EDJE paper reads
    tokens in this way.
    """

    package = "numpy"
    copies = True
    setting = "one flat file, np.take(mapped, ids, out=buffer)"

    def prepare(self) -> None:
        with (self.folder / "records.bin").open("wb") as file:
            for _, records in self.source.batches():
                records.tofile(file)

    def open(self) -> None:
        shape = (self.source.rows, self.source.record_bytes)
        self._mapped = np.memmap(
            self.folder / "records.bin", dtype=np.uint8, mode="r", shape=shape
        )

    def fetch(self, ids: Ints, out: Records) -> Records:
        # With the default mode="raise", NumPy fills a temporary array and copies it to
        # `out`.
        return np.take(self._mapped, ids, axis=0, out=out, mode="clip")


class TensorStore(Subject):
    """Reads the index with TensorStore, without a cache and with many concurrent
    requests.
    """

    package = "tensorstore"
    setting = (
        f"cache_pool 0, file_io_concurrency {_TENSORSTORE_REQUESTS},"
        " data_copy_concurrency = CPUs, into a buffer"
    )

    def open(self) -> None:
        self._ts: Any = import_module("tensorstore")
        self._array = self._ts.open(
            {
                "driver": "zarr3",
                "kvstore": {"driver": "file", "path": str(self.source.array_path)},
            },
            read=True,
            context=self._ts.Context(
                {
                    "cache_pool": {"total_bytes_limit": 0},
                    "file_io_concurrency": {"limit": _TENSORSTORE_REQUESTS},
                    "data_copy_concurrency": {"limit": default_threads()},
                }
            ),
            recheck_cached_metadata=False,
            recheck_cached_data=False,
        ).result()

    def fetch(self, ids: Ints, out: Records) -> Records:
        view = out.view(self._array.dtype.numpy_dtype).reshape(
            len(ids), *self._array.shape[1:]
        )
        self._ts.array(view).write(self._array[ids]).result()
        return out


class ZarrPython(Subject):
    """Reads the index with zarr-python, by orthogonal indexing with ascending row
    ids.
    """

    package = "zarr"
    setting = "oindex of sorted ids, FusedCodecPipeline from version 3.4 on"

    def open(self) -> None:
        zarr: Any = import_module("zarr")
        path = "zarr.core.codec_pipeline"
        if hasattr(import_module(path), "FusedCodecPipeline"):
            zarr.config.set({"codec_pipeline.path": f"{path}.FusedCodecPipeline"})
        self._array = zarr.open_array(str(self.source.array_path), mode="r")

    def fetch(self, ids: Ints, out: Records) -> Records:
        order = np.argsort(ids)
        records = np.ascontiguousarray(self._array.oindex[ids[order]])
        out[order] = records.view(np.uint8).reshape(len(ids), -1)
        return out


class Lance(Subject):
    """Reads a Lance dataset with `take`, which uses io_uring. The records are a
    column of fixed-size binary values.
    """

    package = "pylance"
    copies = True
    setting = "fixed-size binary column, file+uring://, dataset.take of at most 2 GiB"

    def prepare(self) -> None:
        pa: Any = import_module("pyarrow")
        kind = pa.binary(self.source.record_bytes)
        schema = pa.schema([pa.field("record", kind, nullable=False)])

        def batches() -> Iterator[Any]:
            for _, records in self.source.batches():
                buffers = [None, pa.py_buffer(records)]
                column = pa.Array.from_buffers(kind, len(records), buffers)
                yield pa.record_batch([column], schema=schema)

        path = str(self.folder / "records.lance")
        import_module("lance").write_dataset(batches(), path, schema)

    def open(self) -> None:
        lance: Any = import_module("lance")
        self._dataset = lance.dataset(
            f"file+uring://{(self.folder / 'records.lance').resolve()}"
        )

    def fetch(self, ids: Ints, out: Records) -> Records:
        size = self.source.record_bytes
        filled = 0
        for start in range(0, len(ids), _ARROW_BYTES // size):
            for chunk in self._dataset.take(ids[start : start + _ARROW_BYTES // size])[
                "record"
            ].chunks:
                stored = np.frombuffer(chunk.buffers()[1], dtype=np.uint8)
                part = stored[chunk.offset * size : (chunk.offset + len(chunk)) * size]
                out[filled : filled + len(chunk)] = part.reshape(len(chunk), size)
                filled += len(chunk)
        return out


class Lmdb(Subject):
    """Reads LMDB, a memory-mapped B+ tree with one value per row."""

    package = "lmdb"
    copies = True
    setting = "8-byte big-endian keys, readahead off, one read transaction per call"

    def prepare(self) -> None:
        lmdb: Any = import_module("lmdb")
        # A large map costs no disk space, because its file grows only as needed.
        with lmdb.open(str(self.folder), map_size=1 << 42) as environment:
            for first, records in self.source.batches():
                with environment.begin(write=True) as transaction:
                    for row, record in enumerate(records, first):
                        transaction.put(
                            row.to_bytes(8, "big"), record.tobytes(), append=True
                        )

    def open(self) -> None:
        self._opened = import_module("lmdb").open(
            str(self.folder), readonly=True, lock=False, readahead=False
        )

    def fetch(self, ids: Ints, out: Records) -> Records:
        with self._opened.begin(buffers=True) as transaction:
            for position, row in enumerate(ids.tolist()):
                out[position] = np.frombuffer(
                    transaction.get(row.to_bytes(8, "big")), dtype=np.uint8
                )
        return out


class Hdf5(Subject):
    """Reads a contiguous HDF5 dataset by lists of ascending row ids."""

    package = "h5py"
    copies = True
    setting = f"contiguous dataset, sorted fancy selections of {_HDF5_SELECTION} rows"

    def prepare(self) -> None:
        with import_module("h5py").File(self.folder / "records.h5", "w") as file:
            shape = (self.source.rows, self.source.record_bytes)
            dataset = file.create_dataset("records", shape=shape, dtype="uint8")
            for first, records in self.source.batches():
                dataset[first : first + len(records)] = records

    def open(self) -> None:
        self._file = import_module("h5py").File(self.folder / "records.h5", "r")

    def fetch(self, ids: Ints, out: Records) -> Records:
        order = np.argsort(ids)
        for start in range(0, len(ids), _HDF5_SELECTION):
            positions = order[start : start + _HDF5_SELECTION]
            out[positions] = self._file["records"][ids[positions]]
        return out


PEERS: Mapping[str, type[Subject]] = {
    "np.memmap": Memmap,
    "TensorStore": TensorStore,
    "zarr-python": ZarrPython,
    "Lance": Lance,
    "LMDB": Lmdb,
    "HDF5": Hdf5,
}
"""The compared libraries by name, in the order of reports."""

SUBJECTS: Mapping[str, type[Subject]] = {
    READER: EdjeReader,
    RECORDS: EdjeRecords,
    **PEERS,
}
"""Everything that a worker process can measure, by name."""


def subject_versions() -> dict[str, tuple[str | None, str]]:
    """Return the version and the setting of each subject. The version is None if the
    package of the subject is not installed.
    """
    versions = dict[str, tuple[str | None, str]]()
    for name, subject in SUBJECTS.items():
        number: str | None = __version__
        if subject.package is not None:
            try:
                number = f"{subject.package} {version(subject.package)}"
            except PackageNotFoundError:
                number = None
        versions[name] = (number, subject.setting)
    return versions


def open_subject(name: str, source: StoredRecords, scratch: Path) -> Subject:
    """Open a subject. If it reads a copy of the records, the copy is in the directory
    `scratch`, and is written there if it is missing.
    """
    kind = SUBJECTS[name]
    folder = scratch / f"{source.precision}-{name}"
    if kind.copies and not folder.exists():
        # The copy is renamed when it is complete, so that an interruption leaves no
        # incomplete copy under the final name.
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        kind(source, part).prepare()
        part.rename(folder)
    subject = kind(source, folder)
    subject.open()
    return subject
