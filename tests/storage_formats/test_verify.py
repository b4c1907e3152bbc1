from __future__ import annotations

import json
import os
import shutil
import threading
import time
from dataclasses import replace

import pytest

from pipelines import copy_index, delete_rows, quantize_index
from pipelines.jobs.snapshots import roll_back
from storage_formats import CorruptIndexError, UsageError, verify_index
from storage_formats.format.checksum import json_checksum
from storage_formats.format.layout import IndexSpec
from storage_formats.format.manifest import Manifest, Snapshot
from storage_formats.format.places import Directory
from storage_formats.format.rows import RowEntry
from storage_formats.format.shard_table import read_shard_table
from storage_formats.verify import check_shard
from tests.conftest import write_random_index
from tests.storage_formats.reading_cases import flip

SPEC = IndexSpec(21, 8, (4, 16), 6)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    root = tmp_path_factory.mktemp("sound")
    write_random_index(root, SPEC, failed=frozenset({3}), duplicates=frozenset({8}))
    return root


@pytest.fixture
def copy(sound, tmp_path):
    shutil.copytree(sound, tmp_path / "index")
    return tmp_path / "index"


def codes(root) -> set[tuple[str, str]]:
    return {(problem.path, problem.code) for problem in verify_index(root)}


def test_sound_index_has_no_problems(sound):
    steps = []
    assert verify_index(sound, lambda _, done, of: steps.append((done, of))) == []
    assert steps == [(1, 3), (2, 3), (3, 3)]


def test_verifying_no_index_is_an_error(tmp_path):
    with pytest.raises(UsageError):
        verify_index(tmp_path)


def test_a_shard_table_of_wrong_length_is_not_read(copy, monkeypatch):
    os.truncate(copy / Manifest.load(copy).shard_tables[0].path, 1 << 40)
    monkeypatch.setattr(
        "storage_formats.format.file_check.crc32c_open",
        lambda file: pytest.fail("was read"),
    )
    assert codes(copy) == {("index.json", "manifest")}


def test_a_snapshot_of_an_unknown_format_is_a_problem(copy):
    value = json.loads((copy / "index.json").read_text())
    Directory(copy).snapshots.mkdir()
    replace(Manifest.load(copy), snapshot=Snapshot(number=1)).write(Directory(copy))
    value["format_version"] = "99.0"
    value["crc32c"] = json_checksum(value)
    Directory(copy).snapshot(0).write_text(json.dumps(value))
    assert ("snapshots", "snapshot") in codes(copy)


def test_damaged_block_is_named_by_its_row(copy):
    path = Directory(copy).token_shard("bf16", 1)
    flip(path, 2 * 128 + 5)
    found = verify_index(copy)
    assert {problem.code for problem in found} == {"checksum", "block-checksum"}
    assert any(problem.message.endswith("row 10") for problem in found)


def test_files_that_no_commit_made_are_named(copy):
    delete_rows(copy, [0])
    strays = {
        "rows/extra.parquet",
        "tokens/bf16/c.9.0.0",
        "manifest/deleted-00000000.bin",
        f"tokens/bf16/.zarr.json.{'0' * 32}",
    }
    for path in strays:
        (copy / path).write_bytes(b"")
    assert codes(copy) == {(path, "stray-file") for path in strays}
    # of a process that was killed while it removed them
    Directory(copy).journal.write_text("{}")
    assert codes(copy) == set()
    Directory(copy).snapshot(0).write_text("{")
    assert codes(copy) == {("snapshots", "snapshot")}


def test_rows_that_contradict_the_data_are_found(tmp_path, monkeypatch):
    # row 3 stays "indexed" but gets no block
    monkeypatch.setattr(RowEntry, "fail", lambda *_: None)
    write_random_index(tmp_path, SPEC, failed=frozenset({3}))
    assert {code for _, code in codes(tmp_path)} == {"shard-index", "embedding"}


def test_an_index_that_changes_during_verification_is_not_called_damaged(copy):
    def change(activity, done, of):
        if done == of:
            (copy / "tokens" / "bf16" / "extra").write_text("of another precision, say")
            manifest = copy / "index.json"
            manifest.write_text(manifest.read_text() + "\n")

    problems = verify_index(copy, change)
    assert [problem.code for problem in problems] == ["changed"]
    assert "verify the index again" in problems[0].message
    assert codes(copy) == {("tokens/bf16/extra", "stray-file")}


def test_reads_of_shard_tables_do_not_grow_with_the_snapshots(copy, monkeypatch):
    for row in (0, 1, 2, 4):
        delete_rows(copy, rows=[row])
    quantize_index(copy, ["fp8"])
    delete_rows(copy, rows=[5])
    reads = []

    def read(place, table):
        reads.append(table)
        return read_shard_table(place, table)

    monkeypatch.setattr("storage_formats.format.manifest.read_shard_table", read)
    assert verify_index(copy) == []
    assert len(set(reads)) == 2
    assert len(reads) == 3, "only the current one is read twice"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_check_has_checked_only_a_few_shards_ahead(
    tmp_path, monkeypatch, error
):
    write_random_index(tmp_path, IndexSpec(24, 1, (1, 16), 6))
    checks = []
    monkeypatch.setattr(
        "storage_formats.verify.check_shard",
        lambda *shard: (checks.append(shard), check_shard(*shard))[1],
    )

    def interrupt(activity: str, done: int, of: int) -> None:
        time.sleep(0.1)
        raise error

    with pytest.raises(error):
        verify_index(tmp_path, interrupt)
    assert 0 < len(checks) <= 9
    running = [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("edje-verify")
    ]
    assert not running or error is KeyboardInterrupt, (
        "a user who interrupts waits for no check"
    )
    for thread in running:
        # they end without another shard
        thread.join(10)
    assert len(checks) <= 9


def test_a_manifest_of_a_kept_snapshot_that_is_missing_is_found(copy, tmp_path):
    for row in (0, 1, 2):
        delete_rows(copy, rows=[row])
    # the oldest, and the newest
    for number in (0, 2):
        lost = Directory(copy).snapshot(number)
        data = lost.read_bytes()
        lost.unlink()
        assert (f"snapshots/0000000{number}.json", "missing-file") in codes(copy)
        lost.write_bytes(data)
    copy_index(copy, tmp_path / "copied")
    assert verify_index(tmp_path / "copied") == [], "a copy holds one snapshot"


def test_every_kept_snapshot_is_checked_and_a_rollback_to_a_damaged_one_is_refused(
    copy,
):
    delete_rows(copy, rows=[0])
    roll_back(copy, 0)
    quantize_index(copy, ["fp8"], drop=["bf16"])
    earlier = Directory(copy).token_shard("bf16", 1)
    before = (copy / "index.json").read_bytes()
    original = earlier.read_bytes()
    flip(earlier, 9)
    assert codes(copy) == {("tokens/bf16/c.1.0.0", "checksum")}
    with pytest.raises(
        CorruptIndexError,
        match=r"snapshot 0 of .* is .* damaged: tokens/bf16/c\.1\.0\.0 has CRC-32C",
    ):
        roll_back(copy, 0)
    assert (copy / "index.json").read_bytes() == before
    earlier.unlink()
    assert codes(copy) == {("tokens/bf16/c.1.0.0", "missing-file")}
    earlier.write_bytes(original)
    (path,) = (copy / "manifest").glob("deleted-*")
    path.write_bytes(b"")
    assert codes(copy) == {(path.relative_to(copy).as_posix(), "length")}
    assert roll_back(copy, 0).rows == 21
