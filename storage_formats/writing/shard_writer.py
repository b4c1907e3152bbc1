"""One attempt at one shard: private files first, then the commit protocol of SPEC.md section 11."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from storage_formats.codecs import Blocks, codec
from storage_formats.errors import UsageError
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.receipts import ShardReceipt
from storage_formats.format.rows import DUPLICATE, INDEXED, failures_by_reason, write_rows
from storage_formats.writing.staging import StagedFiles
from storage_formats.writing.token_shard import TokenShardFile


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
        self._staged = StagedFiles(self._layout, shard)
        self._embeddings = np.full((spec.shard_size, spec.embed_dim), np.nan, dtype="<f4")
        self._files = {name: open_tokens(self._staged, spec, shard, name) for name in spec.precisions}

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
        for file in self._files.values():
            file.put(positions, file.codec.encode(tokens))

    def commit(self, rows: pa.Table, plan: str, seconds: dict[str, float]) -> ShardReceipt:
        """Flush, rename into place, flush the folders, then write the receipt.

        Args:
            rows: `storage_formats.format.rows.ROW_SCHEMA`, one line a row of the shard.
            plan: fingerprint of the build plan.
            seconds: time spent by stage, recorded in the receipt.
        """
        if len(rows) != len(self._rows):
            raise UsageError(f"shard {self._shard} has {len(self._rows)} rows, its table {len(rows)}")
        for name, file in self._files.items():
            stage_tokens(self._staged, self._layout, self._shard, name, file)
        self._staged.add_bytes("embeddings", self._layout.embedding_shard(self._shard), self._embeddings.tobytes())
        write_rows(self._staged.path("rows"), rows)
        self._staged.add("rows", self._layout.rows_file(self._shard))
        files = self._staged.commit()
        statuses = rows["status"].to_pylist()
        receipt = ShardReceipt(
            shard=self._shard,
            plan=plan,
            rows=len(self._rows),
            indexed=statuses.count(INDEXED),
            duplicates=statuses.count(DUPLICATE),
            failed=failures_by_reason(rows),
            files=files,
            seconds=seconds,
        )
        receipt.write(self._layout)
        self.abort()
        return receipt

    def abort(self) -> None:
        """Remove the attempt; nothing that was committed is touched."""
        for file in self._files.values():
            file.close()
        self._staged.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


def open_tokens(staged: StagedFiles, spec: IndexSpec, shard: int, precision: str) -> TokenShardFile:
    """A token file of a shard, to be written in private."""
    entry = codec(precision, spec.block_shape)
    path = staged.path(f"tokens-{precision}")
    return TokenShardFile(path, entry, len(spec.shard_rows(shard)), spec.shard_size)


def stage_tokens(staged: StagedFiles, layout: Layout, shard: int, precision: str, file: TokenShardFile) -> None:
    """Finish the token file of a shard and stage it with the checksums of its records."""
    crc, checksums = file.finish()
    file.close()
    final = layout.token_shard(precision, shard, len(file.codec.record_shape))
    staged.add(file.path.name, final, file.length, crc)
    staged.add_bytes(f"checksums-{precision}", layout.checksums(precision, shard), checksums.tobytes())
