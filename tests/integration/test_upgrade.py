"""Upgrades of indexes of earlier formats: the same rows, tokens and hits, also if the
upgrade was killed.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edje_index import TokenIndex
from pipelines import copy_index, delete_rows, repair_index
from pipelines.jobs.snapshots import history, remove_snapshots, roll_back, set_columns
from storage_formats import Manifest, TokenStore, UsageError, read_rows, verify_index
from storage_formats.format.journal import Journal, manifest_digest
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.places import Directory
from storage_formats.format.rows import TIMING_COLUMNS, read_all_rows
from storage_formats.format.tombstones import input_hash
from storage_formats.upgrade import upgrade_index
from tests.conftest import REPO, all_files, problems_and_counts

GOLDEN = REPO / "tests/golden/format_1_4"
MODEL = REPO / "tests/golden/release_0_1/model"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "index", tmp_path / "index"))


def contents(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.parent.name != "build"
    }


def rows_of_snapshots(root: Path) -> dict[str, Any]:
    return {
        number: read_all_rows(CommittedIndex.open(root, int(number)))
        .drop_columns(list(TIMING_COLUMNS))
        .to_pylist()
        for number in EXPECTED["rows"]
    }


def test_rows_tokens_and_hits_are_the_same(old):
    before = contents(old)
    assert upgrade_index(old) == 7
    assert Manifest.load(old).to_json()["format_version"] == "3.0"
    assert problems_and_counts(old) == []
    assert rows_of_snapshots(old) == EXPECTED["rows"]
    with np.load(GOLDEN / "blocks.npz") as blocks:
        for name in ("bf16", "nvfp4"):
            with TokenStore.open(old, name) as store:
                assert store.row_ids().tolist() == blocks["row_ids"].tolist()
                tokens = store.fetch(blocks["row_ids"]).view(np.uint16)
                np.testing.assert_array_equal(tokens, blocks[name])
    index = TokenIndex.open(old, model=MODEL)
    for where, expected in EXPECTED["hits"].items():
        hits = index.search(
            "a dog plays in the snow",
            k=5,
            pool=8,
            where=None if where == "None" else where,
        )
        assert [[hit.row_id, hit.uri] for hit in hits] == [
            each[:2] for each in expected
        ]
        scores = [each[2] for each in expected]
        assert [hit.score for hit in hits] == pytest.approx(scores, abs=1e-5)
    after = contents(old)
    for path, data in before.items():
        folder = path.partition("/")[0]
        if folder in ("tokens", "checksums", "embeddings", "ann"):
            assert path.endswith("zarr.json") or after[path] == data
    assert not {path.partition("/")[0] for path in after} & {"filters", "hashes"}
    assert upgrade_index(old) == 0
    assert contents(old) == after


def test_values_of_users_and_removed_inputs_are_known(old):
    upgrade_index(old)
    (row,) = EXPECTED["rows"]["5"][4:5]
    named = (row["uri"], row["uri_raw"], row["content_hash"])
    assert CommittedIndex.open(old).removed == {input_hash(*named)}
    assert [entry.kind for entry in history(old)] == [
        *("build", "append", "edit", "edit", "update", "edit", "delete")
    ]
    # an update of the earlier version has replaced one value of a user
    set_columns(old, [0, 1, 2, 10], unset=["title", "stars"])
    rows = read_rows(old, [0, 1, 2, 3, 10], ["title", "stars"]).to_pylist()
    assert [row["title"] for row in rows] == [
        "photo 0",
        "a new title of the source",
        "photo 2",
        "photo 3, corrected",
        "photo 8",
    ]
    assert [row["stars"] for row in rows] == [0, 1, 2, 3, 8]
    roll_back(old, 5)
    assert len(read_rows(old)) == 9
    assert problems_and_counts(old) == []


def test_readers_and_changes_name_the_upgrade(old, tmp_path, run):
    for read in (TokenStore.open, read_rows, verify_index, history):
        with pytest.raises(UsageError, match=r"format version 1\.4.*upgrade") as caught:
            read(old)
        assert caught.value.remedy == "upgrade"
    with pytest.raises(UsageError, match="upgrade"):
        copy_index(old, tmp_path / "copy")
    assert "edje-index upgrade INDEX" in run("info", old)[2]
    before = all_files(old)
    for change in (partial(delete_rows, rows=[0]), repair_index, remove_snapshots):
        with pytest.raises(UsageError, match="upgrade"):
            change(old)
    assert all_files(old) == before
    out = run.ok("upgrade", old)
    assert "7 snapshots upgraded" in out
    out = run.json("upgrade", old)
    assert out["upgraded"] == 0
    run.refused("upgrade", tmp_path / "nowhere")


def test_an_unfinished_change_is_discarded(old):
    layout = Directory(old)
    layout.erased.mkdir(parents=True)
    moved = layout.erased / "tokens/bf16/c.0.0.0"
    moved.parent.mkdir(parents=True)
    moved.write_bytes(b"not committed")
    layout.receipts.mkdir()
    (layout.receipts / "00000009.json").write_text("{}")
    (old / "rows/00000009.parquet").write_bytes(b"x")
    Journal("append", {}, manifest_digest(layout), plan={}).write(layout)
    said: list[str] = []
    assert upgrade_index(old, said.append) == 7
    assert said == ["discarding the unfinished 'append'"]
    assert problems_and_counts(old) == []
    assert {path.name for path in layout.build.iterdir()} <= {"lock", "staging"}
    assert remove_snapshots(old).files == 0


def test_a_committed_erasure_is_finished_first(old):
    layout = Directory(old)
    for name in ("rows/00000000.parquet", "tokens/bf16/c.1.0.0"):
        moved = layout.erased / name
        moved.parent.mkdir(parents=True)
        (old / name).rename(moved)
    Journal("delete", {}, "0" * 64, plan={}).write(layout)
    with pytest.raises(UsageError, match="upgrade"):
        read_rows(old)
    assert upgrade_index(old) == 7
    assert problems_and_counts(old) == []
    assert rows_of_snapshots(old) == EXPECTED["rows"]


class Killed(BaseException):
    pass


@contextlib.contextmanager
def killed_at(monkeypatch: pytest.MonkeyPatch, step: int) -> Iterator[None]:
    """End the code in the block at its system call `step` that changes a directory."""
    calls = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > step:
                raise Killed
            return function(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", counted(__import__("os").replace))
        patch.setattr(Path, "replace", counted(Path.replace))
        patch.setattr(Path, "unlink", counted(Path.unlink))
        patch.setattr(shutil, "rmtree", counted(shutil.rmtree))
        yield


@pytest.mark.parametrize(
    "step", [3, *(pytest.param(step, marks=pytest.mark.slow) for step in range(3))]
)
def test_an_upgrade_that_is_killed_is_finished(old, tmp_path, monkeypatch, step):
    """An upgrade is killed at every fourth system call, from `step` on."""
    whole = Path(shutil.copytree(old, tmp_path / "whole"))
    upgrade_index(whole)
    expected = contents(whole)
    while True:
        root = Path(shutil.copytree(old, tmp_path / f"killed-{step}"))
        try:
            with killed_at(monkeypatch, step):
                upgrade_index(root)
        except Killed:
            pass
        else:
            break
        with contextlib.suppress(UsageError):
            # An upgraded index can be read, even if earlier files are left.
            assert len(read_rows(root)) == 8
        upgrade_index(root)
        assert contents(root) == expected
        shutil.rmtree(root)
        step += 4
    assert step > 25
    assert verify_index(whole) == []
