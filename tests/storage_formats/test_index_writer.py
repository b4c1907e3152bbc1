"""Writing an index from arrays: what is stored, what is refused, and what a failure
leaves.
"""

from __future__ import annotations

import datetime
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

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

SHAPE = {"block_shape": (4, 16), "embed_dim": 8, "shard_size": 5}


def arrays(count, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    blocks = rng.standard_normal((count, 4, 16), dtype=np.float32).astype(dtype)
    return blocks, rng.standard_normal((count, 8), dtype=np.float32)


@pytest.mark.parametrize("chunks", [[13], [1] * 13, [5, 5, 3], [4, 0, 7, 2], [12, 1]])
def test_round_trip_does_not_depend_on_the_chunks(tmp_path, chunks):
    blocks, embeddings = arrays(13)
    root = tmp_path / "index"
    with IndexWriter.create(root, precisions=["bf16", "fp8"], **SHAPE) as writer:
        done = 0
        for count in chunks:
            part = slice(done, done + count)
            uris = [f"page {row}" for row in range(done, done + count)]
            assert writer.append(blocks[part], embeddings[part], uris) == range(
                done, done + count
            )
            done += count
        assert len(writer) == 13
    assert verify_index(root) == []
    assert same_bits(
        TokenStore.open(root).fetch(range(13)), blocks.astype(ml_dtypes.bfloat16)
    )
    assert read_rows(root)["uri"].to_pylist() == [f"page {row}" for row in range(13)]
    spec = Manifest.load(root).spec
    assert (spec.rows, spec.shards, spec.precisions) == (13, 3, ("bf16", "fp8"))
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    np.testing.assert_allclose(
        read_embeddings(CommittedIndex.open(root), np.arange(13)), unit, rtol=1e-6
    )
    write_arrays(
        tmp_path / "again",
        blocks,
        embeddings,
        [f"page {row}" for row in range(13)],
        precisions=["bf16", "fp8"],
        **SHAPE,
    )
    assert all_files(root) == all_files(tmp_path / "again")


def test_an_index_is_finished_while_its_caller_handles_another_error(tmp_path):
    try:
        (tmp_path / "index").stat()
    except FileNotFoundError:
        write_arrays(tmp_path / "index", *arrays(3), **SHAPE)
    assert verify_index(tmp_path / "index") == []
    assert not Layout(tmp_path / "index").journal.exists()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_block_types(tmp_path, dtype):
    blocks, embeddings = arrays(3, dtype)
    write_arrays(tmp_path / "index", blocks, embeddings, **SHAPE)
    assert same_bits(
        TokenStore.open(tmp_path / "index").fetch([0, 1, 2]),
        blocks.astype(ml_dtypes.bfloat16),
    )
    assert read_rows(tmp_path / "index")["uri"].to_pylist() == ["0", "1", "2"]


MAY = datetime.datetime(2026, 5, 1, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ({"uri": ["a", "b"], "width": [3, 4]}, {"width": [3, 4]}),
        (
            pa.table({"width": pa.array([3, 4], pa.int64()), "uri": ["a", "b"]}),
            {"width": [3, 4]},
        ),
        (
            pa.record_batch({"uri": ["a", "b"], "width": np.array([3, 4])}),
            {"width": [3, 4]},
        ),
        (
            pandas.DataFrame(
                {
                    "uri": ["a", "b"],
                    "stars": [1.5, np.nan],
                    "captions": [["a", "b"], None],
                    "kind": pandas.Categorical(["x", None]),
                    "taken": pandas.to_datetime(["2026-05-01", None]),
                },
                index=["x", "y"],
            ),
            {
                "stars": [1.5, None],
                "captions": [["a", "b"], None],
                "kind": ["x", None],
                "taken": [MAY, None],
            },
        ),
        (
            {
                "uri": ["a", "b"],
                "number": pa.array([7, None]),
                "texts": pa.chunked_array([[["x", "y"]], [None]]),
                "taken": np.array(["2026-05-01", "NaT"], "M8[ns]"),
                "series": pandas.to_datetime(pandas.Series(["2026-05-01", None])),
            },
            {
                "number": [7, None],
                "texts": [["x", "y"], None],
                "taken": [MAY, None],
                "series": [MAY, None],
            },
        ),
        # names that the index uses get a prefix
        (
            {name: ["a", "b"] for name in ("uri", "row_id", "status", "edje_note")},
            {"row_id": [0, 1], "status": ["indexed"] * 2, "source_status": ["a", "b"]},
        ),
    ],
)
def test_columns_of_rows(tmp_path, rows, expected):
    write_arrays(tmp_path / "index", *arrays(2), rows, **SHAPE)
    table = read_rows(tmp_path / "index").to_pydict()
    assert {name: table[name] for name in expected} == expected
    assert (table["uri"], table["height"]) == (["a", "b"], [None, None])
    assert "index" not in table


def hours(east):
    return datetime.timezone(datetime.timedelta(hours=east))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["a"], "2 blocks need 2 rows, but column uri of rows has 1"),
        ("ab", "got 'ab'"),
        ({"a\n": ["x"] * 2}, "cannot have a column 'a.n'"),
        (pa.table([["a"] * 2] * 2, names=["x", "x"]), "exists 2 times"),
        (pandas.DataFrame({"x": ["a", 1]}), "cannot read the table rows"),
        (
            {"width": ["wide", "narrow"]},
            "column width of rows cannot be converted to int32",
        ),
        ({"uri": ["a", None]}, "column uri of rows has 1 nulls"),
        ({3: ["x"]}, "rows must be a string"),
        ({"stars": [1 << 63] * 2}, "column stars of rows cannot store"),
        ({"captions": "a"}, r"rows\['captions'\] must be a sequence"),
        # times outside the years of Python
        *(
            ({"uri": ["a", "b"], "taken": [moment] * 2}, "column taken of rows cannot")
            for moment in (
                datetime.datetime(9999, 12, 31, 23, tzinfo=hours(-5)),
                datetime.datetime(1, 1, 1, tzinfo=hours(5)),
                np.datetime64("10000-01-01"),
                pa.scalar(253402300800, pa.timestamp("s")),
            )
        ),
    ],
)
def test_rows_that_are_refused(tmp_path, rows, message):
    writer = IndexWriter.create(tmp_path / "index", **SHAPE)
    with pytest.raises(UsageError, match=message):
        writer.append(*arrays(2), rows)
    assert len(writer) == 0


def changed(array, position, value):
    array[position] = value
    return array


BLOCKS, EMBEDDINGS = arrays(2)


@pytest.mark.parametrize(
    ("blocks", "embeddings", "message"),
    [
        (
            BLOCKS[:, :3],
            EMBEDDINGS,
            r"blocks must be .* \[k, 4, 16\], got \w+ \[2, 3, 16\]",
        ),
        (BLOCKS[0], EMBEDDINGS, r"blocks must be"),
        (
            BLOCKS,
            EMBEDDINGS[:1],
            r"embeddings of 2 blocks must be .* \[2, 8\], got \w+ \[1, 8\]",
        ),
        (
            BLOCKS.astype(np.float64),
            EMBEDDINGS,
            r"blocks must be float32, float16 or bfloat16 .* got float64",
        ),
        (
            BLOCKS,
            EMBEDDINGS.astype(np.int32),
            r"must be floating-point numbers .* got int32",
        ),
        (
            changed(BLOCKS.copy(), (1, 0, 3), np.nan),
            EMBEDDINGS,
            "the block of row 1 has a value that is NaN",
        ),
        (
            changed(BLOCKS.copy(), (0, 3, 1), -np.inf),
            EMBEDDINGS,
            "the block of row 0 has",
        ),
        (
            changed(BLOCKS.copy(), (1, 3, 1), 3.4e38),
            EMBEDDINGS,
            "too large for bfloat16",
        ),
        (BLOCKS, changed(EMBEDDINGS.copy(), (1, 1), np.inf), "the embedding of row 1"),
        (BLOCKS, changed(EMBEDDINGS.copy(), 1, 0), "the embedding of row 1 is zero"),
        (
            changed(BLOCKS.copy(), (1, 2), 1e-4),
            EMBEDDINGS,
            "row 1: the largest value of token 2 is .* but nvfp4 can store",
        ),
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
    writer.append(*arrays(12))
    writer.append(BLOCKS[0], EMBEDDINGS)


def test_an_exception_removes_everything(tmp_path):
    (tmp_path / "empty").mkdir()
    for root in (tmp_path / "new", tmp_path / "empty"):
        with (
            pytest.raises(UsageError, match="must be"),
            IndexWriter.create(root, **SHAPE) as writer,
        ):
            write_then_fail(writer)
    with (
        pytest.raises(UsageError, match="no row was appended"),
        IndexWriter.create(tmp_path / "new", **SHAPE),
    ):
        pass
    assert not (tmp_path / "new").exists()
    assert list((tmp_path / "empty").iterdir()) == []


def test_other_columns_become_source_columns(tmp_path):
    blocks, embeddings = arrays(12)
    root = tmp_path / "index"
    with IndexWriter.create(root, **SHAPE) as writer:
        first = {"captions": [["a", "b"]] * 6, "stars": [1, None, 3, 4, 5, 6]}
        writer.append(blocks[:6], embeddings[:6], first)
        with pytest.raises(UsageError, match=r"column stars .* cannot store nan"):
            writer.append(blocks[6:], embeddings[6:], {"stars": [float("nan")] * 6})
        other = {"stars": [0.5] * 6, "place": ["here"] * 6}
        writer.append(blocks[6:], embeddings[6:], pa.table(other))
    described = {
        each.name: (each.type, each.values) for each in Manifest.load(root).columns
    }
    assert described == {
        "captions": ("list<string>", 6),
        "place": ("string", 6),
        "stars": ("float64", 11),
    }
    rows = read_rows(root)
    assert rows["stars"].to_pylist() == [1, None, 3, 4, 5, 6, *[0.5] * 6]
    assert rows["captions"].to_pylist() == [["a", "b"]] * 6 + [None] * 6
    assert verify_index(root) == []


def test_rows_are_appended_as_a_snapshot(tmp_path):
    root = tmp_path / "index"
    blocks, embeddings = arrays(20)
    write_arrays(
        root,
        blocks[:7],
        embeddings[:7],
        {"stars": [1] * 7},
        precisions=["bf16", "fp8"],
        **SHAPE,
    )
    before = all_files(root)
    rows = {"uri": [f"late {row}" for row in range(13)], "stars": [0.5] * 13}
    with IndexWriter.open(root) as writer:
        # a shard boundary, after row 6
        assert writer.append(blocks[7:9], embeddings[7:9]) == range(10, 12)
        late = {name: values[2:] for name, values in rows.items()}
        assert writer.append(blocks[9:], embeddings[9:], late) == range(12, 23)
        assert len(writer) == 13
        # nobody sees the rows yet
        assert len(TokenStore.open(root)) == 7
    assert verify_index(root) == []
    manifest = Manifest.load(root)
    assert (manifest.snapshot.number, manifest.counts.indexed) == (1, 20)
    assert (
        manifest.snapshot.change.items()
        >= {
            "kind": "import-arrays",
            "first_row": 10,
            "rows": 13,
        }.items()
    )
    ids = [*range(7), *range(10, 23)]
    assert same_bits(
        TokenStore.open(root, "bf16").fetch(ids), blocks.astype(ml_dtypes.bfloat16)
    )
    write_arrays(tmp_path / "whole", blocks, embeddings, precisions=["fp8"], **SHAPE)
    assert same_bits(
        TokenStore.open(root, "fp8").fetch(ids),
        TokenStore.open(tmp_path / "whole", "fp8").fetch(range(20)),
    )
    table = read_rows(root)
    assert table["uri"].to_pylist()[6:] == ["6", "10", "11", *rows["uri"][2:]]
    # the type of the column has changed for all rows
    assert table["stars"].to_pylist() == [1.0] * 7 + [None] * 2 + [0.5] * 11
    # files of the first snapshot are as before, so it can be read
    after = all_files(root)
    assert {
        path
        for path, data in before.items()
        if after[path] != data and path.name not in ("index.json", "zarr.json")
    } == set()
    # a second append
    with IndexWriter.open(root) as writer:
        assert writer.append(blocks[:1], embeddings[:1]) == range(25, 26)
    assert verify_index(root) == []


def test_an_append_that_fails_changes_nothing(tmp_path):
    root = tmp_path / "index"
    write_arrays(root, *arrays(7), **SHAPE)
    before = all_files(root)
    with (
        pytest.raises(UsageError, match="must be"),
        IndexWriter.open(root) as writer,
    ):
        write_then_fail(writer)
    blocks, embeddings = (each.copy() for each in arrays(3)[:2])
    blocks[1, 0, 0] = np.nan
    with (
        pytest.raises(UsageError, match="the block of row 1 has"),
        IndexWriter.open(root) as writer,
    ):
        writer.append(blocks, embeddings)
    assert all_files(root) == before
    with (
        pytest.raises(UsageError, match="no row was appended"),
        IndexWriter.open(root),
    ):
        pass
    assert all_files(root) == before


@pytest.mark.parametrize(
    ("values", "more", "expected"),
    [
        (
            [1.5, 2],
            ["unknown", "2020"],
            "type float64, and .* change it to string; give",
        ),
        (
            [1, 2],
            ["unknown", None],
            "type int64, and these rows would change it to str",
        ),
        ([True, False], [1, 2], "type bool, and these rows would change it to string"),
        ([MAY, MAY], ["2026", "x"], "type timestamp, and these rows would change it"),
        ([1, 2], [["x"], ["y"]], "type int64, and .* it to list<string>; give values"),
        (
            [1, 2],
            [1.5, 1 << 60],
            "type int64, and these rows would change it to string",
        ),
        ([1, 2], [1.5, None], [1, 2, 1.5, None]),
        ([1.5, 2], [3, None], [1.5, 2, 3, None]),
        (["a", "b"], [["c", "d"], None], [["a"], ["b"], ["c", "d"], None]),
        (["a", None], [None, None], ["a", None, None, None]),
    ],
)
def test_an_append_keeps_the_types_of_columns(tmp_path, values, more, expected):
    root = tmp_path / "index"
    write_arrays(root, *arrays(2), {"x": values}, **SHAPE)
    before = all_files(root)
    with IndexWriter.open(root) as writer:
        if isinstance(expected, list):
            writer.append(*arrays(2), {"x": more})
        else:
            with pytest.raises(UsageError, match=f"the column x .* has the {expected}"):
                writer.append(*arrays(2), {"x": more})
            writer.abort()
    if isinstance(expected, list):
        assert read_rows(root)["x"].to_pylist() == expected
    else:
        assert all_files(root) == before


def test_the_values_of_all_appends_count_for_the_type(tmp_path):
    root = tmp_path / "index"
    write_arrays(root, *arrays(2), {"x": [1, 2]}, **SHAPE)
    with IndexWriter.open(root) as writer:
        writer.append(*arrays(2), {"x": [1.5, 2]})
        with pytest.raises(UsageError, match="these rows would change it to string"):
            writer.append(*arrays(2), {"x": [1 << 60, 2]})
    assert read_rows(root)["x"].to_pylist() == [1, 2, 1.5, 2]


def test_an_index_of_images_is_refused():
    with pytest.raises(UsageError, match="not built from arrays"):
        IndexWriter.open(golden_index())


def test_a_closed_writer_refuses(tmp_path):
    with IndexWriter.create(tmp_path / "index", **SHAPE) as writer:
        writer.append(*arrays(1))
        writer.finish()
    assert verify_index(tmp_path / "index") == []
    for call in (writer.finish, lambda: writer.append(*arrays(1))):
        with pytest.raises(UsageError, match="is closed"):
            call()


def test_paths_that_are_in_use(tmp_path):
    with IndexWriter.create(tmp_path / "index", **SHAPE) as writer:
        writer.append(*arrays(1))
        with pytest.raises(EdjeError, match="is working on"):
            IndexWriter.create(tmp_path / "index", **SHAPE)
    with pytest.raises(UsageError, match="exists already"):
        IndexWriter.create(tmp_path / "index", **SHAPE)
    (tmp_path / "file").write_text("text")
    with pytest.raises(UsageError, match="not a directory"):
        IndexWriter.create(tmp_path / "file", **SHAPE)
    with pytest.raises(UsageError, match="is not empty"):
        IndexWriter.create(tmp_path, **SHAPE)


def test_a_failed_write_is_tried_again(tmp_path, monkeypatch):
    blocks, embeddings = arrays(12)
    commit = ShardWriter.commit
    failures = [OSError(28, "No space left on device")]

    def fail_once(self, *arguments):
        if failures:
            raise failures.pop()
        return commit(self, *arguments)

    monkeypatch.setattr(ShardWriter, "commit", fail_once)
    with IndexWriter.create(tmp_path / "index", **SHAPE) as writer:
        with pytest.raises(OSError, match="No space"):
            writer.append(blocks, embeddings)
        writer.append(blocks[len(writer) :], embeddings[len(writer) :])
    assert verify_index(tmp_path / "index") == []
    assert same_bits(
        TokenStore.open(tmp_path / "index").fetch(range(12)),
        blocks.astype(ml_dtypes.bfloat16),
    )


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


CREATED = ", block_shape=(4, 16), embed_dim=8, shard_size=5"


def kill_when(exists, script, root):
    """Run `script` with the argument `root`, and kill it as soon as the file exists."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(root)], env=environment()
    )
    try:
        limit = time.monotonic() + 60
        while not exists.exists():
            assert time.monotonic() < limit
            assert process.poll() is None
            time.sleep(0.001)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("shards", [0, 1, 4])
def test_a_killed_writer_leaves_nothing_that_opens_and_the_next_begins_again(
    tmp_path, shards
):
    root = tmp_path / "index"
    waited = Layout(root).receipt(shards - 1) if shards else Layout(root).journal
    kill_when(waited, ENDLESS, root)
    with pytest.raises(IncompleteIndexError, match="or delete it"):
        TokenStore.open(root)
    with pytest.raises(IncompleteIndexError):
        verify_index(root)
    write_arrays(root, *arrays(3), **SHAPE)
    write_arrays(tmp_path / "calm", *arrays(3), **SHAPE)
    assert all_files(root) == all_files(tmp_path / "calm")


@pytest.mark.parametrize("shards", [0, 2])
def test_a_killed_append_keeps_the_index(tmp_path, shards):
    root = tmp_path / "index"
    write_arrays(root, *arrays(7), **SHAPE)
    shutil.copytree(root, tmp_path / "calm")
    script = ENDLESS.replace("create(", "open(").replace(CREATED, "")
    waited = Layout(root).receipt(1 + shards) if shards else Layout(root).journal
    kill_when(waited, script, root)
    # readers see the rows of before
    assert len(TokenStore.open(root)) == 7
    for each in (root, tmp_path / "calm"):
        with IndexWriter.open(each) as writer:
            writer.append(*arrays(3))
        assert verify_index(each) == []
    differing = {
        path
        for path, data in all_files(root).items()
        if all_files(tmp_path / "calm").get(path) != data
    }
    # the time of the change
    assert differing <= {Path("index.json")}


def test_memory_is_bounded_by_a_shard(tmp_path):
    """80 shards of 1 MB each, written by a process whose peak grows by far less."""
    script = """
import resource, sys
import numpy as np
from storage_formats import IndexWriter
from storage_formats.format.manifest import CommittedIndex

blocks = np.ones((256, 32, 64), dtype=np.float32)
writer = IndexWriter.create(
    sys.argv[1], block_shape=(32, 64), embed_dim=8, shard_size=256
)
with writer:
    peaks = []
    for _ in range(80):
        writer.append(blocks, blocks[:, 0, :8])
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(peaks[-1] - peaks[10])
"""
    command = [sys.executable, "-c", script, str(tmp_path / "index")]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, check=True
    )
    # KiB
    assert int(done.stdout) < 20 * 1024


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"encoder": None}, "encoder must be a string"),
        ({"encoder": "\ud800"}, "lone surrogate"),
        ({"block_shape": (4,)}, r"block_shape must be \(m, d\)"),
        ({"block_shape": (4.0, 16)}, "block_shape must be an integer"),
        ({"block_shape": None}, "block_shape must be a sequence"),
        ({"embed_dim": 8.5}, "embed_dim must be an integer"),
        ({"shard_size": True}, "shard_size must be an integer"),
        ({"precisions": "bf16"}, "precisions must be a sequence"),
        ({"precisions": ["fp7"]}, "fp7"),
        ({"precisions": []}, None),
        ({"embed_dim": 0}, None),
        ({"block_shape": (0, 16)}, None),
    ],
)
def test_wrong_arguments_are_refused_at_once(tmp_path, changed, message):
    with pytest.raises(UsageError, match=message):
        IndexWriter.create(tmp_path / "index", **{**SHAPE, **changed})
    assert not (tmp_path / "index").exists()


def test_numbers_of_numpy_are_integers(tmp_path):
    given = {
        "block_shape": np.array([4, 16]),
        "embed_dim": np.int32(8),
        "shard_size": np.int64(5),
    }
    write_arrays(tmp_path / "index", *arrays(7), **given)
    assert verify_index(tmp_path / "index") == []
