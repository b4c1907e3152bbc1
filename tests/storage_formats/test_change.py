"""The mechanism of change: the lock, the journal, and every state that a kill can leave."""

from __future__ import annotations

import functools
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipelines import compact_index, delete_rows, quantize_index
from pipelines.jobs.snapshots import history, remove_snapshots, roll_back
from storage_formats import CorruptIndexError, EdjeError, IndexSpec, Manifest, TokenStore, verify_index
from storage_formats.change import (
    UnfinishedChangeError,
    begin_change,
    is_unfinished,
    locked,
    read_journal,
)
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.tombstones import live_rows
from tests.conftest import same_bits, write_random_index

SPEC = IndexSpec(rows=22, shard_size=8, block_shape=(2, 32), embed_dim=4)
KILLED = 77


@pytest.fixture
def index(tmp_path):
    root = tmp_path / "index"
    return root, write_random_index(root, SPEC)


def test_two_drivers_never_share_an_index(tmp_path):
    root = tmp_path / "index"
    with locked(root):
        with pytest.raises(EdjeError, match=f"process {os.getpid()} on .* is working on"), locked(root):
            pass
        assert root.exists()
    assert not root.exists()
    with locked(root):
        pass


def test_directories_of_a_new_index_survive_a_loss_of_power(tmp_path, monkeypatch):
    flushed = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (flushed.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    with locked(tmp_path / "a/b/index"):
        pass
    assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a/b")} <= set(flushed)


def test_a_change_with_work_is_resumed_refused_or_discarded_in_words(index, capsys):
    root, _ = index
    with begin_change(root, "quantize", {"to": ["fp8"]}) as change:
        change.store_plan({"shards": 3})
    assert is_unfinished(root).kind == "quantize"
    advice = rf"'quantize' of .* has not finished .*or discard it with 'edje-index gc {re.escape(str(root))}'"
    for kind, request in (("quantize", {"to": ["int8"]}), ("delete", {})):
        with pytest.raises(UnfinishedChangeError, match=advice), begin_change(root, kind, request):
            pass
    with begin_change(root, "quantize", {"to": ["fp8"]}) as change:
        assert change.plan == {"shards": 3}
    messages = []
    with begin_change(root, "gc", discards=True, notify=messages.append):
        pass
    assert messages == ["discarding the unfinished 'quantize', which had 0 finished shards"]
    assert read_journal(root) is None
    assert verify_index(root) == []


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"kind": "append"}', b"[" * 100_000])
def test_a_damaged_journal_is_one_clear_error_until_it_is_discarded(index, damage):
    root, _ = index
    layout = Layout(root)
    layout.build.mkdir()
    layout.journal.write_bytes(damage)
    with pytest.raises(CorruptIndexError, match=r"journal\.json.*edje-index gc"):
        delete_rows(root, [1])
    remove_snapshots(root, None)
    assert delete_rows(root, [1]).deleted == (1,)


def test_trouble_after_the_commit_is_a_message_and_the_next_change_ends_it(index, monkeypatch):
    root, _ = index
    messages = []
    with begin_change(root, "delete", notify=messages.append) as change:
        monkeypatch.setattr("storage_formats.change.write_array_shapes", fail)
        change.commit(change.index.manifest, {"rows": 0})
        monkeypatch.undo()
        monkeypatch.setattr("storage_formats.change.remove_build", fail)
    monkeypatch.undo()
    assert len(messages) == 2
    assert all("the change is committed, but" in message for message in messages)
    assert Manifest.load(root).snapshot.number == 1
    assert is_unfinished(root) is None
    assert delete_rows(root, [1]).snapshot == 2
    assert not Layout(root).build.exists()


def fail(*_: object, **__: object) -> None:
    raise OSError(5, "Input/output error")


def delete_some(root: Path) -> None:
    delete_rows(root, [3, 17])


def erase_some(root: Path) -> None:
    delete_rows(root, [3], erase=True)


CHANGES: dict[str, Callable[[Path], object]] = {
    "delete": delete_some,
    "erase": erase_some,
    "compact": compact_index,
    "quantize": functools.partial(quantize_index, to=["fp8"]),
    "requantize": functools.partial(quantize_index, to=["int8"], drop=["bf16"]),
    "rollback": functools.partial(roll_back, snapshot=0),
    "gc": functools.partial(remove_snapshots, keep=1),
}
_MUTATORS = ("replace", "rename", "unlink", "rmdir", "mkdir", "fsync", "ftruncate")


def run_until(count: int, change: Callable[[Path], object], root: Path) -> bool:
    """Run `change` in a child process that is killed at its call number `count` that changes files.

    Return whether the child was killed.
    """
    child = os.fork()
    if child == 0:
        calls = 0

        def counting(call: Callable[..., object], *arguments: object, **options: object) -> object:
            nonlocal calls
            calls += 1
            if calls == count:
                os._exit(KILLED)
            return call(*arguments, **options)

        try:
            for name in _MUTATORS:
                setattr(os, name, functools.partial(counting, getattr(os, name)))
            change(root)
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED)
    return code == KILLED


def state(root: Path) -> tuple[object, ...]:
    """What a reader sees: rows, blocks, precisions and the kinds of the changes."""
    opened = CommittedIndex.open(root)
    rows = live_rows(opened)
    with TokenStore(opened, opened.manifest.spec.precisions[-1]) as store:
        blocks = store.fetch(rows)
    kinds = [entry.kind for entry in history(root)]
    return rows.tolist(), blocks.view(np.uint16).tobytes(), opened.manifest.spec.precisions, kinds


@pytest.mark.parametrize("step", [29, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CHANGES)
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_index(index, tmp_path, name, step):
    """The next run of the same command gives the state of an undisturbed run, and no file is left."""
    root, _ = index
    if name in ("compact", "rollback", "gc"):
        delete_some(root)
    fresh = tmp_path / "fresh"
    shutil.copytree(root, fresh)
    before = state(root)
    CHANGES[name](fresh)
    after, count = state(fresh), min(step, 11)
    while True:
        victim = tmp_path / "victim"
        shutil.copytree(root, victim)
        was_killed = run_until(count, CHANGES[name], victim)
        assert verify_index(victim) == []
        seen = state(victim)
        if name != "erase":  # of three changes: delete, compact, gc
            assert seen in (before, after)
        if seen == before or name in ("erase", "gc", "requantize"):
            CHANGES[name](victim)
            assert state(victim) == after
        else:
            remove_snapshots(victim, None)
        assert verify_index(victim) == []
        assert not Layout(victim).build.exists()
        names = {path.relative_to(victim) for path in victim.rglob("*") if path.is_file()}
        tables = {name for name in names if name.parent.name == "manifest"}
        expected = {path.relative_to(fresh) for path in fresh.rglob("*") if path.is_file()}
        assert names - tables == expected - {name for name in expected if name.parent.name == "manifest"}
        shutil.rmtree(victim)
        if not was_killed:
            break
        count += step
    assert count > 5


def test_blocks_of_rows_that_stay_are_the_same(index):
    root, blocks = index
    delete_rows(root, [3], erase=True)
    with TokenStore.open(root) as store:
        moved = store.translate(range(22))
        assert moved[3] == -1
        kept = np.array([row for row in range(22) if row != 3])
        assert moved[8:].tolist() == list(range(8, 22)), "rows of other shards keep their ids"
        assert (moved[kept[:7]] >= 24).all()
        assert same_bits(store.fetch(moved[kept]), blocks[kept])
