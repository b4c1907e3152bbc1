"""An update makes an index equal to its sources: it is compared with a new build of
the same sources.
"""

import errno
import json
import os
import shutil
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from edje_index import ModelError
from edje_index.images.decode import ImageError
from edje_index.images.transient import TransientInputError
from edje_index.indexing.image_encoder import ImageEncoder
from edje_index.inputs import preparation
from edje_index.inputs.names import MAX_SIDECAR_BYTES
from pipelines import (
    add_images,
    append_index,
    compact_index,
    copy_index,
    delete_rows,
    merge_indexes,
    set_columns,
    update_index,
)
from pipelines.cli.info import failed_rows
from pipelines.jobs.snapshots import history, roll_back
from pipelines.progress.events import JobStopped
from storage_formats import (
    EdjeError,
    Manifest,
    TokenStore,
    UsageError,
    read_rows,
)
from storage_formats.format.places import Directory
from tests.conftest import all_files, problems_and_counts
from tests.pipelines.archives import write_tar, write_zip
from tests.pipelines.conftest import run_build, stop_after_one_shard, write_photo


def update(root, *sources, **options):
    result = update_index(root, sources, engine="inline", **options)
    parts = (
        result.unchanged,
        result.new,
        result.changed,
        result.duplicates,
        result.failed,
        result.stay_deleted,
    )
    assert sum(parts) == result.inputs
    return result


def check(result, **counts):
    assert {name: getattr(result, name) for name in counts} == counts


def build(request):
    run_build(request)
    return Path(request.out)


def pack(path, photos):
    """Seven photos; returns an offset in the data of each."""
    names = sorted(photos.glob("0[0-6].jpg"))
    write_tar(path, {photo.name: photo.read_bytes() for photo in names})
    with tarfile.open(path) as archive:
        return [member.offset_data + 10 for member in archive.getmembers()]


def contents(root):
    """Status, reason, content hash and block of each row that is not deleted, by
    uri.
    """
    assert problems_and_counts(root) == []
    rows = read_rows(
        root, columns=["row_id", "uri", "status", "reason", "content_hash"]
    ).to_pylist()
    with TokenStore.open(root) as store:
        blocks = store.fetch([row["row_id"] for row in rows])
    pairs = zip(rows, blocks, strict=True)
    return {
        row["uri"]: (row["status"], row["reason"], row["content_hash"], block.tobytes())
        for row, block in pairs
    }


def row_ids(root):
    rows = read_rows(root, columns=["row_id", "uri"]).to_pylist()
    return {Path(row["uri"]).name: row["row_id"] for row in rows}


def status_of(root, name):
    assert problems_and_counts(root) == []
    (row,) = read_rows(root, [row_ids(root)[name]], ["status"]).to_pylist()
    return row["status"]


def files(root):
    """Inode and time of change of each file and directory."""
    paths = [root, *sorted(root.rglob("*"))]
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}


@pytest.fixture
def built(config, photos):
    """An index of nine photos. One photo failed. The repeated photo is gone."""
    (photos / "03.jpg").unlink()
    return build(config())


def change_photos(photos):
    """Two photos vanish, one changes, two are new, and one of the new ones is
    broken.
    """
    (photos / "00.jpg").unlink()
    (photos / "08.jpg").unlink()
    write_photo(photos / "04.jpg", 44)
    write_photo(photos / "deep/20.jpg", 20)
    (photos / "21.jpg").write_bytes(b"broken")


def test_an_update_equals_a_new_build(built, photos, config):
    ids = row_ids(built)
    before = files(built / "tokens/bf16")
    change_photos(photos)
    result = update(built)
    check(result, inputs=9, unchanged=5, new=1, changed=1, failed=2)
    check(result, vanished=2, deleted=3, first_row=12, rows=3, snapshot=1)
    run_build(config(out=built.with_name("fresh")))
    assert contents(built) == contents(built.with_name("fresh"))
    for name in ("00.jpg", "08.jpg", "04.jpg"):
        del ids[name]
    assert ids.items() <= row_ids(built).items()
    kept = {path: entry for path, entry in before.items() if "/c." in path}
    assert kept
    assert kept.items() <= files(built / "tokens/bf16").items()
    assert [entry.kind for entry in history(built)] == ["build", "update"]
    check(update(built), unchanged=7, deleted=0, rows=0, snapshot=1)


def test_too_many_vanished_rows_are_refused(built, photos, run):
    for name in range(5):
        (photos / f"{name:02d}.jpg").unlink(missing_ok=True)
    with pytest.raises(EdjeError, match=r"4 of 9 rows .* 0\.4 "):
        update(built, max_vanished=0.4)
    code, _, error = run("update", built, "--max-vanished", 0.4, "--dry-run")
    assert code == 1
    assert error.startswith("error: --max-vanished: ")
    assert Manifest.load(built).snapshot.number == 0
    assert update(built, max_vanished=0.45).vanished == 4


@pytest.mark.parametrize("pages", ["the same", "different"])
def test_pages_in_place_of_photos_delete_no_rows(built, photos, pages):
    """As a server sends them for which somebody must log in."""
    before = contents(built)
    for number, path in enumerate(sorted(photos.rglob("*.jpg"))):
        page = f"<html>please log in {number * (pages == 'different')}</html>"
        path.write_text(page)
    with pytest.raises(EdjeError, match="would be deleted"):
        update(built)
    assert contents(built) == before


def test_failed_rows_and_copies_of_kept_photos_are_no_lost_rows(config, photos):
    broken = sorted(photos.rglob("*.jpg"))[3:]
    for number, path in enumerate(broken):
        path.write_bytes(b"broken %d" % number)
    root = build(config(max_failed=1.0))
    for number, path in enumerate(broken):
        path.write_bytes(b"broken again %d" % number)
    assert update(root, max_vanished=0.1).deleted == len(broken)
    # one photo twice, beside a new broken one
    shutil.copy(photos / "00.jpg", photos / "01.jpg")
    (photos / "99.jpg").write_bytes(b"broken")
    assert update(root, max_vanished=0.1).deleted == 1


def test_duplicates_of_failed_inputs_have_failed(config, photos):
    for number in range(60, 70):
        (photos / f"{number}.jpg").write_text("<html>please log in</html>")
    with pytest.raises(EdjeError, match="11 of 20 inputs failed"):
        run_build(config(dedupe=True, max_failed=0.1))


def test_an_image_beside_an_archive_deletes_no_rows(config, tmp_path, photos):
    folder = tmp_path / "folder"
    folder.mkdir()
    pack(folder / "a.tar", photos)
    for number in range(5):
        write_photo(folder / "more" / f"{number}.jpg", 40 + number)
    root = build(config(sources=[str(folder)]))
    before = contents(root)
    write_photo(folder / "cover.jpg", 90)
    with pytest.raises(EdjeError, match=r"a\.tar .*images lie beside it"):
        update(root)
    assert contents(root) == before
    assert update(root, folder, folder / "a.tar").unchanged == 12
    assert update(root, folder, max_vanished=1.0).deleted == 7


def test_an_append_does_not_add_a_failed_input_again(photos, config):
    path = photos / "list.csv"
    path.write_text("path\n00.jpg\nmissing.jpg\n")
    root = build(config(sources=[str(path)]))
    path.write_text("path\n00.jpg\nmissing.jpg\n01.jpg\n")
    check(append_index(root, [str(path)], engine="inline"), indexed=1, failed=0)
    write_photo(photos / "missing.jpg", 95)
    assert retry(root).new == 1
    uris = read_rows(root, columns=["uri"])["uri"].to_pylist()
    assert len(uris) == len(set(uris)) == 3


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([1, 2], [1.5, 2]),
        ([False, True], ["n/a", True]),
        ([True, True], [0.5, 2]),
        ([2**53, 1.5], [2**53 + 1, 1.5]),
    ],
)
def test_a_value_of_another_type_is_a_change(photos, config, before, after):
    path = photos / "list.jsonl"

    def write(values):
        lines = (
            json.dumps({"path": f"{number:02}.jpg", "value": value})
            for number, value in enumerate(values)
        )
        path.write_text("\n".join(lines))

    write(before)
    root = build(config(sources=[str(path)]))
    write(after)
    assert update(root).edited > 0
    found = read_rows(root, columns=["value"])["value"].to_pylist()
    assert all(
        value in (expected, str(expected).lower())
        for value, expected in zip(found, after, strict=True)
    )
    assert problems_and_counts(root) == []
    assert update(root).edited == 0


def test_an_empty_source_is_refused(built, photos, tmp_path):
    write_photo(tmp_path / "more/a.jpg", 50)
    append_index(built, (str(tmp_path / "more"),), engine="inline")
    (tmp_path / "more/a.jpg").unlink()
    with pytest.raises(EdjeError, match=r"more with .* no images.* 1 row"):
        update(built)
    assert update(built, max_vanished=1).vanished == 1
    shutil.rmtree(photos)
    with pytest.raises(UsageError, match="does not exist"):
        update(built)
    assert len(row_ids(built)) == 9


@pytest.mark.parametrize(
    ("number", "error"), [(errno.EACCES, EdjeError), (errno.EIO, TransientInputError)]
)
def test_a_directory_that_cannot_be_listed_has_not_vanished(
    config, photos, monkeypatch, number, error
):
    write_photo(photos / "deep/20.jpg", 20)
    run_build(config())
    scandir = os.scandir

    def failing(path):
        # `shutil.rmtree` passes a descriptor.
        if not isinstance(path, int) and os.fsdecode(path).endswith("deep"):
            raise OSError(number, os.strerror(number), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", failing)
    with pytest.raises(error, match="deep"):
        update(config().out, max_vanished=1)
    assert Manifest.load(config().out).snapshot.number == 0


@pytest.mark.parametrize("lost", [1, 5])
def test_members_of_a_truncated_archive_have_not_vanished(
    config, photos, tmp_path, lost
):
    path = tmp_path / "photos.tar"
    end = pack(path, photos)[-lost]
    root = build(config(sources=[str(path)]))
    assert update(root).unchanged == 7
    os.truncate(path, end)
    with pytest.raises(EdjeError, match=r"photos.tar .*truncated-archive"):
        update(root, max_vanished=1)


def test_a_lost_archive_whose_failed_row_was_deleted_has_not_vanished(
    config, photos, tmp_path
):
    path = tmp_path / "photos.tar"
    os.truncate(path, pack(path, photos)[-1])
    root = build(config(sources=[str(path)]))
    delete_rows(root, rows=[row_ids(root)["photos.tar"]])
    os.truncate(path, 100)
    with pytest.raises(EdjeError, match=r"cannot compare .*photos.tar with the index"):
        update(root, max_vanished=1)


def test_a_file_that_cannot_be_read_has_not_vanished(built, photos):
    (photos / "05.jpg").unlink()
    # a loop
    (photos / "05.jpg").symlink_to("05.jpg")
    with pytest.raises(EdjeError, match=r"05\.jpg, which is row 4 of the index"):
        update(built)


def test_a_duplicate_gets_tokens_when_its_original_vanishes(config, photos):
    write_photo(photos / "05.jpg", 1)
    root = build(config(dedupe=True))
    assert status_of(root, "03.jpg") == "duplicate"
    assert update(root).unchanged == 9
    (photos / "01.jpg").unlink()
    check(update(root), changed=1, duplicates=1, vanished=1, deleted=3)
    assert status_of(root, "03.jpg") == "indexed"
    (photos / "03.jpg").unlink()
    check(update(root), moved=1, duplicates=0, vanished=0)
    assert status_of(root, "05.jpg") == "indexed"


def test_duplicates_without_tokens_are_reported_and_can_be_appended(
    config, photos, tmp_path
):
    root = build(config(dedupe=True))
    messages = []

    def says(event):
        messages.append(str(getattr(event, "text", "")))

    copy_index(root, tmp_path / "part.edje", rows=[0, 3], on_event=says)
    assert any("select 1 original too, first row 1" in each for each in messages)
    uri = read_rows(root, [1], ["uri"])["uri"][0].as_py()
    copy = shutil.copytree(root, tmp_path / "copy.edje")
    add_images(copy, [photos / "02.jpg"], [uri], on_event=says)
    delete_rows(root, [1], on_event=says)
    assert sum("1 duplicate of the deleted rows" in each for each in messages) == 2
    part = tmp_path / "part.edje"
    for index in (root, part):
        again = append_index(index, photos / "03.jpg", engine="inline")
        check(again, indexed=1, duplicates=0)
        again = append_index(index, photos / "01.jpg", engine="inline")
        check(again, indexed=0, duplicates=1)


def test_sources_of_appends_are_recorded(built, photos, tmp_path):
    for folder, seed in (("more", 60), ("others", 61)):
        write_photo(tmp_path / folder / "a.jpg", seed)
        append_index(built, (str(tmp_path / folder),), engine="inline")
    assert update(built).unchanged == 10
    write_photo(photos / "deep/20.jpg", 62)
    append_index(built, (str(photos / "deep"),), engine="inline")
    # photos/deep lies inside photos and is not listed twice
    assert update(built).unchanged == 11
    assert update(built, photos, tmp_path / "more", max_vanished=0.2).vanished == 1
    assert update(built).inputs == 11
    manifest = Manifest.load(built)
    del manifest.settings["indexed_sources"]
    manifest.write(Directory(built))
    with pytest.raises(UsageError, match="name all sources"):
        update(built)


def test_new_sources_are_recorded_if_no_row_changes(built, photos, tmp_path):
    other = tmp_path / "other" / "x.jpg"
    other.parent.mkdir()
    shutil.copy(photos / "01.jpg", other)
    manifest = Directory(built).manifest
    before = manifest.read_bytes()
    update(built)
    assert manifest.read_bytes() == before
    assert append_index(built, other.parent, engine="inline").rows == 0
    assert len(history(built)) == 1
    before = manifest.read_bytes()
    assert append_index(built, other, engine="inline").rows == 0
    assert manifest.read_bytes() == before
    (photos / "01.jpg").unlink()
    update(built)
    assert status_of(built, "x.jpg") == "indexed"


def stop_in_mid_update(root, calls):
    """Stop an update when it asks for the `calls`-th time."""
    answers = iter(range(1000))
    with pytest.raises(JobStopped):
        update(root, should_stop=lambda: next(answers) > calls)


def test_a_stopped_update_resumes(built, photos, config):
    for seed in range(30, 40):
        write_photo(photos / f"{seed}.jpg", seed)
    (photos / "00.jpg").unlink()
    stop_in_mid_update(built, 22)
    receipts = sorted((built / "build/receipts").glob("*"))
    assert 0 < len(receipts) < 3
    made = receipts[0].stat().st_mtime_ns
    with pytest.raises(EdjeError, match=r"'update' of .* has not finished"):
        append_index(built, (str(photos),), engine="inline")
    stop_in_mid_update(built, 20)
    assert receipts[0].stat().st_mtime_ns == made
    check(update(built), new=10, vanished=1, shards=3, snapshot=1)
    run_build(config(out=built.with_name("fresh")))
    assert contents(built) == contents(built.with_name("fresh"))


def test_the_command(built, photos, run):
    change_photos(photos)
    before = files(built)
    words = " ".join(run.ok("update", built, "--dry-run").split())
    assert files(built) == before
    assert "3 to index + 0 duplicates + 1 failed + 5 unchanged" in words
    assert "new 2 changed 1 vanished 2" in words
    assert run.json("update", built, "--engine", "inline")["snapshot"] == 1
    shutil.rmtree(photos)
    photos.mkdir()
    code, output, _ = run("update", built, "--json")
    assert (code, "lists no images" in json.loads(output)["error"]) == (1, True)


def retry(root, **options):
    return update(root, retry_failed=True, **options)


def test_failed_inputs_are_tried_again(built, photos):
    before = all_files(built)
    check(retry(built), unchanged=8, deleted=0, rows=0, snapshot=0)
    # it failed again
    assert all_files(built) == before
    write_photo(photos / "07.jpg", 77)
    (photos / "00.jpg").unlink()
    write_photo(photos / "30.jpg", 30)
    check(retry(built), unchanged=7, new=2, vanished=1, deleted=2, snapshot=1)
    assert status_of(built, "07.jpg") == "indexed"
    assert update(built).unchanged == 9


def test_inputs_that_work_now_are_tried_again_with_the_same_content(
    built, photos, monkeypatch
):
    def refuse(*_, **__):
        raise ImageError("unsupported-image", "by an earlier version")

    write_photo(photos / "04.jpg", 44)
    with monkeypatch.context() as patched:
        patched.setattr(preparation, "decode_input", refuse)
        assert update(built).failed == 2
    assert update(built).unchanged == 7
    check(retry(built), unchanged=7, new=1, failed=1)
    assert status_of(built, "04.jpg") == "indexed"


def test_values_that_users_set_survive_a_retry(photos, config):
    path = photos / "list.csv"
    path.write_text("path,caption\n00.jpg,a\n07.jpg,b\n08.jpg,c\n")
    (photos / "08.jpg").write_bytes(b"broken")
    root = build(config(sources=[str(path)]))
    ids = row_ids(root)
    values = {"caption": ["mine", None], "title": ["x", "y"], "unknown": [None]}
    set_columns(root, [ids["07.jpg"], ids["08.jpg"]], values)
    for seed, name in ((77, "07.jpg"), (88, "08.jpg")):
        write_photo(photos / name, seed)
        # the other one fails again at first
        assert retry(root).new == 1
        assert captions(root) == {"00.jpg": "a", "07.jpg": "mine", "08.jpg": None}
        assert problems_and_counts(root) == []
    titles = read_rows(root, columns=["title"])["title"].to_pylist()
    assert sorted(map(str, titles)) == ["None", "x", "y"]
    check(update(root), unchanged=3, edited=0)
    set_columns(root, read_rows(root)["row_id"].to_pylist(), unset=["caption", "title"])
    assert captions(root) == {"00.jpg": "a", "07.jpg": "b", "08.jpg": "c"}
    assert read_rows(root, columns=["title"])["title"].null_count == 3


def test_a_retry_keeps_deleted_and_excluded_members_of_an_archive_out(
    photos, config, tmp_path
):
    path = tmp_path / "photos.tar"
    end = pack(path, photos)[3]
    whole = path.read_bytes()
    os.truncate(path, end)
    root = build(config(sources=[str(path)], exclude=["01.jpg", "05.jpg"]))
    assert [row["uri"] for row in failed_rows(root)] == [str(path)]
    delete_rows(root, where="uri like '%!02.jpg'")
    assert retry(root).snapshot == 1
    path.write_bytes(whole)
    check(retry(root), stay_deleted=1, vanished=1)
    names = {uri.rpartition("!")[2] for uri in contents(root)}
    assert names == {"00.jpg", "03.jpg", "04.jpg", "06.jpg"}


def test_a_retry_of_unknown_sources_needs_their_names(built, photos):
    add_images(built, [photos / "00.jpg"], ["mine"])
    with pytest.raises(UsageError, match="name all sources"):
        retry(built)
    write_photo(photos / "07.jpg", 77)
    assert update(built, photos, retry_failed=True).new == 1


def captions(root):
    rows = read_rows(root, columns=["uri", "caption"]).to_pylist()
    return {Path(row["uri"]).name: row["caption"] for row in rows}


def test_changed_columns_of_a_list_are_replaced_without_encoding(photos, config):
    path = photos / "list.csv"
    path.write_text("path,caption,stars\n00.jpg,a dog,1\n01.jpg,a lake,2\n02.jpg,,3\n")
    root = build(config(sources=[str(path)]))
    ids = row_ids(root)
    check(update(root), unchanged=3, edited=0, snapshot=0)
    path.write_text(
        "path,caption,stars,place\n00.jpg,a dog,5,here\n01.jpg,,2,\n02.jpg,a hill,3,\n"
    )
    before = files(root / "tokens/bf16")
    check(update(root), unchanged=3, edited=3, rows=0)
    assert files(root / "tokens/bf16") == before
    assert captions(root) == {"00.jpg": "a dog", "01.jpg": None, "02.jpg": "a hill"}
    rows = read_rows(root, columns=["stars", "place"]).to_pylist()
    assert [row["stars"] for row in rows] == [5, 2, 3]
    assert [row["place"] for row in rows] == ["here", None, None]
    assert row_ids(root) == ids
    assert problems_and_counts(root) == []
    roll_back(root, 0)
    assert captions(root)["02.jpg"] is None


@pytest.mark.parametrize("rewrite", ["nothing", "compact", "copy", "erase", "merge"])
def test_edited_values_stay_until_they_are_unset(photos, config, tmp_path, rewrite):
    path = photos / "list.csv"

    def write(*values):
        lines = (f"0{number}.jpg,{value}\n" for number, value in enumerate(values))
        path.write_text("path,caption\n" + "".join(lines))

    write("a", "b", "c", "d", "e")
    root = build(config(sources=[str(path)]))
    ids = row_ids(root)
    edited = ["00.jpg", "01.jpg", "02.jpg"]
    set_columns(root, [ids[name] for name in edited], {"caption": ["mine"]})
    write("a", "b", "C", "D", "e")
    assert update(root).edited == 2
    expected = dict.fromkeys(edited, "mine") | {"03.jpg": "D", "04.jpg": "e"}
    sources: list[Path] = []
    dense = tmp_path / "dense.edje"
    if rewrite == "erase":
        delete_rows(root, rows=[ids["04.jpg"]], erase=True)
        del expected["04.jpg"]
    elif rewrite == "compact":
        compact_index(root, dense)
        root = dense
    elif rewrite == "copy":
        copy_index(root, dense, rows=[ids[name] for name in expected])
        root = dense
        # a copy of some rows does not record the sources
        sources = [path]
    elif rewrite == "merge":
        write_photo(tmp_path / "other" / "90.jpg", 90)
        other = config(sources=[str(tmp_path / "other")], out=tmp_path / "other.edje")
        merge_indexes([build(other), root], dense)
        root = dense
        expected["90.jpg"] = None
    assert captions(root) == expected
    assert update(root, *sources).edited == 0
    # back to what the photos were built with, and what a user had replaced
    write("a", "B", "c", "d", "e")
    assert update(root, *sources).edited == 3
    expected["03.jpg"] = "d"
    assert captions(root) == expected
    set_columns(root, [], where="caption = 'mine'", unset=["caption"])
    assert captions(root) == expected | {"00.jpg": "a", "01.jpg": "B", "02.jpg": "c"}
    assert update(root, *sources).edited == 0
    assert problems_and_counts(root) == []


@pytest.mark.parametrize("rewrite", ["compact", "copy"])
def test_edited_values_of_a_duplicate_survive_the_loss_of_its_original(
    photos, config, tmp_path, rewrite
):
    shutil.copy(photos / "00.jpg", photos / "01.jpg")
    path = photos / "list.csv"
    path.write_text("path,caption\n00.jpg,a\n01.jpg,b\n")
    root = build(config(sources=[str(path)], dedupe=True))
    ids = row_ids(root)
    set_columns(root, [ids["01.jpg"]], {"caption": ["mine"]})
    if rewrite == "copy":
        copy_index(root, tmp_path / "copy.edje", rows=[ids["01.jpg"]])
        root = tmp_path / "copy.edje"
    else:
        delete_rows(root, rows=[ids["00.jpg"]])
        compact_index(root, tmp_path / "dense.edje")
        root = tmp_path / "dense.edje"
    path.write_text("path,caption\n01.jpg,b\n")
    assert update(root, path).changed == 1
    assert captions(root) == {"01.jpg": "mine"}
    path.write_text("path,caption\n01.jpg,B\n")
    assert update(root).edited == 1
    assert captions(root) == {"01.jpg": "mine"}
    assert problems_and_counts(root) == []


@pytest.mark.parametrize("indexed", [100, 1])
def test_texts_of_all_inputs_take_the_memory_of_one_shard(photos, config, indexed):
    """The inputs get a new column, or they are new."""
    path = photos / "list.csv"
    names = ["00.jpg", *(f"missing/{row}.jpg" for row in range(99))]
    path.write_text("path\n" + "\n".join(names[:indexed]))
    root = build(config(sources=[str(path)], shard_size=10, max_failed=1.0))
    peaks = []
    for text in ("x", 15_000 * "x"):
        lines = (f"{name},{text}\n" for name in names)
        path.write_text("path,text\n" + "".join(lines))
        tracemalloc.start()
        try:
            result = update_index(root, engine="inline", dry_run=True)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert (result.edited, result.rows) == (indexed, 100 - indexed)
    # The texts have 1.5 MB.
    assert peaks[1] - peaks[0] < 1 << 20


def test_an_update_with_a_moved_bundle_names_its_new_path(
    built, photos, tiny_bundle, tmp_path
):
    moved = shutil.copytree(tiny_bundle, tmp_path / "moved")
    check(update(built, model=moved), rows=0, snapshot=0)
    assert Manifest.load(built).model["bundle"] == str(moved)
    shutil.rmtree(moved)
    with pytest.raises(ModelError, match="moved, which built"):
        append_index(built, photos, engine="inline")
    append_index(built, photos, engine="inline", model=tiny_bundle)
    assert Manifest.load(built).model["bundle"] == str(tiny_bundle.resolve())
    assert problems_and_counts(built) == []


@pytest.mark.parametrize("erase", [False, True])
def test_what_was_deleted_stays_deleted_until_it_changes(
    built, photos, run, tmp_path, erase
):
    ids = row_ids(built)
    delete_rows(built, rows=[ids["00.jpg"], ids["01.jpg"], ids["02.jpg"]], erase=erase)
    check(update(built), stay_deleted=3, new=0, rows=0)
    compact_index(built, tmp_path / "dense.edje")
    built = tmp_path / "dense.edje"
    assert update(built).stay_deleted == 3
    # another content, and another name
    write_photo(photos / "00.jpg", 70)
    (photos / "01.jpg").rename(photos / "71.jpg")
    check(update(built), stay_deleted=1, new=2)
    assert run.json("update", built, "--engine", "inline", "--restore")["new"] == 1
    assert {"00.jpg", "71.jpg", "02.jpg"} <= row_ids(built).keys()
    # a later deletion counts again
    delete_rows(built, rows=[row_ids(built)["02.jpg"]])
    assert update(built).stay_deleted == 1
    assert problems_and_counts(built) == []


def test_what_was_deleted_before_a_merge_stays_deleted(config, photos, tmp_path):
    root = build(config())
    write_photo(tmp_path / "more" / "0.jpg", 90)
    other = build(config(sources=[str(tmp_path / "more")], out=tmp_path / "other"))
    delete_rows(root, rows=[row_ids(root)["02.jpg"]])
    merge_indexes([root, other], tmp_path / "merged")
    check(update(tmp_path / "merged", photos, tmp_path / "more"), stay_deleted=1, new=0)


def test_a_stopped_update_is_not_resumed_with_other_captions(photos, config):
    path = photos / "list.csv"
    names = ["00.jpg", "01.jpg", "02.jpg", "04.jpg", "05.jpg", "06.jpg"]

    def write(caption, count):
        rows = [f"{name},{caption}\n" for name in names[:count]]
        path.write_text("path,caption\n" + "".join(rows))

    write("old", 2)
    root = build(config(sources=[str(path)], shard_size=2))
    write("first", 6)
    stop_after_one_shard(update_index, root, engine="inline")
    write("second", 4)
    update(root)
    assert {*captions(root).values()} == {"second"}
    # no token file of the stopped update is left
    assert len([*(root / "tokens/bf16").glob("c.*")]) == 2
    assert problems_and_counts(root) == []


def test_duplicates_of_a_failed_input_are_tried_again(config, photos):
    content = (photos / "00.jpg").read_bytes()
    for name in ("00.jpg", "05.jpg"):
        (photos / name).write_bytes(content[:-200])
    root = build(config(dedupe=True))
    assert status_of(root, "05.jpg") == "duplicate"
    for name in ("00.jpg", "05.jpg"):
        (photos / name).write_bytes(content)
    # a duplicate has no row of its own
    check(retry(root), new=1, duplicates=1, deleted=3)
    assert status_of(root, "00.jpg") == "indexed"
    assert "05.jpg" not in row_ids(root)


LINES = b"""{"file_name": "00.jpg", "text": "zero"}
{"file_name": ".\\\\01.jpg", "text": "one, as Windows writes it"}
"""
CSV = "file_name,text,n\n00.jpg,bl\N{LATIN SMALL LETTER E WITH ACUTE},1\n"


@pytest.mark.parametrize(
    ("name", "content", "damaged"),
    [
        # None stands for a link without a target
        ("00.txt", b"a dog", None),
        ("00.txt", b"a dog", bytes(MAX_SIDECAR_BYTES + 1)),
        ("01.json", b'{"licence": "cc0"}', b'{"licence": "cc'),
        *(("metadata.jsonl", LINES, each) for each in (LINES[:58], b"")),
        *(
            ("metadata.csv", CSV.encode() + b"01.jpg,one,2\n", each)
            for each in (
                None,
                bytes(64),
                b"<!DOCTYPE html>\n<html>, x\n",
                CSV.encode() + b"01",
                CSV.encode("latin-1") + b"01",
            )
        ),
    ],
)
def test_damaged_metadata_is_not_taken_for_empty(
    config, photos, name, content, damaged
):
    path = photos / name
    path.write_bytes(content)
    root = build(config())
    before = read_rows(root)
    described = name.startswith("metadata") + 1
    if damaged is None:
        path.unlink()
        path.symlink_to("nowhere")
    else:
        path.write_bytes(damaged)
    events = []
    assert update(root, on_event=events.append).edited == 0
    assert read_rows(root).equals(before)
    (warning,) = [event.text for event in events if getattr(event, "is_warning", False)]
    assert "stay, because their metadata cannot be read in full" in warning
    # a table of another kind has no rows of photos, and a file that is gone no values
    path.unlink()
    if name == "metadata.csv":
        path.write_text("number,label\n1,cat\n")
    assert update(root).edited == described


def test_texts_of_a_list_that_cannot_be_read_are_not_taken_for_empty(
    config, photos, tmp_path
):
    listed = tmp_path / "list.csv"
    text = f"path,text\n{photos}/00.jpg,bl\N{LATIN SMALL LETTER E WITH ACUTE}\n"
    listed.write_text(text, "utf-8")
    run_build(config(sources=[str(listed)]))
    # as a spreadsheet writes it
    listed.write_text(text, "latin-1")
    assert update(config().out).edited == 0


@pytest.mark.parametrize("source", ["folder", "folder/photos.zip"])
def test_a_damaged_sidecar_in_an_archive_is_not_taken_for_empty(
    config, photos, tmp_path, source
):
    path = tmp_path / "folder" / "photos.zip"
    path.parent.mkdir()
    photo = (photos / "00.jpg").read_bytes()

    def write(caption):
        write_zip(path, {"00.jpg": photo, "00.txt": caption})

    write(b"a dog")
    root = build(config(sources=[str(tmp_path / source)]))
    write(b"\xff\xfe\0")
    assert update(root).edited == 0
    assert read_rows(root)["captions"].to_pylist() == [["a dog"]]
    write(b"a cat")
    assert update(root).edited == 1


def test_captions_behind_the_end_of_a_cut_archive_stay(config, photos, tmp_path):
    photo = (photos / "00.jpg").read_bytes()
    members = {"00.jpg": photo, "00.txt": b"a dog" * 1000}
    path = write_tar(tmp_path / "photos.tar", members)
    root = build(config(sources=[str(path)]))
    before = read_rows(root)["captions"].to_pylist()
    os.truncate(path, path.read_bytes().index(b"a dog") + 100)
    assert update(root).edited == 0
    assert read_rows(root)["captions"].to_pylist()[:1] == before


def test_moved_files_keep_their_rows_and_are_not_encoded_again(
    built, photos, monkeypatch
):
    before = contents(built)
    ids = row_ids(built)
    set_columns(built, [ids["00.jpg"]], {"title": ["by a user"]})
    (photos / "moved").mkdir()
    for path in sorted(photos.glob("*.jpg")):
        path.rename(photos / "moved" / f"new {path.name}")
    # an image that is encoded would be an error
    monkeypatch.setattr(ImageEncoder, "encode", None)
    result = update(built, photos)
    check(result, moved=8, new=0, changed=0, duplicates=0, failed=1)
    after = contents(built)
    new_ids = row_ids(built)
    for name in ids.keys() - {"07.jpg"}:
        assert new_ids[f"new {name}"] == ids[name]
        assert after[f"{photos}/moved/new {name}"] == before[f"{photos}/{name}"]
    (title,) = read_rows(built, [ids["00.jpg"]], ["title"])["title"].to_pylist()
    assert title == "by a user"
    check(update(built, photos), moved=0, unchanged=result.unchanged)


def test_files_that_exchange_their_names_exchange_their_rows(built, photos):
    ids = row_ids(built)
    (photos / "00.jpg").rename(photos / "third")
    (photos / "01.jpg").rename(photos / "00.jpg")
    (photos / "third").rename(photos / "01.jpg")
    check(update(built, photos), moved=2, new=0, changed=0, vanished=0)
    exchanged = {"00.jpg": ids["01.jpg"], "01.jpg": ids["00.jpg"]}
    assert row_ids(built) == ids | exchanged
    assert problems_and_counts(built) == []


def test_copies_of_photos_in_a_missing_folder_do_not_take_their_rows(
    built, photos, tmp_path
):
    others = tmp_path / "others"
    write_photo(others / "other.jpg", 70)
    update(built, photos, others)
    before = contents(built)
    # the photos are copied, and their folder is not mounted
    for path in sorted(photos.glob("*.jpg")):
        shutil.copy(path, others / path.name)
    photos.rename(tmp_path / "elsewhere")
    photos.mkdir()
    with pytest.raises(EdjeError, match=r"cannot compare .*photos with the index"):
        update(built)
    assert contents(built) == before
