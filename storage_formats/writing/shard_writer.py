"""Writing of one shard with the commit protocol of SPEC.md section 11."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from storage_formats.codecs import Blocks
from storage_formats.describe import repr_of
from storage_formats.errors import UsageError
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.receipts import ShardReceipt
from storage_formats.writing.staging import StagedFiles


class ShardWriter:
    """Writes all files of one shard under private names. `commit` moves the files into the index. Not thread-safe.

    Use the writer in a `with` statement, which removes uncommitted files at the end. Call `begin_index` before the
    first shard.

    Args:
        root: directory of the index.
        spec: shape of the index.
        shard: shard number.
    """

    def __init__(self, root: str | Path, spec: IndexSpec, shard: int) -> None:
        self._layout = Layout(Path(root))
        self._spec = spec
        self._shard = shard
        self._rows = spec.shard_rows(shard)
        self._next = 0
        self._staged = StagedFiles(self._layout, shard)
        self._embeddings = np.full((spec.shard_size, spec.embed_dim), np.nan, dtype="<f4")
        self._files = [self._staged.open_tokens(spec, name) for name in spec.precisions]

    __repr__ = repr_of("_layout.root", "_shard", "_spec")

    def put(self, positions: NDArray[np.int64], tokens: Blocks, embeddings: NDArray[np.float32]) -> None:
        """Add blocks and embeddings to the shard. Skipped positions become holes.

        Args:
            positions: int64 [k], positions in the shard. They must ascend, within a call and across calls.
            tokens: ml_dtypes.bfloat16 [k, m, d], finite.
            embeddings: float32 [k, embed_dim], finite.

        Raises:
            UsageError: positions do not ascend or are out of range, or an array has the wrong shape or type.
            OSError: the files cannot be written.
        """
        positions = np.asarray(positions, dtype=np.int64)
        if not len(positions):
            return
        ascending = positions[0] >= self._next and bool((np.diff(positions) > 0).all())
        if not ascending or positions[-1] >= len(self._rows):
            raise UsageError(
                f"positions must be in 0..{len(self._rows) - 1} and must ascend, within a call and across calls; "
                f"got {positions}"
            )
        if tokens.shape[0] != len(positions) or embeddings.shape != (len(positions), self._spec.embed_dim):
            raise UsageError(
                f"{len(positions)} positions need tokens [{len(positions)}, m, d] and embeddings "
                f"[{len(positions)}, {self._spec.embed_dim}], got {list(tokens.shape)} and {list(embeddings.shape)}"
            )
        self._next = int(positions[-1]) + 1
        self._embeddings[positions] = embeddings
        for file in self._files:
            file.put(positions, file.codec.encode(tokens))

    def commit(self, rows: pa.Table, plan: str, seconds: dict[str, float]) -> ShardReceipt:
        """Move the files into the index, and write the receipt. The files survive a power failure.

        Args:
            rows: rows table with one line per row of the shard, with the schema
                `storage_formats.format.rows.ROW_SCHEMA`.
            plan: fingerprint of the build plan.
            seconds: seconds spent in each stage, for the receipt.

        Raises:
            UsageError: `rows` does not have one line per row of the shard.
            OSError: the files cannot be written.
        """
        if len(rows) != len(self._rows):
            raise UsageError(
                f"shard {self._shard} has {len(self._rows)} rows, but the rows table has {len(rows)}; give "
                "one line per row"
            )
        for file in self._files:
            self._staged.add_tokens(file)
        self._staged.add_bytes("embeddings", self._layout.embedding_shard(self._shard), self._embeddings.tobytes())
        receipt = self._staged.commit_rows(rows, plan, seconds)
        self.abort()
        return receipt

    def abort(self) -> None:
        """Remove the uncommitted files. Does not change committed files."""
        for file in self._files:
            file.close()
        self._staged.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()
