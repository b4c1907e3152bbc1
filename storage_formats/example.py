"""A tiny index for examples and experiments."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

import numpy as np

from storage_formats.change import begin_index
from storage_formats.codecs import BF16
from storage_formats.format.layout import IndexSpec
from storage_formats.format.rows import RowEntry, rows_table
from storage_formats.writing.publish import Provenance, finish_index
from storage_formats.writing.shard_writer import ShardWriter

_SPEC = IndexSpec(rows=10, shard_size=4, block_shape=(4, 8), embed_dim=6, precisions=("bf16", "fp8"))
_HOLE = 9


@functools.cache
def example_index() -> Path:
    """Return the directory of an index of 10 rows. The blocks are random, 4 x 8, in `bf16` and `fp8`. Row 9 is a hole.

    The first call writes the index to a temporary directory, which is deleted when the process ends.

    Example:
        >>> from storage_formats import Manifest
        >>> from storage_formats.example import example_index
        >>> Manifest.load(example_index()).spec.rows
        10
    """
    folder = tempfile.mkdtemp(prefix="edje-example-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    root = Path(folder) / "example.edje"
    begin_index(root, _SPEC)
    rng = np.random.default_rng(0)
    receipts = []
    for shard in range(_SPEC.shards):
        row_ids = np.array([row_id for row_id in _SPEC.shard_rows(shard) if row_id != _HOLE])
        blocks = rng.standard_normal((len(row_ids), *_SPEC.block_shape)).astype(BF16)
        embeddings = rng.standard_normal((len(row_ids), _SPEC.embed_dim)).astype(np.float32)
        embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
        entries = [RowEntry(row_id, f"{row_id}.jpg") for row_id in _SPEC.shard_rows(shard)]
        if entries[-1].row_id == _HOLE:
            entries[-1].fail("truncated", "the image ends early")
        with ShardWriter(root, _SPEC, shard) as writer:
            writer.put(row_ids - _SPEC.shard_rows(shard).start, blocks, embeddings)
            receipts.append(writer.commit(rows_table(entries), plan="example", seconds={}))
    finish_index(
        root, _SPEC, receipts, Provenance(model={"fingerprint": "example"}, settings={}, plan="example"), ann={}
    )
    return root
