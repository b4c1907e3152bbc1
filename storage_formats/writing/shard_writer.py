"""Writing of one shard with the commit protocol (SPEC.md section 11, steps 2 to 4). The
files are first written under private names. They are then flushed to the device,
renamed to their final paths, and listed in a receipt.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa

from storage_formats.arrays import Floats, Ints
from storage_formats.atomic import json_bytes, naming
from storage_formats.codecs import Blocks
from storage_formats.format.checksum import crc32c, crc32c_file
from storage_formats.format.file_check import FileEntry
from storage_formats.format.layout import IndexSpec
from storage_formats.format.offset import stored_codec
from storage_formats.format.places import Place
from storage_formats.format.receipts import ShardReceipt
from storage_formats.format.rows import (
    DUPLICATE,
    INDEXED,
    failures_by_reason,
    write_rows,
)
from storage_formats.writing.token_shard import TokenShardFile, outside, refuse_outside


class ShardWriter:
    """Writes the files of one shard to a private directory below `build/staging/`.
    `commit` moves them into the index. Not thread-safe.

    Use the writer in a `with` statement, which removes uncommitted files at the end.
    Call `begin_index` before the first shard.

    A new writer removes the private files of earlier attempts at the same shard. If the
    worker of an earlier attempt was taken for dead but still runs, its commit fails.

    Args:
        place: place of the index.
        spec: shape of the index.
        shard: number of the shard.
        precisions: names of the precisions whose token files are written. None writes
            all precisions of `spec`.

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
    ) -> None:
        layout = place
        self._layout = layout
        if spec.offset is not None:
            place.get(place.offset_values)
        self._shard = shard
        self._spec = spec
        place.begin_task()
        for earlier in layout.staging.glob(f"{shard:08d}-*"):
            # A rename moves the whole directory away in one step, even if the worker of
            # the earlier attempt is adding a file to it.
            removed = layout.staging / f"removed-{uuid.uuid4().hex}"
            with contextlib.suppress(FileNotFoundError):
                earlier.replace(removed)
                shutil.rmtree(removed, ignore_errors=True)
        self._folder = layout.staging / f"{shard:08d}-{uuid.uuid4().hex}"
        self._folder.mkdir(parents=True)
        self.staged: list[tuple[Path, FileEntry]] = []
        self.tokens = {
            name: TokenShardFile(
                self.path(f"tokens-{name}"),
                stored_codec(layout.root, spec, name),
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

    def path(self, name: str) -> Path:
        """Return the path of the private file `name`."""
        return self._folder / name

    def outside(self, tokens: Blocks) -> dict[int, str]:
        """Return a description of the problem for each block of `tokens`, bfloat16
        [k, m, d], that one of the precisions cannot store. The key is the position of
        the block in `tokens`. `put` refuses such blocks.
        """
        problems: dict[int, str] = {}
        for file in self.tokens.values():
            problems |= outside(file.codec, tokens)
        return problems

    def put(
        self, positions: Ints, tokens: Blocks, embeddings: Floats | None = None
    ) -> None:
        """Add blocks and embeddings to the shard. Skipped positions become holes.

        Args:
            positions: int64 [k], positions in the shard, ascending. The first must be
                greater than the last position of the previous call.
            tokens: ml_dtypes.bfloat16 [k, m, d], finite.
            embeddings: float32 [k, embed_dim], finite. None adds no embeddings.

        Raises:
            UsageError: a precision cannot store a block, see `outside`.
        """
        if embeddings is not None:
            self.embeddings[positions] = embeddings
        first = self._shard * self._spec.shard_size
        for file in self.tokens.values():
            refuse_outside(file.codec, tokens, first + positions)
            file.put(positions, file.codec.encode(tokens))

    def add(self, name: str, entry: FileEntry) -> None:
        """Stage the finished private file `name`. `commit` moves it to the path in
        `entry`.
        """
        self.staged.append((self.path(name), entry))

    def add_bytes(self, name: str, final: Path, data: bytes) -> None:
        """Write `data` to the private file `name`, and stage the file. `commit` moves
        it to the path `final`.
        """
        with naming(self.path(name)):
            self.path(name).write_bytes(data)
        where = self._layout.relative(final)
        self.add(name, FileEntry(where, len(data), crc32c(data)))

    def commit(
        self,
        rows: pa.Table,
        plan: str,
        seconds: dict[str, float] | None = None,
        encoded_on: str | None = None,
    ) -> ShardReceipt:
        """Move the token files, the embeddings and the rows into the index, and write
        the receipt. All of them are flushed to the device.

        Args:
            rows: rows table with one line per row of the shard. It has the columns of
                `storage_formats.format.rows.ROW_SCHEMA`, and source columns and
                `SOURCE_VALUES` if there are any.
            plan: fingerprint of the plan, see `ShardReceipt`.
            seconds: time spent in each stage, see `ShardReceipt`.
            encoded_on: see `ShardReceipt`.

        Raises:
            FileNotFoundError: a later attempt at the shard has removed the private
                files.
        """
        self.stage_tokens()
        final = self._layout.embedding_shard(self._shard)
        self.add_bytes("embeddings", final, self.embeddings.tobytes())
        write_rows(self.path("rows"), rows)
        where = self._layout.relative(self._layout.staged_rows(self._shard))
        self.add("rows", FileEntry(where, *crc32c_file(self.path("rows"))))
        statuses = rows["status"].to_pylist()
        details = rows["detail"].to_pylist()
        receipt = ShardReceipt(
            shard=self._shard,
            plan=plan,
            rows=len(rows),
            indexed=statuses.count(INDEXED),
            duplicates=statuses.count(DUPLICATE),
            failed=failures_by_reason(rows),
            files=self.commit_files(),
            seconds=seconds or {},
            truncated=sum(
                status == INDEXED and detail is not None
                for status, detail in zip(statuses, details, strict=True)
            ),
            encoded_on=encoded_on,
        )
        self.commit_receipt(receipt)
        return receipt

    def stage_tokens(self) -> None:
        """Finish the token files, write their checksum files, and stage all of them."""
        layout = self._layout
        for name, file in self.tokens.items():
            crc, checksums = file.finish()
            file.close()
            ndim = len(file.codec.record_shape)
            final = layout.relative(layout.token_shard(name, self._shard, ndim))
            self.add(file.path.name, FileEntry(final, file.length, crc))
            self.add_bytes(
                f"checksums-{name}",
                layout.checksums(name, self._shard),
                checksums.tobytes(),
            )
        self.tokens.clear()

    def commit_files(self) -> tuple[FileEntry, ...]:
        """Finish the token files, and move all staged files to their final paths.
        Return the entries of the files.
        """
        self.stage_tokens()
        staged = self.staged
        self.staged = []
        self._layout.put(staged)
        return tuple(entry for _, entry in staged)

    def commit_receipt(self, receipt: ShardReceipt) -> None:
        """Write the receipt, which commits the shard.

        Raises:
            FileNotFoundError: a later attempt at the shard has removed the private
                files.
        """
        final = self._layout.receipt(receipt.shard)
        # The data files are committed already, so the receipt is the only staged file.
        self.add_bytes("receipt.json", final, json_bytes(receipt.to_json()))
        self.commit_files()

    def abort(self) -> None:
        """Remove the uncommitted files. Committed files stay."""
        for file in self.tokens.values():
            file.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()
