"""Indexes at URLs, on an object store in memory: copies, verification, readers, and
what is refused.
"""

import json
import os
import shutil

import numpy as np
import pytest

from edje_index import TokenIndex, add_ann
from edje_index.indexing.faiss_build import AnnRequest
from edje_index.indexing.faiss_index import AnnIndex
from pipelines import (
    compact_index,
    copy_index,
    delete_rows,
    quantize_index,
)
from pipelines.jobs.snapshots import history
from storage_formats import (
    CorruptIndexError,
    EdjeError,
    TokenStore,
    UsageError,
    read_rows,
    verify_index,
)
from storage_formats.change import begin_copy
from storage_formats.format.checksum import json_checksum
from storage_formats.format.manifest import CommittedIndex, Manifest
from storage_formats.format.places import Directory
from storage_formats.format.rows import read_index_rows
from storage_formats.format.shard_table import (
    FileEntry,
    read_shard_table,
    write_shard_table,
)
from storage_formats.remote.objects import ObjectFolder
from tests.conftest import ann_path, rows_path, same_bits
from tests.edje_index.search.indexes import build_photos
from tests.pipelines.test_copy import check_equal, contents

pytestmark = pytest.mark.usefixtures("memory_stores")
CLAIM = "build/claim.json"
URL = "s3://bucket/photos.edje"


@pytest.fixture
def folder():
    return ObjectFolder.open(URL)


def put(key, data, **metadata):
    ObjectFolder.open(URL).put(key, lambda: [data], length=len(data), metadata=metadata)


def flipped(data, offset):
    return data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :]


def test_an_index_returns_unchanged_and_only_changes_are_copied(index, folder):
    result = copy_index(index, URL)
    assert result.copied_files == result.files
    assert copy_index(index, URL).copied_files == 0
    assert set(folder.list_sizes()) == set(contents(index))
    delete_rows(index, rows=[3])
    # the tombstones, and the inputs that an update must not add again
    assert copy_index(index, URL).copied_files == 2
    check_equal(index, URL)
    assert len(TokenStore.open(URL, snapshot=0).fetch([3])) == 1
    assert [entry.kind for entry in history(URL)] == ["import", "delete"]
    copy_index(URL, f"{URL}-2")
    check_equal(index, f"{URL}-2")


def test_another_index_is_refused_or_replaced_on_request(index, other, folder):
    copy_index(other, URL)
    with pytest.raises(
        UsageError,
        match=r"has the file .*, which .*photos\.edje does not have; choose another",
    ):
        copy_index(index, URL)
    assert CLAIM not in folder.list_sizes()
    delete_rows(other, rows=[1])
    copy_index(other, URL)
    with pytest.raises(UsageError, match=r"is at snapshot 1, which .* does not have"):
        copy_index(index, URL)
    check_equal(other, URL)
    copy_index(index, URL, replace=True)
    check_equal(index, URL)
    assert set(folder.list_sizes()) == set(contents(index))


def test_a_copy_loses_no_precision_and_no_nearest_neighbour_index(index, tmp_path):
    copy_index(index, tmp_path / "changed")
    quantize_index(tmp_path / "changed", ["int8"])
    copy_index(tmp_path / "changed", URL)
    delete_rows(index, rows=[3])
    with pytest.raises(
        UsageError, match=r"is at snapshot 0|has the file checksums/int8"
    ):
        copy_index(index, URL)
    quantize_index(index, ["int8"])
    copy_index(index, URL)
    quantize_index(index, drop=["fp8"])
    # snapshot 0 of the source still has it
    copy_index(index, URL)
    add_ann(index)
    copy_index(index, URL)
    add_ann(index, AnnRequest("IVF2,Flat"))
    with pytest.raises(UsageError, match="has the file ann/"):
        copy_index(index, URL)
    copy_index(index, URL, replace=True)
    assert CommittedIndex.open(URL).manifest == CommittedIndex.open(index).manifest


def test_a_commit_never_takes_the_place_of_another(index, other, folder):
    with begin_copy(opened := CommittedIndex.open(index), URL) as begun:
        for source in (index, other):
            with pytest.raises(EdjeError, match=f"process {os.getpid()} on .*{URL}"):
                copy_index(source, URL)
        put("index.json", (other / "index.json").read_bytes())
        with pytest.raises(EdjeError, match=f"another process has changed {URL}"):
            begun.commit(opened.manifest)
    assert CLAIM not in folder.list_sizes()
    folder.delete(["index.json"])
    copy_index(index, URL)
    with begin_copy(opened := CommittedIndex.open(index), URL) as begun:
        folder.delete([CLAIM])
        delete_rows(index, rows=[2])
        copy_index(index, URL)
        with pytest.raises(EdjeError, match=r"another process took over .*claim"):
            begun.commit(opened.manifest)
    check_equal(index, URL)


def test_damage_is_not_copied(index, tmp_path, folder):
    put("index.json", b"[" * 100_000)
    with pytest.raises(CorruptIndexError, match=r"index\.json"):
        copy_index(index, URL)
    assert list(folder.list_sizes()) == ["index.json"]
    folder.delete(["index.json"])
    copy_index(index, URL)
    key = rows_path(index).relative_to(index).as_posix()
    damaged = flipped((index / key).read_bytes(), 40)
    put(key, damaged, **folder.info(key).metadata)
    with pytest.raises(CorruptIndexError, match=f"{key} .*verify the index"):
        copy_index(URL, tmp_path / "stopped")
    folder.delete([key])
    assert copy_index(index, URL).copied_files == 1
    (index / key).write_bytes(damaged)
    folder.delete([key])
    with pytest.raises(CorruptIndexError, match=key):
        copy_index(index, URL)
    assert key not in folder.list_sizes()


def test_readers_download_what_they_need(index, tmp_path):
    add_ann(index)
    delete_rows(index, rows=[4])
    copy_index(index, URL)
    assert compact_index(URL, tmp_path / "dense").removed == 1
    assert read_rows(URL) == read_rows(index)
    ids = TokenStore.open(URL).row_ids()
    assert same_bits(TokenStore.open(URL).fetch(ids), TokenStore.open(index).fetch(ids))
    query = np.array([1, 0, 0, 0], np.float32)
    found, local = (
        AnnIndex(CommittedIndex.open(each)).nearest(query, 3)[0].tolist()
        for each in (URL, index)
    )
    assert found == local
    assert not list((tmp_path / "cache").rglob("tokens/*/c.*"))


def test_hits_equal_those_of_the_local_index(tmp_path, run):
    root, _ = build_photos(tmp_path)
    copy_index(root, URL)
    there = TokenIndex.open(URL)
    hits = TokenIndex.open(root).search("a dog", k=3)
    assert list(there.search("a dog", k=3)) == list(hits)
    first = hits[0].row_id
    delete_rows(root, rows=[first])
    copy_index(root, URL)
    assert there.search("a dog", k=1)[0].row_id == first
    assert there.refresh() == 1
    assert first not in [hit.row_id for hit in there.search("a dog", k=5)]
    counts = [run.json("info", each)["counts"] for each in (URL, root)]
    assert counts[0] == counts[1]


def test_a_reader_of_a_replaced_index_opens_it_again(index, other):
    copy_index(index, URL)
    reader = CommittedIndex.open(URL)
    copy_index(other, URL, replace=True)
    with pytest.raises(CorruptIndexError, match="open the index again"):
        read_index_rows(reader)


DAMAGES = {
    "tokens/bf16/c.1.0.0": lambda data: flipped(data, 40),
    "tokens/fp8/c.0.0": lambda data: data[:-1],
    "tokens/fp8/c.2.0": lambda data: data + b"more",
    "tokens/fp8/zarr.json": lambda data: b"{}",
    "checksums/bf16/00000000.crc32c": lambda data: None,
    "checksums/fp8/00000001.crc32c": lambda data: flipped(data, 3),
    "embeddings/c.1.0": lambda data: flipped(data, 9),
    "rows": lambda data: data[: len(data) // 2],
    "ann": lambda data: flipped(data, len(data) - 1),
    "ann/index-12345678.faiss": lambda data: b"stray",
}


@pytest.fixture
def local(index):
    """An index with two snapshots and a nearest-neighbour index on disk. The same
    index is at `URL`.
    """
    add_ann(index)
    copy_index(index, URL)
    delete_rows(index, rows=[3])
    copy_index(index, URL)
    return index


def test_damage_gives_the_same_problems_as_on_disk(local, tmp_path, run):
    sound = tmp_path / "sound"
    shutil.copytree(local, sound)
    paths = {"rows": rows_path(local), "ann": ann_path(local)}
    damages = {
        str(paths[key].relative_to(local)) if key in paths else key: each
        for key, each in DAMAGES.items()
    }

    def write(key, data):
        (local / key).unlink(missing_ok=True)
        ObjectFolder.open(URL).delete([key])
        if data is not None:
            (local / key).write_bytes(data)
            put(key, data)

    for keys in ([], *([key] for key in damages), list(damages)):
        before = {}
        for key in keys:
            path = sound / key
            before[key] = path.read_bytes() if path.exists() else None
            write(key, damages[key](before[key] or b""))
        found, expected = (
            {
                (each.path, each.code, each.message.replace(URL, str(local)))
                for each in verify_index(root)
            }
            for root in (URL, local)
        )
        assert found == expected
        assert {path for path, *_ in found} >= set(keys)
        assert bool(found) == bool(keys)
        for key in keys:
            write(key, before[key])
    assert not list((tmp_path / "cache").glob("verify-*"))
    shown = {"index": URL, "sound": True, "problems": []}
    assert run.json("verify", URL) == shown


@pytest.mark.parametrize(
    "pattern",
    ["manifest/shards-*.parquet", "snapshots/*.json", "index.json", "manifest/del*"],
)
def test_damaged_metadata_is_a_problem(local, pattern):
    (path,) = sorted(local.glob(pattern))[:1]
    put(
        path.relative_to(local).as_posix(),
        flipped(path.read_bytes(), path.stat().st_size // 2),
    )
    problems = verify_index(URL)
    assert problems
    assert not [each for each in problems if "cache" in each.message]


def list_files(root, lines, *ann):
    """Let the index at `URL` list other files."""
    layout = Directory(root)
    table = write_shard_table(layout, lines)
    put(table.path, (root / table.path).read_bytes())
    value = json.loads(layout.manifest.read_text())
    value["shard_tables"] = [table.to_json()]
    value["ann"]["files"].extend(ann)
    value["crc32c"] = json_checksum(value)
    put("index.json", json.dumps(value).encode())


@pytest.mark.parametrize("lists", ["shard table", "ann"])
@pytest.mark.parametrize("is_absolute", [True, False])
def test_an_index_cannot_make_verify_touch_other_files(
    local, tmp_path, lists, is_absolute
):
    """The files are downloaded to a directory in the cache, and deleted afterwards."""
    outside = tmp_path / "cache/outside"
    outside.parent.mkdir(exist_ok=True)
    outside.write_text("precious")
    entry = FileEntry(str(outside) if is_absolute else "../outside", 8, 0)
    lines = read_shard_table(Directory(local), Manifest.load(local).shard_tables[0])
    if lists == "ann":
        list_files(local, lines, entry.to_json())
    else:
        list_files(local, [*lines, (1, entry)])
    (problem,) = verify_index(URL)
    assert problem.code == "manifest"
    assert outside.read_text() == "precious"


def test_a_file_listed_for_another_shard_is_a_problem(local):
    path = "tokens/bf16/c.0.0.0"
    lines = read_shard_table(Directory(local), Manifest.load(local).shard_tables[0])
    entry = next(entry for _, entry in lines if entry.path == path)
    list_files(local, [*lines, (1, entry)])
    (problem,) = verify_index(URL)
    assert (problem.path, problem.code) == (path, "shard-table")


def test_what_cannot_be_verified_is_an_error(local, monkeypatch, run):
    for url, message in (
        ("s3://bucket/nothing", "there is no index at s3://bucket/nothing"),
        ("https://example.invalid/photos.edje", "copy the index to a directory"),
    ):
        with pytest.raises(UsageError, match=message):
            verify_index(url)
    monkeypatch.setenv("EDJE_CACHE", "/proc/nowhere")
    assert "cannot write to /proc/nowhere" in run.refused("verify", URL)
