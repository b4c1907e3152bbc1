"""Writing an index from arrays: what is stored, what is refused, and what a failure
leaves.
"""

from __future__ import annotations

import contextlib
import datetime
import subprocess
import sys
import time

import ml_dtypes
import numpy as np
import pandas
import pyarrow as pa
import pytest

from storage_formats import IndexWriter, Manifest, TokenStore, read_rows, verify_index
from storage_formats.errors import EdjeError, IncompleteIndexError, UsageError
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import CommittedIndex
from storage_formats.reading.embeddings import read_embeddings
from storage_formats.writing.shard_writer import ShardWriter
from tests.conftest import (
    all_files,
    environment,
    golden_index,
    same_bits,
    write_arrays,
)

# numbers of NumPy are integers as well
SHAPE = {
    "block_shape": np.array([4, 16]),
    "embed_dim": np.int32(8),
    "shard_size": np.int64(5),
}


def arrays(count, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    blocks = rng.standard_normal((count, 4, 16), dtype=np.float32).astype(dtype)
    return blocks, rng.standard_normal((count, 8), dtype=np.float32)


@pytest.mark.parametrize("chunks", [[1] * 13, [5, 5, 3], [4, 0, 7, 2]])
def test_round_trip_does_not_depend_on_the_chunks(tmp_path, chunks):
    blocks, embeddings = arrays(13)
    uris = [f"page {row}" for row in range(13)]
    options = {"precisions": ["bf16", "fp8"], **SHAPE}
    root = tmp_path / "index"
    with IndexWriter.create(root, **options) as writer:
        for count in chunks:
            part = slice(len(writer), len(writer) + count)
            row_ids = writer.append(blocks[part], embeddings[part], uris[part])
            assert row_ids == range(part.start, part.stop)
    assert verify_index(root) == []
    assert same_bits(
        TokenStore.open(root).fetch(range(13)), blocks.astype(ml_dtypes.bfloat16)
    )
    assert read_rows(root)["uri"].to_pylist() == uris
    spec = Manifest.load(root).spec
    assert (spec.rows, spec.shards, spec.precisions) == (13, 3, ("bf16", "fp8"))
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    np.testing.assert_allclose(
        read_embeddings(CommittedIndex.open(root), np.arange(13)), unit, rtol=1e-6
    )
    write_arrays(tmp_path / "again", blocks, embeddings, uris, **options)
    assert all_files(root) == all_files(tmp_path / "again")


def test_an_index_is_finished_while_its_caller_handles_another_error(tmp_path):
    try:
        (tmp_path / "index").stat()
    except FileNotFoundError:
        write_arrays(tmp_path / "index", *arrays(3), **SHAPE)
    assert verify_index(tmp_path / "index") == []
    assert not Layout(tmp_path / "index").journal.exists()


MAY = datetime.datetime(2026, 5, 1, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (pa.record_batch({"width": [3, 4], "uri": ["a", "b"]}), {"width": [3, 4]}),
        (
            pandas.DataFrame(
                {
                    "uri": ["a", "b"],
                    "stars": [1.5, np.nan],
                    "kind": pandas.Categorical(["x", None]),
                    "taken": pandas.to_datetime(["2026-05-01", None]),
                },
                index=["x", "y"],
            ),
            {"stars": [1.5, None], "kind": ["x", None], "taken": [MAY, None]},
        ),
        (
            {
                "uri": ["a", "b"],
                "texts": pa.chunked_array([[["x", "y"]], [None]]),
                "taken": np.array(["2026-05-01", "NaT"], "M8[ns]"),
            },
            {"texts": [["x", "y"], None], "taken": [MAY, None]},
        ),
        # names that the index uses get a prefix
        (
            {name: ["a", "b"] for name in ("uri", "row_id", "status")},
            {"row_id": [0, 1], "status": ["indexed"] * 2, "source_status": ["a", "b"]},
        ),
    ],
)
def test_columns_of_rows(tmp_path, rows, expected):
    write_arrays(tmp_path / "index", *arrays(2), rows, **SHAPE)
    table = read_rows(tmp_path / "index").to_pydict()
    expected = {**expected, "uri": ["a", "b"], "height": [None, None]}
    assert {name: table[name] for name in expected} == expected
    assert "index" not in table


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        (["a"], "2 rows, but column uri of rows has 1"),
        ("ab", "'ab'"),
        ({"a\n": ["x"] * 2}, "'a.n'"),
        (pa.table([["a"] * 2] * 2, names=["x", "x"]), "2 times"),
        (pandas.DataFrame({"x": ["a", 1]}), "cannot read the table rows"),
        ({"width": ["wide", "narrow"]}, "width of rows cannot be .* int32"),
        ({"uri": ["a", None]}, "uri of rows has 1 null"),
        ({"content_hash": [None, "0" * 32]}, "a content hash is not one of SHA-256"),
        ({"content_hash": ["é" * 64, None]}, "a content hash is not one of SHA-256"),
        ({3: ["x"]}, "must be a string"),
        ({"stars": [1 << 63] * 2}, "stars of rows cannot"),
        ({"stars": [float("nan")] * 2}, "stars .* nan"),
        ({"captions": "a"}, r"rows\['captions'\]"),
        # times outside the years of Python
        *(
            ({"uri": ["a", "b"], "taken": [moment] * 2}, "taken of rows cannot")
            for moment in (
                datetime.datetime.fromisoformat("9999-12-31T23:00-05:00"),
                np.datetime64("10000-01-01"),
                pa.scalar(253402300800, pa.timestamp("s")),
            )
        ),
    ],
)
def test_rows_that_are_refused(tmp_path, rows, named):
    writer = IndexWriter.create(tmp_path / "index", **SHAPE)
    with pytest.raises(UsageError, match=named):
        writer.append(*arrays(2), rows)
    assert len(writer) == 0


def changed(array, position, value):
    array = array.copy()
    array[position] = value
    return array


BLOCKS, EMBEDDINGS = arrays(2)


@pytest.mark.parametrize(
    ("blocks", "embeddings", "message"),
    [
        (BLOCKS[:, :3], EMBEDDINGS, r"\[k, 4, 16\], got \w+ \[2, 3, 16\]"),
        (BLOCKS, EMBEDDINGS[:1], r"of 2 blocks .* \[2, 8\], got \w+ \[1, 8\]"),
        (BLOCKS.astype(np.float64), EMBEDDINGS, "blocks .* got float64"),
        (BLOCKS, EMBEDDINGS.astype(np.int32), "embeddings .* got int32"),
        (changed(BLOCKS, (1, 0, 3), np.nan), EMBEDDINGS, "block of row 1 .* NaN"),
        (changed(BLOCKS, (1, 3, 1), 3.4e38), EMBEDDINGS, "too large for bfloat16"),
        (BLOCKS, changed(EMBEDDINGS, (1, 1), np.inf), "embedding of row 1"),
        (BLOCKS, changed(EMBEDDINGS, 1, 0), "embedding of row 1 is zero"),
        (changed(BLOCKS, (1, 2), 1e-4), EMBEDDINGS, "row 1: .* token 2 .* nvfp4"),
    ],
)
def test_arrays_that_are_refused(tmp_path, blocks, embeddings, message):
    root = tmp_path / "index"
    with IndexWriter.create(root, precisions=["bf16", "nvfp4"], **SHAPE) as writer:
        with pytest.raises(UsageError, match=message):
            writer.append(blocks, embeddings)
        # the writer is usable after an error
        writer.append(BLOCKS, EMBEDDINGS)
    assert len(TokenStore.open(root)) == 2


def write_then_fail(writer):
    with writer:
        writer.append(*arrays(12))
        writer.append(changed(BLOCKS, (1, 0, 0), np.nan), EMBEDDINGS)


def write_nothing(writer):
    with writer:
        pass


FAILURES = {write_then_fail: "has a value that is NaN", write_nothing: "no row"}


def test_an_exception_removes_everything(tmp_path):
    (tmp_path / "empty").mkdir()
    for root in (tmp_path / "new", tmp_path / "empty"):
        for fail, message in FAILURES.items():
            with pytest.raises(UsageError, match=message):
                fail(IndexWriter.create(root, **SHAPE))
    assert list(tmp_path.rglob("*")) == [tmp_path / "empty"]


def test_rows_are_appended_as_a_snapshot(tmp_path):
    root = tmp_path / "index"
    blocks, embeddings = arrays(20)
    options = {"precisions": ["bf16", "fp8"], **SHAPE}
    write_arrays(root, blocks[:7], embeddings[:7], {"stars": [1] * 7}, **options)
    before = all_files(root)
    late = {"uri": [f"late {row}" for row in range(11)], "stars": [0.5] * 11}
    with IndexWriter.open(root) as writer:
        # a shard boundary, after row 6
        assert writer.append(blocks[7:9], embeddings[7:9]) == range(10, 12)
        assert writer.append(blocks[9:], embeddings[9:], late) == range(12, 23)
        assert len(writer) == 13
        # nobody sees the rows yet
        assert len(TokenStore.open(root)) == 7
    assert verify_index(root) == []
    manifest = Manifest.load(root)
    assert (manifest.snapshot.number, manifest.counts.indexed) == (1, 20)
    change = {"kind": "import-arrays", "first_row": 10, "rows": 13}
    assert change.items() <= manifest.snapshot.change.items()
    write_arrays(tmp_path / "whole", blocks, embeddings, **options)
    for name in options["precisions"]:
        appended = TokenStore.open(root, name).fetch([*range(7), *range(10, 23)])
        whole = TokenStore.open(tmp_path / "whole", name).fetch(range(20))
        assert same_bits(appended, whole)
    table = read_rows(root)
    assert table["uri"].to_pylist()[6:] == ["6", "10", "11", *late["uri"]]
    # the type of the column has changed for all rows
    assert table["stars"].to_pylist() == [1.0] * 7 + [None] * 2 + [0.5] * 11
    # files of the first snapshot are as before, so it can be read
    changed_files = before.items() - all_files(root).items()
    assert {path.name for path, _ in changed_files} <= {"index.json", "zarr.json"}
    # a second append
    with IndexWriter.open(root) as writer:
        assert writer.append(blocks[:1], embeddings[:1]) == range(25, 26)
    assert verify_index(root) == []


def test_an_append_that_fails_changes_nothing(tmp_path):
    root = tmp_path / "index"
    write_arrays(root, *arrays(7), **SHAPE)
    before = all_files(root)
    for fail, message in FAILURES.items():
        with pytest.raises(UsageError, match=message):
            fail(IndexWriter.open(root))
        assert all_files(root) == before


@pytest.mark.parametrize(
    ("values", "more", "expected"),
    [
        ([1, 2], [1.5, None], [1, 2, 1.5, None]),
        (["a", "b"], [["c", "d"], None], [["a"], ["b"], ["c", "d"], None]),
        (["a", None], [None, None], ["a", None, None, None]),
        ([1.5, 2], ["unknown", "2020"], "float64, .* string"),
        ([True, False], [1, 2], "bool, .* string"),
        ([MAY, MAY], ["2026", "x"], "timestamp, .* it"),
        ([1, 2], [["x"], ["y"]], "int64, .* list<string>"),
        ([1, 2], [1.5, 1 << 60], "int64, .* string"),
    ],
)
def test_an_append_may_widen_a_column_but_not_change_its_type(
    tmp_path, values, more, expected
):
    root = tmp_path / "index"
    write_arrays(root, *arrays(2), {"x": values}, **SHAPE)
    with contextlib.ExitStack() as stack:
        if isinstance(expected, str):
            message = f"the column x .* type {expected}"
            stack.enter_context(pytest.raises(UsageError, match=message))
        writer = stack.enter_context(IndexWriter.open(root))
        writer.append(*arrays(2), {"x": more})
    if not isinstance(expected, str):
        assert read_rows(root)["x"].to_pylist() == expected
        (column,) = Manifest.load(root).columns
        assert column.values == 4 - expected.count(None)


def test_the_values_of_all_appends_count_for_the_type(tmp_path):
    root = tmp_path / "index"
    write_arrays(root, *arrays(2), {"x": [1, 2]}, **SHAPE)
    with IndexWriter.open(root) as writer:
        writer.append(*arrays(2), {"x": [1.5, 2]})
        with pytest.raises(UsageError, match="to string"):
            writer.append(*arrays(2), {"x": [1 << 60, 2]})


def test_an_index_of_images_is_refused():
    with pytest.raises(UsageError, match="not built from arrays"):
        IndexWriter.open(golden_index())


def test_a_closed_writer_refuses(tmp_path):
    with IndexWriter.create(tmp_path / "index", **SHAPE) as writer:
        writer.append(*arrays(1))
        writer.finish()
    for call in (writer.finish, lambda: writer.append(*arrays(1))):
        with pytest.raises(UsageError, match="is closed"):
            call()


def test_paths_that_are_in_use(tmp_path):
    with IndexWriter.create(tmp_path / "index", **SHAPE) as writer:
        writer.append(*arrays(1))
        with pytest.raises(EdjeError, match="is working on"):
            IndexWriter.create(tmp_path / "index", **SHAPE)
    (tmp_path / "file").write_text("text")
    for path, words in (
        (tmp_path / "index", "exists already"),
        (tmp_path / "file", "not a directory"),
        (tmp_path, "is not empty"),
    ):
        with pytest.raises(UsageError, match=words):
            IndexWriter.create(path, **SHAPE)


def test_a_failed_write_is_tried_again(tmp_path, monkeypatch):
    blocks, embeddings = arrays(12)
    root = tmp_path / "index"
    commit = ShardWriter.commit

    def fail_once(self, *arguments):
        monkeypatch.setattr(ShardWriter, "commit", commit)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ShardWriter, "commit", fail_once)
    with IndexWriter.create(root, **SHAPE) as writer:
        with pytest.raises(OSError, match="No space"):
            writer.append(blocks, embeddings)
        writer.append(blocks[len(writer) :], embeddings[len(writer) :])
    assert verify_index(root) == []
    stored = TokenStore.open(root).fetch(range(12))
    assert same_bits(stored, blocks.astype(ml_dtypes.bfloat16))


ENDLESS = """
import sys
import numpy as np
from storage_formats import IndexWriter

blocks = np.ones((7, 4, 16), dtype=np.float32)
writer = IndexWriter.create(
    sys.argv[1], block_shape=(4, 16), embed_dim=8, shard_size=5
)
with writer:
    while True:
        writer.append(blocks, blocks[:, 0, :8])
"""


def test_a_killed_writer_leaves_nothing_that_opens_and_the_next_begins_again(tmp_path):
    root = tmp_path / "index"
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(root)], env=environment()
    )
    try:
        limit = time.monotonic() + 60
        while not Layout(root).receipt(3).exists():
            assert time.monotonic() < limit
            assert process.poll() is None
            time.sleep(0.001)
    finally:
        process.kill()
        process.wait()
    for read in (TokenStore.open, verify_index):
        with pytest.raises(IncompleteIndexError, match="run the same command again"):
            read(root)
    for each in (root, tmp_path / "calm"):
        write_arrays(each, *arrays(3), **SHAPE)
    assert all_files(root) == all_files(tmp_path / "calm")


def test_memory_is_bounded_by_a_shard(tmp_path):
    """40 shards of 1 MB each, written by a process whose peak grows by far less."""
    script = """
import resource, sys
import numpy as np
from storage_formats import IndexWriter

blocks = np.ones((256, 32, 64), dtype=np.float32)
writer = IndexWriter.create(
    sys.argv[1], block_shape=(32, 64), embed_dim=8, shard_size=256
)
with writer:
    peaks = []
    for _ in range(40):
        writer.append(blocks, blocks[:, 0, :8])
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(peaks[-1] - peaks[10])
"""
    command = [sys.executable, "-c", script, str(tmp_path / "index")]
    # KiB
    assert int(subprocess.check_output(command, env=environment())) < 10 * 1024


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("encoder", None, "encoder must be a string"),
        ("encoder", "\ud800", "lone surrogate"),
        ("block_shape", (4,), r"block_shape must be \(m, d\)"),
        ("block_shape", (4.0, 16), "block_shape must be an integer"),
        ("block_shape", None, "block_shape must be a sequence"),
        ("block_shape", (0, 16), None),
        ("embed_dim", 8.5, "embed_dim must be an integer"),
        ("shard_size", True, "shard_size must be an integer"),
        ("precisions", "bf16", "precisions must be a sequence"),
        ("precisions", ["fp7"], "fp7"),
        ("precisions", [], None),
    ],
)
def test_wrong_arguments_are_refused_at_once(tmp_path, name, value, message):
    with pytest.raises(UsageError, match=message):
        IndexWriter.create(tmp_path / "index", **{**SHAPE, name: value})
    assert not (tmp_path / "index").exists()
