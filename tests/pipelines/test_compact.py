"""Compactions and erasures: the rows that are left, their ids, damage, and what no file
holds afterwards.
"""

import re
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipelines import (
    JobStopped,
    compact_index,
    delete_rows,
    quantize_index,
    repair_index,
)
from pipelines.jobs.copy import compact_path
from pipelines.jobs.quantize import add_ann
from pipelines.jobs.snapshots import history, set_columns
from storage_formats import (
    CorruptIndexError,
    DeletedRowError,
    Manifest,
    TokenStore,
    UsageError,
    change,
    read_rows,
)
from storage_formats.change import MOST_SNAPSHOTS
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.places import Directory
from storage_formats.reading.embeddings import read_embeddings
from tests.conftest import (
    all_files,
    problems_and_counts,
    rows_path,
    same_bits,
    write_arrays,
    write_random_index,
)
from tests.pipelines.conftest import SMALL
from tests.storage_formats.reading_cases import flip

SPEC = replace(SMALL, rows=37)
# duplicates of row 0
FAILED = frozenset({5, 20})
DUPLICATES = frozenset({9, 30})


@pytest.fixture
def index(tmp_path):
    root = tmp_path / "index"
    return root, write_random_index(root, SPEC, failed=FAILED, duplicates=DUPLICATES)


def test_the_other_rows_are_copied(index, tmp_path):
    root, blocks = index
    deleted = [1, 8, 20, 36]
    delete_rows(root, rows=deleted)
    before = all_files(root)
    dense = tmp_path / "dense"
    result = compact_index(root, dense)
    assert (result.rows, result.removed, result.shards) == (33, 4, 5)
    assert all_files(root) == before
    kept = [row for row in range(SPEC.rows) if row not in deleted]
    assert problems_and_counts(dense) == []
    with TokenStore.open(dense) as store:
        assert store.row_ids().tolist() == list(range(33))
        assert same_bits(store.fetch(range(33)), blocks[kept])
    with TokenStore.open(dense, "fp8") as store, TokenStore.open(root, "fp8") as old:
        assert (store.fetch_records(range(33)) == old.fetch_records(kept)).all()
    np.testing.assert_array_equal(
        read_embeddings(CommittedIndex.open(dense), range(33)),
        read_embeddings(CommittedIndex.open(root), kept),
    )
    columns = read_rows(dense)
    assert columns["size"].to_pylist() == kept
    assert columns["duplicate_of"].null_count < 33
    manifest = Manifest.load(dense)
    assert manifest.counts.failed == {"truncated": 1}
    assert manifest.snapshot.change["kind"] == "compact"


def test_without_a_name_the_new_index_lies_beside_the_old_one(
    index, tmp_path, run, monkeypatch
):
    root, _ = index
    delete_rows(root, rows=[1])
    dense = tmp_path / "index-compact.edje"
    monkeypatch.chdir(root)
    assert run.json("compact", ".")["out"] == str(dense)
    assert Manifest.load(dense).spec.rows == SPEC.rows - 1
    err = run.refused("compact", root)
    assert f"--out: {dense} exists already; choose another directory" in err
    with pytest.raises(UsageError, match="give the directory of the new index, too"):
        compact_index("s3://bucket/photos.edje")
    monkeypatch.chdir(tmp_path)
    assert compact_path("v2.edje/") == tmp_path / "v2-compact.edje"


@pytest.mark.parametrize("job", ["compact", "erase"])
@pytest.mark.parametrize("file", ["tokens/bf16/c.1.0.0", "rows", "embeddings/c.1.0"])
def test_damage_is_never_copied(index, tmp_path, file, job):
    root, _ = index
    delete_rows(root, rows=[8])
    path = rows_path(root) if file == "rows" else root / file
    manifest = (root / "index.json").read_bytes()

    def run():
        if job == "compact":
            compact_index(root, tmp_path / "dense")
        else:
            delete_rows(root, erase=True)

    flip(path, 100)
    damaged = "row 11 is damaged" if "bf16" in file else path.name
    with pytest.raises((JobStopped, CorruptIndexError), match=damaged):
        run()
    assert (root / "index.json").read_bytes() == manifest
    flip(path, 100)
    run()
    assert problems_and_counts(root if job == "erase" else tmp_path / "dense") == []


def test_no_search_index_is_built_of_damaged_embeddings(index):
    root, _ = index
    flip(root / "embeddings/c.1.0", 100)
    with pytest.raises(CorruptIndexError, match=r"embeddings/c\.1\.0 is not the file"):
        add_ann(root)
    flip(root / "embeddings/c.1.0", 100)
    add_ann(root)


def test_what_cannot_be_compacted_is_refused(index, tmp_path, run):
    root, _ = index
    delete_rows(root, rows=range(SPEC.rows))
    with pytest.raises(UsageError, match=r"all rows of .* are deleted"):
        compact_index(root, tmp_path / "dense")


def test_no_file_holds_what_was_erased(index):
    root, blocks = index
    erased = [0, 3, 9, 17, 30]
    add_ann(root)
    quantize_index(root, ["sign1"])
    set_columns(root, [0, 3, 4], {"title": ["Jane Doe", "Joe Roe", "Sea"]})
    needles = [f"/photos/{row}.jpg".encode() for row in erased]
    needles += [f"{row:064x}".encode() for row in erased]
    needles += [b"Jane Doe", b"Joe Roe"]
    # the others are duplicates of row 0
    own = [0, 3, 17]
    needles += map(bytes, read_embeddings(CommittedIndex.open(root), own))
    for name in ("bf16", "fp8", "sign1"):
        with TokenStore.open(root, name) as store:
            needles += map(bytes, store.fetch_records(own))
    assert all(holders(root, needle) for needle in needles)
    # Rows that were deleted before, and duplicates of deleted rows, are erased, too.
    delete_rows(root, rows=[0])
    result = delete_rows(root, rows=[3, 17], erase=True)
    assert (result.deleted, result.erased) == ((3, 9, 17, 30), 5)
    assert [path for needle in needles for path in holders(root, needle)] == []
    assert [entry.kind for entry in history(root)] == ["delete"]
    # The other rows keep their ids, and later changes work.
    kept = [row for row in range(SPEC.rows) if row not in erased]
    for _ in range(2):
        assert problems_and_counts(root) == []
        with TokenStore.open(root) as store:
            assert store.row_ids().tolist() == kept
            assert same_bits(store.fetch(kept), blocks[kept])
            with pytest.raises(DeletedRowError):
                store.fetch([3])
        assert read_rows(root, kept, ["size"])["size"].to_pylist() == kept
        assert repair_index(root).repaired == ()
        quantize_index(root, ["int8"])
    assert Manifest.load(root).counts.failed == {"erased": 5, "truncated": 2}
    number = history(root)[-1].snapshot
    assert delete_rows(root, rows=[3], erase=True).snapshot == number


def holders(root, needle):
    """The files that hold the bytes `needle`. Columns of Parquet files are compared as
    text, because they are compressed.
    """
    found = []
    for path in root.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            if path.suffix == ".parquet":
                data += str(pq.read_table(path).to_pylist()).encode()
            if needle in data:
                found.append(str(path.relative_to(root)))
    return found


def test_a_reader_ends_an_erasure_that_was_killed_after_its_commit(index, monkeypatch):
    root, blocks = index

    def killed(layout):
        if layout.erased.exists():
            raise OSError(5, "killed")

    with monkeypatch.context() as patch:
        patch.setattr(Directory, "move_erased", killed)
        with pytest.raises(change.EdjeError, match="the change is committed"):
            delete_rows(root, rows=[3], erase=True)
    with TokenStore.open(root) as store:
        assert same_bits(store.fetch([1, 2, 4]), blocks[[1, 2, 4]])
    assert problems_and_counts(root) == []
    assert not Layout(root).erased.exists()


@pytest.fixture
def eighty_rows(tmp_path):
    ones = np.ones((80, 2, 8), np.float32)
    write_arrays(tmp_path / "index", ones, ones[:, 0], shard_size=8)
    return tmp_path / "index"


def test_info_says_when_to_compact(eighty_rows, tmp_path, run):
    value = run.json("info", eighty_rows)
    assert value["compact"] == []
    assert value["history"] == {"snapshots": 1, "most": MOST_SNAPSHOTS}
    delete_rows(eighty_rows, rows=range(0, 40, 2))
    advice = "20 of 80 rows are deleted"
    assert run.json("info", eighty_rows)["compact"] == [advice]
    text = run.ok("info", eighty_rows)
    assert re.search(f"run 'compact' +{advice}", text)
    assert re.search(f"history +snapshots 2, most {MOST_SNAPSHOTS}", text)
    compact_index(eighty_rows, tmp_path / "dense")
    assert run.json("info", tmp_path / "dense")["compact"] == []
