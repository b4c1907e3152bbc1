"""A small index on a disk, for the tests of benchmarks."""

import pytest

from benchmarks.disk import describe_disk
from benchmarks.fetch import make_synthetic
from storage_formats.format.layout import IndexSpec

SPEC = IndexSpec(300, 128, (32, 64), embed_dim=64, precisions=("bf16", "fp8"))


@pytest.fixture(scope="session")
def index(disk):
    """300 rows of 4,096 bytes (bf16) in three shards. The page cache can be emptied
    of its files.
    """
    root = disk / "fetch" / "random.edje"
    if {"tmpfs", "ramfs"} & set(describe_disk(root.parent).split()):
        pytest.skip(
            "temporary files are in memory here, so nothing is ever read from a disk"
        )
    make_synthetic(
        root,
        rows=SPEC.rows,
        precisions=SPEC.precisions,
        block_shape=SPEC.block_shape,
        shard_size=SPEC.shard_size,
    )
    return root
