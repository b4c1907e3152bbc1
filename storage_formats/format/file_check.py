"""Entries of committed files, and the check of a file against its entry.

Readers of files that a manifest or a shard table names call a function of this module.
Token files are the exception: their records have checksums of their own
(`reading/checksums.py`). A function of this module opens regular files inside the index
only, and compares the length and the CRC-32C with the entry: when the file is opened,
at the first use in this process, or while the file is copied.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from storage_formats.arguments import shown
from storage_formats.errors import CorruptIndexError, MachineError, cannot_read
from storage_formats.format.checksum import crc32c, crc32c_file, crc32c_open, to_hex
from storage_formats.format.index_files import (
    IndexFile,
    read_index_file,
    relative_path,
)
from storage_formats.format.json_values import read_json
from storage_formats.format.layout import OWN_FOLDERS, SHARD_FOLDERS, Layout

if TYPE_CHECKING:
    from storage_formats.format.places import Place
    from storage_formats.remote.objects import Chunk

EXCHANGED = (
    "the file was damaged or replaced, or the whole index was replaced while the index"
    " was open. Open the index again; if the error remains, verify the index"
)
"""Part of error messages that explains why a file can differ from its entry, and what
to do.
"""

# number of comparisons after which all recorded comparisons are forgotten
_KEPT_COMPARISONS = 100_000

_compared: set[tuple[object, ...]] = set()
"""Files whose contents this process has compared at their first use. Each item consists
of the entry and the identity of the file (device, inode, size and modification time).
"""


@dataclass(frozen=True)
class FileEntry:
    """The entry of a committed file in a shard table or in the manifest.

    Attributes:
        path: path of the file, relative to the index.
        bytes: length of the file in bytes.
        crc32c: CRC-32C of the whole file.
    """

    path: str
    bytes: int
    crc32c: int

    @classmethod
    def of(cls, layout: Layout, path: Path) -> FileEntry:
        """Return the file entry of the file at `path`, which lies inside the index. The
        whole file is read to compute its checksum.
        """
        length, crc = crc32c_file(path)
        return cls(layout.relative(path), length, crc)

    def to_json(self) -> dict[str, Any]:
        """Return this entry as a JSON object, with a hexadecimal checksum."""
        return {"path": self.path, "bytes": self.bytes, "crc32c": to_hex(self.crc32c)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> FileEntry:
        """Return the entry described by `value`, a result of `to_json`. The file may
        lie anywhere inside the index; see also `data_path`.

        Raises:
            KeyError, TypeError, ValueError: a member is missing or not valid.
        """
        path = relative_path(read_json(str, value["path"], "path"))
        length = read_json(int, value["bytes"], "bytes")
        return cls(path, length, int(value["crc32c"], 16))


def data_path(path: str) -> str:
    """Return `path`, as a manifest or a shard table lists it.

    Raises:
        ValueError: `path` is not the path of a file that a snapshot may name.
    """
    folder = relative_path(path).partition("/")[0]
    if folder not in (*SHARD_FOLDERS, *OWN_FOLDERS) or path.endswith("/zarr.json"):
        raise ValueError(f"{shown(path)} is not the path of a data file of an index")
    return path


@dataclass(frozen=True)
class Problem:
    """A problem that `verify_index` found.

    Attributes:
        path: path of the file with the problem, relative to the index.
        code: kind of problem, for use in programs, for example `missing-file`.
        message: description of the problem, to print after the path, for example
            "cannot be read: ...".

    Examples:
        >>> from pathlib import Path
        >>> from storage_formats import verify_index
        >>> Path("photos.edje/embeddings/c.0.0").unlink()
        >>> [(problem.path, problem.code) for problem in verify_index("photos.edje")]
        [('embeddings/c.0.0', 'missing-file')]
    """

    path: str
    code: str
    message: str


DAMAGED_FILE = ("missing-file", "length", "checksum")
"""The codes of problems of files that differ from their entries."""


def difference(entry: FileEntry, length: int, crc: int | None = None) -> Problem | None:
    """Compare the length of a file, and its CRC-32C unless `crc` is None, with its
    entry. Return None if they match.
    """
    if length != entry.bytes:
        message = f"has {length} bytes instead of the {entry.bytes} that were committed"
        return Problem(entry.path, "length", message)
    if crc not in (None, entry.crc32c):
        message = f"has CRC-32C {crc:08x} instead of {entry.crc32c:08x}"
        return Problem(entry.path, "checksum", message)
    return None


def refuse(
    path: str | Path, problem: Problem | None, row_ids: Sequence[int] = ()
) -> None:
    """Raise CorruptIndexError if `problem`, a result of `difference`, is not None.

    Args:
        path: path or URL of the file, for the message.
        row_ids: row ids for which the file was read, see `CorruptIndexError`.
    """
    if problem is not None:
        raise CorruptIndexError(
            f"{path} is not the file that was committed (it {problem.message}):"
            f" {EXCHANGED}",
            row_ids=tuple(row_ids),
            remedy="verify",
        )


def compare_open(
    fd: int, entry: FileEntry, *, only_first_use: bool = False
) -> Problem | None:
    """Compare the length and the CRC-32C of an open file with its entry. Return None if
    they match.

    Args:
        only_first_use: True does not read the file if this process has compared it
            before, and the file has not changed since then.
    """
    status = os.fstat(fd)
    # The length is compared first, so that no time is spent on the checksum of a file
    # that is far too long.
    if problem := difference(entry, status.st_size):
        return problem
    identity = (
        entry,
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
    )
    if only_first_use and identity in _compared:
        return None
    problem = difference(entry, status.st_size, crc32c_open(fd))
    if problem is None and only_first_use:
        if len(_compared) >= _KEPT_COMPARISONS:
            _compared.clear()
        _compared.add(identity)
    return problem


def open_committed(
    root: Path, entry: FileEntry, *, only_first_use: bool = False
) -> IndexFile:
    """Open a committed file of the index at `root`, and compare it with its entry. For
    `only_first_use`, see `compare_open`.

    Raises:
        CorruptIndexError: the file differs from its entry.
        OSError: the file cannot be opened or read, is not a regular file, or lies
            outside the index.
    """
    path = root / entry.path
    file = IndexFile(root, path)
    try:
        refuse(path, compare_open(file.fileno(), entry, only_first_use=only_first_use))
    except BaseException:
        file.close()
        raise
    return file


def check_file(root: Path, entry: FileEntry) -> Problem | None:
    """Compare the length and the CRC-32C of a file of the index at `root` with its
    entry. Return None if they match.

    Raises:
        MachineError: the file cannot be read now, for example because this process has
            too many open files. The file itself may be undamaged.
    """
    path = root / entry.path
    try:
        with IndexFile(root, path) as file:
            return compare_open(file.fileno(), entry)
    except OSError as error:
        failure = cannot_read(entry.path, error)
        # EIO means that the device cannot read its own data, so the file is damaged.
        if isinstance(failure, MachineError) and error.errno != errno.EIO:
            raise failure from error
        return Problem(entry.path, "missing-file", f"cannot be read: {error.strerror}")


def checked_pieces(
    path: str | Path, entry: FileEntry, pieces: Iterable[Chunk]
) -> Iterator[Chunk]:
    """Yield `pieces`, the contents of the file at `path`, and compare them with `entry`
    after the last one.

    Raises:
        CorruptIndexError: the length or the CRC-32C of the pieces differs from `entry`.
    """
    crc = 0
    length = 0
    for piece in pieces:
        crc = crc32c(bytes(piece), crc)
        length += len(piece)
        yield piece
    refuse(path, difference(entry, length, crc))


@contextlib.contextmanager
def parsing(what: str, advice: str = "", remedy: str | None = None) -> Iterator[None]:
    """Context manager for code that reads and parses `what`, a file of an index. An
    exception of this code means that the file is missing or damaged, or that this
    machine cannot read it at the moment, see `cannot_read`.

    Args:
        advice: what to do with a damaged file, for error messages.
        remedy: the attribute `remedy` of the error, if `cannot_read` sets none.

    Raises:
        CorruptIndexError: the file is missing or damaged.
        MachineError: this machine cannot read the file at the moment.
    """
    try:
        yield
    except (
        OSError,
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
        pa.ArrowException,
    ) as error:
        problem = cannot_read(what, error, advice)
        problem.remedy = problem.remedy or remedy
        raise problem from error


@contextlib.contextmanager
def committed_content(
    place: Place,
    entry: FileEntry,
    what: str,
    advice: str = "restore the file from a backup",
) -> Iterator[bytes]:
    """Context manager that reads a committed file of the index at `place`, compares its
    contents with `entry`, and yields them. The `with` block parses the contents, see
    `parsing`.

    Args:
        what: kind of the file for error messages, such as "shard table".
        advice: what to do with a damaged file, for error messages.
    """
    place.fetch([entry])
    path = place.root / entry.path
    with parsing(f"the {what} {path}", advice):
        data = read_index_file(place.root, path, max_bytes=entry.bytes)
        problem = difference(entry, len(data), crc32c(data))
        refuse(f"the {what} {path}", problem)
        yield data
