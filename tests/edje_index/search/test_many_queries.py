"""Searches with several texts, re-ranking of chosen rows, and image to image, against the same steps done by hand."""

from __future__ import annotations

import shutil
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from edje_index import TokenIndex
from edje_index.bundles.bundle import ModelBundle
from edje_index.models.joint_scorer import JointScorer
from edje_index.scoring.late_interaction import late_interaction
from edje_index.scoring.stop_words import content_token_mask
from edje_index.search.hits import best_hits
from edje_index.search.reranking import Candidates, CandidateScores
from pipelines import quantize_index
from storage_formats import RowIdError, TokenStore, UsageError
from storage_formats.format.manifest import CommittedIndex
from storage_formats.reading.embeddings import read_embeddings
from tests.edje_index.scoring.bundles import bundle_with_all_parts
from tests.edje_index.search.indexes import DUPLICATE_ROW, HOLE, SPEC, build_photos

TEXTS = ["a red canoe", "dogs", "two children play with a ball on a long sandy beach near the sea", "a red canoe"]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    return build_photos(tmp_path_factory.mktemp("search"))


@pytest.fixture(scope="module")
def index(built, tmp_path_factory) -> TokenIndex:
    """Searched with a bundle that has every part of the score."""
    path = tmp_path_factory.mktemp("parts") / "model"
    bundle_with_all_parts(built[1]).save(path)
    return TokenIndex.open(built[0], model=path)


def test_several_texts_give_the_hits_of_each_alone(index, monkeypatch):
    together = index.search(TEXTS, k=6, pool=9)
    alone = [index.search(text, k=6, pool=9) for text in TEXTS]
    assert [[hit.row_id for hit in hits] for hits in together] == [[hit.row_id for hit in hits] for hits in alone]
    np.testing.assert_allclose(scores(together), scores(alone), atol=1e-4, rtol=0)
    monkeypatch.setattr("edje_index.search.token_index._PAIRS_AT_ONCE", 20)
    np.testing.assert_allclose(scores(index.search(TEXTS, k=6, pool=9)), scores(together), atol=1e-4, rtol=0)
    assert index.search([], k=6, pool=9) == []


def scores(results) -> list[list[float]]:
    return [[hit.score for hit in hits] for hits in results]


def test_candidates_of_several_texts_share_batches_of_similar_length(index, monkeypatch):
    shapes = []
    logits = JointScorer.logits

    def record(self, inputs, tokens):
        shapes.append(tuple(inputs.input_ids.shape))
        return logits(self, inputs, tokens)

    monkeypatch.setattr(JointScorer, "logits", record)
    monkeypatch.setattr("edje_index.models.joint_scorer._CPU_BATCH", 9)
    index.search(TEXTS, k=1, pool=9, score="logit")
    assert [pairs for pairs, _ in shapes] == [9, 9, 9, 9]
    assert sorted(length for _, length in shapes) == [length for _, length in shapes], "shortest first"
    assert len({length for _, length in shapes}) == 3, "no short pair is padded to the longest text"


def test_scores_equal_a_loop_over_pairs(index):
    """In float32, one pair at a time, by the modules of transformers and open_clip."""
    hits = index.search(TEXTS, k=9, pool=9, score="logit=1,late=1")
    model = ModelBundle.load(index.model.info.path)
    content = content_token_mask(model.joint.tokenizer)
    for text, its_hits in zip(TEXTS, hits, strict=True):
        for hit in its_hits:
            block = TokenStore.open(index.root).fetch([hit.row_id], as_torch=True)
            words = late_interaction(
                model.joint.tokenizer.caption_ids([text]), block, model.joint.scorer().word_vectors, content
            )
            with torch.inference_mode():
                logit = model.joint(model.joint.tokenizer.inputs([text], block.shape[1]), block)
            expected = float(logit[0]) + float(words[0])
            assert hit.score == pytest.approx(expected, abs=1e-4)


def test_equal_scores_are_ordered_by_row(built):
    candidates = Candidates(np.array([7, 3, 9, 0]), np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))
    final = np.array([1, 1, 2, 1], dtype=np.float32)
    hits = best_hits(CommittedIndex.open(built[0]), candidates, CandidateScores(final, None, {}), k=3)
    assert [(hit.row_id, hit.score) for hit in hits] == [(9, 2), (0, 1), (3, 1)]


def test_rows_are_reranked_by_id_and_by_uri(index):
    everything = {hit.row_id: hit for hit in index.search("a red canoe", k=10, pool=10)}
    by_id = index.rerank("a red canoe", [7, 0, 3, 7])
    assert sorted(hit.row_id for hit in by_id) == [0, 3, 7, 7]
    assert [hit.score for hit in by_id] == sorted((hit.score for hit in by_id), reverse=True)
    for hit in by_id:
        assert hit.uri == everything[hit.row_id].uri
        assert hit.parts == {part: pytest.approx(v, abs=1e-5) for part, v in everything[hit.row_id].parts.items()}
    mixed = index.rerank("a red canoe", [everything[7].uri, np.int64(0), everything[3].uri, 7])
    assert mixed == by_id
    assert index.rerank("a red canoe", []) == []


def test_the_uri_of_a_duplicate_means_its_original(index, built):
    uri = str(built[0].parent / f"{DUPLICATE_ROW}.png")
    assert [hit.row_id for hit in index.rerank("a dog", [uri])] == [0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([99], "row id 99 is out of range"),
        ([-1], "row id -1 is out of range"),
        ([0, HOLE], f"row {HOLE} of .* has no tokens: not-an-image"),
        ([DUPLICATE_ROW], "has no tokens: it is a duplicate of row 0"),
        (["nowhere.png", 1, "x", "y", "z"], r"has the uri 'nowhere.png', 'x', 'y' \(and 1 more\)"),
        ([0.5], "must be a sequence of row ids and uris"),
        ("12", "must be a sequence of row ids and uris"),
    ],
)
def test_rows_that_cannot_be_scored_are_refused(index, rows, message):
    with pytest.raises(UsageError, match=message) as caught:
        index.rerank("a dog", rows)
    assert isinstance(caught.value, RowIdError) == ("out of range" in message)


@pytest.mark.parametrize("texts", [["a dog", " "], ["a dog", 3]])
def test_texts_are_checked_before_any_work(index, texts, monkeypatch):
    monkeypatch.setattr(type(index.model.text), "encode", None)
    with pytest.raises(UsageError, match="query"):
        index.search(texts)


def test_an_image_finds_itself_and_its_neighbours(index, built):
    path = built[0].parent / "4.png"
    rows = np.array([row for row in range(SPEC.rows) if row not in (HOLE, DUPLICATE_ROW)])
    embeddings = read_embeddings(CommittedIndex.open(built[0]), rows)
    similarities = embeddings @ embeddings[list(rows).index(4)]
    expected = rows[np.argsort(-similarities)][:5].tolist()
    hits = index.search_image(path, k=5)
    assert [hit.row_id for hit in hits] == expected
    assert hits[0].row_id == 4
    np.testing.assert_allclose([hit.score for hit in hits], np.sort(similarities)[::-1][:5], atol=1e-5)
    with Image.open(path) as image:
        assert index.search_image(path.read_bytes(), k=5) == index.search_image(image, k=5) == hits
    assert [hit.row_id for hit in index.search_row(4, k=4)] == expected[1:]


def test_an_image_is_turned_upright(index, built, tmp_path):
    with Image.open(built[0].parent / "4.png") as image:
        turned = image.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # the viewer turns it by 90 degrees clockwise
    data = BytesIO()
    turned.save(data, "PNG", exif=exif)
    for query in (data.getvalue(), Image.open(data)):
        assert index.search_image(query, k=1)[0].embedding_score == pytest.approx(1, abs=1e-5)


def test_images_that_cannot_be_read_are_refused(index, built):
    with pytest.raises(UsageError, match=r"cannot read the query image .*none.png: missing"):
        index.search_image(built[0].parent / "none.png")
    with pytest.raises(UsageError, match="cannot read the query image: not-an-image"):
        index.search_image(b"not an image")
    with pytest.raises(UsageError, match="k must be an integer of at least 1"):
        index.search_image(built[0].parent / "4.png", k=0)


def test_several_texts_rerank_rows_of_their_own(index):
    rows = [[7, 0], [], [3, 7, 9]]
    together = index.rerank_each(TEXTS[:3], rows)
    alone = [index.rerank(text, its_rows) for text, its_rows in zip(TEXTS, rows, strict=False)]
    assert [[hit.row_id for hit in hits] for hits in together] == [[hit.row_id for hit in hits] for hits in alone]
    for left, right in zip(together, alone, strict=True):
        np.testing.assert_allclose([hit.score for hit in left], [hit.score for hit in right], atol=1e-4, rtol=0)
    assert index.rerank_each(["a dog"], [[]]) == [[]]


def test_new_images_get_the_scores_of_their_rows(index, built):
    scores = {hit.row_id: hit.score for hit in index.rerank("a red canoe", [7, 0])}
    with Image.open(built[0].parent / "0.png") as image:
        new = index.score_images("a red canoe", [(built[0].parent / "7.png").read_bytes(), image])
    np.testing.assert_allclose(new, [scores[7], scores[0]], atol=1e-3, rtol=0)
    assert abs(scores[7] - scores[0]) > 1e-2, "the images can be told apart"
    assert index.score_images("a red canoe", []) == []
    with pytest.raises(UsageError, match="not-an-image"):
        index.score_images("a red canoe", [b"not an image"])


def test_another_precision_of_the_same_index(built, tmp_path):
    shutil.copytree(built[0], tmp_path / "index")
    quantize_index(tmp_path / "index", ["nvfp4"])
    exact = TokenIndex.open(tmp_path / "index")
    rough = exact.with_precision("nvfp4")
    assert (exact.precision, rough.precision) == ("bf16", "nvfp4")
    expected = TokenIndex.open(tmp_path / "index", precision="nvfp4").search("a red canoe")
    assert rough.search("a red canoe") == expected != exact.search("a red canoe")
    with pytest.raises(UsageError, match="does not have precision 'fp8'"):
        exact.with_precision("fp8")
