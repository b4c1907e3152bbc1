"""Copies to an S3-compatible server: whole or absent, also with two writers, kills, and disturbed requests."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines import JobStopped, copy_index, delete_rows, quantize_index
from pipelines.jobs.ann import run_ann_build
from storage_formats import CorruptIndexError, EdjeError, IndexSpec, TokenStore, UsageError, verify_index
from storage_formats.change import write_array_shapes
from storage_formats.format import object_store
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.mirror import open_index
from storage_formats.format.object_store import ObjectFolder
from storage_formats.writing.index_copy import begin_remote_copy, files_to_copy
from storage_formats.writing.remote_writes import holds_claim, is_data, take_claim
from tests.command_line import command, environment
from tests.conftest import write_random_index
from tests.object_store import FaultyProxy, every, s3_server, use_endpoint
from tests.pipelines.test_copy import contents

pytestmark = pytest.mark.slow  # they start a server
SPEC = IndexSpec(rows=21, shard_size=8, block_shape=(2, 8), embed_dim=4, precisions=("bf16", "fp8"))
LARGE = IndexSpec(rows=200, shard_size=180, block_shape=(64, 384), embed_dim=4)  # a shard of several parts


@pytest.fixture(scope="module")
def server():
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture(autouse=True)
def environment_of_the_server(server, tmp_path, monkeypatch):
    monkeypatch.setenv("EDJE_CACHE", str(tmp_path / "cache"))
    use_endpoint(monkeypatch, server)


@pytest.fixture
def proxy(server, monkeypatch):
    with FaultyProxy(server).running() as running:
        use_endpoint(monkeypatch, running.url)
        yield running


numbers = itertools.count()


@pytest.fixture
def url():
    return f"s3://bucket/index-{next(numbers)}.edje"


@pytest.fixture
def index(tmp_path):
    write_random_index(tmp_path / "photos.edje", SPEC, failed=frozenset({5}), seed=1)
    return tmp_path / "photos.edje"


@pytest.fixture
def other(tmp_path):
    write_random_index(tmp_path / "other.edje", SPEC, seed=2)
    return tmp_path / "other.edje"


def check_equal(url: str, index: Path, tmp_path: Path) -> None:
    """The index at `url` has the same files as the directory `index`."""
    back = tmp_path / f"back-{next(numbers)}"
    copy_index(url, back)
    assert contents(back) == contents(index)
    assert verify_index(back) == []


def test_an_index_returns_unchanged(index, url, tmp_path):
    result = copy_index(index, url)
    assert result.copied_files == result.files
    check_equal(url, index, tmp_path)
    assert copy_index(index, url).copied_files == 0
    assert set(ObjectFolder.open(url).list_keys()) == set(contents(index))


def test_large_files_are_sent_in_parts(tmp_path, url, proxy):
    write_random_index(tmp_path / "large", LARGE)
    copy_index(tmp_path / "large", url)
    assert proxy.count("PUT", "partNumber") >= 2
    check_equal(url, tmp_path / "large", tmp_path)


def test_the_number_of_parts_is_limited(tmp_path, url, proxy, monkeypatch):
    write_random_index(tmp_path / "large", LARGE)
    monkeypatch.setattr(object_store, "_MAX_PARTS", 1)
    copy_index(tmp_path / "large", url)
    assert proxy.count("PUT", "partNumber=1") == 1
    assert proxy.count("PUT", "partNumber=2") == 0
    check_equal(url, tmp_path / "large", tmp_path)


def test_a_copy_during_an_append_describes_its_own_rows(index, url, tmp_path):
    expected = contents(index)
    write_array_shapes(Layout(index), replace(SPEC, rows=1000))  # an append does so before it writes index.json
    copy_index(index, url)
    folder = ObjectFolder.open(url)
    for key in ("tokens/zarr.json", "tokens/fp8/zarr.json", "embeddings/zarr.json"):
        assert folder.read(key, 1 << 20).data == expected[key]
    copy_index(url, tmp_path / "back")
    assert contents(tmp_path / "back") == expected


def test_only_the_files_of_a_change_are_copied(index, url, tmp_path):
    copy_index(index, url)
    delete_rows(index, rows=[3])
    assert copy_index(index, url).copied_files == 1  # the tombstones
    check_equal(url, index, tmp_path)
    assert len(TokenStore.open(url, snapshot=0).fetch([3])) == 1


def test_a_copy_between_two_urls(index, url, tmp_path):
    copy_index(index, url)
    copy_index(url, f"{url}-2")
    check_equal(f"{url}-2", index, tmp_path)


@pytest.mark.parametrize("fault", ["reset", "503", "slow", "truncate", "lost"])
def test_a_copy_survives_disturbed_requests(index, url, tmp_path, proxy, fault):
    proxy.fault = every(4, fault)
    copy_index(index, url)
    check_equal(url, index, tmp_path)


def test_a_commit_whose_response_is_lost_has_succeeded(index, url, tmp_path, proxy):
    lost = every(1, "lost", "/index.json")
    proxy.fault = lambda method, path: lost(method, path) if method == "PUT" and proxy.count("PUT", path) == 1 else None
    copy_index(index, url)
    assert proxy.count("PUT", "/index.json") == 2
    check_equal(url, index, tmp_path)


def test_a_commit_whose_fate_is_unknown_says_so(index, url, tmp_path, proxy, monkeypatch):
    monkeypatch.setattr(object_store, "_RETRIES", 0)
    monkeypatch.setattr(object_store, "_ATTEMPTS", 2)

    def fault(method: str, path: str) -> str | None:
        puts = proxy.count("PUT", "/index.json")
        if not path.endswith("/index.json") or not puts:
            return None
        return "lost" if method == "PUT" and puts == 1 else "503"

    proxy.fault = fault
    with pytest.raises(EdjeError, match=r"^the copy may be complete: .*run the copy again"):
        copy_index(index, url)
    proxy.fault = lambda method, path: None
    copy_index(index, url)
    check_equal(url, index, tmp_path)


def test_another_index_is_refused_or_replaced_on_request(index, other, url, tmp_path):
    copy_index(other, url)
    with pytest.raises(UsageError, match=r"contains another index: its file .* differs.*choose another destination"):
        copy_index(index, url)
    assert "build/claim.json" not in ObjectFolder.open(url).list_keys()
    check_equal(url, other, tmp_path)
    delete_rows(other, rows=[1])
    copy_index(other, url)
    copy_index(index, url, replace=True)
    check_equal(url, index, tmp_path)
    assert set(ObjectFolder.open(url).list_keys()) == set(contents(index))


def test_a_copy_never_reverts_changes_of_the_destination(index, url, tmp_path):
    copy_index(index, url)
    delete_rows(url, rows=[3])
    with pytest.raises(UsageError, match=r"is at snapshot 1, which .* does not have"):
        copy_index(index, url)
    delete_rows(index, rows=[5])
    with pytest.raises(UsageError, match=r"is at snapshot 1, which .* does not have"):
        copy_index(index, url)
    assert len(CommittedIndex.open(index).deleted) == 1
    copy_index(url, tmp_path / "changed")
    assert CommittedIndex.open(tmp_path / "changed").deleted.row_ids().tolist() == [3]


def test_a_copy_never_reverts_changes_that_keep_the_snapshot(index, url):
    copy_index(index, url)
    quantize_index(url, ["int8"])
    with pytest.raises(UsageError, match=r"has the precision int8, which .*photos\.edje does not have"):
        copy_index(index, url)
    delete_rows(index, rows=[3])  # the source is at a later snapshot now
    with pytest.raises(UsageError, match=r"has the precision int8, which"):
        copy_index(index, url)
    assert open_index(url).manifest.spec.precisions == ("bf16", "fp8", "int8")
    quantize_index(index, ["int8"])
    copy_index(index, url)
    quantize_index(index, drop=["fp8"])
    with pytest.raises(UsageError, match=r"has the precision fp8, which"):
        copy_index(index, url)
    copy_index(index, url, replace=True)
    assert open_index(url).manifest.spec.precisions == ("bf16", "int8")


def test_a_precision_that_a_later_snapshot_dropped_is_not_in_the_way(index, url):
    copy_index(index, url)
    delete_rows(index, rows=[3])
    quantize_index(index, drop=["fp8"])
    copy_index(index, url)
    assert open_index(url).manifest == CommittedIndex.open(index).manifest


def test_a_copy_never_reverts_a_new_nearest_neighbour_index(index, url):
    copy_index(index, url)
    run_ann_build(index, "Flat", 0.95, lambda event: None)
    copy_index(index, url)  # the destination has no nearest-neighbour index that could be lost
    built = run_ann_build(url, "IVF2,Flat", 0.95, lambda event: None)
    with pytest.raises(UsageError, match=r"has a nearest-neighbour index that differs from that of .*photos\.edje;"):
        copy_index(index, url)
    assert open_index(url).manifest.ann == built
    copy_index(index, url, replace=True)
    assert open_index(url).manifest.ann == open_index(index).manifest.ann


def test_the_end_of_a_replacement_deletes_nothing_of_a_later_writer(index, url):
    folder, opened = ObjectFolder.open(url), CommittedIndex.open(index)
    entries = files_to_copy(opened)
    begun = [begin_remote_copy(opened, folder, entries, replace=True) for _ in range(2)]  # both share the claim
    for entry in entries:
        begun[0].copy(opened, entry)
    begun[0].commit(opened, entries)
    take_claim(folder, {"writer": "a later one"})
    folder.put("tokens/int8/c.0.0", lambda: (piece for piece in (b"new",)), length=3, metadata={})
    begun[1].commit(opened, entries)
    assert "tokens/int8/c.0.0" in folder.list_keys()


def test_the_claim_of_a_later_writer_outlives_a_copy(index, url):
    opened = CommittedIndex.open(index)
    begun = begin_remote_copy(opened, ObjectFolder.open(url), files_to_copy(opened), replace=False)
    copy_index(index, url)  # the same copy by another process ends first, with the claim that both share
    take_claim(ObjectFolder.open(url), {"writer": "a later one"})
    begun.commit(opened, files_to_copy(opened))
    assert holds_claim(ObjectFolder.open(url), {"writer": "a later one"})


def test_only_files_of_an_index_are_data():
    assert is_data("snapshots/12.json")
    assert not is_data("snapshots/db-2026.tar")
    assert not is_data("snapshots/12.json/x")


def test_a_stopped_copy_is_resumed_and_keeps_others_away(index, other, url, tmp_path):
    calls = iter(range(100))
    with pytest.raises(JobStopped):
        copy_index(index, url, should_stop=lambda: next(calls) > 0)
    with pytest.raises(EdjeError, match=rf"running or was stopped \(process {os.getpid()} on .*build/claim.json"):
        copy_index(other, url)
    result = copy_index(index, url)
    assert 0 < result.copied_files < result.files
    check_equal(url, index, tmp_path)


def test_a_stopped_replacement_is_resumed_without_replace(index, other, url):
    copy_index(other, url)
    delete_rows(other, rows=[1])
    copy_index(other, url)  # its tombstones and snapshot 0 must go
    calls = iter(range(100))
    with pytest.raises(JobStopped):
        copy_index(index, url, replace=True, should_stop=lambda: next(calls) > 0)
    copy_index(index, url)
    assert set(ObjectFolder.open(url).list_keys()) == set(contents(index))


def test_a_copy_that_cannot_begin_keeps_no_others_away(index, url):
    folder = ObjectFolder.open(url)
    folder.put("index.json", lambda: (piece for piece in (b"noise",)), length=5, metadata={})
    with pytest.raises(CorruptIndexError, match=r"index\.json"):
        copy_index(index, url)
    assert folder.list_keys() == ["index.json"]


def test_a_copy_leaves_the_claim_of_a_copy_that_still_runs(index, url, tmp_path):
    """Two copies of the same snapshot share `build/claim.json`. Only the one that created it removes it."""
    folder, opened = ObjectFolder.open(url), CommittedIndex.open(index)
    begin_remote_copy(opened, folder, files_to_copy(opened), replace=False)
    folder.put("index.json", lambda: (piece for piece in (b"noise",)), length=5, metadata={})
    with pytest.raises(CorruptIndexError, match=r"index\.json"):
        copy_index(index, url)
    assert "build/claim.json" in folder.list_keys()


def test_damage_is_not_copied(index, url):
    path = index / "tokens/bf16/c.1.0.0"
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(CorruptIndexError, match=r"c\.1\.0\.0 is not the file that was committed"):
        copy_index(index, url)
    keys = set(ObjectFolder.open(url).list_keys())
    assert "index.json" not in keys
    assert "tokens/bf16/c.1.0.0" not in keys


def test_a_damaged_object_is_copied_again_once_it_is_deleted(index, url, tmp_path):
    copy_index(index, url)
    folder, key = ObjectFolder.open(url), "rows/00000001.parquet"
    info, data = folder.info(key), (index / key).read_bytes()
    assert info is not None
    damaged = data[:-1] + bytes([data[-1] ^ 1])
    folder.put(key, lambda: (piece for piece in (damaged,)), length=len(damaged), metadata=info.metadata)
    with pytest.raises(CorruptIndexError, match=f"{key} is not .* delete this object, and copy the index again"):
        copy_index(url, tmp_path / "stopped")
    folder.delete([key])
    assert copy_index(index, url).copied_files == 1
    check_equal(url, index, tmp_path)


def test_a_commit_never_takes_the_place_of_another(index, url, tmp_path):
    """The state that a copy found has changed before it commits: the other index stays."""
    copy_index(index, url)
    stale, entries = CommittedIndex.open(index), files_to_copy(CommittedIndex.open(index))
    begun = begin_remote_copy(stale, ObjectFolder.open(url), entries, replace=False)
    ObjectFolder.open(url).delete(["build/claim.json"])
    delete_rows(index, rows=[2])
    copy_index(index, url)
    with pytest.raises(
        EdjeError, match=r"another writer removed .*claim.json during the copy, so the copy did not write index.json"
    ):
        begun.commit(stale, entries)
    assert "build/claim.json" not in ObjectFolder.open(url).list_keys()
    check_equal(url, index, tmp_path)


def test_a_refused_commit_ends_its_claim(index, other, url):
    opened = CommittedIndex.open(index)
    entries = files_to_copy(opened)
    begun = begin_remote_copy(opened, ObjectFolder.open(url), entries, replace=False)
    data = (other / "index.json").read_bytes()
    ObjectFolder.open(url).put("index.json", lambda: (each for each in (data,)), length=len(data), metadata={})
    with pytest.raises(EdjeError, match="another writer changed"):
        begun.commit(opened, entries)
    assert ObjectFolder.open(url).list_keys() == ["index.json"]


def test_of_two_writers_one_wins(index, other, tmp_path):
    for _ in range(5):
        url = f"s3://bucket/race-{next(numbers)}.edje"
        errors: list[Exception] = []

        def copy(source: Path, url: str = url, errors: list[Exception] = errors) -> None:
            try:
                copy_index(source, url)
            except EdjeError as error:
                errors.append(error)

        threads = [threading.Thread(target=copy, args=(source,)) for source in (index, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(errors) == 1, errors
        winner = TokenStore.open(url).fetch([0]).tobytes()
        check_equal(url, index if winner == TokenStore.open(index).fetch([0]).tobytes() else other, tmp_path)


def test_a_killed_copy_leaves_no_index_and_is_resumed(index, url, tmp_path, proxy):
    proxy.fault = every(1, "slow")
    for requests in (3, 9):
        stop = proxy.count("PUT", "") + requests
        process = subprocess.Popen(command("copy", index, url), env=environment(), stderr=subprocess.DEVNULL)
        while proxy.count("PUT", "") < stop:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert "index.json" not in set(ObjectFolder.open(url).list_keys())
    proxy.fault = lambda method, path: None
    result = copy_index(index, url)
    assert 0 < result.copied_files < result.files
    check_equal(url, index, tmp_path)
