"""Search over an index that the same tiny model built, against the same steps done by hand."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

import numpy as np
import pytest

from edje_index import TokenIndex
from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
from edje_index.errors import ModelError
from edje_index.models.adapter import PATCHES, AdapterConfig
from edje_index.scoring.weights import PART_NAMES, DirectionWeights, ScoreWeights
from edje_index.search.search_model import SearchModel
from storage_formats import Manifest, TokenStore, UsageError
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import CommittedIndex
from storage_formats.reading.embeddings import read_embeddings
from tests.edje_index.scoring.bundles import WEIGHTS, bundle_with_all_parts
from tests.edje_index.search.indexes import DUPLICATE_ROW, HOLE, SPEC, build_photos


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build_photos(tmp_path_factory.mktemp("search"))


def by_hand(built, text: str, pool: int) -> list[tuple[int, float, float]]:
    root, model = built
    bundle = ModelBundle.load(model)
    embeddings = read_embeddings(CommittedIndex.open(root), np.arange(SPEC.rows))
    similarity = np.nan_to_num(embeddings @ bundle.text.encode([text])[0], nan=-9)
    rows = np.argsort(-similarity)[:pool]
    blocks = TokenStore.open(root).fetch(rows)
    scores = [float(bundle.joint.score([text], block[None])[0]) for block in blocks]
    found = [(int(row), float(similarity[row]), score) for row, score in zip(rows, scores, strict=True)]
    return sorted(found, key=lambda hit: -hit[2])


def test_hits_are_the_pool_sorted_by_the_joint_encoder(built):
    hits = TokenIndex.open(built[0]).search("a red canoe", k=3, pool=6)
    expected = by_hand(built, "a red canoe", 6)[:3]
    assert [hit.row_id for hit in hits] == [row for row, _, _ in expected]
    np.testing.assert_allclose([hit.embedding_score for hit in hits], [score for _, score, _ in expected], atol=1e-5)
    np.testing.assert_allclose([hit.joint_score for hit in hits], [score for _, _, score in expected], atol=1e-5)
    assert [os.path.basename(hit.uri) for hit in hits] == [f"{hit.row_id}.png" for hit in hits]


def test_a_relative_path_of_a_bundle_is_not_followed(built, tmp_path, monkeypatch, run):
    """A stranger can put a bundle beside the index in a folder of downloads."""
    root, model = built
    shutil.copytree(root, tmp_path / "index")
    shutil.copytree(model, tmp_path / "model")
    manifest = Manifest.load(root)
    replace(manifest, model={**manifest.model, "bundle": "model"}).write(Layout(tmp_path / "index"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="names its model bundle by the relative path 'model'"):
        TokenIndex.open("index")
    assert len(TokenIndex.open("index", "model").search("a red canoe", k=1)) == 1
    code, _, errors = run("search", "index", "a red canoe")
    assert code == 1
    assert errors.endswith("give the path of the bundle that built the index with --model\n")


def test_scores_in_bfloat16_are_rounded(built):
    root, model = built
    exact = {hit.row_id: hit.joint_score for hit in TokenIndex.open(root, model).search("a red dog", 11, 11)}
    hits = TokenIndex.open(root, model, dtype="bfloat16").search("a red dog", 11, 11)
    changes = [abs(hit.joint_score - exact[hit.row_id]) for hit in hits]
    assert len(hits) == len(exact) == 11
    assert 0 < max(changes) < 0.02 * max(map(abs, exact.values()))
    with pytest.raises(ModelError, match="unknown data type 'int8'"):
        TokenIndex.open(root, model, dtype="int8")


def test_a_bundle_may_weigh_the_embedding_in(built, tmp_path):
    score = DirectionWeights(t2i=ScoreWeights(embedding=30.0))
    replace(ModelBundle.load(built[1]), score=score, info=None).save(tmp_path / "fused")
    hits = TokenIndex.open(built[0], model=tmp_path / "fused").search("a red canoe", k=6, pool=6)
    pool = by_hand(built, "a red canoe", 6)
    expected = sorted(pool, key=lambda hit: -(hit[2] + 30 * hit[1]))
    assert [hit.row_id for hit in hits] == [row for row, _, _ in expected] != [row for row, _, _ in pool]
    np.testing.assert_allclose([hit.score for hit in hits], [score + 30 * sim for _, sim, score in expected], atol=1e-4)
    again = TokenIndex.open(built[0], model=built[1], score="logit=1,embedding=30").search("a red canoe", k=6, pool=6)
    assert [(hit.row_id, hit.score) for hit in again] == [(hit.row_id, hit.score) for hit in hits]


@pytest.fixture(scope="module")
def with_all_parts(built, tmp_path_factory):
    """The index, searched with a bundle that has every part of the score."""
    path = tmp_path_factory.mktemp("parts") / "model"
    bundle_with_all_parts(built[1]).save(path)
    return TokenIndex.open(built[0], model=path)


def test_hits_carry_their_parts(with_all_parts):
    hits = with_all_parts.search("a red canoe", k=11, pool=11)
    weights = WEIGHTS.t2i.by_part()
    for hit in hits:
        assert set(hit.parts) == set(weights)
        assert hit.score == pytest.approx(sum(weights[part] * hit.parts[part] for part in weights), abs=1e-4)
        joint = sum(weights[part] * hit.parts[part] for part in ("logit", "late", "pooled"))
        assert hit.joint_score == pytest.approx(joint, abs=1e-4)
        assert hit.parts["embedding"] == hit.embedding_score
    assert np.std([hit.parts["hubness"] for hit in hits]) > 0.01


@pytest.mark.parametrize("part", PART_NAMES)
def test_each_part_alone(with_all_parts, part):
    """By the part that a hit of the whole score carries."""
    whole = {hit.row_id: hit.parts[part] for hit in with_all_parts.search("a red canoe", k=11, pool=11)}
    hits = with_all_parts.search("a red canoe", k=11, pool=11, score=f"{part}=2")
    assert {hit.row_id: hit.parts for hit in hits} == {
        row: {part: pytest.approx(value, abs=1e-5)} for row, value in whole.items()
    }
    assert [hit.score for hit in hits] == pytest.approx(sorted((2 * value for value in whole.values()), reverse=True))


def test_the_embedding_alone_reads_no_tokens(with_all_parts, monkeypatch):
    plain = with_all_parts.search("a red canoe", k=4, pool=6, rerank=False)

    def refuse(*_: object) -> None:
        raise AssertionError("tokens were read")

    monkeypatch.setattr(TokenStore, "fetch", refuse)
    assert with_all_parts.search("a red canoe", k=4, pool=6, score="embedding") == plain


def test_a_part_that_the_bundle_lacks_is_refused(built):
    with pytest.raises(ModelError, match="no hubness correction: use only the parts logit, late, embedding"):
        TokenIndex.open(built[0], score="logit=1,hubness=1")
    with pytest.raises(ModelError, match="no pooled similarity"):
        TokenIndex.open(built[0]).search("a red canoe", score="pooled")
    with pytest.raises(UsageError, match="unknown part 'joint'"):
        TokenIndex.open(built[0], score="joint")


def test_without_the_joint_encoder_the_embeddings_decide(built):
    hits = TokenIndex.open(built[0]).search("a red canoe", k=4, pool=6, rerank=False)
    expected = sorted(by_hand(built, "a red canoe", 6), key=lambda hit: -hit[1])[:4]
    assert [hit.row_id for hit in hits] == [row for row, _, _ in expected]
    assert {hit.joint_score for hit in hits} == {None}
    assert [hit.score for hit in hits] == [hit.embedding_score for hit in hits]


def test_holes_are_never_found(built):
    hits = TokenIndex.open(built[0]).search("anything", k=100, pool=100)
    assert sorted(hit.row_id for hit in hits) == [row for row in range(SPEC.rows) if row not in (HOLE, DUPLICATE_ROW)]


def test_features_to_train_on_are_not_reranked(built, monkeypatch):
    opened = TokenIndex.open(built[0])
    monkeypatch.setattr(SearchModel, "adapter_config", AdapterConfig(PATCHES, 16, 32, 32, hidden_dim=0))
    with pytest.raises(ModelError, match="stores features for training"):
        opened.search("anything", k=1, pool=1)
    assert len(opened.search("anything", k=2, pool=2, rerank=False)) == 2


@pytest.mark.parametrize(("text", "k", "pool"), [("", 1, 1), ("  ", 1, 1), ("x", 0, 1), ("x", 2, 1)])
def test_senseless_requests_are_refused(built, text, k, pool):
    with pytest.raises(UsageError):
        TokenIndex.open(built[0]).search(text, k=k, pool=pool)


def test_only_the_model_that_built_an_index_searches_it(built, tmp_path):
    create_untrained_bundle(tmp_path / "other", seed=1, sizes=TINY)
    with pytest.raises(ModelError, match="did not build"):
        TokenIndex.open(built[0], model=tmp_path / "other")


def test_a_damaged_candidate_is_left_out_with_a_warning(built, tmp_path):
    root = shutil.copytree(built[0], tmp_path / "index")
    index = TokenIndex.open(root)
    before = [hit.row_id for hit in index.search("a dog", k=11, pool=11)]
    damaged = before[:2]
    for row_id in damaged:
        shard, position = divmod(row_id, SPEC.shard_size)
        with open(Layout(root).token_shard("bf16", shard, 2), "r+b") as file:
            file.seek(position * 4 * 16 * 2)
            file.write(b"damaged")
    with pytest.warns(RuntimeWarning, match="left out of the search: the block.* damaged"):
        hits = TokenIndex.open(root).search("a dog", k=11, pool=11)
    assert [hit.row_id for hit in hits] == before[2:]


def test_a_search_without_a_sound_candidate_finds_nothing(built, tmp_path):
    root = shutil.copytree(built[0], tmp_path / "index")
    for shard in range(SPEC.shards):
        path = Layout(root).token_shard("bf16", shard, 2)
        path.write_bytes(b"\1" * path.stat().st_size)
    with pytest.warns(RuntimeWarning, match="left out of the search"):
        assert TokenIndex.open(root).search("a dog", k=3, pool=11) == []
