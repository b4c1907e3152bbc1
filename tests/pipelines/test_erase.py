"""An erasure leaves no bytes of the rows behind, and can be stopped at any moment."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from edje_index.indexing.faiss_index import AnnIndex
from pipelines import JobStopped, append_index, compact_index, delete_rows
from pipelines.jobs.append import run_append
from pipelines.jobs.build import run_build
from pipelines.jobs.erase import run_erase
from pipelines.jobs.lock import locked_index
from pipelines.jobs.snapshots import DeleteResult, history, run_delete, run_rollback
from pipelines.planning.config import AppendConfig
from storage_formats import (
    CorruptIndexError,
    DeletedRowError,
    EdjeError,
    Manifest,
    TokenStore,
    UsageError,
    codec,
    read_rows,
    verify_index,
)
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.manifest import CommittedIndex
from storage_formats.reading.embeddings import read_embeddings
from tests.conftest import same_bits, write_random_index
from tests.pipelines.conftest import write_photo

PRECISIONS = ("bf16", "fp8", "sign1")


def data_of(root: Path, row: int) -> list[bytes]:
    """The bytes that the index stores for a row, apart from the compressed rows table."""
    manifest = Manifest.load(root)
    parts = [read_embeddings(CommittedIndex.open(root), [row]).tobytes()]
    shard, position = divmod(row, manifest.spec.shard_size)
    for name in manifest.spec.precisions:
        entry = codec(name, manifest.spec.block_shape)
        data = Layout(root).token_shard(name, shard, len(entry.record_shape)).read_bytes()
        parts.append(data[position * entry.record_bytes : (position + 1) * entry.record_bytes])
    return parts


def texts_of(root: Path) -> set[str]:
    """All texts in Parquet files of an index."""
    tables = [pq.read_table(path) for path in sorted(root.rglob("*.parquet"))]
    return {str(value) for table in tables for column in table.columns for value in column.to_pylist()}


def count_in_files(root: Path, data: bytes) -> int:
    return sum(path.read_bytes().count(data) for path in sorted(root.rglob("*")) if path.is_file())


@pytest.fixture
def built(config: Callable[..., Any]) -> Path:
    """An index of ten photos in three shards and three precisions; row 3 duplicates row 1, and row 7 failed."""
    run_build(config(dedupe=True, precisions=PRECISIONS), lambda event: None)
    return Path(config().out)


def test_no_byte_of_an_erased_row_is_left(built):
    kept = [row for row in range(10) if row not in (1, 3, 4)]
    lines = {row["row_id"]: row for row in read_rows(built).to_pylist()}
    parts = [part for row in (1, 4) for part in data_of(built, row)]
    assert [count_in_files(built, part) for part in parts] == [2, 1, 1, 1] * 2  # embeddings are in FAISS, too
    blocks = TokenStore.open(built).fetch(kept)
    result = run_erase(built, [4], "*/01.jpg")
    assert (result.deleted, result.erased, result.left, result.snapshot) == ((1, 3, 4), 3, 7, 1)
    assert verify_index(built) == []
    assert [count_in_files(built, part) for part in parts] == [0] * 8
    personal = {lines[row][name] for row in (1, 3, 4) for name in ("uri", "content_hash")}
    assert not texts_of(built) & personal
    assert sum(count_in_files(built, text.encode()) for text in personal) == 0
    assert Manifest.load(built).counts.failed == {"erased": 3, "not-an-image": 1}
    with TokenStore.open(built) as store:
        assert same_bits(store.fetch(kept), blocks)
        with pytest.raises(DeletedRowError):
            store.fetch([4])
    assert [row["uri"] for row in read_rows(built).to_pylist()] == [lines[row]["uri"] for row in kept]
    vector = read_embeddings(CommittedIndex.open(built), [5])[0]
    assert set(AnnIndex.open(built).nearest(vector, 10)[0].tolist()) == {0, 2, 5, 6, 8, 9}


def test_no_snapshot_brings_erased_rows_back(built):
    run_delete(built, [0], None)
    run_erase(built, [0], None)
    assert [(entry.snapshot, entry.deleted) for entry in history(built)] == [(1, 1)]
    with pytest.raises(UsageError, match="has no snapshot 0"):
        run_rollback(built, 0)
    run_delete(built, [2], None)
    assert run_erase(built, [0], None).erased == 0  # nothing is left to erase, so the history stays
    run_rollback(built, 1)
    assert 0 not in read_rows(built)["row_id"].to_pylist()
    assert verify_index(built) == []


def test_a_filter_selects_deleted_rows_too(built):
    parts = data_of(built, 4)
    run_delete(built, [4], None)
    name = read_rows(built, [5])["uri"][0].as_py().replace("05", "04")
    result = run_erase(built, [], None, where=f"uri = '{name}' or reason = 'erased'")
    assert (result.deleted, result.already_deleted, result.erased) == ((), 1, 1)
    assert [count_in_files(built, part) for part in parts] == [0] * 4
    assert run_erase(built, [], None, where="uri is not null and reason = 'erased'").erased == 0
    assert verify_index(built) == []


@pytest.mark.parametrize("change", ["compaction", "rollback"])
def test_rows_of_earlier_snapshots_are_erased_with_these(built, change, photos):
    if change == "compaction":
        row = 4
        parts, name = data_of(built, row), read_rows(built, [row])["uri"][0].as_py()
        run_delete(built, [row], None)
        compact_index(built)
    else:
        write_photo(photos / "jane.jpg", 77)
        row = append_index(built, [photos / "jane.jpg"], engine="inline").first_row
        parts, name = data_of(built, row), "*/jane.jpg"
        run_rollback(built, 0)
    assert run_erase(built, [], name, dry_run=True).erased == 1
    assert len(history(built)) == 3
    assert run_erase(built, [], "*/nobody.jpg").erased == 0
    assert len(history(built)) == 3
    assert run_erase(built, [], name).erased == 1
    assert len(history(built)) == 1
    assert [count_in_files(built, part) for part in parts] == [0] * 4
    assert verify_index(built) == []


def test_the_removal_of_earlier_snapshots_can_be_finished(built, monkeypatch):
    parts, name = data_of(built, 4), read_rows(built, [4])["uri"][0].as_py()
    run_delete(built, [4], None)
    compact_index(built)
    with monkeypatch.context() as patch:
        patch.setattr("storage_formats.writing.snapshots.remove_unnamed_files", fail)
        with pytest.raises(OSError, match="input/output error"):
            run_erase(built, [], name)
    assert len(history(built)) == 1
    assert verify_index(built)[0].code == "erasure"
    run_erase(built, [], name)
    assert [count_in_files(built, part) for part in parts] == [0] * 4
    assert verify_index(built) == []


def test_rows_of_earlier_snapshots_are_found_by_uri_where_the_filter_does_not_apply(built, tmp_path):
    parts, name = data_of(built, 4), read_rows(built, [4])["uri"][0].as_py()
    run_delete(built, [4], None)
    compact_index(built)
    write_photo(tmp_path / "more" / "new.jpg", 88)
    (tmp_path / "more.csv").write_text(f"image,place\n{tmp_path}/more/new.jpg,Bern\n")
    append_index(built, [tmp_path / "more.csv"], engine="inline")
    assert run_erase(built, [], name, where="place = 'Rome'").erased == 1
    assert [count_in_files(built, part) for part in parts] == [0] * 4


@pytest.mark.parametrize("selection", [("*/0[24].jpg", [12]), ("*/nobody.jpg", []), ("*/04.jpg", [])])
def test_a_dry_run_counts_what_an_erasure_does(built, selection):
    run_delete(built, [4], None)
    compact_index(built)  # only the earlier snapshot has row 4; row 2 is now row 14
    pattern, rows = selection
    tried, done = (run_erase(built, rows, pattern, dry_run=dry_run) for dry_run in (True, False))
    assert counts_of(tried) == counts_of(done)


def test_an_unfinished_erasure_counts(built, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("storage_formats.writing.snapshots.commit_snapshot", fail)
        with pytest.raises(OSError, match="input/output error"):
            run_erase(built, [1, 4], None)
    tried, done = (run_erase(built, [0], None, dry_run=dry_run) for dry_run in (True, False))
    assert counts_of(tried) == counts_of(done) == ((0, 1, 3, 4), 0, 6, 4)


def fail(*args: object, **options: object) -> None:
    raise OSError(5, "input/output error")


def counts_of(result: DeleteResult) -> tuple[object, ...]:
    return result.deleted, result.already_deleted, result.left, result.erased


@pytest.mark.parametrize("pattern", ["*/04.jpg", "*/nobody.jpg"])
def test_no_stopped_append_is_lost(built, tmp_path, pattern):
    for number in range(20, 26):
        write_photo(tmp_path / "more" / f"{number}.jpg", number)
    config = AppendConfig(built, (str(tmp_path / "more"),), engine="inline")
    with pytest.raises(JobStopped, match="kept"):
        run_append(config, lambda event: None, lambda: Layout(built).receipt(3).exists())
    for dry_run in (True, False):
        with pytest.raises(EdjeError, match=r"'append' of .* has not finished; run 'edje-index append' again"):
            run_erase(built, [], pattern, dry_run=dry_run)
    written = Layout(built).rows_file(3).stat().st_mtime_ns
    assert run_append(config, lambda event: None).indexed == 6
    assert Layout(built).rows_file(3).stat().st_mtime_ns == written
    assert run_erase(built, [4], None).erased == 1


def test_a_stopped_compaction_is_kept_if_nothing_is_erased(built):
    run_delete(built, [0], None)
    with pytest.raises(JobStopped):
        compact_index(built, should_stop=lambda: Layout(built).receipt(3).exists())
    written = Layout(built).rows_file(3).stat().st_mtime_ns
    assert run_erase(built, [], "*/nobody.jpg").erased == 0
    compact_index(built)
    assert Layout(built).rows_file(3).stat().st_mtime_ns == written


def test_an_append_says_that_it_discards_a_stopped_compaction(built, tmp_path):
    run_delete(built, [0], None)
    with pytest.raises(JobStopped):
        compact_index(built, should_stop=lambda: Layout(built).receipt(3).exists())
    write_photo(tmp_path / "new.jpg", 88)
    events: list[Any] = []
    append_index(built, [tmp_path / "new.jpg"], engine="inline", on_event=events.append)
    assert any("a stopped compact or quantize begins anew" in str(event) for event in events)
    assert verify_index(built) == []


@pytest.mark.parametrize("erase", [False, True])
def test_a_row_id_of_more_than_64_bits_is_wrong_usage(built, erase):
    with pytest.raises(UsageError, match="must be a flat sequence of integers"):
        delete_rows(built, [2**70], erase=erase)


@pytest.mark.parametrize("erase", [False, True])
def test_a_dry_run_needs_no_lock(built, erase):
    with locked_index(built):
        assert delete_rows(built, [0], erase=erase, dry_run=True).deleted == (0,)


def test_a_dry_run_changes_nothing(built):
    before = {path: path.read_bytes() for path in built.rglob("*") if path.is_file()}
    result = run_erase(built, [0], None, dry_run=True)
    assert (result.deleted, result.erased, result.left, result.dry_run) == ((0,), 1, 9, True)
    assert {path: path.read_bytes() for path in built.rglob("*") if path.is_file()} == before


def test_an_index_that_shares_files_by_hard_links_stays(built, tmp_path):
    shutil.copytree(built, tmp_path / "linked", copy_function=os.link)
    parts = data_of(built, 5)
    run_erase(built, [5], None)
    assert [count_in_files(built, part) for part in parts] == [0] * 4
    assert verify_index(tmp_path / "linked") == []
    assert data_of(tmp_path / "linked", 5) == parts


def test_precisions_are_added_after_an_erasure(built):
    from pipelines import quantize_index

    run_erase(built, [0, 5], None)
    quantize_index(built, ["int8"], drop=["fp8"])
    assert verify_index(built) == []


def test_the_command(built, run):
    code, output, _ = run("delete", built, "--rows", 1, "--erase", "--json")
    assert (code, json.loads(output)["erased"]) == (0, 2)
    assert "0 rows deleted, 1 were deleted before, 0 erased; 8 left" in run("delete", built, "--rows", 1, "--erase")[1]
    assert run("delete", built, "--erase")[0] == 0


def random_index(root: Path) -> np.ndarray:
    spec = IndexSpec(rows=10, shard_size=4, block_shape=(64, 384), embed_dim=8, precisions=("bf16", "nvfp4"))
    return write_random_index(root, spec, failed=frozenset({2}))


def test_disk_blocks_are_freed(tmp_path):
    random_index(tmp_path / "index")
    paths = [tmp_path / "index/tokens/bf16/c.1.0.0", tmp_path / "index/tokens/nvfp4/c.1.0"]
    before = [path.stat().st_blocks for path in paths]
    lengths = [path.stat().st_size for path in paths]
    run_erase(tmp_path / "index", [5, 6], None)
    freed = [blocks - path.stat().st_blocks for blocks, path in zip(before, paths, strict=True)]
    assert freed == [2 * 11 * 8, (2 + 3) * 8]  # all whole pages but the first of each record, in units of 512 bytes
    assert [path.stat().st_size for path in paths] == lengths


def fail_and_finish(folder: Path, allowed: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Erase two rows while only `allowed` flushes succeed, and then finish. Returns False if no flush failed."""
    blocks = random_index(folder)
    kept = [row for row in range(10) if row not in (0, 5)]
    parts = data_of(folder, 0) + data_of(folder, 5)
    fsync, calls = os.fsync, iter(range(allowed))

    def failing(fd: int) -> None:
        if next(calls, None) is None:
            raise OSError(5, "input/output error")
        fsync(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with contextlib.suppress(OSError):
            run_erase(folder, [0, 5], None)
            return False
    check_stopped(folder, kept, blocks)
    assert run_erase(folder, [0, 5], None).left == 8
    assert verify_index(folder) == []
    assert [count_in_files(folder, part) for part in parts] == [0] * len(parts)
    with TokenStore.open(folder) as store:
        assert same_bits(store.fetch(kept), blocks[kept])
    return True


@pytest.mark.parametrize("allowed", [2, 17, 30])
def test_an_erasure_that_fails_can_be_finished(tmp_path, monkeypatch, allowed):
    assert fail_and_finish(tmp_path / "index", allowed, monkeypatch)


@pytest.mark.slow
def test_an_erasure_that_fails_anywhere_can_be_finished(tmp_path, monkeypatch):
    failed = [fail_and_finish(tmp_path / str(allowed), allowed, monkeypatch) for allowed in range(100)]
    assert 30 < failed.index(False) < 99
    assert not any(failed[failed.index(False) :])


def check_stopped(root: Path, kept: list[int], blocks: np.ndarray) -> None:
    """Check that an erasure which stopped is known, and that no row is returned with wrong data."""
    if not Layout(root).erasure.exists():
        assert {problem.code for problem in verify_index(root)} <= {"stray-file"}  # of a commit that failed
        return
    assert verify_index(root)[0].code == "erasure"
    with pytest.raises(EdjeError, match=r"an erasure of rows of .* has not finished"):
        run_delete(root, [1], None)
    with TokenStore.open(root) as store:
        if Manifest.load(root).snapshot.number:  # otherwise no byte has changed yet
            with pytest.raises(DeletedRowError):
                store.fetch([5])
        with contextlib.suppress(CorruptIndexError):  # the checksums of a shard were moved before `index.json`
            assert same_bits(store.fetch(kept), blocks[kept])
