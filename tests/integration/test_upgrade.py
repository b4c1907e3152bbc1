"""Upgrades of indexes of earlier formats: the same rows, tokens and hits, also if the
upgrade was killed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from edje_index import TokenIndex
from pipelines import copy_index, delete_rows
from pipelines.jobs.snapshots import history, remove_snapshots, roll_back, set_columns
from storage_formats import Manifest, TokenStore, UsageError, read_rows, verify_index
from storage_formats.format.journal import Journal, manifest_digest
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.places import Directory
from storage_formats.format.rows import TIMING_COLUMNS, read_all_rows
from storage_formats.format.tombstones import input_hash
from storage_formats.upgrade import upgrade_index
from tests.conftest import REPO, problems_and_counts, write_files

GOLDEN = REPO / "tests/golden/format_1_4"
MODEL = REPO / "tests/golden/release_0_1/model"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())


@pytest.fixture
def old(tmp_path):
    return Path(shutil.copytree(GOLDEN / "index", tmp_path / "index"))


def contents(root):
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.parent.name != "build"
    }


def rows_of_snapshots(root):
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
        where = None if where == "None" else where
        hits = index.search("a dog plays in the snow", k=5, pool=8, where=where)
        for hit, (row_id, uri, score) in zip(hits, expected, strict=True):
            assert (hit.row_id, hit.uri) == (row_id, uri)
            assert hit.score == pytest.approx(score, abs=1e-5)
    after = contents(old)
    kept = ("tokens/", "checksums/", "embeddings/", "ann/")
    changed = [path for path in before if before[path] != after.get(path)]
    assert not [
        path
        for path in changed
        if path.startswith(kept) and not path.endswith("zarr.json")
    ]
    assert not [path for path in after if path.startswith(("filters/", "hashes/"))]
    assert upgrade_index(old) == 0
    assert contents(old) == after


def test_values_of_users_and_removed_inputs_are_known(old):
    upgrade_index(old)
    row = EXPECTED["rows"]["5"][4]
    named = (row["uri"], row["uri_raw"], row["content_hash"])
    assert CommittedIndex.open(old).removed == {input_hash(*named)}
    assert [entry.kind for entry in history(old)] == [
        *("build", "append", "edit", "edit", "update", "edit", "delete")
    ]
    # an update of the earlier version has replaced one value of a user
    set_columns(old, [0, 1, 2, 10], unset=["title", "stars"])
    rows = read_rows(old, [0, 1, 2, 3, 10], ["title", "stars"])
    assert rows["title"].to_pylist() == [
        *("photo 0", "a new title of the source", "photo 2"),
        *("photo 3, corrected", "photo 8"),
    ]
    assert rows["stars"].to_pylist() == [0, 1, 2, 3, 8]
    roll_back(old, 5)
    assert len(read_rows(old)) == 9
    assert problems_and_counts(old) == []


def test_readers_name_the_upgrade_and_changes_make_it(old, tmp_path, run):
    for read in (TokenStore.open, read_rows, verify_index, history):
        with pytest.raises(UsageError, match=r"format version 1\.4.*upgrade") as caught:
            read(old)
        assert caught.value.remedy == "upgrade"
    with pytest.raises(UsageError, match="upgrade"):
        copy_index(old, tmp_path / "copy")
    assert "edje-index upgrade INDEX" in run("info", old)[2]
    other = Path(shutil.copytree(old, tmp_path / "other"))
    delete_rows(other, rows=[0])
    left = [row["row_id"] for row in EXPECTED["rows"]["6"][1:]]
    assert read_rows(other)["row_id"].to_pylist() == left
    assert problems_and_counts(other) == []
    assert "7 snapshots upgraded" in run.ok("upgrade", old)
    assert run.json("upgrade", old)["upgraded"] == 0
    run.refused("upgrade", tmp_path / "nowhere")


def test_an_unfinished_change_is_discarded(old):
    layout = Directory(old)
    write_files(
        old,
        {
            layout.relative(layout.erased / "tokens/bf16/c.0.0.0"): "not committed",
            layout.relative(layout.receipts / "00000009.json"): "{}",
            "rows/00000009.parquet": "x",
        },
    )
    Journal("append", {}, manifest_digest(layout), plan={}).write(layout)
    said = []
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
def killed_at(monkeypatch, step):
    """End the code in the block at its system call `step` that changes a directory."""
    calls = itertools.count()

    def counted(function):
        def call(*arguments, **options):
            if next(calls) >= step:
                raise Killed
            return function(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for place, name in (
            (os, "replace"),
            (Path, "replace"),
            (Path, "unlink"),
            (shutil, "rmtree"),
        ):
            patch.setattr(place, name, counted(getattr(place, name)))
        yield


@pytest.mark.parametrize(
    "step",
    [
        3,
        *(pytest.param(step, marks=pytest.mark.slow) for step in (0, 1, 2, 4, 5, 6, 7)),
    ],
)
def test_an_upgrade_that_is_killed_is_finished(old, tmp_path, monkeypatch, step):
    """An upgrade is killed at every eighth system call, from `step` on."""
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
        step += 8
    assert step > 25
    assert verify_index(whole) == []
