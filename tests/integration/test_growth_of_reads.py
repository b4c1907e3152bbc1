"""Reads must not cost more because an index has more shards, and filters not more
because more rows pass.

The limits are three to five times what two cores took, so that they hold on a busy
machine. Processor time and counts of system calls are compared, not elapsed time.
"""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from storage_formats import IndexSpec, TokenStore
from tests.wide_index import make_wide_index

pytestmark = pytest.mark.slow

SHARDS = (10, 100, 1000, 10_000)
SPEC = IndexSpec(
    rows=16, shard_size=16, block_shape=(4, 16), embed_dim=8, precisions=("nvfp4",)
)
CANDIDATES = 100


@pytest.fixture(scope="module")
def indexes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wide")
    return {
        shards: make_wide_index(folder / str(shards), shards, SPEC) for shards in SHARDS
    }


def fetches(root: Path, count: int) -> list[float]:
    """Processor time in seconds of each of `count` fetches of random rows."""
    rng = np.random.default_rng(0)
    seconds = []
    with TokenStore.open(root, "nvfp4") as store:
        for _ in range(count):
            row_ids = rng.choice(len(store), CANDIDATES, replace=False)
            started = time.process_time()
            store.fetch(row_ids)
            seconds.append(time.process_time() - started)
    return seconds


def test_a_fetch_grows_slower_than_the_number_of_shards(indexes):
    medians = {
        shards: statistics.median(fetches(root, 60)[20:])
        for shards, root in indexes.items()
    }
    # from 100 shards on, every row of a request lies in a shard of its own
    assert medians[10_000] < 12 * medians[100], medians
    assert medians[10_000] < 0.015, medians


def test_a_fetch_makes_few_system_calls(indexes, tmp_path):
    if not shutil.which("strace"):
        pytest.skip("strace is not installed")
    calls = {}
    for shards, root in indexes.items():
        totals = []
        for count in (20, 40):
            summary = tmp_path / f"{shards}-{count}"
            command = (
                "import sys; from pathlib import Path;"
                "from tests.integration.test_growth_of_reads import fetches;"
                "fetches(Path(sys.argv[1]), int(sys.argv[2]))"
            )
            traced = [sys.executable, "-c", command, str(root), str(count)]
            subprocess.run(["strace", "-f", "-c", "-o", summary, *traced], check=True)
            (total,) = re.findall(r"\s(\d+)\s+(?:\d+\s+)?total$", summary.read_text())
            totals.append(int(total))
        calls[shards] = (totals[1] - totals[0]) / 20
    # open, fstat, ioctl, fadvise, read and close of a token file and of a checksum file
    assert calls[10_000] < 14 * CANDIDATES, calls
