"""The kinds of query of `edje-index search`, on a real index of random images."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest

from edje_index import TokenIndex
from tests.edje_index.search.indexes import build_photos

QUERIES = ["a red canoe", "two dogs", "a red canoe"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build_photos(tmp_path_factory.mktemp("search"))


def hits_of(run, *arguments):
    code, out, _ = run(*arguments, "--json")
    assert code == 0
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.parametrize("name", ["queries.txt", "queries.jsonl"])
def test_queries_of_a_file_give_one_object_each(run, built, tmp_path, name):
    lines = QUERIES if name.endswith(".txt") else [json.dumps({"query": query, "id": 1}) for query in QUERIES]
    (tmp_path / name).write_text("\n" + "\n\n".join(lines) + "\n")
    together = hits_of(run, "search", built[0], "--queries", tmp_path / name, "-k", 3)
    assert [answer["query"] for answer in together] == QUERIES
    for answer in together:
        (alone,) = hits_of(run, "search", built[0], answer["query"], "-k", 3)
        assert [hit["row_id"] for hit in answer["hits"]] == [hit["row_id"] for hit in alone["hits"]]
    _, out, _ = run("search", built[0], "--queries", tmp_path / name, "-k", 3)
    assert [line for line in out.splitlines() if line.startswith("query: ")] == [f"query: {q}" for q in QUERIES]
    assert len(out.splitlines()) == len(QUERIES) * (1 + 1 + 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"query": "a"}\n{"text": "b"}\n', "line 2 of --queries q.jsonl is not an object with"),
        (b'{"query": ["b"]}', "line 1 of --queries q.jsonl must have a non-blank text"),
        (b"[" * 100_000, "line 1 of --queries q.jsonl is not an object"),
        (b"\n \n", "contains no query"),
        (b"\xff\xfe", "cannot read --queries q.jsonl"),
        (None, "cannot read --queries q.jsonl: No such file"),
    ],
)
def test_bad_files_of_queries_are_refused_before_anything_is_loaded(run, tmp_path, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "q.jsonl").write_bytes(content)
    code, out, err = run("search", "nowhere", "--queries", "q.jsonl")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_photo_finds_itself(run, built):
    photo = built[0].parent / "4.png"
    (answer,) = hits_of(run, "search", built[0], "--image", photo, "-k", 3)
    assert (answer["query"], answer["hits"][0]["row_id"]) == (str(photo), 4)
    assert answer["hits"][0]["score"] == pytest.approx(1, abs=1e-5)
    code, out, err = run("search", built[0], "--image", built[0].parent / "5.png")
    assert (code, out) == (2, "")
    assert "--image: cannot read the query image" in err


def test_texts_are_ranked_for_a_photo(run, built, tmp_path):
    photo, texts = built[0].parent / "4.png", [*dict.fromkeys(QUERIES), "snow", "a man on a bicycle"]
    (tmp_path / "texts.txt").write_text("\n".join(["", *texts, " "]))
    command = ["search", built[0], "--image", photo, "--texts", tmp_path / "texts.txt"]
    index = TokenIndex.open(built[0])
    for options, score, pool in (([], "bundle", 100), (["--score", "embedding"], "embedding", 100),
                                 (["--no-rerank"], "embedding", 100), (["--pool", 2], "bundle", 2)):  # fmt: skip
        (answer,) = hits_of(run, *command, "-k", 2, *options)
        expected = index.search_texts(photo, texts, 2, pool, score=score)
        assert [(hit["text"], hit["position"]) for hit in answer["hits"]] == [
            (hit.text, hit.position) for hit in expected
        ]
        assert [hit["score"] for hit in answer["hits"]] == pytest.approx([hit.score for hit in expected], abs=1e-5)
        assert answer["query"] == str(photo)
    _, out, _ = run(*command)
    assert {line.split(maxsplit=2)[2] for line in out.splitlines()[1:]} == set(texts)
    (tmp_path / "texts.txt").write_text(" \n")
    assert "contains no text: write one text per line" in run(*command)[2]


def test_the_path_of_a_photo_as_a_text_gets_a_hint(run, built, tmp_path):
    photo = built[0].parent / "4.png"
    code, _, err = run("search", built[0], photo, "-k", 1)
    assert code == 0
    assert f"did you mean --image {photo}?" in err
    (tmp_path / "notes").write_text("no image")
    for text in (tmp_path / "notes", tmp_path, "a dog", "\0", "a" * 5000):
        assert "did you mean" not in run("search", built[0], text, "-k", 1)[2]


def test_the_precision_of_the_tokens(run, built):
    answers = [hits_of(run, "search", built[0], "a dog", *option)[0] for option in ([], ["--precision", "bf16"])]
    assert answers[0]["hits"] == answers[1]["hits"]
    assert answers[0]["stages_ms"]["total"] >= answers[0]["stages_ms"]["joint_encoder"] > 0
    code, _, err = run("search", built[0], "a dog", "--precision", "fp8")
    assert code == 2
    assert "does not have precision 'fp8'; choose one of: bf16" in err


def test_a_joint_pool_leaves_logits_out(run, built):
    options = ["search", built[0], "a red canoe", "--score", "logit=1,embedding=20", "-k", 4]
    (answer,) = hits_of(run, *options, "--joint-pool", 2)
    assert ["logit" in hit["parts"] for hit in answer["hits"]] == [True, True, False, False]
    (exact,) = hits_of(run, *options, "--joint-pool", 100)
    assert exact["hits"] == hits_of(run, *options)[0]["hits"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["text", "--image", "x.jpg"], "give only one of TEXT, --queries and --image"),
        (["--queries", "q.txt", "--html", "x.html"], "--html shows the hits of one TEXT"),
        (["--image", "x.jpg", "--score", "logit"], "compares embeddings alone: leave out --score"),
        (["--image", "x.jpg", "--joint-pool", "3"], "compares embeddings alone: leave out --joint-pool"),
        (["text", "--no-rerank", "--joint-pool", "3"], "--joint-pool has no effect with --no-rerank"),
        (["text", "--joint-pool", "3"], "joint_pool needs a score with other parts than the logit"),
        (["--image", "x.jpg", "--precision", "bf16"], "--precision has no effect with --image"),
        (["text", "--texts", "x.txt"], "--texts are ranked for an image: add --image FILE"),
        (["--image", "x.jpg", "--texts", "x.txt", "--where", "width > 3"], "--where has no effect with --texts"),
        (["--image", "x.jpg", "--texts", "x.txt", "--joint-pool", "3"], "--joint-pool has no effect with --texts"),
        (["--image", "x.jpg", "--texts", "none.txt"], "cannot read --texts none.txt: No such file"),
        ([], "no query: give TEXT, --queries FILE or --image PHOTO"),
    ],
)
def test_senseless_combinations_are_refused(run, built, arguments, message):
    code, out, err = run("search", built[0], *arguments)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.slow
def test_a_terminal_is_asked_for_queries(built):
    """In a real terminal. A bad query does not end the session."""
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "pipelines.cli", "search", str(built[0]), "-k", "1"]
    with subprocess.Popen(command, stdin=child, stdout=child, stderr=child, close_fds=True) as process:
        os.close(child)
        os.write(parent, b"a red canoe\ntwo dogs\n\n")
        shown = b""
        while True:
            try:
                shown += os.read(parent, 4096)
            except OSError:  # the terminal is closed
                break
        assert process.wait() == 0
    os.close(parent)
    lines = shown.decode().replace("\r", "").splitlines()
    assert sum("query: a red canoe" in line for line in lines) == 1
    assert sum("query: two dogs" in line for line in lines) == 1
    assert sum(line.endswith(".png") for line in lines) == 2
