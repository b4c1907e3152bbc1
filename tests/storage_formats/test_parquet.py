from __future__ import annotations

import io
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage_formats.format.parquet import read_table, table_bytes
from tests.conftest import REPO, write_random_index
from tests.storage_formats.reading_cases import ODD, linux


def test_a_small_file_of_many_equal_rows_is_refused_before_it_is_decoded():
    sink = io.BytesIO()
    equal = pa.array([7], pa.int64()).take(pa.array([0] * 2_000_000))
    pq.write_table(pa.table({"a": equal}), sink, compression="zstd")
    data = sink.getvalue()
    assert len(data) < 20_000
    before = pa.total_allocated_bytes()
    with pytest.raises(ValueError, match="2000000 rows"):
        read_table(data)
    assert pa.total_allocated_bytes() == before


@pytest.mark.parametrize(
    "value",
    [[f"tag {number}" for number in range(100)], [""] * 200, "x" * 16_000, None],
)
@pytest.mark.parametrize("rows", [1, 4000])
def test_what_is_written_can_be_read(value, rows):
    kind = pa.string() if isinstance(value, str) else pa.list_(pa.string())
    table = pa.table({"row_id": range(rows), "v": pa.array([value] * rows, kind)})
    data = table_bytes(table)
    assert read_table(data) == table
    if table.nbytes < 1 << 22 or value is None:
        assert len(data) < 100_000


@linux
def test_reading_an_index_starts_no_thread_of_pyarrow(tmp_path):
    """Such a thread aborts now and then a process that ends: "terminate called
    without an active exception".
    """
    write_random_index(tmp_path / "index", ODD)
    script = """
import os, sys
from storage_formats import Manifest, TokenStore, read_rows
store = TokenStore.open(sys.argv[1], engine="mapped")
store.fetch([0, 1])
read_rows(sys.argv[1])
Manifest.load(sys.argv[1])
tasks = "/proc/self/task"
names = [open(f"{tasks}/{task}/comm").read().strip() for task in os.listdir(tasks)]
print(sum(not name.startswith("jemalloc") for name in names))
"""
    one_thread = {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": str(REPO),
    }
    command = [sys.executable, "-c", script, str(tmp_path / "index")]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **one_thread},
    )
    assert done.stdout.strip() == "1", done.stderr
