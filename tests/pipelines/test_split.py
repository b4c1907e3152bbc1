"""Splits: the rows of every part, merges of the parts, resumed splits, and what is refused."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edje_index.indexing.faiss_index import AnnIndex, build_ann
from pipelines import (
    JobStopped,
    append_index,
    build_index,
    compact_index,
    delete_rows,
    merge_indexes,
    split_index,
    update_index,
)
from storage_formats import IndexSpec, Manifest, RowIdError, TokenStore, UsageError, read_rows, verify_index
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.tombstones import live_rows
from storage_formats.reading.embeddings import read_embeddings
from tests.command_line import environment
from tests.conftest import REPO, same_bits, write_random_index
from tests.pipelines.test_merge import rewrite, stopping_after
from tests.storage_formats.test_source_columns import ROWS, write_index

SPEC = IndexSpec(rows=37, shard_size=8, block_shape=(2, 8), embed_dim=4, precisions=("bf16", "fp8"))


@pytest.fixture
def index(tmp_path):
    """An index of five shards in which row 5 failed, and rows 6 and 30 are duplicates of row 0."""
    root = tmp_path / "whole"
    return root, write_random_index(root, SPEC, failed=frozenset({5}), duplicates=frozenset({6, 30}))


def files_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def check_part(part: Path, whole: Path, shards: range, lost: list[int]) -> None:
    """The part has the rows of the shards `shards`, with their ids. Rows in `lost` are failed duplicates."""
    assert verify_index(part) == []
    origin = CommittedIndex.open(whole)
    spec = origin.manifest.spec
    row_ids = [row for row in live_rows(origin).tolist() if row // spec.shard_size in shards]
    assert live_rows(CommittedIndex.open(part)).tolist() == row_ids
    for precision in spec.precisions:
        with TokenStore.open(part, precision) as store, TokenStore.open(whole, precision) as other:
            assert (store.fetch_records(row_ids) == other.fetch_records(row_ids)).all()
    embeddings = read_embeddings(CommittedIndex.open(part), row_ids)
    np.testing.assert_array_equal(embeddings, read_embeddings(origin, row_ids))
    for row, expected in zip(read_rows(part).to_pylist(), read_rows(whole, row_ids).to_pylist(), strict=True):
        if row["row_id"] in lost:
            assert (row.pop("status"), row.pop("reason")) == ("failed", "original-in-another-part")
            assert (row.pop("detail") is not None, row.pop("duplicate_of")) == (True, None)
        assert row.items() <= expected.items()


def test_the_parts_hold_all_rows_with_their_ids(index, tmp_path):
    whole, blocks = index
    delete_rows(whole, rows=[2, 17, *range(24, 29)])
    before = files_of(whole)
    outs = [tmp_path / "a", tmp_path / "b"]
    result = split_index(whole, outs)
    assert files_of(whole) == before
    # Of 30 rows that are left, 7 are in shard 0, 8 in shard 1, 7 in shard 2, 3 in shard 3 and 5 in shard 4.
    assert [(part.index, part.first_row, part.last_row) for part in result.parts] == [
        (str(outs[0]), 0, 15),
        (str(outs[1]), 16, 36),
    ]
    assert [(part.rows, part.shards, part.lost_duplicates) for part in result.parts] == [(15, 2, 0), (15, 3, 1)]
    check_part(outs[0], whole, range(2), [])
    check_part(outs[1], whole, range(2, 5), [30])
    assert Manifest.load(outs[1]).counts.failed == {"original-in-another-part": 1}
    with TokenStore.open(outs[1]) as store:
        assert same_bits(store.fetch([16, 36]), blocks[[16, 36]])
        with pytest.raises(RowIdError, match=r"row id 3 is below 16.*another part"):
            store.fetch([20, 3])


def test_files_are_copied_as_they_are_and_never_shared(index, tmp_path):
    whole, _ = index
    split_index(whole, [tmp_path / "a", tmp_path / "b"])
    assert all(path.stat().st_nlink == 1 for path in tmp_path.rglob("*") if path.is_file())
    originals = files_of(whole)
    for part in ("a", "b"):
        copied = {name: data for name, data in files_of(tmp_path / part).items() if "manifest" not in name}
        differing = {name for name, data in copied.items() if originals[name] != data}
        assert {name for name in differing if not name.endswith(".json")} == (
            {"rows/00000003.parquet"} if part == "b" else set()
        )


def test_new_rows_of_a_part_get_ids_above_the_whole_index(index, tmp_path):
    whole, _ = index
    delete_rows(whole, rows=[36])
    split_index(whole, [tmp_path / "a", tmp_path / "b"])
    assert Manifest.load(tmp_path / "a").snapshot.next_shard == SPEC.shards
    delete_rows(tmp_path / "a", rows=[1])
    compact_index(tmp_path / "a")
    assert live_rows(CommittedIndex.open(tmp_path / "a"))[0] == SPEC.shards * SPEC.shard_size
    assert verify_index(tmp_path / "a") == []


def test_parts_of_indexes_that_were_compacted_and_merged(index, tmp_path):
    whole, _ = index
    delete_rows(whole, rows=[0, 1, 2, 3, 4, 7, *range(16, 24)])
    compact_index(whole)
    merge_indexes([whole, shutil.copytree(whole, tmp_path / "twin")], tmp_path / "both")
    for root in (whole, tmp_path / "both"):
        shards = list(Manifest.load(root).spec.shard_numbers())
        parts = split_index(root, [tmp_path / f"{root.name}-{number}" for number in range(2)]).parts
        assert (parts[0].first_row, parts[1].last_row) == (shards[0] * 8, Manifest.load(root).spec.rows - 1)
        cut = parts[1].first_row // 8
        check_part(Path(parts[0].index), root, range(cut), [])
        check_part(Path(parts[1].index), root, range(cut, shards[-1] + 1), [])


def test_a_part_translates_no_ids_of_rows_that_it_lacks(index, tmp_path):
    whole, _ = index
    delete_rows(whole, rows=[0])
    compact_index(whole)
    first = SPEC.shards * SPEC.shard_size
    parts = split_index(whole, [tmp_path / "a", tmp_path / "b"]).parts
    cut = parts[1].first_row
    with TokenStore.open(whole) as store:
        assert store.translate([0, 1, first]).tolist() == [-1, first, first]
    with TokenStore.open(parts[0].index) as store:
        assert store.translate([0, 1, first, cut - 1]).tolist() == [-1, -1, first, cut - 1]
    with TokenStore.open(parts[1].index) as store:
        assert store.translate([1, first, cut - 1, cut]).tolist() == [-1, -1, -1, cut]


def write_searchable(root: Path, spec: IndexSpec, *, duplicates: frozenset[int], failed: frozenset[int]) -> None:
    write_random_index(root, spec, failed=failed, duplicates=duplicates)
    rewrite(root, ann=build_ann(root, spec))


def split_and_merge(folder: Path, spec: IndexSpec, *, deleted: frozenset[int], parts: int, **holes: Any) -> None:
    """Split an index of random rows, merge the parts, and compare the merged index with the whole one."""
    write_searchable(folder / "whole", spec, **holes)
    if deleted:
        delete_rows(folder / "whole", rows=sorted(deleted))
    outs = [folder / f"part-{number}" for number in range(parts)]
    result = split_index(folder / "whole", outs)
    merge_indexes(outs, folder / "merged")
    check_equal(folder / "merged", folder / "whole", lost=result.parts[1].first_row)


def test_a_merge_of_the_parts_equals_the_index(tmp_path):
    holes = {"failed": frozenset({4}), "duplicates": frozenset({5, 9})}
    split_and_merge(tmp_path, IndexSpec(14, 4, (2, 4), 3), deleted=frozenset({2, 11}), parts=3, **holes)


@pytest.mark.slow
@settings(max_examples=40)
@given(data=st.data())
def test_a_merge_of_any_parts_of_any_index_equals_the_index(data):
    shard_size = data.draw(st.integers(1, 8))
    rows = data.draw(st.integers(shard_size + 1, 24))
    spec = IndexSpec(rows, shard_size, (2, 4), 3)
    failed, duplicates, deleted = (data.draw(st.frozensets(st.integers(1, rows - 1), max_size=6)) for _ in range(3))
    holes = {"failed": failed, "duplicates": duplicates - failed}
    with tempfile.TemporaryDirectory() as folder:
        split_and_merge(Path(folder), spec, deleted=deleted, parts=data.draw(st.integers(2, spec.shards)), **holes)


def check_equal(merged: Path, whole: Path, lost: int) -> None:
    """The indexes hold equal rows, blocks and vectors. Only duplicates from row `lost` on may have become failed."""
    assert verify_index(merged) == []
    expected, rows = (read_rows(root).to_pylist() for root in (whole, merged))
    kept = [row for row in expected if row["status"] != "duplicate" or row["row_id"] < lost]
    assert [row for row in rows if row["reason"] != "original-in-another-part"] == kept
    row_ids = [row["row_id"] for row in kept]
    with TokenStore.open(merged) as store, TokenStore.open(whole) as other:
        assert same_bits(store.fetch(row_ids), other.fetch(row_ids))
    queries = np.random.default_rng(3).standard_normal((4, 3), dtype=np.float32)
    for query in queries:
        (ids, scores), (expected_ids, expected_scores) = (
            AnnIndex.open(root).nearest(query, 5) for root in (merged, whole)
        )
        assert ids.tolist() == expected_ids.tolist()
        np.testing.assert_allclose(scores, expected_scores, rtol=1e-6)


def test_a_part_in_which_all_rows_are_deleted(tmp_path):
    spec = IndexSpec(16, 8, (2, 4), 3)
    write_searchable(tmp_path / "whole", spec, duplicates=frozenset(), failed=frozenset())
    delete_rows(tmp_path / "whole", rows=list(range(8, 16)))
    result = split_index(tmp_path / "whole", [tmp_path / "a", tmp_path / "b"])
    assert [part.rows for part in result.parts] == [8, 0]
    assert verify_index(tmp_path / "b") == []
    assert len(AnnIndex.open(tmp_path / "b").nearest(np.ones(3, np.float32), 5)[0]) == 0


def test_source_columns_are_counted_per_part(tmp_path):
    write_index(tmp_path / "whole", ROWS)
    split_index(tmp_path / "whole", [tmp_path / "a", tmp_path / "b"])
    for part in ("a", "b"):
        assert [problem for problem in verify_index(tmp_path / part) if problem.code == "columns"] == []
    first = {column.name: column.values for column in Manifest.load(tmp_path / "a").columns}
    second = {column.name: column.values for column in Manifest.load(tmp_path / "b").columns}
    whole = {column.name: column.values for column in Manifest.load(tmp_path / "whole").columns}
    assert {name: first[name] + second[name] for name in whole} == whole


def test_refusals(index, tmp_path):
    whole, _ = index
    a, b = tmp_path / "a", tmp_path / "b"
    (tmp_path / "here").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="at least two"):
        split_index(whole, [a])
    with pytest.raises(UsageError, match="whole has 5 shards, so it cannot be split into 6 parts; give at most 5"):
        split_index(whole, [tmp_path / str(number) for number in range(6)])
    with pytest.raises(UsageError, match="here/b is given twice"):
        split_index(whole, [a, b, tmp_path / "here" / "b"])
    with pytest.raises(UsageError, match=r"there is no index at .*nothing"):
        split_index(tmp_path / "nothing", [a, b])
    with pytest.raises(UsageError, match="whole exists already"):
        split_index(whole, [a, whole])
    with pytest.raises(UsageError, match=r"whole/part is inside the index .*whole; choose another output directory"):
        split_index(whole, [a, whole / "part"])
    b.write_text("a file")
    with pytest.raises(UsageError, match="b exists already"):
        split_index(whole, [a, b])
    assert not a.exists()
    assert not list(tmp_path.glob(".*"))


def test_a_stopped_split_resumes_and_a_finished_one_has_nothing_to_do(index, tmp_path):
    whole, _ = index
    outs = [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(JobStopped, match=r"of (21|16) rows are kept"):
        split_index(whole, outs, should_stop=stopping_after(4))
    assert not (tmp_path / "b").exists()
    inodes = {path: path.stat().st_ino for path in tmp_path.rglob("rows/*.parquet")}
    result = split_index(whole, outs)
    kept = {path.stat().st_ino for out in outs for path in out.rglob("rows/*.parquet")}
    assert {number for path, number in inodes.items() if whole not in path.parents} <= kept
    assert not list(tmp_path.glob(".*"))
    before = files_of(tmp_path / "a") | files_of(tmp_path / "b")
    assert split_index(whole, outs).parts == result.parts
    assert files_of(tmp_path / "a") | files_of(tmp_path / "b") == before
    delete_rows(tmp_path / "b", rows=[36])
    with pytest.raises(UsageError, match="b exists already"):
        split_index(whole, outs)
    shutil.rmtree(tmp_path / "b")
    delete_rows(whole, rows=[1])
    with pytest.raises(UsageError, match="a exists already"):
        split_index(whole, outs)


@pytest.mark.parametrize(
    "file", ["tokens/fp8/c.4.0", "checksums/bf16/00000004.crc32c", "embeddings/c.4.0", "rows/00000004.parquet"]
)
def test_damage_is_never_copied(index, tmp_path, file):
    whole, _ = index
    path = whole / file
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    outs = [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(JobStopped, match=path.name):
        split_index(whole, outs)
    assert not outs[1].exists()
    path.write_bytes(data)
    split_index(whole, outs)
    check_part(outs[1], whole, range(2, 5), [30])


def test_a_damaged_shard_table_and_a_full_disk_are_reported(index, tmp_path, run):
    whole, _ = index
    (table,) = (whole / "manifest").glob("shards-*")
    data = table.read_bytes()
    table.write_bytes(data[:-1])
    code, _, error = run("split", whole, tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert f"the shard table {table} does not match its checksum" in error
    table.write_bytes(data)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        code, _, error = run("split", whole, tmp_path / "a", tmp_path / "b")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert code != 0
    assert "cannot write" in error or "File too large" in error
    assert run("split", whole, tmp_path / "a", tmp_path / "b")[0] == 0


def test_the_command_prints_row_ids(index, tmp_path, run):
    whole, _ = index
    code, out, error = run("split", whole, tmp_path / "a", tmp_path / "b", "--json")
    assert code == 0, error
    assert [(part["first_row"], part["last_row"]) for part in json.loads(out)["parts"]] == [(0, 15), (16, 36)]
    assert "part 2 of 2" in error
    code, out, _ = run("split", whole, tmp_path / "c", tmp_path / "d", "--quiet")
    assert out.splitlines()[1] == f"{tmp_path / 'd'}: 21 rows in 3 shards, row ids 16 to 36; 1 duplicate failed"
    assert "split" in run("history", tmp_path / "a")[1]
    for arguments in (["split", "s3://b/i", "a", "b"], ["split", whole, "a", "s3://b/i"]):
        code, _, error = run(*arguments)
        assert (code, "s3://b/i is a URL, but a path on this machine is needed" in error) == (2, True)
    code, _, error = run("merge", whole, tmp_path / "a", "--out", "gs://b/i")
    assert (code, "gs://b/i is a URL" in error) == (2, True)


def test_an_update_of_a_part_needs_its_sources(tmp_path, tiny_bundle):
    from tests.integration.test_lifecycle import write_photos

    photos = write_photos(tmp_path / "photos", list(range(6)))
    options = {"engine": "inline", "threads": 1}
    build_index(photos, tmp_path / "whole", tiny_bundle, shard_size=2, **options)
    split_index(tmp_path / "whole", [tmp_path / "a", tmp_path / "b"])
    with pytest.raises(UsageError, match="does not record the sources of all its rows; name all sources"):
        update_index(tmp_path / "a", engine="inline", dry_run=True)
    with pytest.raises(UsageError, match="a was built: they had 2 inputs and now have 6"):
        build_index(photos, tmp_path / "a", tiny_bundle, shard_size=2, **options)
    more = write_photos(tmp_path / "more", [7])
    assert append_index(tmp_path / "a", more, engine="inline").first_row == 6
    merge_indexes([tmp_path / "a", tmp_path / "b"], tmp_path / "merged")
    assert verify_index(tmp_path / "merged") == []


@pytest.mark.slow
def test_a_killed_split_resumes(tmp_path):
    """Processes killed at random moments leave the index, the finished parts and the finished shards as they were."""
    whole = tmp_path / "whole"
    spec = IndexSpec(4000, 16, (2, 8), 3)
    write_searchable(whole, spec, duplicates=frozenset({3999}), failed=frozenset({9}))
    before, outs = files_of(whole), [tmp_path / name for name in ("a", "b", "c")]
    command = [sys.executable, "-m", "pipelines.cli", "split", whole, *outs, "--quiet"]
    rng, killed = np.random.default_rng(5), 0
    for _ in range(40):
        process = subprocess.Popen(command, cwd=REPO, env=environment(), stderr=subprocess.DEVNULL)
        time.sleep(rng.uniform(0.3, 1.5))
        process.kill()
        if process.wait() == 0:
            break
        killed += 1
        assert files_of(whole) == before
        assert all(verify_index(out) == [] for out in outs if out.exists())
    else:
        subprocess.run(command, cwd=REPO, env=environment(), check=True)
    assert killed > 0
    merge_indexes(outs, tmp_path / "merged")
    check_equal(tmp_path / "merged", whole, lost=3999)
