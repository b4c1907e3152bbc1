"""Searches over an index that a tiny model built, against the same steps done by
hand.
"""

import shutil
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from edje_index import CrossEncoder, Hit, Hits, TokenIndex
from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.info import read_bundle_info
from edje_index.errors import ModelError
from edje_index.models.joint_scorer import JointScorer
from edje_index.scoring.weights import PART_NAMES
from edje_index.search import search_model, token_index
from pipelines import append_index, build_index, delete_rows, quantize_index
from storage_formats import Manifest, RowIdError, TokenStore, UsageError
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.places import Directory
from storage_formats.reading.embeddings import read_embeddings
from tests.conftest import REPO, golden_index
from tests.edje_index.scoring.bundles import WEIGHTS, bundle_with_all_parts
from tests.edje_index.search.indexes import (
    DUPLICATE_ROW,
    HOLE,
    ROWS,
    SHARD_SIZE,
    photo,
)

GOLDEN = REPO / "tests" / "golden" / "release_0_1"
TEXTS = [
    "a red canoe",
    "dogs",
    "two children play with a ball on a long sandy beach near the sea",
    "a red canoe",
]
SOUND = [row for row in range(ROWS) if row not in (HOLE, DUPLICATE_ROW)]
SCORE = "logit=3,late=1,pooled=2,embedding=5"


@pytest.fixture(scope="module")
def index(built, tmp_path_factory):
    """Searched with a bundle that has every part of the score."""
    path = tmp_path_factory.mktemp("parts") / "model"
    bundle_with_all_parts(built[1]).save(path)
    return TokenIndex.open(built[0], model=path)


def rows_of(hits):
    return [hit.row_id for hit in hits]


def scores_of(hits):
    return [hit.score for hit in hits]


def near(parts):
    return {part: pytest.approx(value, abs=1e-5) for part, value in parts.items()}


def check_same(left, right):
    """The same rows, and scores up to the rounding of batches."""
    for hits, others in zip(left, right, strict=True):
        assert rows_of(hits) == rows_of(others)
        assert scores_of(hits) == pytest.approx(scores_of(others), abs=1e-4)


def check_sums(hits, weights):
    """The scores are the weighted sums of the parts, the largest first."""
    sums = [sum(weights[part] * hit.parts[part] for part in weights) for hit in hits]
    assert scores_of(hits) == pytest.approx(sums, abs=1e-4)
    assert scores_of(hits) == sorted(scores_of(hits), reverse=True)


def test_hits_are_the_pool_sorted_by_the_joint_encoder(built):
    """In float32, one pair at a time, by the modules of transformers and open_clip."""
    root = built[0]
    bundle = ModelBundle.load(built[1])
    similarity = (
        read_embeddings(CommittedIndex.open(root), np.array(SOUND))
        @ bundle.text.encode(["a red canoe"])[0]
    )
    expected = []
    for at in np.argsort(-similarity)[:6]:
        block = TokenStore.open(root).fetch([SOUND[at]], as_torch=True)
        inputs = bundle.joint.tokenizer.inputs(["a red canoe"], block.shape[1])
        with torch.inference_mode():
            logit = bundle.joint(inputs, block).item()
        expected.append((SOUND[at], similarity[at], logit))
    best = sorted(expected, key=lambda hit: -hit[2])[:3]
    opened = TokenIndex.open(root)
    hits = opened.search("a red canoe", k=3, pool=6)
    rows, similarities, logits = zip(*best, strict=True)
    assert rows_of(hits) == [*rows]
    assert [hit.embedding_score for hit in hits] == pytest.approx(
        similarities, abs=1e-5
    )
    assert [hit.joint_score for hit in hits] == pytest.approx(logits, abs=1e-4)
    assert [Path(hit.uri) for hit in hits] == [photo(root, row) for row in rows]
    plain = opened.search("a red canoe", k=4, pool=6, score="embedding")
    assert rows_of(plain) == [row for row, *_ in expected[:4]]
    assert all(
        hit.joint_score is None and hit.score == hit.embedding_score for hit in plain
    )
    # holes are never found
    assert sorted(rows_of(opened.search("anything", k=100, pool=100))) == SOUND


def test_hits_carry_their_parts(index, monkeypatch):
    hits = index.search("a red canoe", k=11, pool=11)
    weights = WEIGHTS.t2i.by_part()
    check_sums(hits, weights)
    for hit in hits:
        assert hit.joint_score == pytest.approx(
            hit.score - weights["embedding"] * hit.embedding_score, abs=1e-4
        )
        assert hit.parts["embedding"] == hit.embedding_score
    for part in PART_NAMES:
        alone = index.search("a red canoe", k=11, pool=11, score=f"{part}=2")
        check_sums(alone, {part: 2})
        assert {hit.row_id: hit.parts for hit in alone} == {
            hit.row_id: near({part: hit.parts[part]}) for hit in hits
        }
    plain = index.search("a red canoe", k=4, pool=6, score="embedding")
    monkeypatch.setattr(TokenStore, "fetch", None)
    # no tokens are read
    assert index.search("a red canoe", k=4, pool=6, score="embedding") == plain


def test_several_texts_give_the_hits_of_each_alone(index, monkeypatch):
    together = index.search(TEXTS, k=6, pool=9)
    check_same(together, [index.search(text, k=6, pool=9) for text in TEXTS])
    rows = [[7, 0], [], [3, 7, 9]]
    check_same(
        index.rerank_each(TEXTS[:3], rows),
        [index.rerank(*pair) for pair in zip(TEXTS, rows, strict=False)],
    )
    pairs = [(text, row) for text in TEXTS[:3] for row in (0, 3, 7)]
    scores = index.score_pairs(pairs)
    monkeypatch.setattr(token_index, "_PAIRS_AT_ONCE", 5)
    check_same(index.search(TEXTS, k=6, pool=9), together)
    np.testing.assert_allclose(index.score_pairs(pairs), scores, atol=1e-5)
    assert index.search([], k=6, pool=9) == []


@pytest.mark.parametrize("width", [None, 0.0, 0.5, 2.0])
def test_the_joint_encoder_scores_only_what_may_come_first(monkeypatch, width):
    """`width` is the length of the range of the logits that the bundle names, as a
    share of their actual range.
    """
    index = TokenIndex.open(golden_index(), GOLDEN / "model", score=SCORE)
    texts = [
        "a dog plays in the snow",
        "two red boats",
        "a child on a long beach near the sea",
    ]
    pairs = []
    logits = JointScorer.logits
    full = index.search(texts, 9, 9)
    values = [hit.parts["logit"] for hits in full for hit in hits]
    low = min(values)
    if width is not None:
        joint = {
            **index.model.info.joint,
            "logit_range": [low, low + width * np.ptp(values)],
        }
        index.model.info = replace(index.model.info, joint=joint)
    monkeypatch.setattr(
        JointScorer,
        "logits",
        lambda self, inputs, tokens, lengths=None: (
            pairs.append(len(tokens)) or logits(self, inputs, tokens)
        ),
    )
    results = index.search(texts, 3, 9)
    # a bundle without a range, or fewer candidates
    assert (sum(pairs) == 27) == (width is None)
    assert sum(pairs) == 9 or width != 0.0
    if width is None or width > 1:
        check_same(results, [hits[:3] for hits in full])
    weights = index.model.weights("t2i", SCORE).by_part()
    for hits in results:
        check_sums(hits, {part: weights[part] for part in hits[0].parts})
    assert index.search(texts, 6, 9, where="row_id < 0") == [[], [], []]
    check_same(index.search(texts, 9, 9), full)


@pytest.mark.parametrize(
    ("change", "is_fast", "chosen"),
    [
        (0.0, True, "bfloat16"),
        (0.0, False, "float32"),
        (0.2, True, "float32"),
        (None, True, "float32"),
    ],
)
def test_bfloat16_needs_a_fast_processor_and_a_bundle_that_keeps_its_recall(
    monkeypatch, change, is_fast, chosen
):
    monkeypatch.setattr(search_model, "has_bfloat16", lambda: is_fast)
    info = read_bundle_info(GOLDEN / "model")
    joint = {**info.joint, "bfloat16_recall_change": change}
    model = search_model.SearchModel(replace(info, joint=joint), dtype="auto")
    assert str(model.joint.compute_dtype) == f"torch.{chosen}"


def test_scores_that_a_bundle_cannot_compute_are_refused(built):
    with pytest.raises(
        ModelError,
        match="no pooled similarity: use only the parts logit, late, embedding",
    ):
        TokenIndex.open(built[0], score="logit=1,pooled=1")
    with pytest.raises(UsageError, match="unknown part 'joint'"):
        TokenIndex.open(built[0], score="joint")


def test_a_relative_path_of_a_bundle_is_not_followed(built, tmp_path, monkeypatch, run):
    """A stranger can put a bundle beside the index in a folder of downloads."""
    root, model = built
    shutil.copytree(root, tmp_path / "index")
    shutil.copytree(model, tmp_path / "model")
    manifest = Manifest.load(root)
    replace(manifest, model={**manifest.model, "bundle": "model"}).write(
        Directory(tmp_path / "index")
    )
    monkeypatch.chdir(tmp_path)
    code, out, err = run("search", "index", "a dog")
    assert (code, out) == (1, "")
    assert "relative path" in err
    run.ok("search", "index", "a dog", "--model", "model")


def test_damaged_candidates_are_left_out_with_a_warning(built, tmp_path):
    root = shutil.copytree(built[0], tmp_path / "index")
    before = rows_of(TokenIndex.open(root).search("a dog", k=11, pool=11))
    for row_id in before[:2]:
        shard, position = divmod(row_id, SHARD_SIZE)
        with open(Directory(root).token_shard("bf16", shard, 2), "r+b") as file:
            file.seek(position * 4 * 16 * 2)
            file.write(b"damaged")
    with pytest.warns(
        RuntimeWarning, match="left out of the search: the block.* damaged"
    ):
        hits = TokenIndex.open(root).search("a dog", k=11, pool=11)
    assert rows_of(hits) == before[2:]
    assert hits.first(1).damaged == sorted(before[:2])
    for path in (root / "tokens").rglob("c.*.0"):
        path.write_bytes(b"\1" * path.stat().st_size)
    with pytest.warns(RuntimeWarning, match="left out of the search"):
        assert TokenIndex.open(root).search("a dog", k=3, pool=11) == []


def test_rows_are_reranked_by_id_and_by_uri(index, built):
    everything = {hit.row_id: hit for hit in index.search("a red canoe", k=10, pool=10)}
    by_id = index.rerank("a red canoe", [7, 0, 3, 7])
    assert sorted(rows_of(by_id)) == [0, 3, 7, 7]
    check_sums(by_id, WEIGHTS.t2i.by_part())
    for hit in by_id:
        assert hit.uri == everything[hit.row_id].uri
        assert hit.parts == near(everything[hit.row_id].parts)
    rows = [everything[7].uri, np.int64(0), everything[3].uri, 7]
    assert index.rerank("a red canoe", rows) == by_id
    assert index.rerank("a red canoe", []) == []
    assert rows_of(index.rerank("a dog", [str(photo(built[0], DUPLICATE_ROW))])) == [0]


def test_rows_that_cannot_be_scored_are_refused(index):
    for rows, message in (
        ([99], "row id 99 is out of range"),
        ([0, HOLE], f"row {HOLE} has no tokens: not-an-image"),
        ([DUPLICATE_ROW], "has no tokens: it is a duplicate of row 0"),
        (
            ["nowhere.png", 1, "x", "y", "z"],
            r"has the uri 'nowhere.png', 'x', 'y' \(and 1 more\)",
        ),
    ):
        with pytest.raises(UsageError, match=message) as caught:
            index.rerank("a dog", rows)
        assert isinstance(caught.value, RowIdError) == ("out of range" in message)


def test_an_image_finds_itself_and_its_neighbours(index, built):
    path = photo(built[0], 4)
    embeddings = read_embeddings(CommittedIndex.open(built[0]), np.array(SOUND))
    similarities = embeddings @ embeddings[SOUND.index(4)]
    expected = [SOUND[at] for at in np.argsort(-similarities)[:5]]
    hits = index.search_image(path, k=5)
    assert rows_of(hits) == expected
    assert scores_of(hits) == pytest.approx(np.sort(similarities)[:-6:-1], abs=1e-5)
    assert index.search_image(path.read_bytes(), k=5) == hits
    assert rows_of(index.search_image(4, k=4)) == expected[1:]
    exif = Image.Exif()
    # the viewer turns it by 90 degrees clockwise
    exif[0x0112] = 6
    data = BytesIO()
    with Image.open(path) as image:
        assert index.search_image(image, k=5) == hits
        image.transpose(Image.Transpose.ROTATE_90).save(data, "PNG", exif=exif)
    for query in (data.getvalue(), Image.open(data)):
        assert scores_of(index.search_image(query, k=1)) == pytest.approx([1], abs=1e-5)
    for wrong, message in (
        (
            built[0].parent / "none.png",
            r"cannot read the query image .*none.png: missing",
        ),
        (b"not an image", "cannot read the query image: not-an-image"),
    ):
        with pytest.raises(UsageError, match=message):
            index.search_image(wrong)


def test_pairs_are_rated_and_ranked_as_by_a_cross_encoder(index, built):
    model = CrossEncoder(index)
    path = photo(built[0], 7)
    images = [7, 3, str(path), path, np.int64(3), path.read_bytes(), Image.open(path)]
    pairs = [("a red canoe", 0), *(("a dog", image) for image in images)]
    hit_of = {hit.row_id: hit for hit in index.rerank("a dog", [3, 7])}
    hits = index.rerank("a red canoe", [0])
    hits += [hit_of[row] for row in (7, 3, 7, 7, 3, 7, 7)]
    relevances = model.predict(pairs)
    np.testing.assert_allclose(relevances, [hit.relevance for hit in hits], atol=1e-3)
    scores = model.predict(pairs, activation_fn=torch.nn.Identity())
    np.testing.assert_allclose(scores, scores_of(hits), atol=1e-3)
    # the images can be told apart
    assert abs(scores[1] - scores[2]) > 1e-2
    assert model.predict(pairs[0]) == pytest.approx(relevances[0], abs=1e-5)
    assert isinstance(model.predict(pairs, convert_to_tensor=True), torch.Tensor)
    rows = [3, 7, 0]
    ranked = model.rank("a dog", rows, top_k=2, return_documents=True)
    best = rows_of(index.rerank("a dog", rows))[:2]
    assert [each["text"] for each in ranked] == best
    assert [rows[each["corpus_id"]] for each in ranked] == best
    assert model.rank("a dog", []) == []


def test_texts_for_a_row_and_for_its_image(index, built):
    """The image-to-text score of a pair, by the parts of the bundle."""
    embedding = read_embeddings(CommittedIndex.open(built[0]), np.array([7]))[0]
    bundle = ModelBundle.load(index.model.info.path)
    similarities = bundle.text.encode(TEXTS[:3]) @ embedding
    hits = index.search_texts(7, TEXTS[:3], k=2, pool=3)
    check_sums(hits, WEIGHTS.i2t.by_part())
    positions = [hit.position for hit in hits]
    for hit in hits:
        assert hit.text == TEXTS[hit.position]
        assert hit.embedding_score == pytest.approx(
            similarities[hit.position], abs=1e-5
        )
    again = index.search_texts(photo(built[0], 7), TEXTS[:3], k=2, pool=3)
    assert [hit.position for hit in again] == positions
    assert scores_of(again) == pytest.approx(scores_of(hits), abs=1e-3)
    (nearest,) = index.search_texts(7, TEXTS[:3], k=1, pool=1)
    assert nearest.position == similarities.argmax()
    with pytest.raises(UsageError, match="texts is empty"):
        index.search_texts(7, [])


def test_a_notebook_escapes_names_and_survives_a_lost_index():
    hits = Hits(
        [Hit(row, "<script>alert(1)</script>", 1.0, 0.5) for row in range(60)],
        Path("/nowhere"),
    )
    html = hits._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert html.count("no image") == 50
    assert html.count('dir="auto"') == 100
    assert "and 10 more" in html


def test_hits_as_a_table_and_as_text(index, tmp_path):
    hits = index.search("a red canoe", k=3)
    table = hits.to_arrow()
    numbers = ["score", "embedding_score", "relevance", "joint_score", "part_logit"]
    assert table.column_names[:7] == ["row_id", "uri", *numbers]
    assert table["relevance"].to_pylist() == [hit.relevance for hit in hits]
    logits = [hit.parts["logit"] for hit in hits]
    assert hits.to_pandas()["part_logit"].tolist() == logits
    columns = {"captions": ["a"], "score": "of a user", "part_logit": 7}
    hit = replace(hits[0], columns=columns)
    described = Hits([hit], hits.root)
    names = ["captions", "source_score", "source_part_logit"]
    assert described.to_arrow().column_names[-3:] == names
    (row,) = described.to_arrow().to_pylist()
    assert (row["score"], row["part_logit"]) == (hit.score, logits[0])
    assert (row["source_score"], row["source_part_logit"]) == ("of a user", 7)
    assert list(hit.metadata())[3:] == ["score", *names]
    Hits([], hits.root).save(tmp_path / "empty.csv")
    Hits([], hits.root).save(tmp_path / "empty.parquet")
    empty = pq.read_table(tmp_path / "empty.parquet")
    assert (empty.num_rows, empty.schema) == (0, table.select(range(6)).schema)
    late = Hits([Hit(0, "a.jpg", 1.0, 0.5)], hits.root).to_arrow()
    assert late.schema == empty.schema
    line = repr(described).splitlines()[-1]
    words = ["1", f"{hit.relevance:.3f}", str(hit.row_id), hit.uri, "a"]
    assert line.split()[:5] == words


def test_a_uri_names_the_photo_that_was_repaired(built, tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(3):
        shutil.copy(photo(built[0], number), photos / f"{number}.png")
    content = (photos / "1.png").read_bytes()
    (photos / "1.png").write_bytes(b"no photo")
    root = tmp_path / "i"
    build_index(photos, root, built[1], engine="inline", shard_size=4, max_failed=1)
    (photos / "1.png").write_bytes(content)
    assert append_index(root, photos, engine="inline").indexed == 1
    (hit,) = TokenIndex.open(root).rerank("a dog", [str(photos / "1.png")])
    assert hit.row_id == 4


def test_a_replaced_index_is_refused_by_stores_and_searches(built, tmp_path):
    root = tmp_path / "index"
    shutil.copytree(built[0], root)
    index = TokenIndex.open(root, model=built[1])
    replace(Manifest.load(root), plan="another collection").write(Directory(root))
    for opened in (index, index.store):
        with pytest.raises(UsageError, match="was replaced by another index"):
            opened.refresh()


def test_a_refreshed_index_keeps_its_precision_while_it_is_stored(built, tmp_path):
    root = tmp_path / "index"
    shutil.copytree(built[0], root)
    quantize_index(root, ["int8", "fp8"])
    index = TokenIndex.open(root, model=built[1], precision="int8")
    delete_rows(root, rows=[1])
    index.refresh()
    assert index.precision == "int8"
    quantize_index(root, drop=["int8"])
    delete_rows(root, rows=[2])
    index.refresh()
    assert index.precision == "bf16"
