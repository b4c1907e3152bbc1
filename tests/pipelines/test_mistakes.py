"""The commonest mistakes end with what to do next."""

import itertools

import pytest

from pipelines import build_index, copy_index, update_index
from pipelines.jobs.snapshots import remove_snapshots, roll_back
from storage_formats import UsageError
from storage_formats.format.layout import IndexSpec
from tests.conftest import write_random_index
from tests.pipelines.conftest import write_photo

SPEC = IndexSpec(10, 8, (2, 8), 4, precisions=("bf16",))
BUILD = "--out new.edje --model model --engine inline"

MISTAKES = [
    ("search nope.edje 'a dog'", 2, "no index at nope.edje", "edje-index build"),
    ("verify nope.edje", 2, "no index at nope.edje", "edje-index build"),
    ("info photos", 2, "not an EDJE index", ""),
    ("info nope.edje", 2, "no index at nope.edje", "edje-index build"),
    ("search photos 'a dog'", 2, "not an EDJE index", "edje-index show"),
    ("delete photos --rows 1", 2, "not an EDJE index", "edje-index show"),
    ("search photos.edje dog beach", 2, "extra argument", "put the query in quotes"),
    ("delete photos.edje --where 'status = failed'", 2, "no column failed", "'failed'"),
    ("delete photos.edje --where 'uri = \"x\"'", 2, "no column x", "single quotes"),
    ("delete photos.edje --where 'reason = null'", 2, "no column null", "'is null'"),
    ("delete photos.edje --where 'width >'", 2, "ends too early", "conditions such as"),
    ("delete photos.edje --where \"width = 'x'\"", 2, "cannot be compared", "a whole"),
    ("delete photos.edje", 2, "no rows are selected", "give row ids"),
    ("delete photos.edje --rows 99", 2, "out of range", "0 to 9"),
    (f"build broken.jsonl {BUILD}", 2, "line 1 cannot be used", "not JSON"),
    (f"build list.jsonl {BUILD}", 2, "not a JSON object", "check the file"),
    (f"build other.csv {BUILD}", 2, "no column path", "columns with texts: name"),
    (f"build nope {BUILD}", 2, "nope does not exist", "check the path"),
    (f"build clip.mp4 {BUILD}", 2, "is a video", "frames per clip"),
    (f"build photos {BUILD} --address x:1", 2, "cannot join", "use the engine ray"),
    (
        "build photos --out new.edje",
        2,
        "Missing option '--model': Directory of",
        "demo (a small model, without the Hub)",
    ),
    (f"build photos {BUILD}2", 2, "inline2", "ray"),
    ("serch photos.edje x", 2, "No such command", "'search'"),
    ("edit photos.edje --rows 1 --set title", 2, "sets nothing", "COLUMN=VALUE"),
    ("edit photos.edje --rows 1 --set uri=x", 2, "column uri", "set another column"),
    ("edit photos.edje --rows 1 --set captionz=x", 2, "mean caption?", "--new-column"),
    ("delete photos.edje --where 'widht = 3'", 2, "mean width?", "columns are row_id"),
    ("quantize photos.edje", 2, "--to: nothing to do", "to add or to drop"),
    ("quantize photos.edje --from 2bit --to fp8", 2, "'gauss2'", "convert from one"),
    ("rollback photos.edje 7", 2, "no snapshot 7", "choose one of: 0"),
    ("copy photos.edje photos.edje", 2, "exists already", "another directory"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_bundle):
    folder = tmp_path_factory.mktemp("mistakes")
    write_random_index(folder / "photos.edje", SPEC)
    write_photo(folder / "photos/0.jpg", 0)
    (folder / "model").symlink_to(tiny_bundle)
    (folder / "broken.jsonl").write_text("{'path': '0.jpg'}\n")
    (folder / "list.jsonl").write_text('["0.jpg"]\n')
    (folder / "other.csv").write_text("name\nphotos/0.jpg\n")
    (folder / "clip.mp4").write_bytes(b"\0\0\0\x18ftypisom" + bytes(40))
    return folder


@pytest.mark.parametrize(
    ("line", "code", "problem", "advice"), MISTAKES, ids=[each[0] for each in MISTAKES]
)
def test_a_mistake_is_named_with_what_to_do(
    run, place, monkeypatch, line, code, problem, advice
):
    import shlex

    monkeypatch.chdir(place)
    found, out, error = run(*shlex.split(line))
    assert (found, out) == (code, "")
    message = error.splitlines()[-1]
    assert problem in message
    assert advice in message
    assert "Traceback" not in error
    assert not (place / "new.edje").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *itertools.product(
            ["threads", "workers", "shard_size", "batch_size", "max_pixels", "frames"],
            [0, -1, 1.5, True, "2"],
        ),
        ("frames", 10_000),
        *itertools.product(["max_failed"], [-0.1, 1.1, float("nan"), "0.5"]),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(place, tmp_path, name, value):
    with pytest.raises(UsageError, match=f"^{name} must be an? .*, got "):
        build_index(
            place / "photos",
            tmp_path / "new.edje",
            place / "model",
            engine="inline",
            **{name: value},
        )
    assert not (tmp_path / "new.edje").exists()


@pytest.mark.parametrize(
    ("job", "name", "value"),
    [
        (update_index, "max_vanished", 1.5),
        (update_index, "max_failed", -1),
        (remove_snapshots, "keep", 0),
        (remove_snapshots, "keep", 1.5),
        (roll_back, "snapshot", -1),
        (copy_index, "snapshot", -1),
        (copy_index, "snapshot", 0.5),
    ],
)
def test_numbers_of_changes_are_refused_by_name(place, tmp_path, job, name, value):
    out = {"out": tmp_path / "out"} if job is copy_index else {}
    with pytest.raises(UsageError, match=f"^{name} must be an? .*, got "):
        job(place / "photos.edje", **out, **{name: value})
