"""Writing of one shard with the commit protocol of SPEC.md section 11."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from storage_formats.codecs import Blocks
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.receipts import ShardReceipt
from storage_formats.writing.staging import StagedFiles
from storage_formats.writing.token_shard import outside, refuse_outside


class ShardWriter:
    """Writes all files of one shard under private names. `commit` moves the files into
    the index. Not thread-safe.

    Use the writer in a `with` statement, which removes uncommitted files at the end.
    Call `begin_index` before the first shard.
    """

    def __init__(self, root: str | Path, spec: IndexSpec, shard: int) -> None:
        self._layout = Layout(Path(root))
        self._spec = spec
        self._shard = shard
        self._staged = StagedFiles(self._layout, shard)
        self._embeddings = np.full(
            (spec.shard_size, spec.embed_dim), np.nan, dtype="<f4"
        )
        self._files = [self._staged.open_tokens(spec, name) for name in spec.precisions]

    def outside(self, tokens: Blocks) -> dict[int, str]:
        """Return the blocks of `tokens` [k, m, d] that a precision cannot store: the
        problem by position. `put` refuses them.
        """
        problems: dict[int, str] = {}
        for file in self._files:
            problems |= outside(file.codec, tokens)
        return problems

    def put(
        self,
        positions: NDArray[np.int64],
        tokens: Blocks,
        embeddings: NDArray[np.float32],
    ) -> None:
        """Add blocks and embeddings to the shard. Skipped positions become holes.

        Args:
            positions: int64 [k], positions in the shard. They must ascend, within a
                call and across calls.
            tokens: ml_dtypes.bfloat16 [k, m, d], finite.
            embeddings: float32 [k, embed_dim], finite.
        """
        self._embeddings[positions] = embeddings
        for file in self._files:
            first = self._shard * self._spec.shard_size
            refuse_outside(file.codec, tokens, first + positions)
            file.put(positions, file.codec.encode(tokens))

    def commit(
        self,
        rows: pa.Table,
        plan: str,
        seconds: dict[str, float],
        encoded_on: str | None = None,
    ) -> ShardReceipt:
        """Move the files into the index, and write the receipt. The files survive a
        power failure.

        Args:
            rows: rows table with one line per row of the shard, with the schema
                `storage_formats.format.rows.ROW_SCHEMA`.
        """
        for file in self._files:
            self._staged.add_tokens(file)
        self._staged.add_bytes(
            "embeddings",
            self._layout.embedding_shard(self._shard),
            self._embeddings.tobytes(),
        )
        receipt = self._staged.commit_rows(rows, plan, seconds, encoded_on)
        self.abort()
        return receipt

    def abort(self) -> None:
        """Remove the uncommitted files. Does not change committed files."""
        for file in self._files:
            file.close()
        self._staged.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()
