"""Changes of an index on an S3-compatible server equal local changes, also with two writers and faults."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from pipelines import (
    JobStopped,
    append_index,
    compact_index,
    copy_index,
    delete_rows,
    quantize_index,
    update_index,
)
from pipelines.jobs.ann import run_ann_build
from pipelines.jobs.snapshots import history, remove_snapshots, roll_back
from pipelines.progress.events import Event, Progress
from storage_formats import CorruptIndexError, EdjeError, IndexSpec, TokenStore, UsageError, read_rows, verify_index
from storage_formats.format import object_store
from storage_formats.format.index_files import read_index_file
from storage_formats.format.mirror import open_index
from storage_formats.format.object_store import ObjectFolder, ObjectStoreError
from storage_formats.writing.working_copy import working_copy
from tests.command_line import command, environment
from tests.conftest import write_random_index
from tests.object_store import FaultyProxy, every, s3_server, use_endpoint
from tests.pipelines.conftest import run_build, write_photo

pytestmark = pytest.mark.slow  # they start a server
SPEC = IndexSpec(rows=21, shard_size=8, block_shape=(2, 8), embed_dim=4)
CLAIM = "build/claim.json"
numbers = itertools.count()


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


@pytest.fixture
def url(tmp_path):
    """An index of random blocks on the server; `tmp_path / "local"` is the same index on disk."""
    write_random_index(tmp_path / "local", SPEC, failed=frozenset({5}))
    url = f"s3://bucket/change-{next(numbers)}.edje"
    copy_index(tmp_path / "local", url)
    return url


@pytest.fixture
def photo_index(config, photos):
    """An index of photos on disk, and the same index on the server."""
    (photos / "03.jpg").unlink()
    run_build(config(), lambda event: None)
    url = f"s3://bucket/photos-{next(numbers)}.edje"
    copy_index(config().out, url)
    return Path(config().out), url


def use_another_machine(monkeypatch, tmp_path):
    """Another machine has other working copies."""
    monkeypatch.setenv("EDJE_CACHE", str(tmp_path / f"machine-{next(numbers)}"))


def keys_of(url: str) -> set[str]:
    return set(ObjectFolder.open(url).list_keys())


def objects_of(url: str) -> dict[str, bytes]:
    folder = ObjectFolder.open(url)
    return {key: bytes(folder.read_range(key, 0, size)) for key, size in folder.list_sizes().items()}


def files_of(index: str | Path, folder: Path) -> dict[str, bytes]:
    """All files of a verified copy, without the times in `rows/` and the checksums that depend on them."""
    copy = folder / f"copy-{next(numbers)}"
    copy_index(index, copy)
    assert verify_index(copy) == []
    kept = (path for path in copy.rglob("*") if path.is_file() and path.parts[-2] not in ("rows", "manifest"))
    return {str(path.relative_to(copy)): path.read_bytes() for path in kept if path.name != "index.json"}


def test_appends_and_updates_equal_local_ones(photo_index, photos, tmp_path):
    root, url = photo_index
    write_photo(photos / "20.jpg", 20)
    local, remote = (append_index(index, photos, engine="inline") for index in (root, url))
    assert (remote.indexed, remote.duplicates, remote.first_row, remote.snapshot) == (1, local.duplicates, 12, 1)
    assert files_of(url, tmp_path) == files_of(root, tmp_path)
    (photos / "00.jpg").unlink()
    local, remote = (update_index(index, engine="inline") for index in (root, url))
    assert (remote.vanished, remote.new, remote.snapshot) == (local.vanished, local.new, 2) == (1, 0, 2)
    assert files_of(url, tmp_path) == files_of(root, tmp_path)
    assert read_rows(url, columns=["row_id", "uri"]) == read_rows(root, columns=["row_id", "uri"])
    assert CLAIM not in keys_of(url)


def test_a_retry_equals_a_local_one(photo_index, photos, tmp_path):
    root, url = photo_index
    for failed in (row["uri"] for row in read_rows(root).to_pylist() if row["status"] == "failed"):
        write_photo(photos / failed, 30)
    local, remote = (update_index(index, retry_failed=True, engine="inline") for index in (root, url))
    assert (remote.new, remote.snapshot) == (local.new, local.snapshot) == (1, 1)
    assert files_of(url, tmp_path) == files_of(root, tmp_path)


def test_an_append_uploads_its_own_files_only_and_keeps_no_tokens(photo_index, photos, proxy, tmp_path):
    _, url = photo_index
    write_photo(photos / "20.jpg", 20)
    append_index(url, photos / "20.jpg", engine="inline")
    puts = {path.partition(".edje/")[2] for method, path, _ in proxy.requests if method == "PUT"}
    assert {name for name in puts if "/c." in name} == {"tokens/bf16/c.3.0.0", "embeddings/c.3.0"}
    assert proxy.count("GET", "tokens/") == 0
    assert not list((tmp_path / "cache/changes").rglob("tokens/*/c.*"))


def test_a_deletion_reads_neither_tokens_nor_rows(url, proxy, tmp_path):
    with TokenStore.open(url) as store:
        blocks = store.fetch([3])
        assert delete_rows(url, rows=[3, 4]).deleted == (3, 4)
        assert (store.fetch([3]) == blocks).all()
    delete_rows(tmp_path / "local", rows=[3, 4])
    assert [proxy.count("GET", f"{name}/") for name in ("rows", "embeddings")] == [0, 0]
    assert files_of(url, tmp_path).keys() == files_of(tmp_path / "local", tmp_path).keys()
    assert [row["row_id"] for row in read_rows(url).to_pylist()] == [n for n in range(21) if n not in (3, 4)]


@pytest.mark.parametrize("activity", ["downloading", "adding embeddings", "measuring the recall"])
def test_a_stopped_ann_build_changes_nothing(url, tmp_path, activity):
    run_ann_build(url, "IVF4,Flat", 0.95, lambda event: None)
    shutil.rmtree(tmp_path / "cache")
    before, should_stop = objects_of(url), threading.Event()

    def stop(event: Event) -> None:
        if isinstance(event, Progress) and event.activity == activity:
            should_stop.set()

    with pytest.raises(JobStopped, match="the index was not changed"):
        run_ann_build(url, "IVF2,Flat", 0.95, stop, should_stop.is_set)
    assert objects_of(url) == before
    left = {path.name for path in (tmp_path / "cache/changes").rglob("*") if path.parent.name in ("ann", "build")}
    assert left == set()
    assert run_ann_build(url, "IVF2,Flat", 0.95, lambda event: None)["factory"] == "IVF2,Flat"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_ann_build_that_a_signal_ends_changes_nothing(url, tmp_path, proxy, number):
    before = objects_of(url)
    proxy.requests.clear()
    proxy.fault = every(1, "slow", "embeddings/")
    arguments = command("ann", "build", url, "--ann", "IVF2,Flat")
    process = subprocess.Popen(arguments, env=environment(), stderr=subprocess.PIPE, text=True)
    while not proxy.count("GET", "embeddings/"):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    if number == signal.SIGINT:
        assert process.returncode == 1
        assert error.endswith("error: stopped; the index was not changed\n")
        assert objects_of(url) == before
    proxy.fault = lambda method, path: None
    assert run_ann_build(url, "IVF2,Flat", 0.95, lambda event: None)["factory"] == "IVF2,Flat"
    assert CLAIM not in keys_of(url)
    assert verify_index(url) == []
    assert not list((tmp_path / "cache/changes").rglob("embeddings/.*"))


def test_conversions_compactions_rollbacks_and_gc(url, tmp_path):
    local = tmp_path / "local"
    for index in (local, url):
        quantize_index(index, ["fp8"])
        delete_rows(index, rows=range(4))
    compacted = [compact_index(index) for index in (local, url)]
    assert compacted[0].first_row == compacted[1].first_row == 24
    assert compacted[1].row_map == f"{url}/{Path(compacted[0].row_map).relative_to(local).as_posix()}"
    assert files_of(url, tmp_path) == files_of(local, tmp_path)
    for index in (local, url):
        assert roll_back(index, 0).rows == 21
    assert files_of(url, tmp_path) == files_of(local, tmp_path)
    assert [entry.kind for entry in history(url)] == ["build", "delete", "compact", "rollback"]
    removals = [remove_snapshots(index, 1) for index in (local, url)]
    assert removals[1].snapshots == removals[0].snapshots == (0, 1, 2)
    assert (removals[1].files, removals[1].bytes) == (removals[0].files, removals[0].bytes)
    assert keys_of(url) == {path.relative_to(local).as_posix() for path in local.rglob("*") if path.is_file()}


def test_an_erasure_removes_the_objects_of_the_rows(url, tmp_path):
    local = tmp_path / "local"
    for index in (local, url):
        delete_rows(index, rows=[9], erase=True)
    assert keys_of(url) == {path.relative_to(local).as_posix() for path in local.rglob("*") if path.is_file()}
    assert not any(key.endswith("c.1.0.0") for key in keys_of(url))
    assert files_of(url, tmp_path) == files_of(local, tmp_path)


def test_a_conversion_stores_no_source_tokens_and_stops_between_pieces(url, proxy, tmp_path):
    changes, local = tmp_path / "cache/changes", tmp_path / "local"
    calls = itertools.count()

    def stops() -> bool:
        assert not list(changes.rglob("tokens/bf16/c.*"))
        return next(calls) > 3

    def convert(should_stop=lambda: False):
        return quantize_index(url, ["fp8"], should_stop=should_stop)

    with pytest.raises(JobStopped):
        convert(stops)
    receipts = len(list(changes.rglob("receipts/*.json")))
    assert 0 < receipts < SPEC.shards
    before = proxy.count("GET", "tokens/bf16/c.")
    convert()
    assert proxy.count("GET", "tokens/bf16/c.") - before == SPEC.shards - receipts
    quantize_index(local, ["fp8"])
    assert files_of(url, tmp_path) == files_of(local, tmp_path)


def test_ray_workers_convert_an_index_on_the_server(url, proxy, tmp_path):
    quantize_index(tmp_path / "local", ["int8"])
    assert quantize_index(url, ["int8"], workers=1).added == ("int8",)
    assert proxy.count("GET", "tokens/bf16/c.") == SPEC.shards
    assert files_of(url, tmp_path) == files_of(tmp_path / "local", tmp_path)


def test_a_damaged_source_block_stops_the_conversion(url, tmp_path):
    key = "tokens/bf16/c.1.0.0"
    data = bytearray((tmp_path / "local" / key).read_bytes())
    data[2 * 32] ^= 1
    folder = ObjectFolder.open(url)
    for damaged, message in ((bytes(data), "block of row 10 is damaged"), (b"", "has 0 bytes")):
        folder.put(key, lambda: (piece for piece in (damaged,)), length=len(damaged), metadata={})  # noqa: B023
        with pytest.raises(JobStopped, match=message):
            quantize_index(url, ["fp8"])
    remove_snapshots(url, None)
    assert [name for name in keys_of(url) if "fp8" in name] == []


def test_a_reader_of_a_replaced_nearest_neighbour_index_opens_the_index_again(url):
    run_ann_build(url, "IVF4,Flat", 0.95, lambda event: None)
    reader = open_index(url)
    run_ann_build(url, "IVF2,Flat", 0.95, lambda event: None)
    (replaced,) = reader.manifest.ann_files
    with pytest.raises(CorruptIndexError, match=r"is missing or too short; open the index again\. If"):
        read_index_file(reader.root, reader.root / replaced.path)
    again = open_index(url)
    (current,) = again.manifest.ann_files
    assert len(read_index_file(again.root, again.root / current.path)) == current.bytes


def test_a_dropped_precision_is_removed_from_the_store(url):
    quantize_index(url, ["fp8"])
    assert quantize_index(url, drop=["bf16"]).precisions == ("fp8",)
    assert not [key for key in keys_of(url) if "bf16" in key]
    with TokenStore.open(url, "fp8") as store:
        assert len(store.fetch([1, 2])) == 2


def test_another_machine_rolls_back_to_a_dropped_precision(url, monkeypatch, tmp_path):
    delete_rows(url, rows=[1])
    quantize_index(url, ["fp8"], drop=["bf16"])
    use_another_machine(monkeypatch, tmp_path)
    entry = roll_back(url, 0)
    assert (entry.rows, entry.precisions) == (21, ("bf16",))
    assert files_of(url, tmp_path) == files_of(tmp_path / "local", tmp_path)


def test_only_the_history_reads_earlier_snapshots(url, run, proxy, monkeypatch, tmp_path):
    delete_rows(url, rows=[1])
    use_another_machine(monkeypatch, tmp_path)
    before = proxy.count("GET", "snapshots")
    assert run("failures", url)[0] == 0
    assert delete_rows(url, rows=[2], dry_run=True).left == 19
    assert proxy.count("GET", "snapshots") == before
    assert [entry.snapshot for entry in history(url)] == [0, 1]


def test_a_change_removes_what_killed_downloads_left(url, tmp_path):
    delete_rows(url, rows=[1])
    root = next(path for path in (tmp_path / "cache/changes").iterdir() if path.is_dir())
    leftover = root / f"tokens/bf16/.c.1.0.0.{'0123456789abcdef' * 2}"
    leftover.touch()
    delete_rows(url, rows=[2])
    assert not leftover.exists()


def test_a_working_copy_that_cannot_be_removed_is_an_error(url, monkeypatch, tmp_path):
    delete_rows(url, rows=[1])
    root = next(path for path in (tmp_path / "cache/changes").iterdir() if path.is_dir())
    root.rename(tmp_path / "moved")
    root.symlink_to(tmp_path / "moved")  # rmtree removes no symbolic links
    with monkeypatch.context() as patch:
        use_another_machine(patch, tmp_path)
        delete_rows(url, rows=[2])
    with pytest.raises(OSError, match="symbolic link"):
        delete_rows(url, rows=[3])
    root.unlink()
    assert delete_rows(url, rows=[3]).left == 18


def test_a_second_writer_is_refused_with_the_name_of_the_first(url, monkeypatch, tmp_path):
    with working_copy(url):
        with pytest.raises(EdjeError, match=rf"process {os.getpid()} on .* is changing {url}"):
            delete_rows(url, rows=[1])
        use_another_machine(monkeypatch, tmp_path)
        for write in (lambda: delete_rows(url, rows=[1]), lambda: copy_index(tmp_path / "local", url)):
            with pytest.raises(EdjeError, match=rf"another copy .* or change .*\(process {os.getpid()} on .*{CLAIM}"):
                write()
        assert delete_rows(url, rows=[1], dry_run=True).deleted == (1,)
    assert delete_rows(url, rows=[1]).snapshot == 1


@pytest.mark.parametrize(("claim", "message"), [("gone", "gone or was replaced"), ("own", "another writer changed")])
def test_a_writer_never_takes_the_place_of_another_snapshot(url, monkeypatch, tmp_path, claim, message):
    """Somebody removed the claim of a writer that was only slow, and another writer committed."""
    folder = ObjectFolder.open(url)

    def change_slowly() -> None:
        with working_copy(url) as copy:
            data = folder.read(CLAIM, 1000).data
            folder.delete([CLAIM])
            with monkeypatch.context() as patch:
                use_another_machine(patch, tmp_path)
                delete_rows(url, rows=[2])
            if claim == "own":
                folder.put(CLAIM, lambda: (piece for piece in (data,)), length=len(data), metadata={})
            delete_rows(copy.root, [7])

    with pytest.raises(EdjeError, match=message) as raised:
        change_slowly()
    assert str(tmp_path) not in str(raised.value)
    assert [row["row_id"] for row in read_rows(url).to_pylist()] == [n for n in range(21) if n != 2]
    assert delete_rows(url, rows=[7]).snapshot == 2
    assert len(read_rows(url)) == 19


@pytest.mark.parametrize("claim", ["gone", "replaced"])
def test_a_writer_without_its_claim_deletes_no_objects(url, claim):
    folder, key = ObjectFolder.open(url), "tokens/fp8/c.0.0"
    with working_copy(url) as copy:
        folder.delete([CLAIM])
        if claim == "replaced":
            folder.put(CLAIM, lambda: (piece for piece in (b"{}",)), length=2, metadata={})
        folder.put(key, lambda: (piece for piece in (b"new",)), length=3, metadata={})
        with pytest.raises(EdjeError, match=f"{CLAIM}.* is gone or was replaced, so .* run 'edje-index gc {url}'"):
            copy.remove_unnamed_objects()
    assert key in keys_of(url)
    folder.delete([CLAIM])
    remove_snapshots(url, None)
    assert key not in keys_of(url)


def test_a_writer_leaves_the_claim_of_another(url, monkeypatch, tmp_path):
    folder = ObjectFolder.open(url)
    with working_copy(url):
        folder.delete([CLAIM])
        folder.put(CLAIM, lambda: (piece for piece in (b"{}",)), length=2, metadata={})
    assert CLAIM in keys_of(url)


def test_of_two_writers_one_wins_and_nothing_is_lost(url, tmp_path):
    wins = 0
    for row in (0, 10):
        processes = []
        for number in range(2):
            cache = {"EDJE_CACHE": str(tmp_path / f"machine-{number}")}
            arguments = command("delete", url, "--rows", str(row + number))
            surroundings = {**environment(), **cache}
            processes.append(subprocess.Popen(arguments, env=surroundings, stderr=subprocess.PIPE, text=True))
        errors = [process.communicate()[1] for process in processes]
        done = [process.returncode == 0 for process in processes]
        assert any(done), errors
        assert all(not error or "running or was stopped" in error for error in errors)
        left = {each["row_id"] for each in read_rows(url).to_pylist()}
        assert [row + number not in left for number in range(2)] == done
        wins += sum(done)
    assert len(read_rows(url)) == 21 - wins
    assert files_of(url, tmp_path)


def test_a_change_of_another_machine_is_seen(url, monkeypatch, tmp_path):
    delete_rows(url, rows=[1])
    with monkeypatch.context() as patch:
        use_another_machine(patch, tmp_path)
        delete_rows(url, rows=[2])
    assert delete_rows(url, rows=[3]).left == 18
    assert files_of(url, tmp_path)


def test_a_stopped_update_begins_again_after_a_change_of_another_machine(photo_index, photos, monkeypatch, tmp_path):
    """Both change the index from the same snapshot, so they write different files under the same names."""
    _, url = photo_index
    for number in range(20, 28):
        write_photo(photos / f"{number}.jpg", number)
    changes = tmp_path / "cache/changes"
    with pytest.raises(JobStopped):
        update_index(url, engine="inline", should_stop=lambda: any(changes.rglob("receipts/*.json")))
    assert CLAIM not in keys_of(url)
    with monkeypatch.context() as patch:
        use_another_machine(patch, tmp_path)
        assert append_index(url, photos / "27.jpg", engine="inline").first_row == 12
    result = update_index(url, photos, engine="inline")
    assert (result.new, result.first_row, result.snapshot) == (7, 16, 2)
    assert files_of(url, tmp_path)


@pytest.mark.parametrize("fault", ["reset", "503", "slow", "truncate", "lost"])
def test_changes_survive_disturbed_requests(url, tmp_path, proxy, fault):
    proxy.fault = every(4, fault)
    delete_rows(url, rows=[3])
    compact_index(url)
    proxy.fault = lambda method, path: None
    local = tmp_path / "local"
    delete_rows(local, rows=[3])
    compact_index(local)
    assert files_of(url, tmp_path) == files_of(local, tmp_path)


@pytest.fixture
def impatient(monkeypatch):
    """A store that does not respond is given up soon."""
    monkeypatch.setattr(object_store, "_RETRIES", 0)
    monkeypatch.setattr(object_store, "_ATTEMPTS", 2)


@pytest.mark.parametrize("lost", [True, False])
def test_a_committed_change_needs_no_further_response(url, proxy, impatient, lost):
    """The response to the commit is lost or not; afterwards, all but one read of the new `index.json` fails."""

    def fault(method: str, path: str) -> str | None:
        puts, is_root = proxy.count("PUT", "edje/index.json"), path.endswith("edje/index.json")
        if lost and method == "PUT" and is_root and puts == 1:
            return "lost"
        return "503" if is_root and method == "GET" and puts and not lost else None

    proxy.fault = fault
    assert delete_rows(url, rows=[3]).snapshot == 1
    proxy.fault = lambda method, path: None
    assert len(read_rows(url)) == 20


@pytest.mark.parametrize("fault", ["lost", "503"])
def test_a_commit_whose_fate_is_unknown_says_so(url, proxy, impatient, tmp_path, fault):
    """After the first attempt to commit, `index.json` can be neither read nor written."""

    def disturb(method: str, path: str) -> str | None:
        puts = proxy.count("PUT", "edje/index.json")
        if not path.endswith("edje/index.json") or not puts:
            return None
        return fault if method == "PUT" and puts == 1 else "503"

    proxy.fault = disturb
    with pytest.raises(EdjeError, match=rf"^the change may have been made: .*edje-index history {url}"):
        delete_rows(url, rows=[3])
    proxy.fault = lambda method, path: None
    assert [entry.kind for entry in history(url)] == ["build", "delete"][: 2 if fault == "lost" else 1]
    assert delete_rows(url, rows=[3, 4]).left == 19
    assert files_of(url, tmp_path)


def test_a_commit_that_was_refused_is_not_called_uncertain(url, proxy, impatient):
    proxy.fault = lambda method, path: "503" if method == "PUT" and path.endswith("edje/index.json") else None
    with pytest.raises(ObjectStoreError, match=r"a request for .*/index.json failed") as raised:
        delete_rows(url, rows=[3])
    assert "may have been made" not in str(raised.value)
    proxy.fault = lambda method, path: None
    assert [entry.kind for entry in history(url)] == ["build"]
    assert delete_rows(url, rows=[3]).snapshot == 1


def test_a_killed_change_resumes_on_the_same_machine(url, tmp_path, proxy, monkeypatch):
    delete_rows(url, rows=[3])
    expected = files_of(url, tmp_path)
    proxy.fault = every(1, "slow", "c.3.")
    process = subprocess.Popen(command("compact", url), env=environment(), stderr=subprocess.DEVNULL)
    while not proxy.count("PUT", "c.3."):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    proxy.fault = lambda method, path: None
    assert files_of(url, tmp_path) == expected
    with monkeypatch.context() as patch:
        use_another_machine(patch, tmp_path)
        with pytest.raises(EdjeError, match=rf"running or was stopped \(process {process.pid} on "):
            delete_rows(url, rows=[4])
    assert compact_index(url).rows == 20
    assert CLAIM not in keys_of(url)
    assert files_of(url, tmp_path)


def test_a_process_that_dies_after_its_commit_has_changed_the_index(url, tmp_path, monkeypatch):
    """The working copy does not know yet that its commit succeeded."""
    delete_rows(url, rows=[3])
    root = next(path for path in (tmp_path / "cache/changes").iterdir() if path.is_dir())
    before = tmp_path / "before"
    shutil.copytree(root, before)
    delete_rows(url, rows=[4])
    shutil.copy(before / "index.json", root / "index.json")
    (root / "marker").touch()
    assert delete_rows(url, rows=[5]).left == 18
    assert (root / "marker").exists()  # it was not taken for the change of another writer
    assert files_of(url, tmp_path)


def test_what_cannot_be_changed_is_refused(url, run, tmp_path):
    with pytest.raises(UsageError, match="there is no index at s3://bucket/nothing"):
        delete_rows("s3://bucket/nothing", rows=[1])
    assert "nothing/build/claim.json" not in keys_of("s3://bucket")
    code, _, error = run("delete", "https://example.invalid/photos.edje", "--rows", 1)
    assert code == 2
    assert "can only be read" in error
    code, out, error = run("history", url, "--json")
    assert (code, json.loads(out)["index"]) == (0, url), error
    code, out, error = run("failures", url, "--json")
    assert (code, [row["row_id"] for row in json.loads(out)["failures"]]) == (0, [5]), error
    delete_rows(url, rows=range(21))
    with pytest.raises(EdjeError, match=rf"compact {url}: all its rows are deleted"):
        compact_index(url)
