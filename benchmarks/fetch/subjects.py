"""Interface of all subjects. A subject is a reader or a reference measurement."""

from __future__ import annotations

import ctypes
import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks.fetch.records import StoredRecords
from benchmarks.fetch.workloads import Ids
from storage_formats.codecs import BF16, Records
from storage_formats.threads import default_threads
from storage_formats.token_store import TokenStore


class Subject(ABC):
    """One way to fetch blocks: this project's reader, a compared library, or a reference measurement.

    This project's reader returns decoded blocks. Compared libraries return stored records.

    Attributes:
        package: Python package that must be installed; None if the dependencies of this project suffice.
        copies: True if the subject reads a copy of the records, which `prepare` writes to `folder`.
        setting: description of the configuration, for reports.
    """

    package: ClassVar[str | None] = None
    copies: ClassVar[bool] = False
    setting: ClassVar[str] = ""

    def __init__(self, source: StoredRecords, folder: Path, options: Mapping[str, Any]) -> None:
        self.source = source
        self.folder = folder
        self.options = options

    @property
    def output_bytes(self) -> int:
        """Number of bytes that `fetch` returns per block."""
        return self.source.record_bytes

    @classmethod
    def copy_bytes(cls, rows: int, record_bytes: int) -> int:
        """Return the largest possible size in bytes of the subject's copy of the records."""
        return int(rows * record_bytes * 1.05) if cls.copies else 0

    def prepare(self) -> None:
        """Write a copy of the records to `folder`."""
        raise NotImplementedError(
            f"{type(self).__name__} reads the files of the index and needs no copy of the records"
        )

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


class EdjeSubject(Subject):
    """This project's reader: `TokenStore.fetch` into a reused buffer. The option `engine` selects the I/O engine."""

    setting = "TokenStore.fetch into a buffer, decoded to bfloat16"

    @property
    def output_bytes(self) -> int:
        return self.source.block_bytes

    def open(self) -> None:
        self._store = TokenStore.open(self.source.root, self.source.precision, self.options.get("engine", "auto"))

    def fetch(self, ids: Ids, out: Records) -> Records:
        self._store.fetch(ids, out.view(BF16).reshape(len(ids), *self._store.block_shape))
        return out

    def close(self) -> None:
        self._store.close()

    def expected(self, ids: Ids) -> Records:
        return self.source.codec.decode(self.source.read(ids)).view(np.uint8).reshape(len(ids), self.output_bytes)


class MemcpySubject(Subject):
    """Upper limit for warm fetches: copies as many bytes in memory with memmove(3)."""

    setting = "memmove(3) between touched buffers, one part per thread"

    @property
    def output_bytes(self) -> int:
        return self.source.block_bytes

    def files(self) -> list[Path]:
        return []

    def open(self) -> None:
        self._source_bytes = np.ones(0, dtype=np.uint8)
        self._threads = default_threads()
        self._pool = ThreadPoolExecutor(self._threads)

    def fetch(self, ids: Ids, out: Records) -> Records:
        if len(self._source_bytes) < out.nbytes:
            self._source_bytes = np.ones(out.nbytes, dtype=np.uint8)
        cuts = np.linspace(0, out.nbytes, self._threads + 1, dtype=np.int64).tolist()
        target, origin = out.ctypes.data, self._source_bytes.ctypes.data
        list(self._pool.map(lambda part: ctypes.memmove(target + part[0], origin + part[0], part[1]), _parts(cuts)))
        return out

    def close(self) -> None:
        self._pool.shutdown()

    def expected(self, ids: Ids) -> Records:
        return np.ones((len(ids), self.output_bytes), dtype=np.uint8)


def _parts(cuts: list[int]) -> list[tuple[int, int]]:
    return [(start, stop - start) for start, stop in itertools.pairwise(cuts)]


_CLASSES = {
    "edje": "subjects:EdjeSubject",
    "memcpy": "subjects:MemcpySubject",
    "direct probe": "direct_probe:DirectProbe",
    "np.memmap": "peers_arrays:MemmapPeer",
    "np.memmap MADV_RANDOM": "peers_arrays:RandomMemmapPeer",
    "tensorstore": "peers_arrays:TensorStorePeer",
    "zarr-python": "peers_arrays:ZarrPythonPeer",
    "zarrs-python": "peers_arrays:ZarrsPeer",
    "lance": "peers_databases:LancePeer",
    "lmdb": "peers_databases:LmdbPeer",
    "hdf5": "peers_databases:Hdf5Peer",
    "parquet": "peers_databases:ParquetPeer",
}
PEERS = tuple(name for name in _CLASSES if name not in ("edje", "memcpy", "direct probe"))
"""Names of the compared libraries, in the order of reports."""


def subject_class(name: str) -> type[Subject]:
    """Return the class of the subject `name`."""
    module, _, attribute = _CLASSES[name].partition(":")
    subject: type[Subject] = getattr(import_module(f"benchmarks.fetch.{module}"), attribute)
    return subject


def installed_version(name: str) -> str | None:
    """Return the version of the package that the subject `name` needs.

    Returns None if the package is not installed, and "" if the subject needs no package.
    """
    package = subject_class(name).package
    if package is None:
        return ""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
