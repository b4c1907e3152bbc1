"""Repairs: a repaired index has the bytes that it had before the damage, or the
damage is named.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from edje_index import add_ann
from edje_index.indexing.faiss_build import AnnRequest
from edje_index.indexing.faiss_index import AnnIndex
from pipelines import delete_rows, quantize_index, repair_index
from pipelines.jobs.snapshots import roll_back
from storage_formats import IndexSpec, verify_index
from storage_formats.format.manifest import CommittedIndex
from tests.conftest import all_files, ann_path, rows_path, write_random_index

SPEC = IndexSpec(21, 8, (2, 32), 4)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """An index with bf16, from which fp8, int8 and mxfp4 were made."""
    root = tmp_path_factory.mktemp("sound") / "index"
    write_random_index(root, SPEC, failed=frozenset({3, 9}))
    quantize_index(root, ["fp8", "int8", "mxfp4"])
    add_ann(root)
    return root


@pytest.fixture
def index(sound, tmp_path):
    return Path(shutil.copytree(sound, tmp_path / "index"))


def harm(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "short":
        path.write_bytes(data[:20])
    elif how == "noise":
        path.write_bytes(np.random.default_rng(0).bytes(len(data)))
    else:
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize("how", ["missing", "short", "noise", "flipped"])
@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("tokens/fp8/c.1.0", "precision bf16"),
        ("tokens/mxfp4/c.2.0", "precision bf16"),
        ("checksums/bf16/00000000.crc32c", "the tokens"),
        ("tokens/bf16/zarr.json", "index.json"),
        ("ann", "the embeddings"),
    ],
)
def test_a_file_that_others_determine_gets_its_bytes_back(index, path, source, how):
    if path == "ann":
        path = ann_path(index).relative_to(index).as_posix()
    before = all_files(index)
    harm(index / path, how)
    result = repair_index(index)
    assert [(file.path, file.source) for file in result.repaired] == [(path, source)]
    assert result.left == ()
    assert all_files(index) == before


def test_the_best_precision_cannot_be_made_from_others(index):
    harm(index / "tokens/bf16/c.1.0.0", "flipped")
    damaged = all_files(index)
    result = repair_index(index)
    assert result.repaired == ()
    assert {problem.path for problem in result.left} == {"tokens/bf16/c.1.0.0"}
    assert all_files(index) == damaged


@pytest.mark.parametrize("path", ["rows", "embeddings/c.1.0"])
def test_what_cannot_be_repaired_is_named(index, run, path):
    if path == "rows":
        path = rows_path(index).relative_to(index).as_posix()
    harm(index / path, "flipped")
    harm(index / "tokens/fp8/c.1.0", "missing")
    ann = ann_path(index)
    harm(ann, "missing")
    code, out, _ = run("repair", index)
    assert code == 1
    assert f" path {path}, " in out
    assert "path tokens/fp8/c.1.0, source precision bf16" in out
    # Damaged embeddings must not become a new nearest-neighbour index.
    assert (f"path ann/{ann.name}, source" in out) == path.startswith("rows")


def test_a_sound_index_stays_as_it_is(index, run):
    before = all_files(index)
    out = run.ok("repair", index)
    assert all_files(index) == before
    assert out == "nothing to do\n"


def test_an_earlier_snapshot_is_repaired_too(index):
    delete_rows(index, rows=[12])
    harm(index / "tokens/fp8/c.1.0", "noise")
    repair_index(index)
    assert verify_index(index) == []


@pytest.mark.parametrize("is_shared", [True, False])
def test_the_neighbours_of_an_earlier_snapshot_are_found_again(index, is_shared):
    ann = ann_path(index)
    delete_rows(index, rows=[12])
    if not is_shared:
        # The new file has inverted lists, and another name.
        add_ann(index, AnnRequest("IVF2,Flat"))
    harm(ann, "flipped")
    result = repair_index(index)
    assert [file.path for file in result.repaired] == [f"ann/{ann.name}"]
    assert result.left == ()
    assert verify_index(index) == []
    assert len(AnnIndex(CommittedIndex.open(index, 0))) == 19
    roll_back(index, 0)


def test_a_repair_removes_what_a_killed_repair_left(index):
    before = all_files(index)
    harm(index / "tokens/fp8/c.1.0", "noise")
    (index / "build/staging/00000001-attempt").mkdir(parents=True)
    (index / "build/staging/00000001-attempt/fp8").touch()
    (index / "build/staging/00000002-attempt").mkdir()
    repair_index(index)
    assert all_files(index) == before
    assert not (index / "build/journal.json").exists()
