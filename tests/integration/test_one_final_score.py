"""Every place that scores changes alike with each weight, because all of them call `FinalScore`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.rerank import bench_rerank
from edje_index.bundles.bundle import ModelBundle
from edje_index.evaluation import evaluate as evaluation
from edje_index.evaluation.quantization import measure_precisions
from edje_index.scoring.final_score import FinalScore
from edje_index.scoring.weights import ScoreWeights
from edje_index.search.token_index import TokenIndex
from edje_index.training.fit_weights import DevPools
from tests.conftest import REPO

GOLDEN = REPO / "tests" / "golden" / "release_0_1"
INDEX, MODEL = GOLDEN / "index", GOLDEN / "model"
QUERY = "a dog plays in the snow"


@pytest.fixture(scope="module")
def bundle() -> ModelBundle:
    return ModelBundle.load(MODEL)


def perturbed(weights: ScoreWeights, part: str) -> ScoreWeights:
    return replace(weights, **{part: getattr(weights, part) + 1.25})


def search_scores(weights: ScoreWeights) -> dict[int, float]:
    """Final score of each row."""
    hits = TokenIndex.open(INDEX, MODEL).search(QUERY, k=20, pool=20, score=weights)
    return {hit.row_id: hit.score for hit in hits}


def evaluation_scores(
    weights: ScoreWeights, captions: Path, monkeypatch: pytest.MonkeyPatch, joint_pool: int | None = None
) -> np.ndarray:
    """Final scores [p] of the pool of the only query."""
    captured, score_pools = [], evaluation.score_pools

    def capture(models, its_weights, eval_set, embeddings, pools, source, **options):
        scores, pairs = score_pools(models, its_weights, eval_set, embeddings, pools, source, **options)
        captured.append((pools["t2i"].candidates, scores["t2i"][20]))
        return scores, pairs

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "score_pools", capture)
        evaluation.evaluate(
            INDEX,
            captions,
            model=MODEL,
            images=Path("/photos"),
            precisions=("bf16",),
            pools=(20,),
            directions=("t2i",),
            full=True,
            score=weights,
            joint_pool=joint_pool,
            resamples=0,
        )
    ((candidates, scores),) = captured
    return scores[0][np.argsort(candidates[0])]


@pytest.fixture
def one_caption(tmp_path) -> Path:
    """A caption file with `QUERY` for the first image of the golden captions."""
    first = json.loads((GOLDEN / "captions.jsonl").read_text().splitlines()[0])
    path = tmp_path / "captions.jsonl"
    path.write_text(json.dumps({**first, "captions": [QUERY]}) + "\n")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("part", ["late", "hubness"])
def test_each_weight_changes_all_scores_alike(bundle, part, one_caption, monkeypatch):
    plain, changed = bundle.score.t2i, perturbed(bundle.score.t2i, part)
    before, after = (search_scores(weights) for weights in (plain, changed))
    rows = sorted(before)
    change = np.array([after[row] - before[row] for row in rows])
    hits = TokenIndex.open(INDEX, MODEL).search(QUERY, k=20, pool=20)
    own = {hit.row_id: hit.parts[part] for hit in hits}
    np.testing.assert_allclose(change, [1.25 * own[row] for row in rows], atol=1e-5)
    assert np.std(change) > 1e-4

    evaluated = [evaluation_scores(weights, one_caption, monkeypatch) for weights in (plain, changed)]
    np.testing.assert_allclose(evaluated[0], [before[row] for row in rows], atol=1e-5)
    np.testing.assert_allclose(evaluated[1] - evaluated[0], change, atol=1e-5)


@pytest.mark.parametrize("joint_pool", [1, 4])
def test_search_and_evaluation_have_the_same_cascade(bundle, one_caption, monkeypatch, joint_pool):
    weights = replace(bundle.score.t2i, logit=30.0)
    hits = TokenIndex.open(INDEX, MODEL).search(QUERY, k=20, pool=20, score=weights, joint_pool=joint_pool)
    by_row = sorted((hit.row_id, hit.score) for hit in hits)
    evaluated = evaluation_scores(weights, one_caption, monkeypatch, joint_pool)
    np.testing.assert_allclose(evaluated, [score for _, score in by_row], atol=1e-5)
    exact = search_scores(weights)
    assert sum(abs(score - exact[row]) < 1e-5 for row, score in by_row) == joint_pool


class OtherSumError(Exception):
    """Raised in place of the sum."""


def test_every_score_is_summed_in_one_place(bundle, one_caption, monkeypatch, tmp_path):
    """Without the sum nothing can be scored."""

    def refuse(*_: object) -> None:
        raise OtherSumError

    monkeypatch.setattr(FinalScore, "sum", refuse)
    calls = [
        lambda: TokenIndex.open(INDEX, MODEL).search(QUERY, k=2, pool=4),
        lambda: evaluation_scores(bundle.score.t2i, one_caption, monkeypatch),
        lambda: measure_precisions(INDEX, "bf16", ("fp8",), model=MODEL),
        lambda: bench_rerank(MODEL, INDEX, batch_sizes=(1,), threads=(1,), repeats=1, device="cpu"),
        lambda: DevPools({"logit": np.ones((1, 2))}, np.ones((1, 2), bool), np.zeros(1, np.int64)).hits(ScoreWeights()),
    ]
    for call in calls:
        with pytest.raises(OtherSumError):
            call()
