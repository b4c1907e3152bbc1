"""Edits of columns: what is set, what reads it, and what undoes it."""

import datetime

import numpy as np
import pyarrow as pa
import pytest

from edje_index.search.rows import IndexRows
from pipelines import copy_index, delete_rows
from pipelines.jobs.snapshots import history, roll_back, set_columns
from storage_formats import (
    IndexSpec,
    IndexWriter,
    Manifest,
    RowIdError,
    UsageError,
    read_rows,
)
from storage_formats.format.manifest import CommittedIndex
from tests.conftest import (
    all_files,
    problems_and_counts,
    write_arrays,
    write_random_index,
)
from tests.pipelines.conftest import stop_after_one_shard

SPEC = IndexSpec(37, 8, (2, 8), 4, precisions=("bf16",))
NOON = datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.UTC)


@pytest.fixture
def index(tmp_path):
    root = tmp_path / "index"
    write_random_index(root, SPEC, failed=frozenset({5}), duplicates=frozenset({9}))
    return root


def column(root, name):
    """The values of a column by row id, without nulls."""
    rows = read_rows(root, columns=["row_id", name]).to_pylist()
    return {row["row_id"]: row[name] for row in rows if row[name] is not None}


def passing(root, where):
    return np.flatnonzero(IndexRows(CommittedIndex.open(root)).passing(where)).tolist()


def test_values_that_all_rows_share_are_read_filtered_and_edited(tmp_path):
    rows = 3000
    tags = [f"keyword {number}" for number in range(100)]
    given = {
        "uri": [f"report.pdf#page={page}" for page in range(rows)],
        "tags": [tags] * rows,
        "text": ["x" * 10_000] * rows,
    }
    with IndexWriter.create(
        tmp_path / "index", block_shape=(1, 16), embed_dim=2, shard_size=2048
    ) as writer:
        ones = np.ones((rows, 1, 16), np.float32)
        writer.append(ones, np.ones((rows, 2)), given)
    root = tmp_path / "index"
    set_columns(root, range(rows), {"licence": ["y" * 12_000] * rows})
    assert problems_and_counts(root) == []
    assert len(passing(root, "tags = 'keyword 7' and licence like 'y%'")) == rows
    (last,) = read_rows(root, [rows - 1]).to_pylist()
    assert (last["tags"], last["licence"]) == (tags, "y" * 12_000)


def test_a_column_cannot_be_both_set_and_unset(index):
    set_columns(index, [3], {"title": ["Hill"]})
    with pytest.raises(UsageError, match="both set and unset"):
        set_columns(index, [3], {"title": ["Sea"]}, unset=["title"])


def test_an_edit_that_changes_nothing_says_why(index):
    said = []
    set_columns(index, [3], {"title": ["Sea"]}, on_event=said.append)
    assert said == []
    for rows, where in (([], "title = 'Hill'"), ([3], None)):
        result = set_columns(
            index, rows, {"title": ["Sea"]}, where=where, on_event=said.append
        )
        assert (result.values, result.snapshot) == (0, 1)
    assert [event.text for event in said] == [
        "no row passes the filter; nothing was changed",
        "the rows have these values; nothing was changed",
    ]


@pytest.mark.parametrize(
    ("values", "type_", "where"),
    [
        (["Sea", "Hill"], "string", "c = 'Hill'"),
        ([["a dog", "a lake"], ["a hill"]], "list<string>", "c = 'a hill'"),
        ([1.5, 2], "float64", "c >= 2.0"),
        ([True, False], "bool", "not c"),
        ([NOON, NOON.replace(hour=13)], "timestamp", "c > '2026-01-31T12:30'"),
        ([1 << 60, "x"], "string", "c = 'x'"),
    ],
)
def test_a_new_column_is_read_filtered_and_undone(index, values, type_, where):
    before = all_files(index)
    result = set_columns(index, [3, 20], {"c": values})
    assert (result.rows, result.values, result.snapshot) == (2, 2, 1)
    stored = [str(value) for value in values] if type_ == "string" else values
    assert column(index, "c") == dict(zip([3, 20], stored, strict=True))
    (described,) = Manifest.load(index).columns
    assert (described.name, described.type, described.values) == ("c", type_, 2)
    assert passing(index, where) == [20]
    assert problems_and_counts(index) == []
    for path, data in before.items():
        assert path.name == "index.json" or (index / path).read_bytes() == data, path
    assert [entry.kind for entry in history(index)] == ["import", "edit"]
    roll_back(index, 0)
    assert Manifest.load(index).columns == ()
    assert problems_and_counts(index) == []


def test_later_edits_replace_and_remove_values(index):
    set_columns(index, [0, 1, 2], {"title": ["a", "b", "c"], "stars": [1]})
    # values of Arrow keep their type
    set_columns(index, [1, 2], pa.table({"title": ["B", None], "n": [1, None]}))
    assert column(index, "n") == {1: 1}
    assert column(index, "title") == {0: "a", 1: "B"}
    assert column(index, "stars") == {0: 1, 1: 1, 2: 1}
    values = {each.name: each.values for each in Manifest.load(index).columns}
    assert values == {"n": 1, "title": 2, "stars": 3}
    again = set_columns(index, [1], {"title": ["B"]})
    assert (again.values, again.snapshot) == (0, 2)
    set_columns(index, [], {"stars": [5]}, where="title = 'B' or row_id = 30")
    assert column(index, "stars") == {0: 1, 1: 5, 2: 1, 30: 5}
    assert problems_and_counts(index) == []


WRONG = [
    ([0], {"uri": ["x"]}, "column uri"),
    ([0], {"edje_note": ["x"]}, "column edje_note"),
    ([0], {3: ["x"]}, "name not allowed"),
    ([0], {"c\n": ["x"]}, "name not allowed"),
    ([0, 1], {"c": ["x"] * 3}, "3 values for 2 rows"),
    ([], {"c": ["x"]}, "at least one row"),
    ([0], {}, "at least one value"),
    ([0], {"c": [float("nan")]}, "not finite"),
    ([0], {"c": [np.datetime64("10000-01-01")]}, "row 0"),
    ([0], {"c": ["x" * 20_000]}, "16,384 bytes"),
    ([0], {"stars": [5.5]}, "type int64"),
    ([0], {"stars": ["five"]}, "type int64"),
    ([0], {"title": "Sea"}, "must be a sequence"),
    ([0], {"stars": 5}, "must be a sequence"),
]


def test_what_cannot_be_set_changes_nothing(index):
    set_columns(index, [7], {"stars": [4]})
    before = all_files(index)
    for rows, columns, message in WRONG:
        with pytest.raises(UsageError, match=message):
            set_columns(index, rows, columns)
        assert all_files(index) == before


def test_rows_that_do_not_exist_are_refused(index):
    delete_rows(index, rows=[4])
    for row in (4, 37, -1):
        with pytest.raises(RowIdError):
            set_columns(index, [row], {"c": ["x"]})


def test_many_edits_leave_one_file_of_a_size(index):
    expected = {}
    sizes = []
    for number in range(30):
        row = 6 * number % 35
        title = f"title {number}"
        set_columns(index, [row], {"title": [title]})
        expected[row] = title
        (file,) = Manifest.load(index).rows_files
        sizes.append(file.file.bytes)
        assert column(index, "title") == expected
    assert problems_and_counts(index) == []
    assert max(sizes[-10:]) < 1.5 * max(sizes[:10])
    roll_back(index, 20)
    assert column(index, "title")[9] == "title 19"


def test_an_unset_value_is_that_of_the_sources(tmp_path):
    root = tmp_path / "index"
    given = {"title": ["a", "b", None], "stars": [1, 2, 3], "when": [NOON] * 3}
    write_arrays(root, np.ones((3, 1, 16), np.float32), np.ones((3, 2)), given)
    set_columns(root, [0, 1, 2], {"title": ["x", None, "z"], "stars": [9]})
    set_columns(root, [0], {"title": ["y"], "when": [NOON.replace(hour=1)]})
    assert column(root, "title") == {0: "y", 2: "z"}
    result = set_columns(root, [0, 1, 2], {"stars": [8]}, unset=["title"])
    assert (result.rows, result.values, result.columns) == (3, 6, ("stars", "title"))
    assert column(root, "title") == {0: "a", 1: "b"}
    result = set_columns(root, [], where="row_id < 2", unset=["stars", "when"])
    assert (result.values, column(root, "stars")) == (3, {0: 1, 1: 2, 2: 8})
    assert column(root, "when") == dict.fromkeys(range(3), NOON)
    # nothing is left to take back
    again = set_columns(root, [0, 1], unset=["stars", "title"])
    assert (again.values, again.snapshot) == (0, result.snapshot)
    assert problems_and_counts(root) == []
    with pytest.raises(UsageError, match=r"did you mean title\?"):
        set_columns(root, [0], unset=["titel"])


def test_a_renamed_column_has_its_stored_name(tmp_path, run):
    root = tmp_path / "index"
    blocks = np.ones((2, 1, 16), np.float32)
    vectors = np.ones((2, 2))
    write_arrays(root, blocks, vectors, {"status": ["a", "b"]})
    run.ok("edit", root, "--rows", 0, "--set", "source_status=x")
    assert column(root, "source_status") == {0: "x", 1: "b"}
    for rows in (
        {"source_status": ["c", "d"]},
        {"status": ["e", "f"]},
        # two columns of the rows stay two columns
        {"source_status": ["g", "h"], "status": ["i", "j"]},
        {"source_source_status": ["k", "l"], "source_status": ["m", "n"]},
    ):
        with IndexWriter.open(root) as writer:
            writer.append(blocks, vectors, rows)
    assert [*column(root, "source_status").values()] == [*"xbcdefijmn"]
    assert [*column(root, "source_source_status").values()] == [*"ghkl"]
    names = [each.name for each in Manifest.load(root).columns]
    assert names == ["source_source_status", "source_status"]


def test_the_command_sets_texts_numbers_and_lists(index, run):
    out = run.json(
        *("edit", index, "--rows", 3, "--rows", "row_id >= 35"),
        *("--set", "title=The lake = big", "--set", "stars=4"),
    )
    assert out["values"] == 6
    assert column(index, "stars") == {3: 4, 35: 4, 36: 4}
    assert column(index, "title")[3] == "The lake = big"
    run.ok("edit", index, "--rows", 3, "--set", "c=a", "--set", "c=b")
    assert column(index, "c") == {3: ["a", "b"]}
    for values in (1, 0):
        edited = run.json("edit", index, "--rows", 3, "--set", "stars=")
        assert edited["values"] == values
        assert column(index, "stars") == {35: 4, 36: 4}
    edit_titles = ("edit", index, "--rows", 3, "--set", "titles=x")
    run.refused(*edit_titles)
    assert "new columns  titles\n" in run.ok(*edit_titles, "--new-column")
    # a name that is not similar to that of a column
    run.ok("edit", index, "--rows", 3, "--set", "rating=4")
    run.ok("edit", index, "--rows", 3, "--unset", "titles")
    assert column(index, "titles") == {}


def test_values_belong_to_rows_in_the_given_order(index):
    set_columns(index, [20, 3], {"c": ["for 20", "for 3"]})
    assert column(index, "c") == {3: "for 3", 20: "for 20"}
    set_columns(index, [20, 3], {"c": ["both"]}, where="row_id = 7")
    assert column(index, "c") == {3: "both", 7: "both", 20: "both"}
    for arguments in ({"row_ids": [3, 3]}, {"row_ids": [3], "where": "row_id = 7"}):
        with pytest.raises(UsageError, match="name each row once and give no filter"):
            set_columns(index, **arguments, columns={"c": ["a", "b"]})
    assert set_columns(index, [3, 3], {"c": ["one"]}).rows == 1


def test_a_part_is_not_resumed_after_an_edit(index, tmp_path):
    stop_after_one_shard(copy_index, index, tmp_path / "part", where="row_id < 30")
    set_columns(index, [0, 20], {"c": ["new"]})
    copy_index(index, tmp_path / "part", where="row_id < 30")
    assert list(column(tmp_path / "part", "c").values()) == ["new", "new"]
