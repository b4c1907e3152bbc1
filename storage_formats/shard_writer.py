"""One attempt at one shard: private files first, then the commit protocol of SPEC.md section 11."""

from __future__ import annotations

import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from storage_formats.atomic import fsync_paths
from storage_formats.checksum import crc32c, crc32c_file
from storage_formats.codecs import Blocks, codec
from storage_formats.errors import UsageError
from storage_formats.layout import IndexSpec, Layout
from storage_formats.manifest import FileRecord
from storage_formats.receipts import ShardReceipt
from storage_formats.rows import DUPLICATE, INDEXED, failures_by_reason, write_rows
from storage_formats.token_shard import TokenShardFile


@dataclass(frozen=True)
class _Staged:
    """A private file, and where it will stand."""

    path: Path
    final: Path
    record: FileRecord


class ShardWriter:
    """Writes every file of a shard under a private name; `commit` puts them in place durably.

    Leaving the context without `commit` removes the attempt. Not thread-safe.
    """

    def __init__(self, root: str | Path, spec: IndexSpec, shard: int) -> None:
        self._layout = Layout(Path(root))
        self._spec = spec
        self._shard = shard
        self._rows = spec.shard_rows(shard)
        self._next = 0
        self._staging = self._layout.staging / f"{shard:08d}-{uuid.uuid4().hex}"
        self._staging.mkdir(parents=True)
        self._embeddings = np.full((spec.shard_size, spec.embed_dim), np.nan, dtype="<f4")
        self._codecs = {name: codec(name, spec.block_shape) for name in spec.precisions}
        self._files: dict[str, TokenShardFile] = {}
        for name, entry in self._codecs.items():
            path = self._staging / f"tokens-{name}"
            self._files[name] = TokenShardFile(path, entry, len(self._rows), spec.shard_size)

    def put(self, positions: NDArray[np.int64], tokens: Blocks, embeddings: NDArray[np.float32]) -> None:
        """Add blocks at ascending `positions` within the shard, each after every position put before.

        Args:
            positions: [k], 0 <= position < rows of the shard; positions left out become holes.
            tokens: bfloat16 [k, m, d], finite.
            embeddings: float32 [k, embed_dim], finite.
        """
        positions = np.asarray(positions, dtype=np.int64)
        if not len(positions):
            return
        ascending = positions[0] >= self._next and bool((np.diff(positions) > 0).all())
        if not ascending or positions[-1] >= len(self._rows):
            raise UsageError(f"positions of a shard must ascend within 0..{len(self._rows) - 1}, got {positions}")
        if tokens.shape[0] != len(positions) or embeddings.shape != (len(positions), self._spec.embed_dim):
            raise UsageError(
                f"{len(positions)} positions with tokens {list(tokens.shape)} and embeddings {list(embeddings.shape)}"
            )
        self._next = int(positions[-1]) + 1
        self._embeddings[positions] = embeddings
        runs = np.split(np.arange(len(positions)), np.flatnonzero(np.diff(positions) > 1) + 1)
        for name, file in self._files.items():
            records = self._codecs[name].encode(tokens)
            for run in runs:
                file.append(int(positions[run[0]]), records[run[0] : run[-1] + 1])

    def commit(self, rows: pa.Table, plan: str, seconds: dict[str, float]) -> ShardReceipt:
        """Flush, rename into place, flush the folders, then write the receipt.

        Args:
            rows: `storage_formats.rows.ROW_SCHEMA`, one line a row of the shard.
            plan: fingerprint of the build plan.
            seconds: time spent by stage, recorded in the receipt.
        """
        if len(rows) != len(self._rows):
            raise UsageError(f"shard {self._shard} has {len(self._rows)} rows, its table {len(rows)}")
        staged = [*self._finish_tokens(), self._finish_embeddings(), self._finish_rows(rows)]
        fsync_paths(file.path for file in staged)
        for file in staged:
            file.final.parent.mkdir(parents=True, exist_ok=True)
            file.path.replace(file.final)
        fsync_paths(file.final.parent for file in staged)
        statuses = rows["status"].to_pylist()
        receipt = ShardReceipt(
            shard=self._shard,
            plan=plan,
            rows=len(self._rows),
            indexed=statuses.count(INDEXED),
            duplicates=statuses.count(DUPLICATE),
            failed=failures_by_reason(rows),
            files=tuple(file.record for file in staged),
            seconds=seconds,
        )
        receipt.write(self._layout)
        self.abort()
        return receipt

    def abort(self) -> None:
        """Remove the attempt; nothing that was committed is touched."""
        for file in self._files.values():
            file.close()
        shutil.rmtree(self._staging, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _finish_tokens(self) -> list[_Staged]:
        staged = []
        for name, file in self._files.items():
            crc, checksums = file.finish()
            file.close()
            final = self._layout.token_shard(name, self._shard, len(self._codecs[name].record_shape))
            staged.append(self._stage(file.path, final, file.length, crc))
            sums = self._layout.checksums(name, self._shard)
            staged.append(self._stage_bytes(f"checksums-{name}", sums, checksums.tobytes()))
        return staged

    def _finish_embeddings(self) -> _Staged:
        final = self._layout.embedding_shard(self._shard)
        return self._stage_bytes("embeddings", final, self._embeddings.tobytes())

    def _finish_rows(self, rows: pa.Table) -> _Staged:
        path = self._staging / "rows"
        write_rows(path, rows)
        return self._stage(path, self._layout.rows_file(self._shard), *crc32c_file(path))

    def _stage_bytes(self, name: str, final: Path, data: bytes) -> _Staged:
        path = self._staging / name
        path.write_bytes(data)
        return self._stage(path, final, len(data), crc32c(data))

    def _stage(self, path: Path, final: Path, length: int, crc: int) -> _Staged:
        return _Staged(path, final, FileRecord(self._layout.relative(final), length, crc))
