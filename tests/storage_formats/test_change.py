"""The mechanism of change: the lock, the journal, and errors after a commit."""

from __future__ import annotations

import os

import numpy as np
import pytest

from pipelines import delete_rows
from pipelines.jobs.snapshots import remove_snapshots
from storage_formats import (
    CorruptIndexError,
    EdjeError,
    IndexSpec,
    Manifest,
    TokenStore,
    change,
    verify_index,
)
from storage_formats.change import (
    UnfinishedChangeError,
    begin_change,
    collect_garbage,
    read_journal,
    unfinished_journal,
)
from storage_formats.format.layout import Layout
from storage_formats.lock import locked
from tests.conftest import same_bits, write_random_index

SPEC = IndexSpec(rows=22, shard_size=8, block_shape=(2, 32), embed_dim=4)


@pytest.fixture
def index(tmp_path):
    root = tmp_path / "index"
    return root, write_random_index(root, SPEC)


def test_two_drivers_never_share_an_index(tmp_path):
    root = tmp_path / "index"
    with locked(root):
        with (
            pytest.raises(
                EdjeError, match=f"process {os.getpid()} on .* is working on"
            ),
            locked(root),
        ):
            pass
        assert root.exists()
    assert not root.exists()
    with locked(root):
        pass


def test_directories_of_a_new_index_survive_a_loss_of_power(tmp_path, monkeypatch):
    flushed = []
    fsync = os.fsync
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: (flushed.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)),
    )
    with locked(tmp_path / "a/b/index"):
        pass
    assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a/b")} <= set(flushed)


def test_a_change_with_work_is_resumed_refused_or_discarded_in_words(index, capsys):
    root, _ = index
    with begin_change(root, "quantize", {"to": ["fp8"]}) as begun:
        begun.store_plan({"shards": 3})
    assert unfinished_journal(root).kind == "quantize"
    advice = r"'quantize' of .* has not finished .*or discard it$"
    for kind, request in (("quantize", {"to": ["int8"]}), ("delete", {})):
        with (
            pytest.raises(UnfinishedChangeError, match=advice) as caught,
            begin_change(root, kind, request),
        ):
            pass
        assert caught.value.remedy == "discard"
    with begin_change(root, "quantize", {"to": ["fp8"]}) as begun:
        assert begun.plan == {"shards": 3}
    messages = []
    collect_garbage(root, notify=messages.append)
    assert messages == [
        "discarding the unfinished 'quantize', which had 0 finished shards"
    ]
    assert read_journal(root) is None
    assert verify_index(root) == []


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"kind": "append"}', b"[" * 100_000])
def test_a_damaged_journal_is_one_clear_error_until_it_is_discarded(index, damage):
    root, _ = index
    layout = Layout(root)
    layout.build.mkdir()
    layout.journal.write_bytes(damage)
    with pytest.raises(CorruptIndexError, match=r"journal\.json.*discard it") as caught:
        delete_rows(root, [1])
    assert caught.value.remedy == "discard"
    remove_snapshots(root, None)
    assert delete_rows(root, [1]).deleted == (1,)


@pytest.mark.parametrize("name", ["write_array_shapes", "remove_build"])
def test_trouble_after_the_commit_is_told_and_the_next_change_ends_it(
    index, monkeypatch, name
):
    root, _ = index

    real = getattr(change, name)

    def fail(*arguments: object) -> None:
        if Manifest.load(root).snapshot.number:
            raise OSError(5, "Input/output error")
        real(*arguments)

    def delete_nothing() -> None:
        with begin_change(root, "delete") as begun:
            manifest = begun.new_snapshot(begun.index.manifest, {"rows": 0})
            begun.commit(manifest)

    with monkeypatch.context() as patch:
        patch.setattr(change, name, fail)
        with pytest.raises(
            EdjeError, match=r"the change is committed, but .*does what is left"
        ):
            delete_nothing()
    assert Manifest.load(root).snapshot.number == 1
    assert verify_index(root) == []
    assert unfinished_journal(root) is None
    assert delete_rows(root, [1]).snapshot == 2
    assert not Layout(root).build.exists()


def test_blocks_of_rows_that_stay_are_the_same(index):
    root, blocks = index
    delete_rows(root, [3], erase=True)
    with TokenStore.open(root) as store:
        moved = store.translate(range(22))
        assert moved[3] == -1
        kept = np.array([row for row in range(22) if row != 3])
        assert moved[8:].tolist() == list(range(8, 22)), (
            "rows of other shards keep their ids"
        )
        assert (moved[kept[:7]] >= 24).all()
        assert same_bits(store.fetch(moved[kept]), blocks[kept])
