"""The commonest mistakes end with what to do next."""

import shlex

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
    ("search nope.edje 'a dog'", "no index at nope.edje", "edje-index build"),
    ("info photos", "not an EDJE index", ""),
    ("search photos 'a dog'", "not an EDJE index", "edje-index show"),
    ("search photos.edje dog beach", "extra argument", "put the query in quotes"),
    ("delete photos.edje --where 'status = failed'", "no column failed", "'failed'"),
    ("delete photos.edje --where 'uri = \"x\"'", "no column x", "single quotes"),
    ("delete photos.edje --where 'reason = null'", "no column null", "'is null'"),
    ("delete photos.edje --where 'width >'", "ends too early", "conditions such as"),
    ("delete photos.edje --where \"width = 'x'\"", "cannot be compared", "a whole"),
    ("delete photos.edje", "no rows are selected", "give row ids"),
    ("delete photos.edje --rows 99", "out of range", "0 to 9"),
    (f"build broken.jsonl {BUILD}", "line 1 cannot be used", "not JSON"),
    (f"build list.jsonl {BUILD}", "not a JSON object", "check the file"),
    (f"build other.csv {BUILD}", "no column path", "columns with texts: name"),
    (f"build nope {BUILD}", "nope does not exist", "check the path"),
    (f"build clip.mp4 {BUILD}", "is a video", "frames per clip"),
    (f"build photos {BUILD} --address x:1", "cannot join", "use the engine ray"),
    (
        "build photos --out new.edje",
        "Missing option '--model': Directory of",
        "demo (a small model, without the Hub)",
    ),
    (f"build photos {BUILD}2", "inline2", "ray"),
    ("serch photos.edje x", "No such command", "'search'"),
    ("edit photos.edje --rows 1 --set title", "sets nothing", "COLUMN=VALUE"),
    ("edit photos.edje --rows 1 --set uri=x", "column uri", "set another column"),
    ("edit photos.edje --rows 1 --set captionz=x", "mean caption?", "--new-column"),
    ("delete photos.edje --where 'widht = 3'", "mean width?", "columns are row_id"),
    ("quantize photos.edje", "--to: nothing to do", "to add or to drop"),
    ("quantize photos.edje --from 2bit --to fp8", "'gauss2'", "convert from one"),
    ("rollback photos.edje 7", "no snapshot 7", "choose one of: 0"),
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
    ("line", "problem", "advice"), MISTAKES, ids=[each[0] for each in MISTAKES]
)
def test_a_mistake_is_named_with_what_to_do(
    run, place, monkeypatch, line, problem, advice
):
    monkeypatch.chdir(place)
    error = run.refused(*shlex.split(line))
    message = error.splitlines()[-1]
    assert problem in message
    assert advice in message
    assert "Traceback" not in error
    assert not (place / "new.edje").exists()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *(
            (name, [0, -1, 1.5, True, "2"])
            for name in ("threads", "workers", "shard_size", "batch_size", "max_pixels")
        ),
        ("frames", [0, 1.5, 10_000]),
        ("max_failed", [-0.1, 1.1, float("nan"), "0.5"]),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(place, tmp_path, name, values):
    paths = (place / "photos", tmp_path / "new.edje", place / "model")
    for value in values:
        with pytest.raises(UsageError, match=f"^{name} must be an? .*, got "):
            build_index(*paths, engine="inline", **{name: value})
    assert not (tmp_path / "new.edje").exists()


def test_numbers_of_changes_are_refused_by_name(place, tmp_path):
    for job, name, value in (
        (update_index, "max_vanished", 1.5),
        (update_index, "max_failed", -1),
        (remove_snapshots, "keep", 0),
        (remove_snapshots, "keep", 1.5),
        (roll_back, "snapshot", -1),
        (copy_index, "snapshot", 0.5),
    ):
        out = {"out": tmp_path / "out"} if job is copy_index else {}
        with pytest.raises(UsageError, match=f"^{name} must be an? .*, got "):
            job(place / "photos.edje", **out, **{name: value})
