"""The mechanism of change: the lock, the journal, and errors after a commit."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys

import pytest

from pipelines import delete_rows, quantize_index
from pipelines.jobs.snapshots import remove_snapshots, roll_back
from storage_formats import (
    CorruptIndexError,
    EdjeError,
    IndexSpec,
    Manifest,
    change,
    verify_index,
)
from storage_formats.atomic import private_path
from storage_formats.change import UnfinishedChangeError, begin_change, collect_garbage
from storage_formats.format.directory import locked
from storage_formats.format.journal import Journal, read_journal, unfinished_journal
from storage_formats.format.places import Directory
from tests.conftest import environment, write_files

SPEC = IndexSpec(22, 8, (2, 32), 4)


def test_two_drivers_never_share_an_index(tmp_path):
    root = tmp_path / "index"
    with locked(root):
        with pytest.raises(EdjeError, match=f"process {os.getpid()} on"), locked(root):
            pass
        assert root.exists()
    assert not root.exists()
    with locked(root):
        pass


# A change that waits between its start and its commit. Its argument is an index. Locks
# have no effect, as on a network file system that keeps them on one machine.
OTHER_MACHINE = """
import fcntl, sys
fcntl.flock = lambda *_: None
from storage_formats.change import begin_change
with begin_change(sys.argv[1], "delete") as begun:
    print("begun", flush=True)
    input()
    begun.commit(begun.new_snapshot(begun.index.manifest, {}))
"""


def test_locks_of_one_machine_do_not_lose_a_change_of_another(index, monkeypatch):
    root, _ = index
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    with subprocess.Popen(
        [sys.executable, "-c", OTHER_MACHINE, root],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as other:
        assert other.stdout.readline() == "begun\n"
        assert delete_rows(root, [1]).snapshot == 1
        message = other.communicate("\n")[1]
    assert other.returncode == 1
    assert "another process has changed" in message
    assert "nothing was committed" in message
    assert Manifest.load(root).snapshot.deleted_rows == 1
    assert delete_rows(root, [2]).snapshot == 2
    assert verify_index(root) == []
    assert read_journal(Directory(root)) is None


def test_the_lock_file_of_an_index_stays(index):
    layout = Directory(index[0])
    delete_rows(layout.root, [1])
    inode = layout.lock.stat().st_ino
    assert layout.lock.read_bytes() == b""
    delete_rows(layout.root, [2])
    assert layout.lock.stat().st_ino == inode


def kill(root, kind, plan=None):
    """Leave a change as a killed process does. Return its journal."""
    with contextlib.suppress(KeyboardInterrupt), begin_change(root, kind) as begun:
        begun.store_plan(plan or {})
        raise KeyboardInterrupt
    if plan is None:
        Journal(kind, {}, begun._journal.base).write(Directory(root))


@pytest.mark.parametrize("has_journal", [True, False])
def test_files_of_killed_writers_are_removed(index, has_journal):
    root, _ = index
    names = ("tokens/offset/c.0.0", "rows/rows-00000099.parquet", "ann/new.faiss")
    if has_journal:
        kill(root, "append")
    write_files(root, dict.fromkeys(names, ""))
    paths = [root / name for name in names]
    paths.append(private_path(root / "index.json", Directory(root).staging))
    paths[-1].touch()
    if has_journal:
        delete_rows(root, [1])
    else:
        collect_garbage(root)
    assert not [path for path in paths if path.exists()]


def test_a_damaged_snapshot_stops_no_recovery(index):
    """As after a restore that was stopped: `index.json` is newer than other files."""
    root, _ = index
    delete_rows(root, [1])
    delete_rows(root, [2])
    quantize_index(root, ["fp8"])
    (root / Manifest.load(root).shard_tables[-1].path).unlink()
    kill(root, "repair")
    kill(root, "append", {"shards": 3})
    assert read_journal(Directory(root)).kind == "append"
    with pytest.raises(CorruptIndexError):
        remove_snapshots(root, None)
    assert read_journal(Directory(root)) is None
    kill(root, "repair")
    assert roll_back(root, 1).snapshot == 3
    remove_snapshots(root, 1)
    assert verify_index(root) == []


FULL_DISK = """
mount -t tmpfs -o size=$1k tmpfs "$2" && cp -r "$3" "$2/i" || exit 2
head -c 100000000 /dev/zero > "$2/fill" 2> /dev/null
exec "$4" -c "
import sys
from storage_formats.change import collect_garbage
print(collect_garbage(sys.argv[1], 1))" "$2/i"
"""


def test_garbage_is_removed_on_a_full_disk(index, tmp_path):
    root, _ = index
    # only the manifest of one snapshot can be removed, which is one page
    delete_rows(root, [1])
    shutil.rmtree(root / "build")
    (tmp_path / "disk").mkdir()
    unshare = ["unshare", "-rm", "bash", "-c", FULL_DISK, "bash", "1000"]
    done = subprocess.run(
        [*unshare, tmp_path / "disk", root, sys.executable],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    if done.returncode == 2:
        pytest.skip(f"needs mount namespaces: {done.stderr}")
    assert "Removal(snapshots=(0,)" in done.stdout, done.stderr


def test_directories_of_a_new_index_survive_a_loss_of_power(tmp_path, monkeypatch):
    flushed = set()
    fsync = os.fsync

    def note(fd):
        flushed.add(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    with locked(tmp_path / "a/b/index"):
        pass
    assert {str(tmp_path / each) for each in ("", "a", "a/b")} <= flushed


def test_a_change_with_work_is_resumed_refused_or_discarded(index):
    root, _ = index
    with begin_change(root, "quantize", {"to": ["fp8"]}) as begun:
        begun.store_plan({"shards": 3})
    assert unfinished_journal(Directory(root)).kind == "quantize"
    for kind, request in (("quantize", {"to": ["int8"]}), ("delete", {})):
        with (
            pytest.raises(UnfinishedChangeError, match="'quantize' of") as caught,
            begin_change(root, kind, request),
        ):
            pass
        assert caught.value.remedy == "discard"
    with begin_change(root, "quantize", {"to": ["fp8"]}) as begun:
        assert begun.plan == {"shards": 3}
    messages = []
    assert collect_garbage(root, notify=messages.append).discarded == "quantize"
    assert "which had 0 finished shards" in messages[0]
    assert read_journal(Directory(root)) is None
    assert verify_index(root) == []


@pytest.mark.parametrize("damage", ["", "[]", '{"kind": "append"}', "[" * 100_000])
def test_a_damaged_journal_is_one_clear_error_until_it_is_discarded(index, damage):
    root, _ = index
    write_files(root, {"build/journal.json": damage})
    with pytest.raises(CorruptIndexError, match=r"journal\.json") as caught:
        delete_rows(root, [1])
    assert caught.value.remedy == "discard"
    remove_snapshots(root, None)
    assert delete_rows(root, [1]).deleted == (1,)


def test_trouble_after_the_commit_is_told_and_the_next_change_ends_it(
    index, monkeypatch
):
    root, _ = index
    real = change.remove_build

    def fail(*arguments):
        if Manifest.load(root).snapshot.number:
            raise OSError(5, "Input/output error")
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(change, "remove_build", fail)
        with pytest.raises(EdjeError, match="the change is committed, but"):
            delete_rows(root, [1])
    assert Manifest.load(root).snapshot.number == 1
    assert verify_index(root) == []
    assert unfinished_journal(Directory(root)) is None
    assert delete_rows(root, [2]).snapshot == 2
    assert not Directory(root).journal.exists()
