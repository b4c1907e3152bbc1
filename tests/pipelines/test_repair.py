"""Repairs: a repaired index has the bytes that it had before the damage, or the
damage is named.
"""

import errno
import shutil
from pathlib import Path

import numpy as np
import pytest

from edje_index import add_ann
from edje_index.indexing.faiss_build import AnnRequest
from edje_index.indexing.faiss_index import AnnIndex
from pipelines import append_index, delete_rows, quantize_index, repair_index
from pipelines.jobs.snapshots import roll_back
from pipelines.progress.events import JobStopped
from storage_formats import IndexSpec, verify_index
from storage_formats.format.manifest import CommittedIndex
from tests.conftest import all_files, ann_path, rows_path, write_random_index
from tests.pipelines.conftest import run_build, write_photo
from tests.pipelines.test_build_resume import break_reads
from tests.storage_formats.reading_cases import flip

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


def harm(path, how):
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "short":
        path.write_bytes(data[:20])
    elif how == "noise":
        path.write_bytes(np.random.default_rng(0).bytes(len(data)))
    else:
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize(
    ("path", "source", "how"),
    [
        ("tokens/fp8/c.1.0", "precision bf16", "missing"),
        ("tokens/fp8/c.1.0", "precision bf16", "short"),
        ("tokens/mxfp4/c.2.0", "precision bf16", "noise"),
        ("checksums/bf16/00000000.crc32c", "the tokens", "flipped"),
        ("tokens/bf16/zarr.json", "index.json", "missing"),
        ("tokens/bf16/zarr.json", "index.json", "noise"),
        ("ann", "the embeddings", "flipped"),
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
    path = rows_path(index) if path == "rows" else index / path
    ann = ann_path(index)
    harm(path, "flipped")
    harm(index / "tokens/fp8/c.1.0", "missing")
    harm(ann, "missing")
    code, out, _ = run("repair", index)
    assert code == 1
    assert f" path {path.relative_to(index)}, " in out
    assert "path tokens/fp8/c.1.0, source precision bf16" in out
    # Damaged embeddings must not become a new nearest-neighbour index.
    assert (f"path ann/{ann.name}, source" in out) == (path.suffix == ".parquet")


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


FIRST = "tokens/bf16/c.0.0.0"
SECOND = "tokens/bf16/c.1.0.0"


# Tokens that are encoded again from the photos


@pytest.fixture
def built(config):
    """An index of ten photos in shards of four rows: 03 is a duplicate, 07 failed."""
    run_build(config())
    return Path(config().out)


def test_tokens_and_checksums_in_every_precision(built):
    quantize_index(built, ["fp8", "int8"])
    before = all_files(built)
    for path in [
        *(built / "tokens").rglob("c.*"),
        *(built / "checksums").rglob("*.crc32c"),
    ]:
        path.unlink()
    assert repair_index(built).left == ()
    assert all_files(built) == before


def test_appended_and_deleted_rows(built, photos):
    write_photo(photos / "new/20.jpg", 20)
    append_index(built, photos / "new", engine="inline")
    delete_rows(built, rows=[0, 12])
    before = all_files(built)
    harm(built / FIRST, "missing")
    harm(built / "tokens/bf16/c.3.0.0", "missing")
    assert {file.source for file in repair_index(built).repaired} == {"the sources"}
    assert all_files(built) == before


def test_changed_and_missing_photos_are_refused_and_named(built, photos, run):
    for path in (FIRST, SECOND):
        harm(built / path, "missing")
    write_photo(photos / "01.jpg", 99)
    (photos / "02.jpg").unlink()
    code, out, _ = run("repair", built)
    assert code == 1
    refused = "cannot be encoded again from"
    assert f"row 1 {refused} {photos / '01.jpg'}: its content has changed" in out
    assert f"row 2 {refused} {photos / '02.jpg'}: missing" in out
    assert "row 0 " not in out
    assert f"path {SECOND}, source the sources" in out
    assert {problem.path for problem in verify_index(built)} == {FIRST}


def test_only_needed_rows_are_named(built, photos):
    # row 0
    path = built / FIRST
    flip(path, 0)
    # both are in the same batch
    write_photo(photos / "00.jpg", 98)
    write_photo(photos / "01.jpg", 99)
    left = repair_index(built).left
    refused = [each.message for each in left if each.code == "source-refused"]
    assert [message.split(" cannot")[0] for message in refused] == ["row 0"]


def test_without_the_model_the_damage_stays_and_the_model_is_named(
    built, tiny_bundle, tmp_path
):
    before = all_files(built)
    harm(built / FIRST, "missing")
    damaged = all_files(built)
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    messages = [problem.message for problem in repair_index(built, model=wrong).left]
    assert any("cannot be encoded again: " in each for each in messages)
    assert str(wrong) in str(messages)
    assert all_files(built) == damaged
    assert repair_index(built, model=tiny_bundle).left == ()
    assert all_files(built) == before


def test_a_source_that_cannot_be_read_now_does_not_end_the_repair(
    built, photos, run, monkeypatch
):
    before = all_files(built)
    for path in (FIRST, SECOND):
        harm(built / path, "missing")
    with monkeypatch.context() as patched:
        break_reads(patched, photos / "01.jpg", errno.EIO)
        code, out, _ = run("repair", built)
    assert code == 1
    assert f"cannot read {photos / '01.jpg'}: Input/output error; " in out
    assert f"path {SECOND}, source the sources" in out
    assert repair_index(built).left == ()
    assert all_files(built) == before


@pytest.mark.parametrize("text", ["repairing", "encoding rows of shard"])
def test_a_stopped_repair_changes_nothing(built, text):
    harm(built / FIRST, "missing")
    damaged = all_files(built)
    events = []
    with pytest.raises(JobStopped, match="files that were repaired stay repaired"):
        repair_index(
            built, on_event=events.append, should_stop=lambda: text in str(events)
        )
    assert text in str(events[-1])
    assert all_files(built) == damaged
