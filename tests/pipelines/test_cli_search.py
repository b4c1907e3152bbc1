"""The kinds of query of `edje-index search`, on a real index of random images."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from dataclasses import replace
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from edje_index import Hit, TokenIndex, set_columns
from edje_index.bundles.info import describe_bundle, read_bundle_info
from edje_index.errors import ModelError
from edje_index.models.filesystem import write_json
from edje_index.search.query import read_queries
from edje_index.search.search_model import SearchModel
from pipelines.cli import main
from pipelines.cli.main import _explain
from tests.edje_index.search.indexes import HOLE, build_photos, photo

QUERIES = ["a red canoe", "two dogs", "a red canoe"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return build_photos(tmp_path_factory.mktemp("search"))[0]


def hits_of(run, *arguments):
    return [json.loads(line) for line in run.ok(*arguments, "--json").splitlines()]


def test_queries_of_a_file_give_one_object_each(run, root, tmp_path):
    name = "queries.jsonl"
    plain = tmp_path / "queries.txt"
    lines = [
        json.dumps({"captions": QUERIES[:1]}),
        json.dumps(QUERIES[1]),
        json.dumps({"query": QUERIES[2], "id": 1}),
    ]
    (tmp_path / name).write_text("\n" + "\n\n".join(lines) + "\n")
    plain.write_text("\n" + "\n\n".join(QUERIES) + "\n")
    assert read_queries(plain) == read_queries(tmp_path / name) == QUERIES
    plain.write_text("a\u2028b\r\n\fc\x85d\v e\n\u2029\n", "utf-8", newline="")
    assert read_queries(plain) == ["a\u2028b", "c\x85d\v e"]
    other = tmp_path / "queries.NDJSON"
    other.write_bytes((tmp_path / name).read_bytes())
    assert read_queries(other) == QUERIES
    together = hits_of(run, "search", root, "--queries", tmp_path / name, "-k", 3)
    assert [answer["query"] for answer in together] == QUERIES
    for answer in together:
        (alone,) = hits_of(run, "search", root, answer["query"], "-k", 3)
        assert [hit["row_id"] for hit in answer["hits"]] == [
            hit["row_id"] for hit in alone["hits"]
        ]
    _, out, _ = run("search", root, "--queries", tmp_path / name, "-k", 3)
    assert [line for line in out.splitlines() if line.startswith("query: ")] == [
        f"query: {q}" for q in QUERIES
    ]
    assert len(out.splitlines()) == len(QUERIES) * (1 + 1 + 3)


@pytest.mark.parametrize("name", ["hits.csv", "hits.parquet"])
def test_hits_as_a_table_for_spreadsheets(run, tmp_path, name):
    root, *_ = build_photos(tmp_path)
    captions = ["a caf\u00e9; open", 'two "dogs"\nrun']
    set_columns(root, [3], {"captions": [captions]})
    queries = tmp_path / "queries.txt"
    queries.write_text("\n".join(QUERIES))
    words = ["search", root, "-k", 12, "--columns", "captions,width"]
    answers = hits_of(run, *words, "--queries", queries)
    run.ok(*words, "--queries", queries, "--csv", tmp_path / name)
    data = (tmp_path / name).read_bytes()
    if name == "hits.csv":
        # with the mark of UTF-8 that spreadsheets look for
        assert data.decode().startswith('\ufeff"query","row_id","uri",')
        rows = [*csv.DictReader(io.StringIO(data.decode("utf-8-sig")))]
    else:
        rows = pq.read_table(tmp_path / name).to_pylist()
    expected = [(of["query"], hit) for of in answers for hit in of["hits"]]
    assert [(row["query"], int(row["row_id"])) for row in rows] == [
        (query, hit["row_id"]) for query, hit in expected
    ]
    found = [row["captions"] for row in rows if row["captions"]]
    assert found == ["; ".join(captions) if name == "hits.csv" else captions] * 3
    run.ok(*words, "--image", photo(root, 0), "--csv", tmp_path / name)
    err = run.refused(*words, "a dog", "--csv", tmp_path / "hits.xlsx")
    assert "--csv writes no .xlsx: give a name that ends in .csv or .parquet" in err


def test_weak_matches_are_marked_or_left_out(run, tmp_path):
    """With a bundle whose relevance is 0.5 between the third and the fourth hit."""
    root, bundle = build_photos(tmp_path)
    command = ("search", root, "a red canoe", "-k", 5)
    (answer,) = hits_of(run, *command)
    middle = (answer["hits"][2]["score"] + answer["hits"][3]["score"]) / 2
    info = read_bundle_info(bundle)
    weights = replace(info.score.t2i, calibration=(1e4, -1e4 * middle))
    fitted = replace(info, trained=True, score=replace(info.score, t2i=weights))
    write_json(bundle / "bundle.json", describe_bundle(fitted).to_json())
    out = run.ok(*command)
    assert len(out.splitlines()) == 1 + 5
    with (
        io.StringIO() as terminal,
        contextlib.redirect_stdout(terminal),
        contextlib.redirect_stderr(terminal),
    ):
        assert main([*map(str, command)]) == 0
        lines = terminal.getvalue().splitlines()
    assert lines.index("--------- weak matches from here") == 1 + 3
    rows = [hit["row_id"] for hit in answer["hits"]]
    (strong,) = hits_of(run, *command, "--min-relevance", "0.5")
    assert [hit["row_id"] for hit in strong["hits"]] == rows[:3]
    found = TokenIndex.open(root, bundle).search("a red canoe", k=5, min_relevance=0.5)
    assert [hit.row_id for hit in found] == rows[:3]
    assert min(hit.relevance for hit in found) >= 0.5
    code, out, err = run(*command, "--min-relevance", "1", "--html", tmp_path / "p")
    assert (code, out) == (0, "")
    assert "no hit has a relevance of 1: lower --min-relevance" in err
    run(*command, "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    before, _, after = page.partition("Weak matches from here")
    assert "Weak matches from here" not in after
    assert before.count(f"row {rows[2]},") == 1
    assert f"row {rows[3]}," not in before
    run(*command, "--min-relevance", 0.5, "--html", tmp_path / "strong.html")
    assert f"row {rows[3]}," not in (tmp_path / "strong.html").read_text()


def test_of_five_captions_one_is_shown():
    hit = Hit(3, "a.jpg", 1.0, 1.0, columns={"captions": ["one", "two", "three"]})
    assert hit.described() == "one  +2"
    assert hit.described(every_caption=True) == "one; two; three"
    assert replace(hit, columns={"captions": ["one"]}).described() == "one"


def test_bad_files_of_queries_are_refused_before_anything_is_loaded(
    run, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for content, message in (
        (
            b'{"query": "a"}\n{"key": "b"}\n',
            "q.jsonl, line 2: a query must be a JSON string, or an object with",
        ),
        (b'{"query": [3]}', "captions; got {'query': [3]}"),
        (b"[" * 100_000, "q.jsonl, line 1: a query must be a JSON string"),
        (b'"a"\na dog\n', "q.jsonl, line 2: a query must be a JSON string, or an"),
        (b"a dog", "captions; the text is not JSON: Expecting value"),
        (b"\n \n", "q.jsonl is empty"),
        (b"\xff\xfe", "captions; the text is not UTF-8"),
    ):
        (tmp_path / "q.jsonl").write_bytes(content)
        code, out, err = run("search", "nowhere", "--queries", "q.jsonl")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err


def test_a_photo_finds_itself(run, root):
    (answer,) = hits_of(run, "search", root, "--image", photo(root, 4), "-k", 3)
    assert (answer["query"], answer["hits"][0]["row_id"]) == (str(photo(root, 4)), 4)
    assert answer["hits"][0]["score"] == pytest.approx(1, abs=1e-5)
    # the similarity of two photos is no measure of a match
    assert {hit["relevance"] for hit in answer["hits"]} == {None}
    words = ["search", root, "--image", photo(root, 4)]
    assert run(*words)[1].splitlines()[0].split() == ["cosine", "row", "image"]
    err = run.refused(*words, "--min-relevance", "0.5")
    assert "have no relevance: leave out --min-relevance" in err
    err = run.refused("search", root, "--image", photo(root, HOLE))
    assert "--image: cannot read the query image" in err
    assert (
        f"did you mean --image {photo(root, 4)}?"
        in run("search", root, photo(root, 4), "-k", 1)[2]
    )
    assert "did you mean" not in run("search", root, "a dog.png", "-k", 1)[2]


def test_texts_are_ranked_for_a_photo(run, root, tmp_path):
    texts = [*dict.fromkeys(QUERIES), "snow", "a man on a bicycle"]
    (tmp_path / "texts.txt").write_text("\n".join(["", *texts, " "]))
    command = [
        "search",
        root,
        "--image",
        photo(root, 4),
        "--texts",
        tmp_path / "texts.txt",
    ]
    index = TokenIndex.open(root)
    (answer,) = hits_of(run, *command, "-k", 2, "--pool", 2)
    expected = index.search_texts(photo(root, 4), texts, 2, 2)
    assert [(hit["text"], hit["position"]) for hit in answer["hits"]] == [
        (hit.text, hit.position) for hit in expected
    ]
    _, out, _ = run(*command)
    assert {line.split(maxsplit=1)[1] for line in out.splitlines()[1:]} == set(texts)
    (all_texts,) = hits_of(run, *command, "-k", len(texts))
    least = all_texts["hits"][1]["relevance"]
    (strong,) = hits_of(run, *command, "-k", len(texts), "--min-relevance", least)
    assert strong["hits"] == [
        hit for hit in all_texts["hits"] if hit["relevance"] >= least
    ]


def test_options_of_a_text_search(run, root):
    command = [
        "search",
        root,
        "a red canoe",
        "--score",
        "logit=1,embedding=20",
        "-k",
        4,
    ]
    (exact,) = hits_of(run, *command)
    assert run(*command)[1].splitlines()[0].split() == ["relevance", "row", "image"]
    assert exact["hits"] == hits_of(run, *command, "--precision", "bf16")[0]["hits"]
    (rounded,) = hits_of(run, *command, "--dtype", "bfloat16")
    assert [hit["score"] for hit in rounded["hits"]] != [
        hit["score"] for hit in exact["hits"]
    ]
    assert exact["stages_ms"]["total"] >= exact["stages_ms"]["joint_encoder"] > 0
    (filtered,) = hits_of(run, *command, "--where", "row_id = 7")
    assert [hit["row_id"] for hit in filtered["hits"]] == [7]
    (chosen,) = hits_of(
        run, *command, "--where", "row_id = 7", "--columns", "row_id, width"
    )
    assert chosen["hits"] == [
        {**filtered["hits"][0], "columns": {"row_id": 7, "width": 32}}
    ]
    assert run(*command, "--columns", "x")[2].startswith(
        "error: --columns: the rows have no column x; choose from: row_id"
    )
    assert "no photo passes the filter" in run(*command, "--where", "row_id > 99")[2]
    err = run.refused("search", root, "a dog", "--where", "size > 'a'")
    assert (
        "the column size (int64) cannot be compared with the constant 'a'; give a whole"
        " number" in err
    )
    err = run.refused("search", root, "a dog", "--precision", "fp8")
    assert "does not have precision 'fp8'; choose one of: bf16; 'edje-index quan" in err


def test_senseless_combinations_are_refused(run, root):
    for arguments, message in (
        ([], "give one of TEXT, --queries FILE and --image FILE"),
        (
            ["text", "--image", "x.jpg"],
            "give one of TEXT, --queries FILE and --image FILE",
        ),
        (
            ["--queries", "q.txt", "--html", "x.html"],
            "--html has no effect with --queries",
        ),
        (
            ["text", "--pool", "3"],
            "--pool: k must be at most pool, got k = 10 and pool = 3",
        ),
        (
            ["--image", "x.jpg", "--score", "logit"],
            "--score has no effect with --image",
        ),
        (
            ["--image", "x.jpg", "--precision", "bf16"],
            "--precision has no effect with --image",
        ),
        (
            ["text", "--texts", "x.txt"],
            "--texts are ranked for an image: add --image FILE",
        ),
        (
            ["--image", "x.jpg", "--texts", "x.txt", "--where", "width > 3"],
            "--where has no effect with --texts",
        ),
        (
            ["--image", "x.jpg", "--texts", "none.txt"],
            "cannot read none.txt: No such file",
        ),
        (["--image", "none.jpg"], "none.jpg does not exist; check the path"),
    ):
        assert message in run.refused("search", root, *arguments)


def test_an_index_of_features_is_searched_by_embedding():
    config = SimpleNamespace(is_feature=True, kind="patches")
    with pytest.raises(ModelError, match="cannot be re-ranked") as refusal:
        SearchModel.check_reranks(SimpleNamespace(adapter_config=config))
    _, message = _explain(refusal.value)
    assert message.endswith("search without re-ranking, with --score embedding")
