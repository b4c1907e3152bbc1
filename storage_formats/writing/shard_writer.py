"""Writing of one shard with the commit protocol (SPEC.md section 11, steps 2 to 4). The
files are first written under private names. They are then flushed to the device,
renamed to their final paths, and listed in a receipt.
"""

from __future__ import annotations

import contextlib
import functools
import math
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from storage_formats.arrays import Floats, Ints
from storage_formats.atomic import json_bytes, naming
from storage_formats.codecs import BF16, Blocks, Codec, Records, fill_record
from storage_formats.errors import UsageError
from storage_formats.format.checksum import crc32c, crc32c_rows
from storage_formats.format.file_check import FileEntry
from storage_formats.format.layout import IndexSpec, Layout, padded_shard_bytes
from storage_formats.format.manifest import Counts
from storage_formats.format.offset import stored_codec
from storage_formats.format.parquet import table_bytes
from storage_formats.format.places import Place
from storage_formats.format.receipts import ShardReceipt
from storage_formats.format.rows import (
    INDEXED,
    count_rows,
)
from storage_formats.format.zarr_metadata import shard_index_bytes


class ShardWriter:
    """Writes the files of one shard to a private directory below `build/staging/`.
    `commit` moves them into the index. Not thread-safe.

    Use the writer in a `with` statement, which removes uncommitted files at the end.

    A new writer removes the private files of earlier attempts at the same shard. If the
    worker of an earlier attempt was taken for dead but still runs, its commit fails.

    Args:
        place: place of the index.
        spec: shape of the index.
        shard: number of the shard.
        precisions: names of the precisions whose token files are written. None writes
            all precisions of `spec`.
        erases: True for a shard of an erasure. Its data files are written to
            `build/erased/`, from where the commit moves them into place.

    Attributes:
        tokens: the unfinished token files, keyed by precision.
        staged: (private path, entry of the final file) of each finished file.
    """

    def __init__(
        self,
        place: Place,
        spec: IndexSpec,
        shard: int,
        precisions: Iterable[str] | None = None,
        *,
        erases: bool = False,
    ) -> None:
        self._place = place
        self._data = Layout(place.erased if erases else place.root)
        self._shard = shard
        self._spec = spec
        place.begin_task()
        for earlier in place.staging.glob(f"{shard:08d}-*"):
            # A rename moves the whole directory away in one step, even if the worker of
            # the earlier attempt is adding a file to it.
            removed = place.staging / f"removed-{uuid.uuid4().hex}"
            with contextlib.suppress(FileNotFoundError):
                earlier.replace(removed)
                shutil.rmtree(removed, ignore_errors=True)
        self._folder = place.staging / f"{shard:08d}-{uuid.uuid4().hex}"
        self._folder.mkdir(parents=True)
        self.staged: list[tuple[Path, FileEntry]] = []
        self.tokens = {
            name: TokenShardFile(
                self._folder / f"tokens-{name}",
                stored_codec(place, spec, name),
                len(spec.shard_rows(shard)),
                spec.shard_size,
            )
            for name in (spec.precisions if precisions is None else precisions)
        }

    @functools.cached_property
    def embeddings(self) -> Floats:
        """Embeddings of the shard, float32 [shard_size, embed_dim], NaN in holes. The
        array is created at the first access, because a conversion does not need it.
        """
        shape = (self._spec.shard_size, self._spec.embed_dim)
        return np.full(shape, np.nan, dtype="<f4")

    @property
    def codecs(self) -> list[Codec]:
        """The codecs of the written precisions."""
        return [file.codec for file in self.tokens.values()]

    def put(
        self, positions: Ints, tokens: Blocks, embeddings: Floats | None = None
    ) -> None:
        """Add blocks and embeddings to the shard. Skipped positions become holes.

        Args:
            positions: int64 [k], positions in the shard, ascending. The first must be
                greater than the last position of the previous call.
            tokens: ml_dtypes.bfloat16 [k, m, d], finite. Every precision must be able
                to store them, see `outside`.
            embeddings: float32 [k, embed_dim], finite. None adds no embeddings.
        """
        if embeddings is not None:
            self.embeddings[positions] = embeddings
        for file in self.tokens.values():
            file.put(positions, file.codec.encode(tokens))

    def _stage(self, name: str, final: Path, data: bytes) -> None:
        """Write `data` to the private file `name`. `commit_files` moves it to the path
        `final`.
        """
        path = self._folder / name
        with naming(path):
            path.write_bytes(data)
        entry = FileEntry(self._place.relative(final), len(data), crc32c(data))
        self.staged.append((path, entry))

    def commit(
        self,
        rows: pa.Table | None,
        plan: str,
        seconds: dict[str, float] | None = None,
        encoded_on: str | None = None,
    ) -> ShardReceipt:
        """Move the token files, the embeddings and the rows into the index, and write
        the receipt. All of them are flushed to the device.

        Args:
            rows: rows table with one line per row of the shard. It has the columns of
                `storage_formats.format.rows.ROW_SCHEMA`, and source columns and
                `SOURCE_VALUES` if there are any. None writes only token files, for a
                conversion, which does not change the rows.
            plan: fingerprint of the plan, see `ShardReceipt`.
            seconds: time spent in each stage, see `ShardReceipt`.
            encoded_on: see `ShardReceipt`.

        Raises:
            FileNotFoundError: a later attempt at the shard has removed the private
                files.
        """
        self.stage_tokens()
        number = len(self._spec.shard_rows(self._shard))
        counts = Counts(number, number, 0)
        truncated = 0
        values: dict[str, int] = {}
        if rows is not None:
            final = self._data.embedding_shard(self._shard)
            self._stage("embeddings", final, self.embeddings.tobytes())
            self._stage("rows", self._place.staged_rows(self._shard), table_bytes(rows))
            counts = count_rows(rows)
            is_indexed = pc.equal(rows["status"], INDEXED)
            truncated = len(rows["detail"].filter(is_indexed).drop_null())
            values = {
                name: len(rows) - rows[name].null_count for name in rows.column_names
            }
        receipt = ShardReceipt(
            shard=self._shard,
            plan=plan,
            rows=counts.inputs,
            indexed=counts.indexed,
            duplicates=counts.duplicates,
            failed=counts.failed,
            files=self.commit_files(),
            seconds=seconds or {},
            truncated=truncated,
            encoded_on=encoded_on,
            values=values,
        )
        # The data files are committed already, so the receipt is the only staged file.
        final = self._place.receipt(self._shard)
        self._stage("receipt.json", final, json_bytes(receipt.to_json()))
        self.commit_files()
        return receipt

    def stage_tokens(self) -> None:
        """Finish the token files, write their checksum files, and stage all of them."""
        for name, file in self.tokens.items():
            crc, checksums = file.finish()
            file.close()
            ndim = len(file.codec.record_shape)
            final = self._data.token_shard(name, self._shard, ndim)
            entry = FileEntry(self._place.relative(final), file.length, crc)
            self.staged.append((file.path, entry))
            path = self._data.checksums(name, self._shard)
            self._stage(f"checksums-{name}", path, checksums.tobytes())
        self.tokens.clear()

    def commit_files(self) -> tuple[FileEntry, ...]:
        """Finish the token files, and move all staged files to their final paths.
        Return the entries of the files.
        """
        self.stage_tokens()
        staged = self.staged
        self.staged = []
        self._place.put(staged)
        return tuple(entry for _, entry in staged)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the uncommitted files. Committed files stay."""
        for file in self.tokens.values():
            file.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def outside(codecs: Iterable[Codec], blocks: Blocks) -> dict[int, str]:
    """Return a description of the problem for each block that one of `codecs` cannot
    store, keyed by the position of the block in `blocks`.

    A block cannot be stored if it has a token whose largest magnitude, after the offset
    was subtracted, is outside `codec.form.token_range`. The values of such a token
    would lose their precision or be limited to the largest value that the codec can
    store. A token of zeros can be stored.

    Args:
        blocks: bfloat16 [k, m, d].
    """
    problems: dict[int, str] = {}
    for codec in codecs:
        low, high = codec.form.token_range
        if (low, high) == (0.0, math.inf):
            continue
        largest = _largest(codec.residuals(blocks))
        is_small = (largest < low) & (largest > 0)
        if codec.offset is not None:
            # If a token nearly equals the offset, the differences between them are
            # small. They may be lost if they are no larger than the error with which
            # the token was rounded to bfloat16.
            is_small &= largest > 2.0**-8 * _largest(blocks)
        lost = is_small | (largest > high)
        # Tokens are visited in reverse order, so that the description of a block names
        # its first lost token.
        for block, token in reversed(np.argwhere(lost).tolist()):
            problems[block] = (
                f"the largest value of token {token} is {largest[block, token]:g}, but"
                f" {codec.name} can store {low:g} to {high:g}; scale the tokens, or"
                " choose bf16, fp8 or int8"
            )
    return problems


def refuse_outside(codecs: Iterable[Codec], blocks: Blocks, row_ids: Ints) -> None:
    """Raise UsageError if one of `codecs` cannot store one of `blocks` [k, m, d], see
    `outside`.

    Args:
        row_ids: int64 [k], row id of each block, for the error message.
    """
    if problems := outside(codecs, blocks):
        block = min(problems)
        raise UsageError(f"row {row_ids[block]}: {problems[block]}")


def _largest(blocks: Blocks) -> Floats:
    """Return the largest magnitude of each token of `blocks` [k, m, d], float32
    [k, m].
    """
    # Without the sign bit, the bits of a bfloat16, read as an integer, have the same
    # order as the magnitudes.
    bits = (blocks.view(np.uint16) & 0x7FFF).max(axis=2)
    magnitudes: Floats = bits.view(BF16).astype(np.float32)
    return magnitudes


class TokenShardFile:
    """Writes a token file from front to back, and computes its checksums. Not
    thread-safe.

    Args:
        path: path of the file, which must not exist.
        rows: number of rows of the shard.
        shard_size: number of rows of a full shard.

    Attributes:
        length: length of the finished file in bytes.
    """

    def __init__(self, path: Path, codec: Codec, rows: int, shard_size: int) -> None:
        self.path = path
        self.codec = codec
        self._rows = rows
        self._present = np.zeros(shard_size, dtype=np.bool_)
        self._checksums = np.empty(rows, dtype="<u4")
        self._fill = fill_record(codec)
        self._next = 0
        self._crc = 0
        self._index_offset, self.length = padded_shard_bytes(
            rows, shard_size, codec.record_bytes
        )
        with naming(path):
            # The file stays open until `close`.
            self._file = open(path, "xb")  # noqa: SIM115

    def put(self, positions: Ints, records: Records) -> None:
        """Write records at positions of the shard. Skipped positions become holes.

        Args:
            positions: int64 [k], ascending. The first must be greater than the last
                position of the previous call.
            records: uint8 [k, record_bytes].
        """
        if not len(positions):
            return
        # Each run of consecutive positions is written at once. `run` holds indices in
        # `positions`.
        for run in np.split(
            np.arange(len(positions)), np.flatnonzero(np.diff(positions) > 1) + 1
        ):
            self._fill_to(int(positions[run[0]]))
            self._present[positions[run]] = True
            self._write(records[run[0] : run[-1] + 1])

    def finish(self) -> tuple[int, NDArray[np.uint32]]:
        """Write holes at the remaining positions, and then the padding and the shard
        index.

        Returns:
            (CRC-32C of the file, CRC-32C of each record as uint32 [rows]).
        """
        self._fill_to(self._rows)
        end = self._rows * self.codec.record_bytes
        tail = bytes(self._index_offset - end) + shard_index_bytes(
            self._present, self.codec.record_bytes
        )
        with naming(self.path):
            self._file.write(tail)
            self._file.flush()
        self._crc = crc32c(tail, self._crc)
        return self._crc, self._checksums

    def close(self) -> None:
        """Close the file. May be called repeatedly."""
        # `finish` has flushed the file and raised the errors of writes. A file that is
        # not finished is removed, so errors that occur when it is closed do not matter.
        with contextlib.suppress(OSError):
            self._file.close()

    def _fill_to(self, position: int) -> None:
        while self._next < position:
            count = min(position - self._next, 64)
            self._write(np.broadcast_to(self._fill, (count, self.codec.record_bytes)))

    def _write(self, records: Records) -> None:
        records = np.ascontiguousarray(records)
        stop = self._next + len(records)
        self._checksums[self._next : stop] = crc32c_rows(records)
        flat = records.reshape(-1)
        self._crc = crc32c(flat, self._crc)
        with naming(self.path):
            self._file.write(flat.data)
        self._next = stop
