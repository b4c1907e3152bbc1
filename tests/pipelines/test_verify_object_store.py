"""`verify`, `repair` and `ann` with the URL of an index on an S3-compatible server do what they do with a directory."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from edje_index import add_ann
from pipelines import copy_index, delete_rows, quantize_index, repair_index
from pipelines.jobs.ann import run_ann_build
from storage_formats import CorruptIndexError, EdjeError, IndexSpec, UsageError, verify_index
from storage_formats.format.checksum import json_checksum
from storage_formats.format.committed_files import iter_shard_files
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import CommittedIndex, Manifest
from storage_formats.format.mirror import open_index
from storage_formats.format.object_store import ObjectFolder, ObjectStoreError
from storage_formats.format.shard_table import FileEntry, read_shard_table, write_shard_table
from storage_formats.shard_check import ShardCheck
from storage_formats.verified_files import verified_files
from storage_formats.verify import Problem
from tests.command_line import command, environment
from tests.conftest import write_random_index
from tests.object_store import FaultyProxy, every, s3_server, use_endpoint

pytestmark = pytest.mark.slow  # they start a server
SPEC = IndexSpec(rows=21, shard_size=8, block_shape=(2, 8), embed_dim=4, precisions=("bf16", "fp8"))
URL = "s3://bucket/verified.edje"


@pytest.fixture(scope="module")
def server():
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture
def local(server, tmp_path, monkeypatch):
    """An index with two snapshots and a nearest-neighbour index on disk. The same index is at `URL`."""
    monkeypatch.setenv("EDJE_CACHE", str(tmp_path / "cache"))
    use_endpoint(monkeypatch, server)
    root = tmp_path / "local"
    write_random_index(root, SPEC, failed=frozenset({5}))
    add_ann(root)
    copy_index(root, URL, replace=True)
    ObjectFolder.open(URL).delete(["ann/stray.faiss"])  # which is no file of an index, so no copy deletes it
    delete_rows(root, rows=[3])
    copy_index(root, URL)
    return root


def put(key: str, data: bytes) -> None:
    ObjectFolder.open(URL).put(key, lambda: (piece for piece in (data,)), length=len(data), metadata={})


def flipped(data: bytes, offset: int) -> bytes:
    return data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :]


DAMAGES = {
    "tokens/bf16/c.1.0.0": lambda data: flipped(data, 40),
    "tokens/fp8/c.0.0": lambda data: data[:-1],
    "tokens/fp8/c.2.0": lambda data: data + b"more",
    "tokens/fp8/zarr.json": lambda data: b"{}",
    "checksums/bf16/00000000.crc32c": lambda data: None,
    "checksums/fp8/00000001.crc32c": lambda data: flipped(data, 3),
    "embeddings/c.1.0": lambda data: flipped(data, 9),
    "rows/00000002.parquet": lambda data: data[: len(data) // 2],
    "ann/index.faiss": lambda data: flipped(data, len(data) - 1),
    "ann/stray.faiss": lambda data: b"stray",
}


def normal(problem: Problem, root: Path) -> tuple[str, str, str]:
    """A problem without the name of the index. What to do about a file that does not belong to it differs."""
    message = problem.message.replace(URL, "INDEX").replace(str(root), "INDEX")
    return problem.path, problem.code, "" if problem.code == "stray-file" else message


def test_a_sound_index_has_no_problem_and_leaves_no_files(local, run, tmp_path):
    progress = []
    assert verify_index(URL, lambda done, total: progress.append((done, total))) == []
    assert progress == [(1, 3), (2, 3), (3, 3)]
    assert not list((tmp_path / "cache").glob("verify-*"))
    code, out, error = run("verify", URL, "--json", "--sample", 2)
    assert (code, json.loads(out)) == (
        0, {"index": URL, "sound": True, "problems": [], "sample": {"shards": 2, "of": 3}},
    ), error  # fmt: skip


@pytest.mark.parametrize("keys", [*([key] for key in DAMAGES), list(DAMAGES)], ids=lambda keys: "+".join(keys)[:60])
def test_damage_gives_the_same_problems_as_on_disk(local, keys):
    for key in keys:
        path = local / key
        data = DAMAGES[key](path.read_bytes() if path.exists() else b"")
        if data is None:
            path.unlink()
            ObjectFolder.open(URL).delete([key])
        else:
            path.write_bytes(data)
            put(key, data)
    expected = verify_index(local)
    assert expected
    assert len(keys) == 1 or {each.path for each in expected} >= set(DAMAGES)
    assert sorted(normal(each, local) for each in verify_index(URL)) == sorted(normal(each, local) for each in expected)


METADATA = ["manifest/shards-*.parquet", "snapshots/*.json", "index.json", "manifest/deleted-*"]


@pytest.mark.parametrize("pattern", METADATA)
def test_damaged_metadata_is_a_problem(local, pattern):
    (path,) = sorted(local.glob(pattern))[:1]
    put(path.relative_to(local).as_posix(), flipped(path.read_bytes(), path.stat().st_size // 2))
    problems = verify_index(URL)
    assert problems
    assert not [each for each in problems if "cache" in each.message]


def test_a_shard_table_cannot_make_verify_touch_other_files(local, tmp_path):
    """The files are downloaded to a directory in the cache, and deleted afterwards."""
    outside = tmp_path / "cache/outside"
    outside.parent.mkdir(exist_ok=True)
    outside.write_text("precious")
    layout, manifest = Layout(local), Manifest.load(local)
    lines = [*read_shard_table(local, manifest.shard_table), (0, FileEntry("../outside", 8, 0))]
    lines.append((1, FileEntry(str(outside), 8, 0)))
    lines.append((1, next(entry for _, entry in lines if entry.path == "tokens/bf16/c.0.0.0")))
    table = write_shard_table(layout, sorted(lines, key=lambda line: (line[0], line[1].path)))
    value = json.loads(layout.manifest.read_text())
    value["shard_table"] = table.to_json()
    value["crc32c"] = json_checksum(value)
    put(table.path, (local / table.path).read_bytes())
    put("index.json", json.dumps(value).encode())
    problems = {each.path: each.code for each in verify_index(URL)}
    assert set(problems) == {"../outside", str(outside), "tokens/bf16/c.0.0.0"}
    assert set(problems.values()) == {"shard-table"}
    assert outside.read_text() == "precious"


def test_what_cannot_be_verified_is_an_error(local, server, monkeypatch):
    with pytest.raises(UsageError, match="there is no index at s3://bucket/nothing"):
        verify_index("s3://bucket/nothing")
    monkeypatch.setattr("storage_formats.format.object_store._RETRIES", 0)
    monkeypatch.setattr("storage_formats.format.object_store._ATTEMPTS", 2)
    with FaultyProxy(server, every(1, "503", "c.1.0")).running() as proxy:
        use_endpoint(monkeypatch, proxy.url)
        with pytest.raises(ObjectStoreError, match=r"c\.1\.0"):
            verify_index(URL)


def test_a_running_check_keeps_its_directory_and_a_killed_one_loses_it(local, tmp_path):
    with verified_files(URL) as running:
        abandoned = tmp_path / "cache/verify-abandoned"
        abandoned.mkdir()
        for directory in (abandoned, running.root):
            os.utime(directory, (0, 0))
        assert verify_index(URL) == []
        assert (running.root.exists(), abandoned.exists()) == (True, False)


def test_a_disk_that_cannot_be_written_is_no_damage_of_the_index(local, run, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("storage_formats.verified_files.os.pwrite", full)
        with pytest.raises(UsageError, match=r"cannot write to .*No space left.* set EDJE_CACHE"):
            verify_index(URL)
    monkeypatch.setenv("EDJE_CACHE", "/proc/nowhere")
    code, out, error = run("verify", URL, "--json")
    assert (code, set(json.loads(out))) == (2, {"error", "exit_code"}), error
    assert "cannot write to /proc/nowhere" in out


def test_a_snapshot_that_disappears_during_the_check_is_no_damage(local, monkeypatch):
    folder, read = ObjectFolder.open(URL), ObjectFolder.read

    def racing(self, key, max_bytes):
        if key == "snapshots/00000000.json":
            folder.delete([key])
        return read(self, key, max_bytes)

    monkeypatch.setattr(ObjectFolder, "read", racing)
    assert verify_index(URL) == []


def test_snapshots_that_are_removed_during_the_check_are_named_as_a_change(local, monkeypatch):
    folder, list_keys = ObjectFolder.open(URL), ObjectFolder.list_keys

    def racing(self):  # the objects of another process appear and disappear
        put("rows/00000009.parquet", b"new")
        folder.delete(["snapshots/00000000.json"])
        return list_keys(self)

    monkeypatch.setattr(ObjectFolder, "list_keys", racing)
    assert [each.code for each in verify_index(URL)] == ["changed"]


def test_an_oversized_snapshot_is_named(local, monkeypatch):
    monkeypatch.setattr("storage_formats.format.mirror.MAX_MANIFEST_BYTES", 1 << 16)
    put("snapshots/00000007.json", b"x" * (1 << 16 | 1))
    (problem,) = verify_index(URL)
    assert (problem.path, problem.code) == ("snapshots", "snapshot")
    pattern = f"{URL}/snapshots/00000007.json is not the manifest of a snapshot.*delete this object"
    assert re.search(pattern, problem.message)
    with pytest.raises(CorruptIndexError, match=pattern):
        delete_rows(URL, rows=[9])


def test_web_addresses_are_refused(local, server, run):
    copy_index(local, "s3://public/verified.edje")
    url = f"{server}/public/verified.edje"
    assert run("info", url)[0] == 0
    for arguments in (["verify"], ["repair", "--dry-run"]):
        code, _, error = run(*arguments, url)
        assert (code, "copy the index to a directory" in error) == (2, True), error


def test_a_repair_names_the_object_of_a_damaged_shard_table(local):
    table = Manifest.load(local).shard_table.path
    put(table, b"short")
    with pytest.raises(CorruptIndexError, match=f"the shard table {URL}/{table} does not match"):
        repair_index(URL, dry_run=True)


@pytest.fixture
def repairable(local):
    """The index at `URL`, with a precision that was converted from `bf16`."""
    quantize_index(local, ["int8"])
    copy_index(local, URL, replace=True)
    return local


REPAIRED = {
    "tokens/int8/c.1.0": "precision bf16",
    "checksums/bf16/00000000.crc32c": "the tokens",
    "tokens/bf16/zarr.json": "index.json",
    "ann/index.faiss": "the embeddings",
}


def test_a_repair_makes_damaged_objects_sound(repairable, run, tmp_path):
    before = {key: (repairable / key).read_bytes() for key in REPAIRED}
    for key, data in before.items():
        put(key, flipped(data, 20))
    tried = repair_index(URL, dry_run=True)
    assert {file.path: file.source for file in tried.repaired} == REPAIRED
    assert {each.path for each in verify_index(URL)} >= set(REPAIRED)
    assert "build/claim.json" not in ObjectFolder.open(URL).list_keys()
    result = repair_index(URL)
    assert ({file.path: file.source for file in result.repaired}, result.left) == (REPAIRED, ())
    assert verify_index(URL) == []
    for key, data in before.items():
        if not key.startswith("ann"):
            assert ObjectFolder.open(URL).read(key, 1 << 20).data == data
    copy_index(URL, tmp_path / "copy")
    assert verify_index(tmp_path / "copy") == []
    assert not [path for path in (tmp_path / "cache").glob("*") if path.name.startswith("verify")]
    code, out, error = run("repair", URL, "--json")
    assert (code, json.loads(out)["repaired"]) == (0, []), error


def test_a_repair_downloads_sound_files_once(repairable, server, monkeypatch):
    key = "tokens/int8/c.1.0"
    put(key, flipped((repairable / key).read_bytes(), 20))
    with FaultyProxy(server).running() as proxy:
        use_endpoint(monkeypatch, proxy.url)
        assert repair_index(URL).left == ()
        sound = ("tokens/int8/c.0.0", "rows/00000002.parquet", "embeddings/c.0.0", "ann/index.faiss")
        assert [proxy.count("GET", name) for name in sound] == [1] * 4
        assert proxy.count("GET", key) == 3


def test_an_object_that_only_seems_to_be_the_committed_one_is_replaced(repairable):
    """The damaged object has the length and the recorded checksum of the committed file."""
    key = "tokens/int8/c.0.0"
    folder, data = ObjectFolder.open(URL), (repairable / key).read_bytes()
    info = folder.info(key)
    damaged = flipped(data, 7)
    folder.put(key, lambda: (piece for piece in (damaged,)), length=len(data), metadata=info.metadata)
    assert [file.path for file in repair_index(URL).repaired] == [key]
    assert folder.read(key, 1 << 20).data == data


def test_what_cannot_be_repaired_stays_a_problem(repairable):
    put("tokens/bf16/c.0.0.0", b"too short")
    put("embeddings/c.0.0", b"too short")
    result = repair_index(URL)
    assert result.repaired == ()
    assert {"tokens/bf16/c.0.0.0", "embeddings/c.0.0"} <= {each.path for each in result.left}
    assert not [each for each in result.left if "cache" in each.message]


def test_a_repair_waits_for_no_other_writer(repairable):
    put("tokens/int8/c.1.0", b"damaged")
    put("build/claim.json", b'{"writer": "another", "owner": "process 1 on elsewhere"}')
    with pytest.raises(EdjeError, match="process 1 on elsewhere"):
        repair_index(URL)
    assert [file.path for file in repair_index(URL, dry_run=True).repaired] == ["tokens/int8/c.1.0"]
    ObjectFolder.open(URL).delete(["build/claim.json"])


def test_a_disk_without_room_for_a_shard_is_named(local, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1000, 900, 100))
    with pytest.raises(UsageError, match=f"the check of {URL} needs .* bytes of disk, but only 100 are free"):
        verify_index(URL)
    with pytest.raises(UsageError, match=f"the embeddings of {URL} need .* bytes of disk, but only 100 are free"):
        run_ann_build(URL, "auto", 0.95, lambda event: None)


@pytest.mark.parametrize(("room", "at_once"), [(1, 1), (2, 2), (1000, 3)])
def test_as_many_shards_are_checked_at_once_as_the_disk_has_room_for(local, monkeypatch, tmp_path, room, at_once):
    index = CommittedIndex.open(local)
    entries = dict(iter_shard_files(index, list(index.manifest.spec.shard_numbers())))
    largest = max(sum(entry.bytes for entry in of_shard.values()) for of_shard in entries.values())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, room * largest))
    lock, run, running, numbers = threading.Lock(), ShardCheck.run, 0, []

    def counted(check):
        nonlocal running
        with lock:
            running += 1
            numbers.append(running)
            present = {path.name for path in (tmp_path / "cache").glob("verify-*/rows/*")}
            assert len(present) <= at_once
        time.sleep(0.5)
        checked = run(check)
        with lock:
            running -= 1
        return checked

    monkeypatch.setattr(ShardCheck, "run", counted)
    assert verify_index(URL) == []
    assert (len(numbers), max(numbers)) == (3, at_once)


def test_ctrl_c_ends_the_downloads_and_removes_their_files(local, server, tmp_path, monkeypatch):
    with FaultyProxy(server, every(1, "slow", "/c.")).running() as proxy:
        use_endpoint(monkeypatch, proxy.url)
        arguments = command("verify", URL, "--quiet")
        process = subprocess.Popen(arguments, env=environment(), stderr=subprocess.PIPE, text=True)
        while proxy.count("GET", "/c.") == 0:
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (1, "error: interrupted\n")
    assert not list((tmp_path / "cache").glob("verify-*"))


def test_a_repair_needs_room_for_the_embeddings(local, monkeypatch):
    key = "ann/index.faiss"
    put(key, flipped((local / key).read_bytes(), 20))
    monkeypatch.setattr("pipelines.jobs.ann.free_disk", lambda path: 100)
    with pytest.raises(UsageError, match=f"the embeddings of {URL} need .* bytes of disk, but only 100 are free"):
        repair_index(URL)


def test_ann_build_takes_a_url(local, run, tmp_path):
    events = []
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    built = run_ann_build(URL, "IVF2,Flat", 0.95, events.append)
    assert built["kind"] != "flat"
    assert run_ann_build(local, "IVF2,Flat", 0.95, events.append)["factory"] == built["factory"]
    assert open_index(URL).manifest.ann == built
    copy_index(URL, tmp_path / "copy")
    assert verify_index(tmp_path / "copy") == verify_index(URL) == []
    assert Manifest.load(tmp_path / "copy").ann["factory"] == built["factory"]
    assert [key for key in ObjectFolder.open(URL).list_keys() if key.startswith("build/")] == []
    code, out, error = run("ann", "info", URL, "--json")
    assert (code, json.loads(out)["factory"]) == (0, built.factory), error


def test_a_new_ann_of_the_first_snapshot_leaves_the_old_file_until_the_commit(server, tmp_path, monkeypatch):
    monkeypatch.setenv("EDJE_CACHE", str(tmp_path / "cache"))
    url = "s3://bucket/ann.edje"
    with FaultyProxy(server).running() as proxy:
        use_endpoint(monkeypatch, proxy.url)
        write_random_index(tmp_path / "local", SPEC)
        add_ann(tmp_path / "local")
        copy_index(tmp_path / "local", url)
        run_ann_build(url, "auto", 0.95, lambda event: None)
        puts = [path for method, path, _ in proxy.requests if method == "PUT"]
        assert sum(path.endswith("ann/index.faiss") for path in puts) == 1
        assert verify_index(url) == []
