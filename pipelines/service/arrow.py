"""Writes token blocks as an Arrow stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from edje_index.search.token_index import TokenIndex

ARROW_TYPE = "application/vnd.apache.arrow.stream"


def blocks_as_arrow(index: TokenIndex, row_ids: Sequence[int]) -> bytes:
    """Return the blocks of `row_ids` as an Arrow IPC stream, in the order of `row_ids`.

    The columns are `row_id` (int64) and `block` (the values [m, d] as little-endian bfloat16; null for a hole).

    Raises:
        RowIdError: a row id does not exist.
        CorruptIndexError: a block is damaged.
    """
    import pyarrow as pa

    blocks = index.fetch_blocks(row_ids)
    m, d = index.manifest.spec.block_shape
    is_hole = np.isnan(blocks[:, 0, 0].astype(np.float32))
    values = [None if hole else block.tobytes() for hole, block in zip(is_hole, blocks, strict=True)]
    metadata = {"block_shape": json.dumps([m, d]), "dtype": "bfloat16", "precision": index.precision}
    schema = pa.schema([pa.field("row_id", pa.int64()), pa.field("block", pa.binary(2 * m * d))], metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(
            pa.record_batch([pa.array(row_ids, pa.int64()), pa.array(values, schema[1].type)], schema=schema)
        )
    return bytes(sink.getvalue())
