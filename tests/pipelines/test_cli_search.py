"""The kinds of query of `edje-index search`, on a real index of random images."""

import contextlib
import csv
import io
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from edje_index import TokenIndex, set_columns
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


def rows_of(answer):
    return [hit["row_id"] for hit in answer["hits"]]


def test_queries_of_a_file_give_one_object_each(run, root, tmp_path):
    path = tmp_path / "queries.jsonl"
    lines = [
        json.dumps({"captions": QUERIES[:1]}),
        json.dumps(QUERIES[1]),
        json.dumps({"query": QUERIES[2], "id": 1}),
    ]
    path.write_text("\n" + "\n\n".join(lines) + "\n")
    assert read_queries(path) == QUERIES
    plain = tmp_path / "queries.txt"
    plain.write_text("a\u2028b\r\n\fc\x85d\v e\n\u2029\n", "utf-8", newline="")
    assert read_queries(plain) == ["a\u2028b", "c\x85d\v e"]
    together = hits_of(run, "search", root, "--queries", path, "-k", 3)
    assert [answer["query"] for answer in together] == QUERIES
    for answer in together:
        (alone,) = hits_of(run, "search", root, answer["query"], "-k", 3)
        assert rows_of(answer) == rows_of(alone)
    out = run.ok("search", root, "--queries", path, "-k", 3).splitlines()
    assert [line for line in out if "query: " in line] == [
        f"query: {query}" for query in QUERIES
    ]
    assert len(out) == len(QUERIES) * (1 + 1 + 3)


def test_hits_as_a_table_for_spreadsheets(run, root, tmp_path):
    root = shutil.copytree(root, tmp_path / "index")
    captions = ["a caf\u00e9; open", 'two "dogs"\nrun']
    set_columns(root, [3], {"captions": [captions]})
    queries = tmp_path / "queries.txt"
    queries.write_text("\n".join(QUERIES))
    words = ["search", root, "-k", 12, "--columns", "captions,width"]
    answers = hits_of(run, *words, "--queries", queries)
    expected = [(of["query"], row) for of in answers for row in rows_of(of)]
    for name in ("hits.csv", "hits.parquet"):
        run.ok(*words, "--queries", queries, "--csv", tmp_path / name)
    rows = pq.read_table(tmp_path / "hits.parquet").to_pylist()
    assert [(row["query"], row["row_id"]) for row in rows] == expected
    assert [row["captions"] for row in rows if row["captions"]] == [captions] * 3
    # with the mark of UTF-8 that spreadsheets look for
    text = (tmp_path / "hits.csv").read_bytes().decode()
    assert text.startswith('\ufeff"query","row_id","uri",')
    rows = [*csv.DictReader(io.StringIO(text.removeprefix("\ufeff")))]
    assert [(row["query"], int(row["row_id"])) for row in rows] == expected
    found = [row["captions"] for row in rows if row["captions"]]
    assert found == ["; ".join(captions)] * 3
    err = run.refused(*words, "a dog", "--csv", tmp_path / "hits.xlsx")
    assert "--csv writes no .xlsx" in err


def test_a_table_replaces_no_link_and_no_pipe_and_no_column(run, root, tmp_path):
    root = shutil.copytree(root, tmp_path / "index")
    set_columns(root, range(12), {"query": ["asked"]})
    link = tmp_path / "link.csv"
    link.symlink_to(tmp_path / "real.csv")
    words = ["search", root, "a dog", "-k", 1, "--columns", "query", "--csv"]
    run.ok(*words, link)
    assert link.is_symlink()
    header, line = (tmp_path / "real.csv").read_text("utf-8-sig").splitlines()
    assert (header.split(",")[0], header.split(",")[-1]) == (
        '"query"',
        '"source_query"',
    )
    assert line.startswith('"a dog"')
    assert line.endswith('"asked"')
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as pool:
        read = pool.submit(pipe.read_bytes)
        run.ok(*words, pipe)
        assert read.result(timeout=60) == (tmp_path / "real.csv").read_bytes()


def test_weak_matches_are_marked_or_left_out(run, tmp_path):
    """With a bundle whose relevance is 0.5 between the third and the fourth hit."""
    root, bundle = build_photos(tmp_path)
    command = ("search", root, "a red canoe", "-k", 5)
    (answer,) = hits_of(run, *command)
    rows = rows_of(answer)
    middle = (answer["hits"][2]["score"] + answer["hits"][3]["score"]) / 2
    info = read_bundle_info(bundle)
    weights = replace(info.score.t2i, calibration=(1e4, -1e4 * middle))
    fitted = replace(info, trained=True, score=replace(info.score, t2i=weights))
    write_json(bundle / "bundle.json", describe_bundle(fitted).to_json())
    assert len(run.ok(*command).splitlines()) == 1 + 5
    with (
        io.StringIO() as terminal,
        contextlib.redirect_stdout(terminal),
        contextlib.redirect_stderr(terminal),
    ):
        assert main([*map(str, command)]) == 0
        lines = terminal.getvalue().splitlines()
    assert lines.index("--------- weak matches from here") == 1 + 3
    (strong,) = hits_of(run, *command, "--min-relevance", "0.5")
    assert rows_of(strong) == rows[:3]
    assert min(hit["relevance"] for hit in strong["hits"]) >= 0.5
    _, _, err = run(*command, "--min-relevance", "1", "--html", tmp_path / "page.html")
    assert "lower --min-relevance" in err
    run(*command, "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    before, _, after = page.partition("Weak matches from here")
    assert "Weak matches from here" not in after
    assert f"row {rows[2]}," in before
    assert f"row {rows[3]}," not in before


def test_bad_files_of_queries_are_refused_before_anything_is_loaded(
    run, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for content, message in (
        (b'{"query": "a"}\n{"key": "b"}\n', "q.jsonl, line 2: "),
        (b'{"query": [3]}', "{'query': [3]}"),
        (b"[" * 100_000, "q.jsonl, line 1: "),
        (b"a dog", "not JSON"),
        (b"\n \n", "q.jsonl is empty"),
        (b"\xff\xfe", "not UTF-8"),
    ):
        (tmp_path / "q.jsonl").write_bytes(content)
        code, out, err = run("search", "nowhere", "--queries", "q.jsonl")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err


def test_a_photo_finds_itself(run, root):
    (answer,) = hits_of(run, "search", root, "--image", photo(root, 4), "-k", 3)
    assert (answer["query"], rows_of(answer)[0]) == (str(photo(root, 4)), 4)
    assert answer["hits"][0]["score"] == pytest.approx(1, abs=1e-5)
    # the similarity of two photos is no measure of a match
    assert {hit["relevance"] for hit in answer["hits"]} == {None}
    words = ["search", root, "--image", photo(root, 4)]
    assert run(*words)[1].splitlines()[0].split() == ["cosine", "row", "image"]
    err = run.refused(*words, "--min-relevance", "0.5")
    assert "leave out --min-relevance" in err
    err = run.refused("search", root, "--image", photo(root, HOLE))
    assert "--image: cannot read the query image" in err
    did_you_mean = f"did you mean --image {photo(root, 4)}?"
    assert did_you_mean in run("search", root, photo(root, 4), "-k", 1)[2]
    assert "did you mean" not in run("search", root, "a dog.png", "-k", 1)[2]


def test_texts_are_ranked_for_a_photo(run, root, tmp_path):
    texts = [*dict.fromkeys(QUERIES), "snow", "a man on a bicycle"]
    (tmp_path / "texts.txt").write_text("\n".join(["", *texts, " "]))
    image = ["--image", photo(root, 4)]
    command = ["search", root, *image, "--texts", tmp_path / "texts.txt"]
    (answer,) = hits_of(run, *command, "-k", 2, "--pool", 2)
    expected = TokenIndex.open(root).search_texts(photo(root, 4), texts, 2, 2)
    for hit, other in zip(answer["hits"], expected, strict=True):
        assert (hit["text"], hit["position"]) == (other.text, other.position)
    out = run.ok(*command).splitlines()[1:]
    assert {line.split(maxsplit=1)[1] for line in out} == {*texts}
    (ranked,) = hits_of(run, *command, "-k", len(texts))
    least = ranked["hits"][1]["relevance"]
    (strong,) = hits_of(run, *command, "-k", len(texts), "--min-relevance", least)
    assert strong["hits"] == ranked["hits"][: len(strong["hits"])]
    assert strong["hits"][-1]["relevance"] == least


def test_options_of_a_text_search(run, root):
    score = ["--score", "logit=1,embedding=20"]
    command = ["search", root, "a red canoe", *score, "-k", 4]
    (exact,) = hits_of(run, *command)
    assert run(*command)[1].splitlines()[0].split() == ["relevance", "row", "image"]
    assert exact["hits"] == hits_of(run, *command, "--precision", "bf16")[0]["hits"]
    assert exact["hits"] != hits_of(run, *command, "--dtype", "bfloat16")[0]["hits"]
    assert exact["stages_ms"]["total"] >= exact["stages_ms"]["joint_encoder"] > 0
    where = ["--where", "row_id = 7", "--columns", "row_id, width"]
    ((hit,),) = (answer["hits"] for answer in hits_of(run, *command, *where))
    assert (hit["row_id"], hit["columns"]) == (7, {"row_id": 7, "width": 32})
    assert "no photo passes the filter" in run(*command, "--where", "row_id > 99")[2]
    for option, words in (
        (["--columns", "x"], "error: --columns: the rows have no column x"),
        (["--where", "size > 'a'"], "column size (int64) cannot be compared"),
        (["--precision", "fp8"], "'fp8'; choose one of: bf16"),
    ):
        assert words in run.refused(*command, *option)


def test_senseless_combinations_are_refused(run, root):
    for arguments, message in (
        ([], "give one of TEXT"),
        (["text", "--image", "x.jpg"], "give one of TEXT"),
        (["--queries", "q.txt", "--html", "x.html"], "--html has no effect"),
        (["text", "--pool", "3"], "--pool: k must be at most pool"),
        (["--image", "x.jpg", "--score", "logit"], "--score has no effect"),
        (["--image", "x.jpg", "--precision", "bf16"], "--precision has no effect"),
        (["text", "--texts", "x.txt"], "add --image FILE"),
        (
            ["--image", "x.jpg", "--texts", "x.txt", "--where", "width > 3"],
            "--where has no effect",
        ),
        (["--image", "x.jpg", "--texts", "none.txt"], "none.txt: No such file"),
        (["--image", "none.jpg"], "none.jpg does not exist"),
    ):
        assert message in run.refused("search", root, *arguments)


def test_an_index_of_features_is_searched_by_embedding():
    config = SimpleNamespace(is_feature=True, kind="patches")
    with pytest.raises(ModelError, match="cannot be re-ranked") as refusal:
        SearchModel.check_reranks(SimpleNamespace(adapter_config=config))
    _, message = _explain(refusal.value)
    assert message.endswith("search without re-ranking, with --score embedding")
