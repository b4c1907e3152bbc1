"""`edje-index import-arrays`: files to an index, and an index that the other
commands take.
"""

import decimal
import shutil

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from edje_index.search.late_interaction_search import LateInteractionSearch
from edje_index.search.rows import IndexRows
from pipelines.jobs import import_arrays as importing
from pipelines.progress.events import JobStopped
from storage_formats import TokenStore, read_rows, verify_index
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import CommittedIndex
from tests.conftest import same_bits

ROWS = 2500


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """(tokens, embeddings, rows) on disk."""
    folder = tmp_path_factory.mktemp("arrays")
    rng = np.random.default_rng(0)
    np.save(folder / "tokens.npy", rng.standard_normal((ROWS, 4, 16), dtype=np.float32))
    np.save(folder / "embeddings.npy", rng.standard_normal((ROWS, 8), dtype=np.float32))
    columns = {
        "uri": [f"page {row}" for row in range(ROWS)],
        "width": list(range(ROWS)),
        "note": ["x"] * ROWS,
    }
    pq.write_table(pa.table(columns), folder / "rows.parquet", row_group_size=999)
    return folder / "tokens.npy", folder / "embeddings.npy", folder / "rows.parquet"


def test_round_trip(run, files, tmp_path):
    out = tmp_path / "pages.edje"
    precisions = ["--precision", "fp8", "--precision", "bf16"]
    result = run.json("import-arrays", *files, "--out", out, *precisions)
    assert result.pop("seconds") > 0
    assert result == {
        "rows": ROWS,
        "shards": 3,
        "first_row": 0,
        "block_shape": [4, 16],
        "embed_dim": 8,
        "bytes_per_image": {"fp8": 68, "bf16": 128},
        "ann": "flat",
    }
    assert verify_index(out) == []
    assert same_bits(
        TokenStore.open(out).fetch(range(ROWS)),
        np.load(files[0]).astype(ml_dtypes.bfloat16),
    )
    table = read_rows(out)
    assert table["uri"].to_pylist() == [f"page {row}" for row in range(ROWS)]
    assert table["width"].to_pylist() == list(range(ROWS))
    # the other columns are kept
    rows = IndexRows(CommittedIndex.open(out))
    passing = rows.passing("note = 'x' and width = 7")
    assert np.flatnonzero(passing).tolist() == [7]


def test_other_commands_take_the_index(run, files, tmp_path):
    out = tmp_path / "pages.edje"
    run.ok("import-arrays", *files[:2], "--out", out, "--encoder", "mine-1")
    assert "mine-1" in run.ok("info", out)
    run.ok("verify", out)
    run.ok("quantize", out, "--to", "fp8")
    code, _, message = run("search", out, "a page about boats")
    assert code == 1
    assert "has no text tower: use edje_index.LateInteractionSearch" in message
    search = LateInteractionSearch.open(out)
    query = np.load(files[0])[7, :2]
    # of any length: the stored embeddings have length 1
    for scale in (0.01, 1, 1000):
        embedding = scale * np.load(files[1])[7]
        (hit,) = search.search(query, k=1, pool=1, embedding=embedding)
        assert hit.row_id == 7
        assert hit.embedding_score == pytest.approx(1.0)


@pytest.mark.parametrize("dtype", ["float16", "uint16", "raw"])
def test_token_types(run, files, tmp_path, dtype):
    number_type = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
    blocks = np.asfortranarray(np.load(files[0])[:5]).astype(number_type)
    paths = [tmp_path / "tokens.npy", tmp_path / "embeddings.npy"]
    np.save(paths[0], blocks.view(np.uint16) if dtype == "uint16" else blocks)
    np.save(paths[1], np.load(files[1])[:5])
    run.ok("import-arrays", *paths, "--out", tmp_path / "out")
    stored = TokenStore.open(tmp_path / "out").fetch(range(5))
    assert same_bits(stored, blocks.astype(ml_dtypes.bfloat16))


def refused(run, tmp_path, *files):
    """The message of an import that exits with code 2 and leaves nothing."""
    message = run.refused("import-arrays", *files, "--out", tmp_path / "out")
    lines = [line for line in message.splitlines() if not line.startswith("importing")]
    assert len(lines) == 1
    assert not (tmp_path / "out").exists()
    return message


def save_several(path):
    with path.open("wb") as file:
        np.savez(file, tokens=np.ones(3))


BAD_TOKENS = [
    (lambda tokens: tokens[:-1], f"has {ROWS - 1} rows"),
    (lambda tokens: tokens[0], "3 dimensions"),
    (lambda tokens: tokens[:0], "[0, 4, 16]"),
    (
        lambda tokens: np.where(np.arange(ROWS)[:, None, None] == 9, np.nan, tokens),
        "row 9",
    ),
    (lambda tokens: np.array([{"an": "object"}], dtype=object), "as a .npy file"),
]
BAD_FILES = [
    (lambda path: path.write_bytes(path.read_bytes()[:-1]), "as a .npy file"),
    (lambda path: path.write_bytes(b"no array"), "as a .npy file"),
    (save_several, "save the array with numpy.save"),
]


def test_arrays_that_are_refused(run, files, tmp_path):
    tokens, embeddings, _ = files
    bad = tmp_path / "bad.npy"
    for change, message in BAD_TOKENS:
        values = change(np.load(tokens))
        np.save(bad, values, allow_pickle=True)
        other = embeddings if len(values) else bad
        assert message in refused(run, tmp_path, bad, other)
    for harm, message in BAD_FILES:
        shutil.copy(tokens, bad)
        harm(bad)
        assert message in refused(run, tmp_path, bad, embeddings)


def test_rows_that_are_refused(run, files, tmp_path):
    bad = tmp_path / "rows.parquet"
    texts = ["a"] * ROWS
    for table, message in (
        (pa.table({"url": texts}), "no column 'uri'"),
        (pa.table({"uri": ["a"]}), "has 1 rows"),
        (pa.table([texts, texts], names=["uri"] * 2), "several columns uri"),
    ):
        pq.write_table(table, bad)
        assert message in refused(run, tmp_path, *files[:2], bad)
    damaged = bytearray(files[2].read_bytes())
    page = pq.read_metadata(files[2]).row_group(1).column(0).data_page_offset
    damaged[page : page + 100] = bytes(100)
    bad.write_bytes(damaged)
    message = refused(run, tmp_path, *files[:2], bad)
    assert f"cannot read {bad} as a Parquet file" in message
    (tmp_path / "rows.csv").write_text("uri,note\na,b\n")
    for name, message in (("rows.csv", "must be a Parquet"), ("none", "not exist")):
        assert message in refused(run, tmp_path, *files[:2], tmp_path / name)


def test_other_columns_are_kept_as_those_of_a_source(run, files, tmp_path):
    columns = {
        "price": pa.array([decimal.Decimal("1.50")]),
        "data": pa.array([b"x"]),
        # names that the rows table uses or reserves
        "status": pa.array(["draft"]),
        "source_status": pa.array(["final"]),
        "edje_note": pa.array(["x"]),
        "uri_raw": pa.array([b"x"]),
    }
    first = pa.array([0] * ROWS)
    table = pa.table({name: each.take(first) for name, each in columns.items()})
    scores = [1.5] * (ROWS - 1) + [float("nan")]
    table = table.append_column("score", pa.array(scores))
    table = table.append_column("uri", pa.array(map(str, range(ROWS))))
    pq.write_table(table, tmp_path / "rows.parquet")
    out = tmp_path / "out"
    rows = tmp_path / "rows.parquet"
    code, _, message = run("import-arrays", *files[:2], rows, "--out", out)
    assert code == 0
    assert "(binary column) 1, (number not finite) 1" in message
    first, last = read_rows(out, [0, ROWS - 1]).to_pylist()
    expected = {
        "price": "1.50",
        "score": 1.5,
        "status": "indexed",
        "uri_raw": b"x",
        "source_status": "draft",
        "source_source_status": "final",
        "source_edje_note": "x",
    }
    assert first.items() >= expected.items()
    assert {"data", "edje_note"}.isdisjoint(first)
    assert last["score"] is None


def test_a_stopped_import_leaves_nothing(files, tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setattr(importing, "_CHUNK_ROWS", 32)
    monkeypatch.setattr(importing, "SHARD_SIZE", 32)
    with pytest.raises(JobStopped, match="is as before"):
        importing.import_arrays(
            *files[:2],
            out,
            should_stop=lambda: Layout(out).receipt(2).exists(),
        )
    assert not out.exists()


def test_rows_are_appended_with_their_nearest_neighbours(run, files, tmp_path):
    out = tmp_path / "pages.edje"
    run.ok("import-arrays", *files[:2], "--out", out, "--encoder", "mine-1")
    words = ["import-arrays", *files, "--out", out, "--append"]
    first = run.json(*words)["first_row"]
    assert first == 3 * 1024
    assert verify_index(out) == []
    search = LateInteractionSearch.open(out)
    tokens, embeddings = map(np.load, files[:2])
    for row, where in ((7, None), (first + 7, "note = 'x'")):
        hits = search.search(tokens[7], k=1, embedding=embeddings[7], where=where)
        assert hits[0].row_id == row
    for options, message in (
        (["--precision", "fp8"], "stores bf16"),
        (["--encoder", "mine-2"], "'mine-1', not 'mine-2'"),
    ):
        assert message in run.refused(*words, *options)
    assert run.refused(*words[:-1]).endswith(" with --append\n")
    assert run.json("info", out)["unused_ids"] == first - ROWS
    run.refused(*words[:-2], tmp_path / "none", "--append")
    run.ok("rollback", out, "0")
    assert len(read_rows(out)) == ROWS
