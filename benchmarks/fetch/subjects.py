"""Everything that can be asked for blocks, behind one interface, and the list of them by name."""

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
from storage_formats.codecs.threads import default_threads
from storage_formats.token_store import TokenStore


class Subject(ABC):
    """One way to fetch. Peers give stored records; the reader of this project gives decoded blocks, which is more.

    Attributes:
        package: distribution that must be installed; None for those that need nothing more.
        copies: whether it reads a copy of the records, made by `prepare` in a folder of its own.
        setting: how it was set up, for reports.
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
        """Bytes that it gives for a block."""
        return self.source.record_bytes

    @classmethod
    def copy_bytes(cls, rows: int, record_bytes: int) -> int:
        """Length of its copy, at most."""
        return int(rows * record_bytes * 1.05) if cls.copies else 0

    def prepare(self) -> None:
        """Write its copy of the records into `folder`."""
        raise NotImplementedError(f"{type(self).__name__} reads the index itself")

    def files(self) -> list[Path]:
        """What it reads from."""
        if self.copies:
            return sorted(path for path in self.folder.rglob("*") if path.is_file())
        return self.source.files()

    @abstractmethod
    def open(self) -> None:
        """Get ready to fetch."""

    @abstractmethod
    def fetch(self, ids: Ids, out: Records) -> Records:
        """uint8 [k, output_bytes] of the rows `ids`, in their order: `out`, or an array of the subject's own."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything, mapped pages included."""

    def expected(self, ids: Ids) -> Records:
        """What `fetch` should give, from plain reads."""
        return self.source.read(ids)


class EdjeSubject(Subject):
    """`TokenStore.fetch`, into a touched buffer, decoded to bfloat16. Option `engine`."""

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
    """Plain copies of as many bytes, by as many threads as the codecs use; reads no file."""

    setting = "memmove(3) between touched buffers, one part a thread"

    @property
    def output_bytes(self) -> int:
        return self.source.block_bytes

    def files(self) -> list[Path]:
        return []

    def open(self) -> None:
        self._from = np.ones(0, dtype=np.uint8)
        self._threads = default_threads()
        self._pool = ThreadPoolExecutor(self._threads)

    def fetch(self, ids: Ids, out: Records) -> Records:
        if len(self._from) < out.nbytes:
            self._from = np.ones(out.nbytes, dtype=np.uint8)
        cuts = np.linspace(0, out.nbytes, self._threads + 1, dtype=np.int64).tolist()
        target, origin = out.ctypes.data, self._from.ctypes.data
        list(self._pool.map(lambda at: ctypes.memmove(target + at[0], origin + at[0], at[1]), _parts(cuts)))
        return out

    def close(self) -> None:
        self._pool.shutdown()

    def expected(self, ids: Ids) -> Records:
        return np.ones((len(ids), self.output_bytes), dtype=np.uint8)


def _parts(cuts: list[int]) -> list[tuple[int, int]]:
    """(start, length) between neighbouring cuts."""
    return [(start, stop - start) for start, stop in itertools.pairwise(cuts)]


_HOME = {
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
PEERS = tuple(name for name in _HOME if name not in ("edje", "memcpy", "direct probe"))
"""Names of the other readers, in the order of reports."""


def subject_class(name: str) -> type[Subject]:
    """The class of a subject, by its name."""
    module, _, attribute = _HOME[name].partition(":")
    found = getattr(import_module(f"benchmarks.fetch.{module}"), attribute)
    subject: type[Subject] = found
    return subject


def installed_version(name: str) -> str | None:
    """Version of the package that a subject needs; "" where it needs none, None where it is absent."""
    package = subject_class(name).package
    if package is None:
        return ""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
