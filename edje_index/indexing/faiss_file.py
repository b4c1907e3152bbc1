"""Checks a FAISS file before FAISS reads the file, because FAISS does not check its files.

A crafted file can make FAISS open any file for writing, allocate any amount of memory, or read outside of arrays. The
check accepts only structures that `build_ann` writes or wrote in earlier versions.

The order of the fields is defined in `impl/index_write.cpp` and `invlists/BlockInvertedLists.cpp` of FAISS.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

_FLOAT_BYTES = 4
_INNER_PRODUCT = 0
_BLOCK_VECTORS = 32  # FAISS's fast scan compares a query with 32 codes at once
_CODE_BITS = 4


class FaissFileError(ValueError):
    """A FAISS file differs from the files that `build_ann` writes."""


@dataclass(frozen=True)
class FaissShape:
    """Expected sizes in a FAISS file.

    Attributes:
        dimensions: width of the embeddings.
        vectors: number of embeddings.
        rows: number of rows of the index. Every row id must be smaller than this number.
    """

    dimensions: int
    vectors: int
    rows: int


def check_faiss_file(file: BinaryIO, shape: FaissShape) -> None:
    """Check the structure, sizes and ids of a FAISS file.

    Raises:
        FaissFileError: `build_ann` does not write this structure, or a size differs from `shape`.
    """
    fields = _Fields(file)
    kind = fields.tag("IxM2", "IwFl", "IwPf")
    if kind == "IxM2":
        _check_id_map(fields, shape)
    elif kind == "IwFl":
        _check_exact_lists(fields, shape, id_limit=shape.rows)
    else:
        _check_coded_lists(fields, shape)
    fields.end()


class _Fields:
    """Reads the fields of a file in order. Raises FaissFileError for a size beyond the end of the file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._left = os.fstat(file.fileno()).st_size
        file.seek(0)

    def number(self, form: str) -> Any:
        """Read one little-endian number of the `struct` format `form`."""
        return struct.unpack(f"<{form}", self._read(struct.calcsize(f"<{form}")))[0]

    def array(self, count: int) -> NDArray[np.int64]:
        return np.frombuffer(self._read(8 * count), dtype="<i8")

    def tag(self, *accepted: str) -> str:
        """Read the four-letter name of a structure. Raise FaissFileError if the name is not in `accepted`."""
        name = self._read(4).decode("latin-1")
        if name not in accepted:
            raise FaissFileError(f"the FAISS file contains the structure {name!r} instead of {' or '.join(accepted)}")
        return name

    def header(self, dimensions: int, vectors: int) -> None:
        """Read and check the first fields, which are the same in all kinds of FAISS index."""
        self.expect("number of dimensions", self.number("i"), dimensions)
        self.expect("number of vectors", self.number("q"), vectors)
        self.skip(16)  # no longer used
        self.expect("flag of a trained index", self.number("B"), 1)
        self.expect("metric", self.number("i"), _INNER_PRODUCT)

    def ids(self, count: int, *, limit: int) -> None:
        """Read `count` ids, and check that each is at least 0 and below `limit`. FAISS uses ids as offsets."""
        ids = self.array(count)
        if count and (ids.min() < 0 or ids.max() >= limit):
            raise FaissFileError(
                f"the FAISS file contains ids from {ids.min()} to {ids.max()}, but ids must be in 0..{limit - 1}"
            )

    def skip(self, length: int) -> None:
        self._take(length)
        self._file.seek(length, os.SEEK_CUR)

    def end(self) -> None:
        self.expect("number of bytes after the end", self._left, 0)

    @staticmethod
    def expect(name: str, actual: int, expected: int) -> None:
        if actual != expected:
            raise FaissFileError(f"the {name} in the FAISS file is {actual} instead of {expected}")

    def _read(self, length: int) -> bytes:
        self._take(length)
        return self._file.read(length)

    def _take(self, length: int) -> None:
        if not 0 <= length <= self._left:
            raise FaissFileError(f"the FAISS file ends {length - self._left} bytes too early")
        self._left -= length


def _check_id_map(fields: _Fields, shape: FaissShape) -> None:
    """Check the fields after the name of an `IndexIDMap2`: a header, an inner index, and one row id per vector."""
    fields.header(shape.dimensions, shape.vectors)
    if fields.tag("IxFI", "IwFl") == "IxFI":
        _check_flat(fields, shape.dimensions, shape.vectors)
    else:
        _check_exact_lists(fields, shape, id_limit=shape.vectors)
    fields.expect("number of row ids", fields.number("Q"), shape.vectors)
    fields.ids(shape.vectors, limit=shape.rows)


def _check_flat(fields: _Fields, dimensions: int, vectors: int) -> None:
    """Check the fields after the name of an `IndexFlatIP`: a header and the vectors."""
    fields.header(dimensions, vectors)
    fields.expect("number of values", fields.number("Q"), dimensions * vectors)
    fields.skip(dimensions * vectors * _FLOAT_BYTES)


def _check_centroids(fields: _Fields, shape: FaissShape) -> int:
    """Check the common first fields of kinds with inverted lists. Return the number of lists.

    The fields are a header, the centroids and an empty direct map.
    """
    fields.header(shape.dimensions, shape.vectors)
    lists, probes = fields.number("Q"), fields.number("Q")
    if not probes:
        raise FaissFileError("the number of inverted lists to search in the FAISS file is 0, but must be at least 1")
    fields.tag("IxFI")
    _check_flat(fields, shape.dimensions, lists)
    fields.expect("type of direct map", fields.number("B"), 0)
    fields.expect("length of the direct map", fields.number("Q"), 0)
    return int(lists)


def _check_exact_lists(fields: _Fields, shape: FaissShape, id_limit: int) -> None:
    """Check the fields after the name of an `IndexIVFFlat`. Each id in the lists must be below `id_limit`."""
    lists = _check_centroids(fields, shape)
    fields.tag("ilar")
    code_bytes = shape.dimensions * _FLOAT_BYTES
    fields.expect("number of inverted lists", fields.number("Q"), lists)
    fields.expect("length of a stored vector", fields.number("Q"), code_bytes)
    lengths = _list_lengths(fields, lists)
    fields.expect("number of vectors in the lists", sum(lengths), shape.vectors)
    for length in lengths:
        fields.skip(length * code_bytes)
        fields.ids(length, limit=id_limit)


def _check_coded_lists(fields: _Fields, shape: FaissShape) -> None:
    """Check the fields after the name of an `IndexIVFPQFastScan`.

    The fields are settings, the product quantizer, and lists of ids and codes.
    """
    lists = _check_centroids(fields, shape)
    fields.expect("flag of residual codes", fields.number("B"), 0)
    code_bytes = fields.number("Q")
    fields.expect("number of vectors per block", fields.number("i"), _BLOCK_VECTORS)
    padded_parts = fields.number("Q")
    fields.expect("implementation", fields.number("i"), 0)
    fields.expect("size of query batches", fields.number("Q"), 0)
    parts = _check_quantizer(fields, shape.dimensions)
    fields.expect("length of a code", code_bytes, -(-parts // 2))
    fields.expect("number of parts in a block", padded_parts, 2 * code_bytes)
    block_bytes = _BLOCK_VECTORS * code_bytes
    fields.tag("ilbl")
    fields.expect("number of inverted lists", fields.number("Q"), lists)
    fields.expect("code length of the lists", fields.number("q"), -1)  # codes lie in blocks
    fields.expect("number of vectors per block", fields.number("Q"), _BLOCK_VECTORS)
    fields.expect("length of a block", fields.number("Q"), block_bytes)
    vectors = 0
    for _ in range(lists):
        length = fields.number("Q")
        fields.ids(length, limit=shape.rows)
        blocks = -(-length // _BLOCK_VECTORS)
        fields.expect("length of the codes of a list", fields.number("Q"), blocks * block_bytes)
        fields.skip(blocks * block_bytes)
        vectors += length
    fields.expect("number of vectors in the lists", vectors, shape.vectors)


def _check_quantizer(fields: _Fields, dimensions: int) -> int:
    """Check a product quantizer with 4-bit codes. Return the number of parts of a vector."""
    fields.expect("number of dimensions of the quantizer", fields.number("Q"), dimensions)
    parts = int(fields.number("Q"))
    if not parts or dimensions % parts:
        raise FaissFileError(f"the quantizer in the FAISS file cannot split {dimensions} dimensions into {parts} parts")
    fields.expect("number of bits of a code", fields.number("Q"), _CODE_BITS)
    values = dimensions << _CODE_BITS
    fields.expect("number of values of the quantizer", fields.number("Q"), values)
    fields.skip(values * _FLOAT_BYTES)
    return parts


def _list_lengths(fields: _Fields, lists: int) -> list[int]:
    """Read the length of each inverted list."""
    # FAISS stores all lengths, or (list, length) pairs if most lists are empty.
    if fields.tag("full", "sprs") == "full":
        fields.expect("number of list lengths", fields.number("Q"), lists)
        return [int(length) for length in fields.array(lists)]
    count = fields.number("Q")
    fields.expect("remainder of the number of list values divided by 2", count % 2, 0)
    pairs = fields.array(count).reshape(-1, 2)
    if pairs.size and (pairs[:, 0].min() < 0 or pairs[:, 0].max() >= lists):
        raise FaissFileError(f"the FAISS file contains numbers of inverted lists that are not in 0..{lists - 1}")
    lengths = np.zeros(lists, dtype=np.int64)
    lengths[pairs[:, 0]] = pairs[:, 1]
    return [int(length) for length in lengths]
