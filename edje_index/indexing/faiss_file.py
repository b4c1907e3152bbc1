"""Checks a FAISS file before FAISS reads the file.

A checksum does not show that a FAISS file is safe to read, because the author of a
malicious index also writes the checksum. In a test without this check, FAISS 1.15.1
read 4,500 files of 6 to 18 kB with damaged sizes, ids or bytes. No file crashed the
process. But 1.8 % of the files made FAISS allocate 50 MB to more than 2 GB of memory.
Another 4 % could be searched, and gave ids that the index does not have. A file can
also contain a structure that names another file with inverted lists, and FAISS opens
that file for writing. So this check accepts only the structures of SPEC.md section 10,
with the sizes of this index.

The order of the fields is defined in `impl/index_write.cpp` and
`invlists/BlockInvertedLists.cpp` of FAISS.
"""

from __future__ import annotations

import mmap
import struct

import numpy as np

from storage_formats.arrays import Ints

# FAISS's fast scan compares a query with 32 codes at once
_BLOCK_VECTORS = 32


class FaissFileError(ValueError):
    """A FAISS file differs from the files that `build_ann` writes."""


def check_faiss_file(
    data: bytes | mmap.mmap, *, dimensions: int, vectors: int, rows: int
) -> None:
    """Check the structure, sizes and ids of a FAISS file with the content `data`.

    Args:
        rows: number of rows of the index. Every id must be smaller than this number.

    Raises:
        FaissFileError: `build_ann` does not write this structure, or a size or an id
            does not belong to this index.
    """
    fields = _Fields(data)
    try:
        kind = fields.tag("IxM2", "IwFl", "IwPf")
        _header(fields, dimensions, vectors)
        if kind == "IxM2":
            _flat(fields, dimensions, vectors)
            fields.expect("Q", vectors)
            fields.ids(vectors, limit=rows)
        else:
            _lists(fields, kind, dimensions, vectors, rows)
        if fields.at != len(data):
            raise ValueError(f"it has {len(data)} bytes instead of {fields.at}")
    except (OverflowError, ValueError, struct.error) as error:
        raise FaissFileError(
            f"the FAISS file differs from those that `ann build` writes: {error}"
        ) from error


class _Fields:
    """Reads the fields of a file in order, from the offset `at` on. An error is raised
    for a field beyond the end of the file.
    """

    def __init__(self, data: bytes | mmap.mmap) -> None:
        self._data = data
        self.at = 0

    def numbers(self, form: str) -> tuple[int, ...]:
        """Read little-endian numbers of the `struct` format `form`."""
        numbers = struct.unpack_from(f"<{form}", self._data, self.at)
        self.at += struct.calcsize(f"<{form}")
        return numbers

    def expect(self, form: str, *expected: int) -> None:
        """Read numbers, and raise an error if they differ from `expected`."""
        if (numbers := self.numbers(form)) != expected:
            raise ValueError(
                f"it has the sizes {numbers} instead of {expected} before byte"
                f" {self.at}"
            )

    def tag(self, *accepted: str) -> str:
        """Read the four-letter name of a structure. Raise an error if the name is not
        in `accepted`.
        """
        name = self._data[self.at : self.at + 4].decode("latin-1")
        if name not in accepted:
            raise ValueError(
                f"it contains the structure {name!r} instead of {' or '.join(accepted)}"
            )
        self.at += 4
        return name

    def array(self, count: int) -> Ints:
        values = np.frombuffer(self._data, "<i8", count, self.at)
        self.at += values.nbytes
        return values

    def ids(self, count: int, *, limit: int) -> None:
        """Read `count` ids, and check that each is at least 0 and below `limit`. FAISS
        uses ids as offsets, so a wrong id could address other memory.
        """
        ids = self.array(count)
        if count and (ids.min() < 0 or ids.max() >= limit):
            raise ValueError(
                f"it contains ids from {ids.min()} to {ids.max()}, but ids must be in"
                f" 0..{limit - 1}"
            )


def _header(fields: _Fields, dimensions: int, vectors: int) -> None:
    """Check the fields at the start of every structure: dimensions, number of vectors,
    16 unused bytes, whether the structure is trained, and the metric (0 is the inner
    product).
    """
    fields.expect("iq16xBi", dimensions, vectors, 1, 0)


def _flat(fields: _Fields, dimensions: int, vectors: int) -> None:
    """Check a structure of exact vectors."""
    fields.tag("IxFI")
    _header(fields, dimensions, vectors)
    fields.expect("Q", dimensions * vectors)
    fields.at += dimensions * vectors * 4


def _lists(
    fields: _Fields, kind: str, dimensions: int, vectors: int, rows: int
) -> None:
    """Check inverted lists, of exact vectors ("IwFl") or of 4-bit codes ("IwPf"),
    after their header.
    """
    lists, probes = fields.numbers("QQ")
    if not probes:
        raise ValueError("it has 0 inverted lists to search, but must have at least 1")
    # the centroids
    _flat(fields, dimensions, lists)
    # the file must not have a map from ids to positions in the lists
    fields.expect("BQ", 0, 0)
    total = 0
    if kind == "IwFl":
        fields.tag("ilar")
        fields.expect("QQ", lists, 4 * dimensions)
        lengths = _list_lengths(fields, lists)
        if min(lengths, default=0) < 0:
            raise ValueError(f"it has a list of {min(lengths)} vectors")
        # If the sum of the lengths is not `vectors`, nothing more is read, and the
        # comparison at the end of this function raises an error.
        if sum(lengths) == vectors:
            for length in lengths:
                fields.at += length * 4 * dimensions
                fields.ids(length, limit=rows)
        total = sum(lengths)
    else:
        # The settings of the codes, and the product quantizer. It splits a vector into
        # `parts` parts, and has 16 centroids for each part.
        settings = fields.numbers("BQiQiQQQQQ")
        parts = settings[7]
        code_bytes = -(-parts // 2)
        values = 16 * dimensions
        if not parts or dimensions % parts:
            raise ValueError(
                f"its quantizer cannot split {dimensions} dimensions into {parts} parts"
            )
        if settings != (
            *(0, code_bytes, _BLOCK_VECTORS, 2 * code_bytes, 0, 0),
            *(dimensions, parts, 4, values),
        ):
            raise ValueError(f"it has other settings of codes: {settings}")
        fields.at += values * 4
        fields.tag("ilbl")
        block_bytes = _BLOCK_VECTORS * code_bytes
        fields.expect("QqQQ", lists, -1, _BLOCK_VECTORS, block_bytes)
        for _ in range(lists):
            (length,) = fields.numbers("Q")
            fields.ids(length, limit=rows)
            list_bytes = -(-length // _BLOCK_VECTORS) * block_bytes
            fields.expect("Q", list_bytes)
            fields.at += list_bytes
            total += length
    if total != vectors:
        raise ValueError(f"it has {total} vectors instead of {vectors}")


def _list_lengths(fields: _Fields, lists: int) -> list[int]:
    """Read the length of each inverted list: all lengths, or (list, length) pairs
    if most lists are empty.
    """
    if fields.tag("full", "sprs") == "full":
        fields.expect("Q", lists)
        return [int(length) for length in fields.array(lists)]
    (count,) = fields.numbers("Q")
    pairs = fields.array(count)[: count // 2 * 2].reshape(-1, 2)
    if count % 2 or (
        pairs.size and (pairs[:, 0].min() < 0 or pairs[:, 0].max() >= lists)
    ):
        raise ValueError("it contains wrong numbers of inverted lists")
    lengths = np.zeros(lists, dtype=np.int64)
    lengths[pairs[:, 0]] = pairs[:, 1]
    return [int(length) for length in lengths]
