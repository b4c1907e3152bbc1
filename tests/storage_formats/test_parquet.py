from __future__ import annotations

import io
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage_formats.format.parquet import iter_batches, open_parquet, read_table
from tests.conftest import REPO, write_random_index
from tests.storage_formats.reading_cases import ODD, linux


def parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def test_columns_come_in_the_requested_order():
    data = parquet(pa.table({"a": [1, 2], "b": ["x", "y"], "c": [0.5, 1.5]}))
    assert read_table(data, ["c", "a"]).to_pydict() == {"c": [0.5, 1.5], "a": [1, 2]}
    assert read_table(data).column_names == ["a", "b", "c"]


def test_a_missing_column_is_an_error():
    with pytest.raises(ValueError, match="the Parquet file has no column 'b'"):
        read_table(parquet(pa.table({"a": [1]})), ["b"])


def test_a_small_file_of_many_equal_rows_is_refused_before_it_is_decoded():
    data = parquet(pa.table({"a": pa.array([7], pa.int64()).take(pa.array([0] * 2_000_000))}))
    assert len(data) < 20_000
    before = pa.total_allocated_bytes()
    with pytest.raises(ValueError, match="it declares 2000000 rows"):
        read_table(data)
    assert pa.total_allocated_bytes() == before


def test_batches_are_those_of_the_file(tmp_path):
    (tmp_path / "list.parquet").write_bytes(parquet(pa.table({"a": range(10), "b": range(10)})))
    with open_parquet(tmp_path / "list.parquet") as file:
        batches = [batch.to_pydict() for batch in iter_batches(file, 4, ["b"])]
    assert batches == [{"b": [0, 1, 2, 3]}, {"b": [4, 5, 6, 7]}, {"b": [8, 9]}]


@linux
def test_reading_an_index_starts_no_thread_of_pyarrow(tmp_path):
    """Such a thread aborts now and then a process that ends: "terminate called without an active exception"."""
    write_random_index(tmp_path / "index", ODD)
    script = """
import os, sys
from storage_formats import Manifest, TokenStore, read_rows
store = TokenStore.open(sys.argv[1], engine="mapped")
store.fetch([0, 50])
read_rows(sys.argv[1])
Manifest.load(sys.argv[1])
names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
print(sum(not name.startswith("jemalloc") for name in names))
"""
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-c", script, str(tmp_path / "index")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **one_thread})
    assert done.stdout.strip() == "1", done.stderr
